"""Steps that were given up: between micro-batches, or by an exception that the trainer caught."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ._torch_private import drop_pending
from .backward import Backward
from .errors import FSDP2Error
from .gathering import complete_forwards, reshard_all
from .step_state import StepState
from .torch_compat import reset_after_exception
from .unit_grads import UnitGradients


@dataclass(frozen=True)
class _Mark:
    """A gradient that stays as it is until the next backward, unless the trainer drops or changes it."""

    param: nn.Parameter
    grad: torch.Tensor
    version: int
    added: bool  # zeros of ours; otherwise a gradient that was there

    @property
    def dropped(self) -> bool:
        return self.param.grad is None

    @property
    def changed(self) -> bool:
        return self.param.grad is not self.grad or _version_of(self.grad) != self.version

    def remove(self) -> None:
        # A backward that nobody announced may have added to the zeros of a gathered parameter.
        if self.added and self.param.grad is self.grad and _version_of(self.grad) == self.version:
            self.param.grad = None


def _version_of(grad: torch.Tensor) -> int:
    return grad._version + (grad.to_local()._version if isinstance(grad, DTensor) else 0)


class Recovery:
    """Keeps gradients of a step that was given up out of the next one.

    FSDP keeps sums that no optimizer sees: whole gradients until the last micro-batch, or sums that wait for the
    replicas. ``optimizer.zero_grad()`` does not reach them, and after an exception FSDP takes the next forward for a
    part of the one before.

    So between micro-batches every parameter carries a gradient, of zeros that take no memory where it has none: once
    they are gone, the trainer has dropped the step's gradients, and the sums are dropped too. After an exception in
    backward, training goes on only when all gradients have been dropped.
    """

    def __init__(
        self,
        root: nn.Module,
        state: StepState,
        backward: Backward,
        units: UnitGradients,
        hides_sums: bool,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        """Listen to forwards and backwards (**in place**).

        Args:
            root: The root unit's module, every unit sharded.
            state: Tells whether a step is unfinished.
            backward: Announces forwards and backwards, and knows of exceptions.
            units: What else remembers a step.
            hides_sums: Whether FSDP keeps sums outside of ``grad`` between micro-batches.
            group: All data-parallel ranks.
            device: Where their collectives run.
        """
        self._root = root
        self._state = state
        self._backward = backward
        self._units = units
        self._group = group
        self._device = device
        self._names = {id(param): name for name, param in root.named_parameters()}
        self._params = list(root.parameters())
        self._hides_sums = hides_sums
        self._whole = {id(param) for param in self._params if not isinstance(param, DTensor)}
        self._shards = [param for param in self._params if isinstance(param, DTensor)]
        self._zeros: dict[int, torch.Tensor] = {}  # id of a shard -> its mark
        self._marks: list[_Mark] = []
        self._trainable: list[bool] = []  # after the last held micro-batch
        backward.on_forward(self._before_forward)
        backward.on_begin(self._begin)
        backward.on_end(self._after_backward)

    def drop(self) -> None:
        """Drop what a step that was given up left behind (**in place**; **collective** after an exception).

        Raises:
            FSDP2Error: After an exception: this version of torch cannot go on, or the ranks stopped at different
                places.
        """
        stopped = self._backward.stopped()
        if stopped:
            self._reset()
        if stopped or self._state.unfinished:
            self._drop_sums()
            self._state.unfinished = False
            self._trainable = []
        self._units.give_up()

    def _drop_sums(self) -> None:
        self._remove_marks()
        for unit in self._root.modules():
            if isinstance(unit, FSDPModule):
                drop_pending(unit)

    def _begin(self) -> None:
        self._trainable = []
        if self._dropped():  # since the forward that this backward belongs to
            self._drop_sums()
            self._units.give_up()
        self._remove_marks()

    def _dropped(self) -> bool:
        """Return whether the trainer dropped the gradients of an unfinished step since its last backward."""
        shards = [mark for mark in self._marks if isinstance(mark.param, DTensor)]
        if len(shards) < len(self._marks) and self._marks[-1].dropped:
            return True
        kept = [mark for mark in shards if not mark.dropped]
        if kept and len(kept) < len(shards):
            name = self._names[id(kept[0].param)]
            raise FSDP2Error(
                f"accumulate: some gradients of an unfinished step were dropped, but not that of {name}. To give the "
                "step up call model.zero_grad(), and freeze parameters that no optimizer holds."
            )
        return bool(shards) and not kept

    def _before_forward(self) -> None:
        complete_forwards(self._root)
        if self._backward.failed or (self._backward.forward_failed and self._state.unfinished):
            left = [p for p in self._params if p.grad is not None or getattr(p, "main_grad", None) is not None]
            if left:
                raise FSDP2Error(
                    f"the last {'backward' if self._backward.failed else 'forward'} ended with an exception, so the "
                    "gradients of this step are incomplete. Call model.zero_grad() and run the step again from its "
                    "first micro-batch."
                )
            self.drop()
        elif self._backward.forward_failed:
            self._reset()
        elif self._dropped():
            self.drop()
        elif self._state.unfinished and self._trainable not in ([], self._requires_grad()):
            raise FSDP2Error(
                "accumulate: parameters were frozen or unfrozen between two micro-batches of one step, whose sums hold "
                "their gradients or do not. Do that between steps; to give this one up call model.zero_grad()."
            )
        elif self._hides_sums and any(mark.changed for mark in self._marks):
            raise FSDP2Error(
                "accumulate: gradients were changed between two micro-batches of one step, whose sums are not there "
                "yet. Change them after the last micro-batch; to give the step up call model.zero_grad()."
            )

    def _after_backward(self) -> None:
        if not self._state.holding:
            return
        self._remove_marks()
        self._trainable = self._requires_grad()
        for shard in self._shards:
            if shard.requires_grad and (self._hides_sums or shard.grad is not None):
                self._mark(shard, self._zeros_like(shard))
        # Units that stay gathered show other parameters than these. One of those is enough, for nobody optimizes them.
        gathered = [p for p in self._root.parameters() if p.requires_grad and not isinstance(p, DTensor)]
        smallest = min((p for p in gathered if id(p) not in self._whole), key=torch.Tensor.numel, default=None)
        if smallest is not None:
            self._mark(smallest, torch.zeros_like(smallest) if smallest.grad is None else smallest.grad)

    def _mark(self, param: nn.Parameter, zeros: torch.Tensor) -> None:
        added = param.grad is None
        grad = zeros if param.grad is None else param.grad
        param.grad = grad
        self._marks.append(_Mark(param, grad, _version_of(grad), added))

    def _zeros_like(self, shard: nn.Parameter) -> torch.Tensor:
        """Return zeros of the shape of ``shard`` that take no memory."""
        if id(shard) not in self._zeros and isinstance(shard, DTensor):
            local = shard.to_local().detach()
            self._zeros[id(shard)] = DTensor.from_local(
                local.new_zeros(()).expand(local.shape),
                shard.device_mesh,
                shard.placements,
                run_check=False,
                shape=shard.shape,
                stride=shard.stride(),
            )
        return self._zeros[id(shard)]

    def _requires_grad(self) -> list[bool]:
        return [param.requires_grad for param in self._root.parameters()]

    def _remove_marks(self) -> None:
        for mark in self._marks:
            mark.remove()
        self._marks.clear()

    def _reset(self) -> None:
        reset_after_exception(self._root)
        reshard_all(self._root)
        if not self._backward.forward_failed:
            self._refuse_different_places(len(self._units.order))
        self._backward.recovered()

    def _refuse_different_places(self, reduced: int) -> None:
        mine = torch.tensor([reduced, -reduced], device=self._device)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._group)
        highest, lowest = mine.tolist()
        if highest != -lowest:
            raise FSDP2Error(
                f"the ranks stopped at different places: between {-lowest} and {highest} units had been reduced. Start "
                "the run again from its last checkpoint."
            )
