"""Inputs of units that require grad on some ranks only."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from .casts import is_kept, keep
from .hidden_outputs import tensors_hooked


def let_inputs_require_grad(units: Iterable[Sequence[nn.Module]]) -> None:
    """Let the inputs of each module of each trainable unit require grad in every forward with gradients (**in place**).

    FSDP reduces a unit when the gradients of its inputs are there, or at the very end of backward where no input
    requires grad. Behind a frozen embedding that would depend on whether a rank ran an optional tower, whose output
    is added to the embedding's, and the ranks would reduce in different orders.
    """
    for members in units:
        mark = functools.partial(_mark, members)
        for module in members:
            module.register_forward_pre_hook(mark, prepend=True, with_kwargs=True)  # before FSDP looks at the inputs


def _mark(members: Sequence[nn.Module], _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    # A frozen member counts too: FSDP looks at the inputs of the one that runs first.
    if not torch.is_grad_enabled() or not any(p.requires_grad for module in members for p in module.parameters()):
        return None
    if any(tensor.requires_grad for tensor in tensors_hooked((args, kwargs))):
        return None
    return tuple(_required(value) for value in args), {name: _required(value) for name, value in kwargs.items()}


def _required(value: Any) -> Any:
    # Not inside containers: they would have to be copied, and what the unit writes into them would be lost.
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    marked = value.detach().requires_grad_()
    if is_kept(value):
        keep(marked)
    return marked
