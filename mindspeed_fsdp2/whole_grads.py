"""Average the gradients of trainable parameters that FSDP does not shard: those of ignored modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from ._torch_private import reduction_hooks
from .backward import Backward
from .errors import FSDP2Error
from .torch_compat import new_group_of

_BUCKET_BYTES = 25 * 2**20  # as DDP: large enough to use the links, small enough to start early


@dataclass
class _Bucket:
    """Parameters reduced in one collective, and its buffer while that is on its way."""

    params: list[nn.Parameter]
    waiting: dict[int, int] = field(default_factory=dict)  # id of a parameter -> times its gradient is still to come
    late: bool = False  # a gradient came after the buffer had been sent
    flat: torch.Tensor | None = None
    work: dist.Work | None = None


class WholeGradients:
    """Averages whole gradients in each backward, each bucket as soon as its gradients are there.

    Ranks may skip an optional tower, so no rank knows when the others send. Buckets therefore go out in one fixed
    order, through a process group of their own: among FSDP's collectives they would meet another one's. A rank without
    a gradient sends zeros. At the end of backward the ranks tell each other which parameters had a gradient (one that
    none used keeps ``grad`` None) and which buckets were sent too early, as happens when reentrant recomputation
    delivers a gradient in pieces; those are sent again.

    Attributes:
        enabled: False while micro-batches before the last one accumulate.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        backward: Backward,
        group: dist.ProcessGroup | None,
        reduce_dtype: torch.dtype | None,
        main_grads: bool = False,
    ) -> None:
        """Register the hooks (**in place**, **collective** over ``group``).

        Args:
            params: All whole parameters, equal on every rank; frozen ones too, since they may be unfrozen later.
            backward: Announces backwards.
            group: All data-parallel ranks.
            reduce_dtype: dtype of the sum; None means each gradient's own.
            main_grads: Whether gradients are accumulated and left in fp32 in ``param.main_grad``, as Megatron's
                optimizer takes them, instead of ``param.grad`` in the parameter's dtype.
        """
        self.enabled = True
        self._main_grads = main_grads
        self._params = list(params)
        self._parent = group
        self._group: dist.ProcessGroup | None = None
        self._reduce_dtype = reduce_dtype
        self._ranks = dist.get_world_size(group)
        self._trainable: list[nn.Parameter] = []
        self._hooked: set[int] = set()
        self._buckets: list[_Bucket] = []
        self._of: dict[int, _Bucket] = {}
        self._arrived: Counter[int] = Counter()
        self._usual: dict[int, int] = {}  # id of a parameter -> most often its gradient came in one backward
        self._next = 0
        self._announced = False
        self._backward = backward
        self._follow()
        backward.on_forward(self._follow)
        backward.on_begin(self._begin)
        backward.on_end(self._finish)

    def _follow(self) -> None:
        """Take up which parameters are trainable now.

        Raises:
            FSDP2Error: Somebody waits for the gradient of one, and would act on it before it is averaged.
        """
        for param in self._params:
            if len(reduction_hooks(param) or ()) > (id(param) in self._hooked):
                raise FSDP2Error(
                    "ignored_modules: a hook of register_post_accumulate_grad_hook on one of their parameters, of the "
                    f"shape {tuple(param.shape)}, would see this rank's gradient, before it is averaged over the "
                    "ranks. Step the optimizer after the backward."
                )
        trainable = [param for param in self._params if param.requires_grad]
        if [id(param) for param in trainable] == [id(param) for param in self._trainable]:
            return
        self._trainable = trainable
        for param in trainable:
            if id(param) not in self._hooked:
                param.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
                self._hooked.add(id(param))
        # Reverse registration order is roughly the order in which backward reaches them.
        self._buckets = _build_buckets(trainable[::-1])
        self._of = {id(param): bucket for bucket in self._buckets for param in bucket.params}
        if self._group is None and trainable:
            self._group = _own_group(self._parent, trainable[0].device)

    def _begin(self) -> None:
        self._announced = self.enabled and bool(self._buckets)
        self._next = 0
        self._arrived.clear()
        for bucket in self._buckets:
            expected = ((id(param), self._usual.get(id(param), 1)) for param in bucket.params)
            bucket.waiting = {key: times for key, times in expected if times}
            bucket.late, bucket.flat, bucket.work = False, None, None

    def _grad(self, param: nn.Parameter) -> torch.Tensor | None:
        return getattr(param, "main_grad", None) if self._main_grads else param.grad

    def _ready(self, param: nn.Parameter) -> None:
        if self._main_grads and param.grad is not None:
            main = self._grad(param)
            if main is None:
                param.main_grad = param.grad.float()  # type: ignore[attr-defined]
            else:
                main.add_(param.grad)
            param.grad = None
        bucket = self._of.get(id(param))
        self._backward.begin()  # the loss may not have come through an output of the root that the hooks could see
        if not self._announced or bucket is None:
            return
        self._arrived[id(param)] += 1
        if bucket.work is not None:
            bucket.late = True
            return
        if self._arrived[id(param)] >= bucket.waiting.get(id(param), 0):
            bucket.waiting.pop(id(param), None)
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._send(self._buckets[self._next])
            self._next += 1

    def _send(self, bucket: _Bucket) -> None:
        dtype = self._reduce_dtype or bucket.params[0].dtype
        pieces = []
        for param in bucket.params:
            grad = self._grad(param)
            pieces.append((torch.zeros_like(param) if grad is None else grad).detach().to(dtype).flatten())
        bucket.flat = torch.cat(pieces)
        # A plain sum, scaled afterwards: averaging is missing or wrong on some backends.
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)

    def _finish(self) -> None:
        if not self._announced:
            return
        self._announced = False
        for bucket in self._buckets[self._next :]:
            self._send(bucket)
        for key in self._of:
            self._usual[key] = max(self._usual.get(key, 0), self._arrived[key])
        used, late = self._exchange_flags()
        for bucket, again in zip(self._buckets, late):
            if again:
                _wait(bucket)
                self._send(bucket)
        for bucket in self._buckets:
            total = _wait(bucket)
            for param, piece in zip(bucket.params, torch.split(total, [param.numel() for param in bucket.params])):
                if not used[id(param)]:
                    continue
                mean = (piece / self._ranks).view_as(param)
                grad = self._grad(param)
                if grad is not None:
                    grad.copy_(mean)
                elif self._main_grads:
                    param.main_grad = mean.float()  # type: ignore[attr-defined]
                else:
                    param.grad = mean.to(param.dtype)

    def _exchange_flags(self) -> tuple[dict[int, bool], list[bool]]:
        """Return which parameters, by id, have a gradient on some rank, and which buckets were late on some rank."""
        mine = [self._grad(param) is not None for param in self._trainable] + [bucket.late for bucket in self._buckets]
        flags = torch.tensor(mine, dtype=torch.int32, device=self._trainable[0].device)
        dist.all_reduce(flags, group=self._group)
        seen = [count > 0 for count in flags.tolist()]
        count = len(self._trainable)
        return dict(zip((id(param) for param in self._trainable), seen[:count])), seen[count:]


def _wait(bucket: _Bucket) -> torch.Tensor:
    """Return the sum over ranks and let go of the buffer."""
    flat, work = bucket.flat, bucket.work
    bucket.flat = bucket.work = None
    if flat is None or work is None:
        raise RuntimeError("a bucket of whole gradients was never sent")
    work.wait()
    return flat


def _own_group(group: dist.ProcessGroup | None, device: torch.device) -> dist.ProcessGroup | None:
    """Return a new group with the ranks of ``group``, connected (**collective** over ``group``)."""
    if dist.get_world_size(group) == 1:
        return group
    own = new_group_of(group)
    # Backends connect in a group's first collective and block there; in the middle of a backward, where another rank
    # may be waiting in one of FSDP's, that would be a deadlock.
    dist.all_reduce(torch.zeros(1, device=device), group=own)
    return own


def _build_buckets(params: Sequence[nn.Parameter]) -> list[_Bucket]:
    buckets: list[_Bucket] = []
    size = 0
    for param in params:
        new = param.numel() * param.element_size()
        full = not buckets or size + new > _BUCKET_BYTES
        if full or buckets[-1].params[0].dtype != param.dtype or buckets[-1].params[0].device != param.device:
            buckets.append(_Bucket([]))
            size = 0
        buckets[-1].params.append(param)
        size += new
    return buckets
