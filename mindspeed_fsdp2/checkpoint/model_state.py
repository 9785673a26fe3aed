"""The model's part of a checkpoint: the state dict of the unwrapped model, under the same keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError

SECTION = "model"


@dataclass(frozen=True)
class ModelState:
    """What is saved of a model.

    Attributes:
        tensors: Key of the state dict -> tensor; values of parameters and buffers are the model's own.
        ties: Key of a further name of a tensor -> key of its first name; not in ``tensors``.
        extra: Key -> what a module's ``get_extra_state`` returned.
        watched: Keys of tensors that are whole on every rank and may come to differ, frozen parameters too.
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
    origins = _origins(root)
    buffers = {id(buffer) for buffer in root.buffers()}
    ties = _ties(origins.items())
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
    watched = [key for key, value in tensors.items() if not isinstance(value, DTensor)]
    return ModelState(
        tensors,
        known,
        extra,
        tuple(watched),
        frozenset(key for key, origin in origins.items() if id(origin) in buffers),
    )


def _origins(root: nn.Module) -> dict[str, torch.Tensor]:
    """Return key of the state dict -> the parameter or buffer that it is the value of, in the state dict's order.

    By the objects: wrappers and hooks rename keys, so that the name inside of the module need not be the key.
    """
    named: dict[str, torch.Tensor] = {
        **dict(root.named_parameters(remove_duplicate=False)),
        **dict(root.named_buffers(remove_duplicate=False)),
    }
    own = {id(tensor) for tensor in named.values()}
    kept: Mapping[str, Any] = root.state_dict(keep_vars=True)
    found = {id(value) for value in kept.values()} & own
    origins: dict[str, torch.Tensor] = {}
    for key, value in kept.items():
        if id(value) in found:
            origins[key] = value
        elif key in named and id(named[key]) not in found:  # a hook has converted the value and kept the name
            origins[key] = named[key]
    return origins


def _ties(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    # By the objects, not by their storage: on a rank without a piece of a parameter there is none to compare.
    first: dict[int, str] = {}
    return {key: name for key, tensor in named if (name := first.setdefault(id(tensor), key)) != key}


def parameter_names(root: nn.Module, trained: Iterable[torch.Tensor] = ()) -> dict[str, nn.Parameter]:
    """Return fqn -> parameter, each parameter under its first key in the state dict.

    Args:
        root: The root unit's module.
        trained: What an optimizer holds. Other parameters may have no key, and are left out then.

    Raises:
        CheckpointError: A parameter among ``trained`` has no key.
    """
    keys: dict[int, str] = {}
    for key, origin in _origins(root).items():
        keys.setdefault(id(origin), key)
    held = {id(param) for param in trained}
    lost = [name for name, param in root.named_parameters() if id(param) in held and id(param) not in keys]
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise CheckpointError(
            f"optimizer: {', '.join(lost[:3])}{more} has no key in the model's state_dict(), so neither its values nor "
            "its optimizer state can be saved or loaded. Remove the hook that drops it, or do not train it."
        )
    return {keys[id(param)]: param for param in root.parameters() if id(param) in keys}


def trained_by(optimizer: object) -> list[torch.Tensor]:
    """Return the parameters that ``optimizer`` holds, none if it is no optimizer."""
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    return [param for group in groups for param in group["params"]]
