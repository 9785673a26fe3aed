"""Every rank reduces the same parameters of a unit, whichever of them it used."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ._torch_private import before_reduction, keep_in_reduce_dtype, reduction_hooks, set_reduction_hooks
from .backward import Backward
from .errors import FSDP2Error
from .step_state import StepState

_SHOWN = 6


@dataclass(frozen=True)
class _Slot:
    """Where one parameter is registered, sharded or gathered."""

    fqn: str
    module: nn.Module
    leaf: str
    shard: nn.Parameter

    @property
    def param(self) -> nn.Parameter | None:
        return self.module._parameters[self.leaf]


class UnitGradients:
    """Gives zeros to those parameters of a unit that have no gradient where the unit is reduced.

    FSDP reduces, per unit, the gradients that are there, laid end to end. So a parameter that one rank did not use (an
    expert that got no token) would shift all that follow it there: other parameters' gradients are added to each
    other, without an error where sizes happen to agree. The same holds for the sums of micro-batches that wait for the
    average over replicas. With the zeros the result is that of DDP with ``find_unused_parameters``.

    At the end of a step's last backward the ranks tell each other which parameters any of them used: one that none
    did gets its ``grad`` None back, so that no optimizer decays it. And they compare in which order units were
    reduced (**collective** in backward, one small all-reduce).
    """

    def __init__(
        self,
        root: nn.Module,
        units: Mapping[str, Sequence[nn.Module]],
        group: dist.ProcessGroup | None,
        device: torch.device,
        state: StepState,
        backward: Backward,
    ) -> None:
        """Register the hooks (**in place**).

        Args:
            root: The root unit's module.
            units: Name -> modules of every unit, nested units before those around them.
            group: All data-parallel ranks.
            device: Where their collectives run.
            state: Tells whether a micro-batch is held.
            backward: Announces the ends of backwards.
        """
        self._unit_names = list(units)
        self._units = [modules[0] for modules in units.values()]
        self._slots = _own_slots(root, list(units.values()))
        self._index = {slot.fqn: n for n, slot in enumerate(slot for slots in self._slots for slot in slots)}
        self._group = group
        self._device = device
        self._state = state
        self._backward = backward
        self._kept: dict[int, set[str]] = {}  # unit -> parameters whose gradients are kept whole for the last backward
        self._waiting: set[int] = set()  # units whose sums wait for the replicas
        self._used: set[str] = set()
        self._filled: dict[str, nn.Parameter] = {}  # parameters without a gradient that got zeros -> their shards
        self._hooks: dict[str, Any] = {}  # of those among them that somebody waits for
        self._reduced: set[int] = set()  # units reduced in this backward
        self.order: list[int] = []  # units in the order of their reductions in this step
        backward.on_forward(self.follow_freezing)
        backward.on_begin(self._reduced.clear)
        # Before FSDP's own, which reshards.
        root.register_state_dict_pre_hook(lambda *_unused: self.follow_freezing())  # type: ignore[no-untyped-call]
        for number, unit in enumerate(self._units):
            if isinstance(unit, FSDPModule):
                vars(unit)["reshard"] = functools.partial(self._reshard, number, unit.reshard)
        if dist.get_world_size(group) > 1:
            for number, unit in enumerate(self._units):
                before_reduction(unit, functools.partial(self._fill, number))
            backward.on_end(self._finish)

    def give_up(self) -> None:
        """Forget the step under way, and the zeros it gave to parameters that nothing used."""
        for name, shard in self._filled.items():
            if name not in self._used:
                shard.grad = None
        self.forget()

    def forget(self) -> None:
        """Forget the step under way."""
        self._kept.clear()
        self._waiting.clear()
        self._used.clear()
        for name, hooks in self._hooks.items():
            hooks.update(reduction_hooks(self._filled[name]) or {})  # what was added meanwhile
            set_reduction_hooks(self._filled[name], hooks)
        self._hooks.clear()
        self._filled.clear()
        self.order.clear()

    def _fill(self, number: int, reached: bool, reduces: bool) -> None:
        self._backward.begin()  # the loss may not have come through an output of the root that the hooks could see
        unit = self._units[number]
        owed = number in self._kept or number in self._waiting
        if owed and not self._state.holding and isinstance(unit, FSDPModule):
            unit.unshard()  # this backward may not have come here; what waits must not stay for the next step
        self._follow_freezing(number)
        there = [(slot, param) for slot in self._slots[number] if (param := _gathered(slot)) is not None]
        got = {slot.fqn for slot, param in there if param.grad is not None}
        self._used |= got
        if not there or not (got or reached or (owed and not self._state.holding)):
            return
        if not reduces:
            self._kept.setdefault(number, set()).update(got)
            return
        self._refuse_second_step(number)
        self.order.append(number)
        kept = self._kept.pop(number, set())
        for slot, param in there:
            if slot.fqn not in got and slot.fqn not in kept:
                # From torch 2.15 on a parameter says in which dtype its gradients are kept.
                param.grad = torch.zeros_like(param, dtype=getattr(param, "grad_dtype", None))
                if slot.shard.grad is None:
                    self._filled[slot.fqn] = slot.shard
                    self._hold_hooks(slot)
        if kept:
            keep_in_reduce_dtype(unit)
        if self._state.holding:
            self._waiting.add(number)
        else:
            self._waiting.discard(number)

    def _follow_freezing(self, number: int) -> None:
        """Let shards follow what was frozen or unfrozen while the parameters were gathered, or it would be lost."""
        for slot in self._slots[number]:
            param = slot.param
            if param is not None and param.requires_grad != slot.shard.requires_grad:
                slot.shard.requires_grad_(param.requires_grad)

    def _reshard(self, number: int, original: Callable[[], None]) -> None:
        self._follow_freezing(number)
        original()

    def follow_freezing(self) -> None:
        """Do so for every unit, before it is sharded again (**in place**)."""
        for number in range(len(self._units)):
            self._follow_freezing(number)

    def _refuse_second_step(self, number: int) -> None:
        stepped = number in self._reduced and any(reduction_hooks(slot.shard) for slot in self._slots[number])
        self._reduced.add(number)
        if stepped:
            raise FSDP2Error(
                f"{self._unit_names[number]}: it ran twice before this backward, which reduces it twice, and a hook on "
                "its parameters' gradients (register_post_accumulate_grad_hook) would act on a part of them. Step the "
                "optimizer after the backward."
            )

    def _hold_hooks(self, slot: _Slot) -> None:
        """Let hooks on a reduced gradient, such as an optimizer's step, wait until it is known whether there is one."""
        if hooks := reduction_hooks(slot.shard):
            self._hooks.setdefault(slot.fqn, hooks).update(hooks)
            set_reduction_hooks(slot.shard, None)

    def _finish(self) -> None:
        if self._state.holding or not self.order:
            return
        digest = int.from_bytes(hashlib.sha256(repr(self.order).encode()).digest()[:4], "big") >> 1
        flags = torch.zeros(len(self._index) + 2, dtype=torch.int32)
        flags[[self._index[name] for name in self._used]] = 1
        flags[-2], flags[-1] = digest, -digest
        flags = flags.to(self._device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        *used, highest, lowest = flags.tolist()
        if highest != -lowest:
            self._refuse_other_order()
        filled, hooks = dict(self._filled), dict(self._hooks)
        self.forget()
        for name, shard in filled.items():
            if not used[self._index[name]]:
                shard.grad = None
            for hook in hooks[name].values() if name in hooks and shard.grad is not None else ():
                hook(shard)

    def _refuse_other_order(self) -> None:
        mine = [self._unit_names[number] for number in self.order]
        every: list[list[str]] = [mine] * dist.get_world_size(self._group)
        dist.all_gather_object(every, mine, group=self._group)
        self.forget()
        at = next(n for n in range(max(map(len, every))) if len({tuple(order[n : n + 1]) for order in every}) > 1)
        ranks = dist.get_process_group_ranks(self._group) if self._group is not None else range(len(every))
        seen = [f"{order[at] if at < len(order) else 'none'} on rank {rank}" for rank, order in zip(ranks, every)]
        more = f" and {len(seen) - _SHOWN} more" if len(seen) > _SHOWN else ""
        raise FSDP2Error(
            f"the ranks reduced the gradients of different units: as number {at + 1} of this step "
            f"{', '.join(seen[:_SHOWN])}{more}. Every rank's loss must use the output of every unit it runs. List a "
            "module whose output only some ranks use in optional_modules; where one is listed, frozen units after it "
            "get a gradient with it only: add its output times 0 on the other ranks."
        )


def _gathered(slot: _Slot) -> nn.Parameter | None:
    param = slot.param
    return None if param is None or isinstance(param, DTensor) or not param.requires_grad else param


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
                        own.append(_Slot(".".join(filter(None, (fqns[module], leaf))), module, leaf, param))
        slots.append(own)
    return slots
