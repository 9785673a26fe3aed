"""The average over replicas, where the micro-batches of one step do not run the same things."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ._torch_private import apply_to_tensors, queue_callback
from .errors import FSDP2Error
from .step_state import StepState


@dataclass(frozen=True)
class _Slot:
    """Where one parameter is registered, sharded or gathered."""

    fqn: str
    module: nn.Module
    leaf: str

    @property
    def param(self) -> nn.Parameter | None:
        return self.module._parameters[self.leaf]


class ReplicaAverage:
    """Keeps HSDP's sums complete while ``accumulate`` leaves the average over replicas to the last micro-batch.

    Until then FSDP adds up, per unit, the reduce-scattered gradients of those parameters that had one. The average
    comes with the last micro-batch's backward through the same unit. So a unit that this backward does not reach
    would lose its gradient and hand it to the next step: it is reduced here, with zeros. And sums over different
    parameters would be added to each other: that is refused.
    """

    def __init__(self, root: nn.Module, units: Sequence[Sequence[nn.Module]], state: StepState) -> None:
        """Register the hooks (**in place**).

        Args:
            root: The root unit's module.
            units: Modules of every unit, nested units before those around them.
            state: Tells whether a micro-batch is held.
        """
        self._units = units
        self._state = state
        self._slots = _own_slots(root, units)
        self._sums: dict[int, frozenset[str]] = {}  # unit -> parameters in the sum that waits for the replicas
        self._now: dict[int, set[str]] = {}  # unit that this backward reached -> parameters with a gradient
        self._watched: set[int] = set()  # ids of gathered parameters
        self._queued = False
        for number, modules in enumerate(units):
            for module in modules:
                # Before FSDP's own hooks: they take the gathered parameters away, and their callback, in which FSDP
                # reduces whatever backward left over, must run after the one queued here.
                module.register_forward_hook(functools.partial(self._watch, number), prepend=True)
        root.register_forward_pre_hook(self._start, prepend=True)

    def check(self) -> None:
        """Raise if the micro-batches of this step used different parameters of one unit.

        Raises:
            FSDP2Error: They did; names the parameters.
        """
        partly = sorted(
            name for number, names in self._now.items() for name in names ^ self._sums.get(number, frozenset(names))
        )
        if partly:
            more = f" and {len(partly) - 3} more" if len(partly) > 3 else ""
            raise FSDP2Error(
                f"accumulate: {', '.join(partly[:3])}{more} got a gradient in some micro-batches of this step only. "
                "Between replicas the sum over a whole unit is averaged once per step, so every micro-batch must use "
                "the same parameters of it. Set reduce_grads: last_microbatch."
            )

    def _start(self, _module: nn.Module, _args: Any) -> None:
        self._queued = False  # still true after a backward that failed
        self._now.clear()

    def _watch(self, number: int, _module: nn.Module, _args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for slot in self._slots[number]:
            param = slot.param
            if param is None or isinstance(param, DTensor) or not param.requires_grad or id(param) in self._watched:
                continue
            self._watched.add(id(param))
            param.register_post_accumulate_grad_hook(functools.partial(self._note, number, slot.fqn))  # type: ignore[no-untyped-call]

        def reach(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._reach, number))  # type: ignore[no-untyped-call]
            return tensor

        apply_to_tensors(reach, output)

    def _reach(self, number: int, _grad: torch.Tensor) -> None:
        self._now.setdefault(number, set())
        if not self._queued:
            self._queued = True
            queue_callback(self._finish)

    def _note(self, number: int, fqn: str, _param: torch.Tensor) -> None:
        self._now.setdefault(number, set()).add(fqn)

    def _finish(self) -> None:
        self._queued = False
        self.check()
        if self._state.holding:
            self._sums.update({number: frozenset(names) for number, names in self._now.items() if names})
        else:
            for number in sorted(self._sums.keys() - {number for number, names in self._now.items() if names}):
                self._add_zeros(number, self._sums[number])
            self._sums.clear()
        self._now.clear()

    def _add_zeros(self, number: int, names: frozenset[str]) -> None:
        """Gather a unit and give its parameters zeros, so that FSDP reduces it at the end of this backward."""
        unit = self._units[number][0]
        if isinstance(unit, FSDPModule):
            unit.unshard()
        for slot in self._slots[number]:
            if slot.fqn in names and slot.param is not None:
                slot.param.grad = torch.zeros_like(slot.param)


def _own_slots(root: nn.Module, units: Sequence[Sequence[nn.Module]]) -> list[list[_Slot]]:
    """Return, for each unit, where its own sharded parameters are registered."""
    fqns = {module: fqn for fqn, module in root.named_modules()}
    taken: set[int] = set()
    slots: list[list[_Slot]] = []
    for modules in units:
        own: list[_Slot] = []
        for outer in modules:
            for module in outer.modules():
                for leaf, param in module._parameters.items():
                    if isinstance(param, DTensor) and id(param) not in taken:
                        taken.add(id(param))
                        own.append(_Slot(".".join(filter(None, (fqns[module], leaf))), module, leaf))
        slots.append(own)
    return slots
