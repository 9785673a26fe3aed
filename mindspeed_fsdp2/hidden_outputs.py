"""Outputs that FSDP cannot look into: backward would use sharded weights, or leave gradients unreduced."""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ._torch_private import SEES_DATACLASSES, has_gradient_hooks, in_backward, tree_flatten
from .errors import FSDP2Error
from .step_hooks import before_each_step

_SEEN_AT_MOST = 2000  # objects, so that an output that holds a whole program costs little
_NAMED_AT_MOST = 3
_CONTAINERS = "a tensor, or tensors in a tuple, list, dict" + (
    ", dataclass or named tuple" if SEES_DATACLASSES else " or named tuple (a newer torch sees them in dataclasses too)"
)


def tensors_in(value: Any, *, opaque: bool) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``value``.

    Args:
        value: Output of a forward.
        opaque: Whether to look into sets and into the attributes of any object too, where FSDP's hooks do not.
    """
    seen: set[int] = set()
    left = deque([value])
    while left and len(seen) < _SEEN_AT_MOST:
        item = left.popleft()
        if isinstance(item, torch.Tensor):
            yield item
        elif id(item) not in seen:
            seen.add(id(item))
            left.extend(_inside(item, opaque))


def tensors_hooked(value: Any) -> list[torch.Tensor]:
    """Return the tensors in inputs or outputs of a unit that FSDP's hooks look for."""
    if SEES_DATACLASSES:
        return list(tensors_in(value, opaque=False))
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def _inside(item: Any, opaque: bool) -> Iterable[Any]:
    if isinstance(item, (list, tuple)):
        return item
    if isinstance(item, dict):
        return item.values()
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name, None) for field in dataclasses.fields(item)]
    if not opaque or item is None or isinstance(item, (str, bytes, int, float, type, nn.Module, types.FunctionType)):
        return ()
    if isinstance(item, (set, frozenset, deque)):
        return item
    slots = [name for kind in type(item).__mro__ for name in _names(getattr(kind, "__slots__", ()))]
    return [*getattr(item, "__dict__", {}).values(), *(getattr(item, name, None) for name in slots)]


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def refuse_hidden_outputs(units: Mapping[str, Sequence[nn.Module]], recast: Iterable[str]) -> None:
    """Raise where backward cannot reach a unit because no hook sees the tensors it returns (**in place**).

    Args:
        units: Name -> modules of every unit but the root, which stays gathered until its backward.
        recast: Names of the units that return copies in another dtype of what FSDP has hooked.
    """
    for name, members in units.items():
        # Of a unit of several modules FSDP hooks the output of the last one only.
        exact = len(members) == 1 and name not in recast
        for module in members:
            module.register_forward_hook(functools.partial(_check_output, name, exact))


def _check_output(name: str, exact: bool, _module: nn.Module, _args: Any, output: Any) -> None:
    if isinstance(output, torch.Tensor) or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    if in_backward():  # in recomputation FSDP hooks nothing, nor needs to
        return
    seen = [tensor for tensor in tensors_hooked(output) if tensor.requires_grad]
    if any(not exact or has_gradient_hooks(tensor) for tensor in seen):  # type: ignore[arg-type]
        return
    if seen or any(tensor.requires_grad for tensor in tensors_in(output, opaque=True)):
        raise FSDP2Error(
            f"{name}: this unit returns its tensors in a {type(output).__name__}, where FSDP2 cannot see them, so that "
            f"backward would meet sharded weights. Return {_CONTAINERS}."
        )


def refuse_unreduced(root: nn.Module, units: Iterable[Sequence[nn.Module]]) -> None:
    """Refuse an optimizer's step that would miss gradients, or that torch cannot make, while ``root`` lives.

    FSDP reduces what a backward left in a gathered parameter when a gradient has come through an output. If none has
    (the loss was kept in an attribute of the model, say), the gradient stays there, and the optimizer sees none.

    Args:
        root: The root unit's module, every unit sharded.
        units: Modules of every unit, the root included.
    """
    names = {id(param): name for name, param in root.named_parameters()}
    own = {id(param) for param in root.parameters()}
    gathered = _learn_gathered(root, units)
    known: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()

    def before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if optimizer not in known:
            known[optimizer] = any(id(param) in own for group in optimizer.param_groups for param in group["params"])
            if known[optimizer]:
                _refuse_mixed(optimizer, names)
        if not known[optimizer] or in_backward():
            return
        left = [name for name, param in gathered.items() if param.grad is not None]
        if left:
            raise FSDP2Error(
                f"optimizer: the gradients of {_some(left)} were never averaged over the ranks, because the loss came "
                f"out of the model where FSDP2 cannot see it: in an attribute, or in an object. Return it as "
                f"{_CONTAINERS}."
            )

    before_each_step(root, before_step)


def _learn_gathered(root: nn.Module, units: Iterable[Sequence[nn.Module]]) -> dict[str, nn.Parameter]:
    """Return a mapping that the first forward of each unit fills: name -> gathered parameter."""
    gathered: dict[str, nn.Parameter] = {}
    names = {name for name, param in root.named_parameters() if isinstance(param, DTensor)}
    handles: dict[nn.Module, RemovableHandle] = {}

    def learn(prefix: str, module: nn.Module, _args: Any, _output: Any) -> None:
        for name, param in module.named_parameters(prefix):
            if name in names and not isinstance(param, DTensor):
                gathered[name] = param
        if (handle := handles.pop(module, None)) is not None:  # a module may have called itself
            handle.remove()  # FSDP keeps these objects

    prefixes = {module: fqn for fqn, module in root.named_modules()}
    for module in [module for members in units for module in members]:
        # Before FSDP's hook, which takes the gathered parameters away again.
        handles[module] = module.register_forward_hook(functools.partial(learn, prefixes[module]), prepend=True)
    return gathered


def _refuse_mixed(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    for group in optimizer.param_groups:
        kinds = [key for key in ("foreach", "fused") if group.get(key)]
        whole = [param for param in group["params"] if not isinstance(param, DTensor)]
        if kinds and whole and len(whole) < len(group["params"]):
            listed = _some([names.get(id(param), "a parameter of another model") for param in whole])
            raise FSDP2Error(
                f"optimizer: {kinds[0]}=True needs sharded and whole parameters in groups of their own, and one group "
                f"holds both: {listed} {'is' if len(whole) == 1 else 'are'} whole. Give "
                f"{type(optimizer).__name__} two groups, or pass {kinds[0]}=False."
            )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")
