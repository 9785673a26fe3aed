"""Cast the inputs of units to the compute dtype, and spare what must stay exact.

PyTorch's own ``cast_forward_inputs`` casts every floating input. Rotary angles rounded to bf16 are off by up to
2 rad at 1024 tokens, so the cast is done here: it spares arguments named in ``keep_input_dtype`` and the outputs of
modules without parameters that make numbers rather than pass activations on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ._torch_private import apply_to_tensors

_MARK = "_mindspeed_fsdp2_keep_dtype"


def keep(tensor: torch.Tensor) -> torch.Tensor:
    """Mark ``tensor`` as one that no input cast may round (**in place**); return it."""
    setattr(tensor, _MARK, True)
    return tensor


def is_kept(tensor: torch.Tensor) -> bool:
    """Return whether :func:`keep` was called on this very tensor object."""
    return getattr(tensor, _MARK, False)


def apply_input_casts(modules: Iterable[nn.Module], dtype: torch.dtype, keep_names: Iterable[str]) -> None:
    """Cast the floating inputs of each module to ``dtype`` before its forward (**in place**).

    Args:
        modules: Units, or modules whose parameters live in the root unit. Call after ``fully_shard``, whose own
            pre-forward hook must run first.
        dtype: The compute dtype.
        keep_names: Argument names of ``forward`` that are passed on untouched.
    """
    names = frozenset(keep_names)
    for module in modules:
        module.register_forward_pre_hook(_input_cast(module, dtype, names), with_kwargs=True)


def apply_exact_outputs(modules: Iterable[nn.Module]) -> None:
    """Mark the outputs of modules without parameters as exact, unless they only pass activations on (**in place**).

    A module whose inputs hold a floating tensor (dropout, an activation function) passes activations on; one that
    is called with lengths or positions (rotary embeddings) makes numbers. One that owns a floating buffer may do
    either with a floating input: an output of that input's shape passes it on (a normalisation, positions added to
    embeddings), any other is made of the buffer (rotary embeddings that take their dtype and device from an input).
    """
    for module in modules:
        module.register_forward_hook(_mark_outputs, with_kwargs=True)


def apply_output_casts(modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Cast the floating outputs of ignored modules to ``dtype``, so that units take them (**in place**)."""
    for module in modules:
        module.register_forward_hook(functools.partial(_cast_outputs, dtype))


def _input_cast(
    module: nn.Module, dtype: torch.dtype, keep_names: frozenset[str]
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds]

    def cast_value(value: Any) -> Any:
        return apply_to_tensors(lambda t: t.to(dtype) if t.is_floating_point() and not is_kept(t) else t, value)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        named = zip(args, [*positional, *[""] * max(0, len(args) - len(positional))])
        return (
            tuple(value if name in keep_names else cast_value(value) for value, name in named),
            {name: value if name in keep_names else cast_value(value) for name, value in kwargs.items()},
        )

    return hook


def _mark_outputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    shapes: set[torch.Size] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            shapes.add(tensor.shape)
        return tensor

    apply_to_tensors(note, (args, kwargs))
    if shapes and not any(b.is_floating_point() for b in module.buffers()):
        return
    apply_to_tensors(lambda t: keep(t) if t.is_floating_point() and t.shape not in shapes else t, output)


def _cast_outputs(dtype: torch.dtype, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
    return apply_to_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, output)
