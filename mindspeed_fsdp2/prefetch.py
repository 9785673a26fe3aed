"""Record the order in which units run, and set explicit prefetch lists from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from ._torch_private import apply_to_tensors, in_backward

logger = logging.getLogger("mindspeed_fsdp2")


@dataclass(frozen=True)
class PrefetchOrder:
    """The recorded order of units, by name.

    Attributes:
        forward: Units in the order in which their forward begins; the root first.
        backward: Units in the order in which backward reaches them: the reverse of the order in which their forward
            ended. The two differ for nested units; units that backward never reaches (a frozen tower) are left out.
    """

    forward: tuple[str, ...]
    backward: tuple[str, ...]


@dataclass
class PrefetchRecorder:
    """Watches the first training forward of ``root``, then sets the prefetch lists and takes its hooks away.

    In evaluation mode only a backward tells a training forward from others, so there it is the next one.

    Lists that differ between ranks train on wrong weights without any error, so the ranks compare their orders in
    one collective and set nothing unless all are equal.

    Attributes:
        root: The root unit's module.
        units: Name -> modules of every unit, the root included.
        ahead_forward: Units to gather ahead in forward.
        ahead_backward: Units to gather ahead in backward.
        recomputed: Names of units from which nothing is gathered ahead in forward.
        group: The data-parallel ranks, which compare their orders.
        order: What was recorded; None until then, and forever if the ranks differ.
    """

    root: nn.Module
    units: Mapping[str, Sequence[nn.Module]]
    ahead_forward: int
    ahead_backward: int
    recomputed: Sequence[str]
    group: dist.ProcessGroup | None
    order: PrefetchOrder | None = None
    _recording: bool = False
    _trained: bool = False  # a backward came after a forward in evaluation mode
    _begun: list[str] = field(default_factory=list)
    _ended: list[str] = field(default_factory=list)
    _handles: list[RemovableHandle] = field(default_factory=list)

    def start(self) -> None:
        """Register the recording hooks (**in place**)."""
        for name, modules in self.units.items():
            for module in modules:
                self._handles.append(module.register_forward_pre_hook(partial(self._begin, name)))
                self._handles.append(module.register_forward_hook(partial(self._end, name)))

    def _begin(self, name: str, module: nn.Module, _args: Any) -> None:
        if module is self.root:
            self._begun.clear()
            self._ended.clear()
            self._recording = torch.is_grad_enabled() and (module.training or self._trained)
        if self._recording and name not in self._begun:
            self._begun.append(name)

    def _end(self, name: str, module: nn.Module, _args: Any, output: Any) -> None:
        if not self._recording:
            if module is self.root and torch.is_grad_enabled() and not in_backward():
                apply_to_tensors(self._watch, output)
            return
        if name in self._ended:  # a unit that runs twice is needed last by its last run
            self._ended.remove(name)
        # Inside a reentrantly recomputed module gradients are off, yet backward comes.
        if not torch.is_grad_enabled() or _requires_grad(output):
            self._ended.append(name)
        if module is self.root:
            self._recording = False
            self._finish()

    def _watch(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensor.register_hook(self._note_backward)  # type: ignore[no-untyped-call]
        return tensor

    def _note_backward(self, _grad: torch.Tensor) -> None:
        self._trained = True

    def _finish(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        mine = PrefetchOrder(tuple(self._begun), tuple(reversed(self._ended)))
        every: list[PrefetchOrder] = [mine] * dist.get_world_size(self.group)
        dist.all_gather_object(every, mine, group=self.group)
        other = next((n for n, order in enumerate(every) if order != every[0]), None)
        if other is not None:
            logger.warning(
                "prefetch is left to PyTorch: the execution order differs between data-parallel ranks 0 and %d, first "
                "at %s. Explicit lists that differ between ranks would train on wrong weights.",
                other,
                _first_difference(every[0], every[other]),
            )
            return
        self.order = mine
        self._set(mine.forward, self.ahead_forward, forward=True)
        self._set(mine.backward, self.ahead_backward, forward=False)

    def _set(self, order: Sequence[str], ahead: int, *, forward: bool) -> None:
        if not ahead:
            return
        for position, name in enumerate(order):
            if forward and name in self.recomputed:
                continue
            # All modules of a unit share one state, so the first stands for them.
            following = [_fsdp(self.units[other][0]) for other in order[position + 1 : position + 1 + ahead]]
            unit = _fsdp(self.units[name][0])
            if forward:
                unit.set_modules_to_forward_prefetch(following)
            else:
                unit.set_modules_to_backward_prefetch(following)


def _requires_grad(output: Any) -> bool:
    found: list[bool] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor.requires_grad)
        return tensor

    apply_to_tensors(note, output)
    return any(found)


def _fsdp(module: nn.Module) -> FSDPModule:
    if not isinstance(module, FSDPModule):
        raise TypeError(f"{type(module).__name__} is not an FSDP unit")
    return module


def _first_difference(a: PrefetchOrder, b: PrefetchOrder) -> str:
    for way in ("forward", "backward"):
        one, two = getattr(a, way), getattr(b, way)
        for n in range(max(len(one), len(two))):
            left, right = (seq[n] if n < len(seq) else "nothing" for seq in (one, two))
            if left != right:
                return f"{way} position {n}: {left} against {right}"
    return "nowhere"
