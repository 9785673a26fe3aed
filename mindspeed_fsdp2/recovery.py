"""Steps that were given up: between micro-batches, or by an exception that the trainer caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ._torch_private import drop_pending
from .backward import Backward
from .errors import FSDP2Error
from .gathering import reshard_all
from .step_state import StepState
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
        return self.param.grad is not self.grad or self.grad._version != self.version

    def remove(self) -> None:
        if self.added and self.param.grad is self.grad:
            self.param.grad = None


class Recovery:
    """Keeps gradients of a step that was given up out of the next one.

    FSDP keeps sums that no optimizer sees: whole gradients until the last micro-batch, or sums that wait for the
    replicas. ``optimizer.zero_grad()`` does not reach them, and after an exception FSDP takes the next forward for a
    part of the one before.

    So between micro-batches a parameter carries a gradient of zeros while such sums exist: once it is gone, the trainer
    has dropped the step's gradients, and the sums are dropped too. After an exception in backward, training goes on
    only when all gradients have been dropped.
    """

    def __init__(
        self,
        root: nn.Module,
        state: StepState,
        backward: Backward,
        units: UnitGradients | None,
        hides_sums: bool,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        """Listen to forwards and backwards (**in place**).

        Args:
            root: The root unit's module, every unit sharded.
            state: Tells whether a step is unfinished.
            backward: Announces forwards and backwards, and knows of exceptions.
            units: What else remembers a step; None on one rank.
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
        self._params = list(root.parameters())
        self._hides_sums = hides_sums
        self._marked = _smallest_shard(root)
        self._marks: list[_Mark] = []
        backward.on_forward(self._before_forward)
        backward.on_begin(self._remove_marks)
        backward.on_end(self._after_backward)

    def drop(self) -> None:
        """Drop what a step that was given up left behind (**in place**; **collective** after an exception).

        Raises:
            FSDP2Error: After an exception: this version of torch cannot go on, or the ranks stopped at different
                places.
        """
        if self._backward.stopped():
            self._reset()
        if self._state.unfinished:
            self._remove_marks()
            for unit in self._root.modules():
                if isinstance(unit, FSDPModule):
                    drop_pending(unit)
            self._state.unfinished = False
        if self._units is not None:
            self._units.forget()

    def _before_forward(self) -> None:
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
        elif any(mark.dropped for mark in self._marks):
            self.drop()
        elif self._hides_sums and any(mark.changed for mark in self._marks):
            raise FSDP2Error(
                "accumulate: gradients were changed between two micro-batches of one step, whose sums are not there "
                "yet. Change them after the last micro-batch; to give the step up call model.zero_grad()."
            )

    def _after_backward(self) -> None:
        if not self._state.holding or self._marked is None:
            return
        shard, module, leaf = self._marked
        gathered = module._parameters[leaf]  # the shard itself, unless the unit stays gathered for the next micro-batch
        for param in [shard] if gathered is None or gathered is shard else [shard, gathered]:
            added = param.grad is None
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            param.grad = grad
            self._marks.append(_Mark(param, grad, grad._version, added))

    def _remove_marks(self) -> None:
        for mark in self._marks:
            mark.remove()
        self._marks.clear()

    def _reset(self) -> None:
        reset: Callable[[], None] | None = getattr(self._root, "reset_iter_state", None)
        if reset is None:
            raise FSDP2Error(
                "a forward or backward ended with an exception, after which FSDP2 cannot go on before torch 2.14. "
                "Start the run again from its last checkpoint."
            )
        reset()
        reshard_all(self._root)
        if self._units is not None and not self._backward.forward_failed:
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


def _smallest_shard(root: nn.Module) -> tuple[nn.Parameter, nn.Module, str] | None:
    """Return the smallest trainable sharded parameter, and where it is registered."""
    shards = [
        (param, module, leaf)
        for module in root.modules()
        for leaf, param in module.named_parameters(recurse=False)
        if isinstance(param, DTensor) and param.requires_grad
    ]
    return min(shards, key=lambda found: found[0].numel(), default=None)
