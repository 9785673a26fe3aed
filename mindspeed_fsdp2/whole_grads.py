"""Average the gradients of trainable parameters that FSDP does not shard: those of ignored modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ._torch_private import apply_to_tensors, queue_callback

_BUCKET_BYTES = 25 * 2**20  # as DDP: large enough to use the links, small enough to start early


@dataclass
class _Bucket:
    """Parameters reduced in one collective, and its buffer while that is on its way."""

    params: list[nn.Parameter]
    waiting: set[int] = field(default_factory=set)  # ids of parameters whose gradient is not there yet
    flat: torch.Tensor | None = None
    work: dist.Work | None = None


class WholeGradients:
    """Reduces whole gradients at the end of each backward, starting as soon as they are there.

    Buckets go out in one fixed order on every rank, whatever order backward takes, and a rank that did not run a
    module sends zeros: ranks may skip an optional tower. A parameter that no rank used keeps ``grad`` None.

    Attributes:
        enabled: False while micro-batches before the last one accumulate.
    """

    def __init__(
        self,
        root: nn.Module,
        params: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup | None,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        """Register the hooks on ``root`` and the parameters (**in place**).

        Args:
            root: The root unit; gradients reach its outputs first, which announces a backward.
            params: fqn -> trainable parameter, equal on every rank.
            group: All data-parallel ranks.
            reduce_dtype: dtype of the sum; None means each gradient's own.
        """
        self.enabled = True
        self._group = group
        self._reduce_dtype = reduce_dtype
        self._ranks = dist.get_world_size(group)
        # Reverse registration order is roughly the order in which backward reaches them.
        self._buckets = _build_buckets(list(params.values())[::-1])
        self._of = {id(param): bucket for bucket in self._buckets for param in bucket.params}
        self._next = 0
        self._announced = False
        for param in params.values():
            param.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
        root.register_forward_hook(self._watch)

    def _watch(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            apply_to_tensors(self._watch_tensor, output)

    def _watch_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensor.register_hook(self._begin)  # type: ignore[no-untyped-call]
        return tensor

    def _begin(self, _grad: torch.Tensor) -> None:
        if self._announced or not self.enabled:
            return
        self._announced = True
        self._next = 0
        for bucket in self._buckets:
            bucket.waiting = {id(param) for param in bucket.params}
        queue_callback(self._finish)

    def _ready(self, param: nn.Parameter) -> None:
        if not self._announced:
            return
        self._of[id(param)].waiting.discard(id(param))
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._launch(self._buckets[self._next])
            self._next += 1

    def _launch(self, bucket: _Bucket) -> None:
        dtype = self._reduce_dtype or bucket.params[0].dtype
        used = [param.grad is not None for param in bucket.params]
        pieces = [
            (param.grad if param.grad is not None else torch.zeros_like(param)).detach().to(dtype).flatten()
            for param in bucket.params
        ]
        pieces.append(torch.tensor(used, dtype=dtype, device=bucket.params[0].device))
        bucket.flat = torch.cat(pieces)
        # A plain sum, scaled afterwards: averaging is missing or wrong on some backends.
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)

    def _finish(self) -> None:
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        self._announced = False
        for bucket in self._buckets:
            if bucket.work is None or bucket.flat is None:
                continue
            bucket.work.wait()
            sizes = [*(param.numel() for param in bucket.params), len(bucket.params)]
            *pieces, used = torch.split(bucket.flat, sizes)
            for param, piece, count in zip(bucket.params, pieces, used.tolist()):
                if count == 0:
                    continue
                mean = (piece / self._ranks).view_as(param).to(param.dtype)
                if param.grad is None:
                    param.grad = mean
                else:
                    param.grad.copy_(mean)
            bucket.flat = bucket.work = None


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
