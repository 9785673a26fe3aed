"""The places in a model that may hold tensors on the meta device, and the mark of a tensor without value."""

from __future__ import annotations

import sys
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._torch_private import unsaved_buffers
from .build import MARK
from .tape import View

_SKIPPED = ("_parameters", "_buffers", "_modules", MARK)


@dataclass(frozen=True)
class Slot:
    """One place in a model that holds a tensor on the meta device.

    Attributes:
        name: For messages.
        get: Returns what is there now.
        put: Puts another tensor there.
        kind: ``"parameter"``, ``"buffer"``, ``"cache"`` (a buffer that checkpoints do not hold) or ``"attribute"``.
        view: Where its value comes from; None if nothing computes it.
    """

    name: str
    get: Callable[[], torch.Tensor]
    put: Callable[[torch.Tensor], None]
    kind: str
    view: View | None = None

    @property
    def unset(self) -> bool:
        """Whether nobody gives it a value."""
        return self.view is None or not self.view.buffer.writers


def slots(root: nn.Module) -> Iterator[Slot]:
    """Yield a slot for every tensor that ``root`` holds, one under several names several times."""
    seen: set[int] = set()
    for fqn, module in root.named_modules():
        yield from slots_of(module, f"{fqn}." if fqn else "", seen)


def slots_of(module: nn.Module, prefix: str = "", seen: set[int] | None = None) -> Iterator[Slot]:
    """Yield a slot for every tensor that ``module`` itself holds, in attributes and objects that are no modules too.

    Args:
        module: A module.
        prefix: Begins the slots' names.
        seen: Objects that were looked into already (**changed in place**).
    """
    for key, param in module._parameters.items():
        if param is not None:
            yield _slot(prefix + key, module._parameters, key, "parameter")
    for key, buffer in module._buffers.items():
        if buffer is not None:
            kind = "cache" if key in unsaved_buffers(module) else "buffer"
            yield _slot(prefix + key, module._buffers, key, kind)
    for key, value in list(vars(module).items()):
        if key not in _SKIPPED:
            yield from _inside(prefix + key, vars(module), key, value, set() if seen is None else seen)


def _inside(name: str, holder: Any, key: Any, value: Any, seen: set[int]) -> Iterator[Slot]:
    if isinstance(value, torch.Tensor):
        yield _slot(name, holder, key, "attribute")
        return
    parts: Iterable[tuple[str, Any, Any, Any]] = ()
    if isinstance(value, (list, deque, tuple)):
        place = _Tuple(holder, key) if isinstance(value, tuple) else value
        parts = ((f"{name}[{at}]", place, at, item) for at, item in enumerate(value))
    elif isinstance(value, dict):
        parts = ((f"{name}[{inner!r}]", value, inner, item) for inner, item in list(value.items()))
    elif _is_plain(value):  # Megatron's token dispatchers hold indices
        parts = ((f"{name}.{inner}", vars(value), inner, item) for inner, item in list(vars(value).items()))
    else:
        return
    # A tuple is replaced in each place that holds it; everything else is changed in place.
    if isinstance(value, tuple) or id(value) not in seen:
        seen.add(id(value))
        for part in parts:
            yield from _inside(*part, seen)


def _is_plain(value: object) -> bool:
    """Return whether ``value`` is an object of a class of the model's own, or of a library for models."""
    library = type(value).__module__.partition(".")[0]
    skipped = isinstance(value, (type, nn.Module)) or library == "torch" or library in sys.stdlib_module_names
    skipped = skipped and not isinstance(value, (SimpleNamespace, UserDict, UserList))
    return not skipped and isinstance(getattr(value, "__dict__", None), dict)


class _Tuple:
    """Lets the items of a tuple be read and set like those of a list."""

    def __init__(self, holder: Any, key: Any) -> None:
        self._holder, self._key = holder, key

    def __getitem__(self, at: int) -> Any:
        return self._holder[self._key][at]

    def __setitem__(self, at: int, item: Any) -> None:
        items = self._holder[self._key]
        parts = (*items[:at], item, *items[at + 1 :])
        kind = type(items)
        # A named tuple's class takes its fields one by one; torch.return_types can be made by calling only.
        made = kind(parts) if hasattr(kind, "n_sequence_fields") else tuple.__new__(kind, parts)
        getattr(made, "__dict__", {}).update(getattr(items, "__dict__", {}))
        self._holder[self._key] = made


def _slot(name: str, holder: Any, key: Any, kind: str) -> Slot:
    def put(tensor: torch.Tensor) -> None:
        holder[key] = tensor

    return Slot(name, lambda: holder[key], put, kind)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def no_mark(tensor: torch.Tensor) -> bool:
    """Return whether tensors of this dtype cannot be marked."""
    return tensor.dtype == torch.bool or tensor.is_complex()


def mark(tensor: torch.Tensor) -> None:
    """Fill ``tensor`` with what no loaded tensor holds (**in place**)."""
    local = _local(tensor)
    local.fill_(torch.nan if local.is_floating_point() else torch.iinfo(local.dtype).max)


def is_marked(tensor: torch.Tensor) -> bool:
    """Return whether this rank holds a part of ``tensor`` and all of it is as :func:`mark` left it."""
    local = _local(tensor)
    if local.numel() == 0:
        return False
    return bool((local.isnan() if local.is_floating_point() else local == torch.iinfo(local.dtype).max).all())
