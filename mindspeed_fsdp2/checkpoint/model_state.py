"""The model's part of a checkpoint: the state dict of the unwrapped model, under the same keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

SECTION = "model"


@dataclass(frozen=True)
class ModelState:
    """What is saved of a model.

    Attributes:
        tensors: Key of the state dict -> tensor; values of parameters and buffers are the model's own.
        ties: Key of a further name of a tensor -> key of its first name; not in ``tensors``.
        extra: Key -> what a module's ``get_extra_state`` returned.
        watched: Keys of tensors that are whole on every rank and may come to differ: buffers and trainable parameters.
        buffers: Keys of the buffers among them.
    """

    tensors: dict[str, torch.Tensor]
    ties: dict[str, str]
    extra: dict[str, Any]
    watched: tuple[str, ...]
    buffers: frozenset[str]


def model_state(root: nn.Module) -> ModelState:
    """Return the state of ``root``, whose units are resharded for it (**in place**).

    Args:
        root: The root unit's module, outside of forward and backward.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # what a forward left gathered are not the tensors that the optimizer steps on
    params = dict(root.named_parameters(remove_duplicate=False))
    buffers = dict(root.named_buffers(remove_duplicate=False))
    ties = _ties([*params.items(), *buffers.items()])
    tensors: dict[str, torch.Tensor] = {}
    extra: dict[str, Any] = {}
    for key, value in root.state_dict().items():
        if isinstance(value, torch.Tensor) and not key.endswith("_extra_state"):
            tensors[key] = value
        else:
            extra[key] = value
    known = {key: first for key, first in ties.items() if key in tensors and first in tensors}
    for key in known:
        del tensors[key]
    watched = [
        key
        for key, value in tensors.items()
        if not isinstance(value, DTensor) and (key in buffers or (key in params and params[key].requires_grad))
    ]
    return ModelState(tensors, known, extra, tuple(watched), frozenset(buffers))


def _ties(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    # By the objects, not by their storage: on a rank without a piece of a parameter there is none to compare.
    first: dict[int, str] = {}
    return {key: name for key, tensor in named if (name := first.setdefault(id(tensor), key)) != key}


def parameter_names(root: nn.Module) -> dict[str, nn.Parameter]:
    """Return fqn -> parameter, each parameter under its first name."""
    return dict(root.named_parameters())
