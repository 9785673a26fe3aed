"""What does not go together with recomputing a module: arguments it writes into, and checkpointing of its own."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn

from ._torch_private import tree_flatten, tree_unflatten
from .errors import FSDP2Error

logger = logging.getLogger(__name__)

DEPTH: Final = 4  # objects within objects that are looked into: a cache holds layers, which hold tensors
PLAIN: Final = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, nn.Module)

State = tuple[Any, ...]


def checkpoints_itself(module: nn.Module) -> bool:
    """Return whether ``module`` does activation checkpointing of its own, as Transformers' models can."""
    return bool(vars(module).get("gradient_checkpointing"))


def checkpointed_twice(where: str, fqn: str) -> str:
    """Return the error for a module ``fqn`` that does activation checkpointing of its own."""
    return (
        f"{where}: the model does activation checkpointing of its own as well (in {fqn or 'the model itself'!r}), "
        "so layers would run three times. Call model.gradient_checkpointing_disable(), or leave recompute_modules out."
    )


class LeftOut:
    """The key/value caches that modules of one model were called without; says so once.

    A cache that comes back, in the forward of a later piece of the text, lacks what the module would have put there.
    """

    def __init__(self) -> None:
        self._said = False
        self._last: dict[str, weakref.ref[Any]] = {}

    def met(self, fqn: str, cache: object) -> bool:
        """Return whether the last call of ``fqn`` was made without this very ``cache``."""
        last = self._last.get(fqn)
        return last is not None and last() is cache

    def note(self, fqn: str, cache: object) -> None:
        """Remember that ``fqn`` is called without ``cache``; the first time of all log it."""
        self._last[fqn] = weakref.ref(cache)
        if not self._said:
            self._said = True
            logger.warning(
                "recompute_modules: %r got a key/value cache in training; recomputed modules neither fill nor read it "
                "(a second run would append to it). Pass use_cache=False to the model.",
                fqn,
            )


def checked_arguments(
    fqn: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], left_out: LeftOut
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with None in place of every empty key/value cache.

    Transformers models make such a cache in each forward unless told not to, and every layer appends to it. The
    recomputation would find the keys and values of the first run, which carry no gradient.

    Raises:
        FSDP2Error: A cache holds tokens already: with None the module would compute something else. Or the module's own
            checkpointing was turned on after wrapping.
    """
    if module.training and checkpoints_itself(module):
        raise FSDP2Error(checkpointed_twice("recompute_modules", fqn))
    leaves, spec = tree_flatten((args, dict(kwargs)), is_leaf=_is_cache)
    caches = [index for index, leaf in enumerate(leaves) if _is_cache(leaf)]
    if not caches:
        return args, dict(kwargs)
    for index in caches:
        cache = leaves[index]
        held = (
            "lacks the keys and values of an earlier forward" if left_out.met(fqn, cache) else _content(cache, module)
        )
        if held:
            raise FSDP2Error(
                f"recompute_modules: {fqn!r} is called with a {type(cache).__name__} that {held}; a "
                "recomputed module cannot read and extend it. Train without past keys and values (past_key_values, "
                "prefix tuning), or do not recompute this module."
            )
        leaves[index] = None
        left_out.note(fqn, cache)
    new_args, new_kwargs = tree_unflatten(leaves, spec)
    return new_args, new_kwargs


def _is_cache(value: Any) -> bool:
    # Some versions of Transformers make caches modules, and some nodes of torch's pytrees.
    return callable(getattr(type(value), "get_seq_length", None)) and callable(getattr(type(value), "update", None))


def _content(cache: Any, module: nn.Module) -> str:
    """Return what ``cache`` holds for ``module``, whose attention knows its index; empty for nothing."""
    indices = (getattr(part, "layer_idx", None) for part in module.modules())
    index = next((index for index in indices if isinstance(index, int)), 0)
    try:
        tokens = int(cache.get_seq_length(index))
    except ValueError:  # a layer with a state of one size, such as Mamba's, counts no tokens
        has_state = getattr(cache, "has_previous_state", None)
        return "holds a state already" if callable(has_state) and has_state(index) else ""
    return f"holds {tokens} tokens already" if tokens else ""


def state_of_arguments(values: Iterable[Any]) -> State:
    """Return something that differs once an argument that is no tensor has been written into.

    Identity, version and place of the tensors inside stand for their values. Tensors that are arguments themselves
    are left out: torch's checkpoint looks after those.
    """
    return tuple(_state(value, DEPTH) for value in values if not isinstance(value, torch.Tensor))


def check_unwritten(fqn: str, before: State, after: State) -> None:
    """Compare what :func:`state_of_arguments` returned before and after the first run.

    Raises:
        FSDP2Error: The module wrote into an argument; a second run would compute something else, without an error.
    """
    if before != after:
        raise FSDP2Error(
            f"recompute_modules: {fqn!r} writes into an argument that is no tensor (a cache, a list, an object), so "
            "running it again would give other gradients. Call it without that argument, or do not recompute it."
        )


def _state(value: Any, depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        return (id(value), value._version)
    if isinstance(value, PLAIN) or callable(value) or not depth:
        return None  # numbers inside objects may count calls or measure time, which harms nobody
    if isinstance(value, Mapping):
        return tuple((id(key), _state(inner, depth - 1)) for key, inner in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return tuple(_state(inner, depth - 1) for inner in value)
    return _state(vars(value), depth - 1) if hasattr(value, "__dict__") else None
