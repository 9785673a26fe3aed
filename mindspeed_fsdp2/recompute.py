"""Activation checkpointing that leaves names, state-dict keys and module paths alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from . import rng
from ._torch_private import TreeSpec, apply_to_tensors, tree_flatten, tree_unflatten
from .casts import is_kept, keep
from .errors import FSDP2Error
from .recompute_args import LeftOut, check_unwritten, checked_arguments, state_of_arguments


def apply_recompute(
    modules: Iterable[tuple[str, nn.Module]], use_reentrant: bool, random_states: Sequence[rng.RandomState]
) -> None:
    """Make each module recompute its activations in backward (**in place**; before ``fully_shard``).

    ``forward`` is replaced on the instance, below FSDP's hooks: the parameters that backward has gathered serve the
    recomputation too, and no wrapper enters the module's name (``checkpoint_wrapper`` renames; applied after
    sharding it costs one more all-gather per unit).

    Args:
        modules: ``(fqn, module)`` pairs.
        use_reentrant: Which of torch's two implementations.
        random_states: What is put back before the second run, so that dropout draws the same masks.
    """
    left_out = LeftOut()
    for fqn, module in modules:
        run = _reentrant if use_reentrant else _non_reentrant
        module.forward = run(fqn, module, module.forward, tuple(random_states), left_out)


class _SameAgain:
    """Calls a function again with the random states of its first call, and without moving running statistics.

    One object per forward call: the first call is the forward, every later one a recomputation.
    """

    def __init__(self, fqn: str, module: nn.Module, states: Sequence[rng.RandomState]) -> None:
        self._fqn = fqn
        self._module = module
        self._states = states
        self._first: list[Any] | None = None

    def __call__(self, function: Callable[[], Any], arguments: Iterable[Any]) -> Any:
        if self._first is None:
            self._first = rng.snapshot(self._states)
            before = state_of_arguments(arguments)
            result = function()
            check_unwritten(self._fqn, before, state_of_arguments(arguments))
            return result
        outer = rng.snapshot(self._states)
        rng.restore(self._states, self._first)
        try:
            with _still(self._module):
                return function()
        finally:  # non-reentrant recomputation stops early by raising through here
            rng.restore(self._states, outer)


@contextmanager
def _still(module: nn.Module) -> Iterator[None]:
    """Let copies take the updates of running statistics: the forward has made them, once per micro-batch."""
    norms = [norm for norm in module.modules() if {"running_mean", "running_var"} & norm._buffers.keys()]
    kept = [(norm, name, buffer) for norm in norms for name, buffer in norm.named_buffers(recurse=False)]
    for norm, name, buffer in kept:
        setattr(norm, name, buffer.clone())
    try:
        yield
    finally:
        for norm, name, buffer in kept:
            setattr(norm, name, buffer)


def _non_reentrant(
    fqn: str, module: nn.Module, forward: Callable[..., Any], states: Sequence[rng.RandomState], left_out: LeftOut
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        args, kwargs = checked_arguments(fqn, module, args, kwargs, left_out)
        draws = _SameAgain(fqn, module, states)

        def run(*inner: Any, **inner_kwargs: Any) -> Any:
            return draws(lambda: forward(*inner, **inner_kwargs), (*inner, *inner_kwargs.values()))

        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return checkpointed


def _reentrant(
    fqn: str, module: nn.Module, forward: Callable[..., Any], states: Sequence[rng.RandomState], left_out: LeftOut
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Reentrant checkpointing sees tensors only as direct positional arguments and results: a tensor in a keyword,
        # a tuple or a dict would keep its graph and be differentiated twice or not at all.
        args, kwargs = checked_arguments(fqn, module, args, kwargs, left_out)
        leaves, spec = tree_flatten((args, kwargs))
        _check_visible(fqn, leaves, lambda tensor: tensor.requires_grad)
        if not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            _check_frozen(fqn, module)
            return forward(*args, **kwargs)  # no backward comes here
        kept = [isinstance(leaf, torch.Tensor) and is_kept(leaf) for leaf in leaves]
        draws = _SameAgain(fqn, module, states)
        out_spec: list[TreeSpec] = []

        def run(*flat: Any) -> Any:
            for leaf, mark in zip(flat, kept):
                if mark:  # torch hands over detached copies, which lost the mark
                    keep(leaf)
            inner, inner_kwargs = tree_unflatten(list(flat), spec)
            values = (*inner, *inner_kwargs.values())
            out_leaves, out = tree_flatten(draws(lambda: forward(*inner, **inner_kwargs), values))
            _check_visible(fqn, out_leaves, torch.Tensor.is_floating_point)  # gradients are off here
            out_spec[:] = [out]
            return tuple(out_leaves)

        results = checkpoint(run, *leaves, use_reentrant=True, preserve_rng_state=False)
        return tree_unflatten(list(results), out_spec[0])

    return checkpointed


def _check_visible(fqn: str, leaves: Iterable[Any], matters: Callable[[torch.Tensor], bool]) -> None:
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            continue
        inside: list[torch.Tensor] = []

        def note(tensor: torch.Tensor, inside: list[torch.Tensor] = inside) -> torch.Tensor:
            inside.append(tensor)
            return tensor

        apply_to_tensors(note, leaf)
        if any(matters(tensor) for tensor in inside):
            raise FSDP2Error(
                f"recompute_modules: {fqn!r} is recomputed reentrantly but tensors go in or out inside a "
                f"{type(leaf).__name__}, where their gradients would silently be lost. Set use_reentrant: false, or "
                "pass them in tuples and dicts."
            )


def _check_frozen(fqn: str, module: nn.Module) -> None:
    if any(param.requires_grad for param in module.parameters()):
        raise FSDP2Error(
            f"recompute_modules: {fqn!r} is recomputed reentrantly but none of its inputs requires grad, so its "
            "parameters would silently get no gradient. Set use_reentrant: false, or do not recompute it."
        )
