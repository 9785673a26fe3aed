"""Do all ranks run the same units, and use the same parameters in them?"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

from .errors import FSDP2Error
from .hidden_outputs import tensors_in

_FIRST_FORWARDS = 20
_NAMED_AT_MOST = 4


class UnitOrderCheck:
    """Compares, before each unit gathers, which unit every rank is about to run (**collective** in forward).

    A rank that skips a unit leaves the others waiting in its all-gather, or pairs it with another unit's. Here every
    rank sends the number of its next unit first, so a difference is seen by all of them at the same moment.

    After a forward with gradients the ranks compare which units' parameters backward will reach: a unit that it
    reaches on some ranks only would be reduced by them alone.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Mapping[str, Sequence[nn.Module]],
        group: dist.ProcessGroup | None,
        device: torch.device,
        always: bool,
    ) -> None:
        """Register the hooks (**in place**; after ``fully_shard``, so that they run before its own).

        Args:
            root: The root unit's module.
            units: Name -> modules of every unit that gathers something.
            group: The data-parallel ranks.
            device: Where their collectives run.
            always: Whether to go on after the first 20 forwards.
        """
        self._names = [*units, "the end of the forward"]
        self._root = root
        self._group = group
        self._device = device
        self._left = -1 if always else _FIRST_FORWARDS
        self._inside = False
        self._gathered: dict[int, str] = {}  # id of a gathered parameter -> its unit's name
        self._outputs: dict[Node, str] = {}  # where an output of this forward was made -> its unit's name
        self._whole = {id(param) for param in root.parameters() if not isinstance(param, DTensor)}
        for number, (name, modules) in enumerate(units.items()):
            for module in modules:
                module.register_forward_pre_hook(functools.partial(self._before, number), prepend=True)
                # Before FSDP's hook, which takes the gathered parameters away again.
                module.register_forward_hook(functools.partial(self._learn, name), prepend=True)
        root.register_forward_pre_hook(self._begin, prepend=True)
        root.register_forward_hook(self._end, always_call=True)

    def _begin(self, _module: nn.Module, _args: Any) -> None:
        self._inside = self._left != 0
        self._outputs.clear()

    def _before(self, number: int, _module: nn.Module, _args: Any) -> None:
        if self._inside:  # outside lies recomputation, whose order follows from the forward's
            self._compare(number)

    def _learn(self, name: str, module: nn.Module, _args: Any, output: Any) -> None:
        if not self._inside:
            return
        for node in _nodes(output):
            self._outputs.setdefault(node, name)
        for param in module.parameters():
            if not isinstance(param, DTensor) and id(param) not in self._whole:
                self._gathered.setdefault(id(param), name)  # a unit inside this one came first

    def _end(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if not self._inside:
            return
        self._inside = False
        self._left -= self._left > 0
        if output is not None:  # None: the forward raised
            self._compare(len(self._names) - 1)
            if torch.is_grad_enabled():
                self._compare_used(self._used(output))

    def _compare(self, number: int) -> None:
        numbers = self._exchange(number)
        if len(set(numbers)) == 1:
            return
        self._inside = False
        at: dict[int, list[int]] = {}
        for rank, other in zip(self._ranks(), numbers):
            at.setdefault(other, []).append(rank)
        seen = "; ".join(f"{self._names[number]} {_on(ranks)}" for number, ranks in at.items())
        raise FSDP2Error(
            f"the ranks run different units: {seen}. Every rank must run the same units in the same order. List a "
            "tower that some ranks skip in optional_modules, or run it on every rank with a dummy input."
        )

    def _used(self, output: Any) -> frozenset[str]:
        """Return the units whose outputs or parameters are in the graph of ``output``, recomputation left out."""
        stack = _nodes(output)
        seen = set(stack)
        used: set[str] = set()
        while stack:
            node = stack.pop()
            name = self._outputs.get(node) or self._gathered.get(id(getattr(node, "variable", None)))
            if name is not None:
                used.add(name)
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    stack.append(following)
        self._outputs.clear()
        return frozenset(used)

    def _compare_used(self, used: frozenset[str]) -> None:
        digest = hashlib.sha256("\n".join(sorted(used)).encode()).digest()
        if len(set(self._exchange(int.from_bytes(digest[:7], "big")))) == 1:
            return
        every: list[frozenset[str]] = [used] * dist.get_world_size(self._group)
        dist.all_gather_object(every, used, group=self._group)
        partly = sorted(frozenset().union(*every) - frozenset.intersection(*every))
        at: dict[tuple[int, ...], list[str]] = {}
        for name in partly:
            ranks = tuple(rank for rank, names in zip(self._ranks(), every) if name in names)
            at.setdefault(ranks, []).append(name)
        seen = "; ".join(f"{_some(names)} {_on(ranks)}" for ranks, names in at.items())
        raise FSDP2Error(
            f"backward will reach different units: {seen} only. The ranks reduce a unit's gradients together, so every "
            "rank's loss must use the output of every unit it runs. List a module whose output only some ranks use in "
            "optional_modules; where one is listed, frozen units after it get a gradient with it only: add its output "
            "times 0 on the other ranks."
        )

    def _exchange(self, number: int) -> list[int]:
        mine = torch.tensor([number], device=self._device)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(every, mine, group=self._group)
        return [int(other) for other in every]

    def _ranks(self) -> Sequence[int]:
        if self._group is None:
            return range(dist.get_world_size())
        return dist.get_process_group_ranks(self._group)


def _nodes(output: Any) -> list[Node]:
    """Return where the tensors in ``output`` were made."""
    return [tensor.grad_fn for tensor in tensors_in(output, opaque=True) if tensor.grad_fn is not None]


def _on(ranks: Sequence[int]) -> str:
    return f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")
