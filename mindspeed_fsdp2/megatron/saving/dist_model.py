"""torch_dist: the model's part of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .dist_pieces import ShardFactory, shard_factory

METHOD = "sharded_state_dict"
_FSDP2_MARK = "is_torch_fsdp2_param"


def shard_state_dicts(model: nn.Module) -> None:
    """Let ``model.sharded_state_dict()`` describe shards (**in place**).

    Megatron calls it on the innermost model, below its wrappers, so that instance gets the method.

    Args:
        model: A model with sharded parameters and a ``sharded_state_dict`` of its own.
    """
    original: Callable[..., dict[str, Any]] = getattr(model, METHOD)

    def sharded_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return sharded_model_state(model, lambda: original(*args, **kwargs))

    setattr(model, METHOD, sharded_state_dict)


def sharded_model_state(model: nn.Module, describe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what ``describe`` returns, with this rank's shards in the place of whole parameters.

    Args:
        model: The model; what a forward left gathered is resharded (**in place**).
        describe: Its own ``sharded_state_dict``. It sees parameters of the size they have under plain data parallelism,
            without values, so none of Megatron's own rules for FSDP2 applies.

    Raises:
        CheckpointError: A parameter is not described in a way that can be cut to shards.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    with whole_parameters(model) as sharded:
        described = describe()
    dtypes: dict[str, torch.dtype] = {}
    _note_dtypes(described, dtypes)
    return {name: _with_shards(value, sharded, dtypes) for name, value in described.items()}


@contextmanager
def whole_parameters(model: nn.Module) -> Iterator[Mapping[int, tuple[nn.Parameter, DTensor]]]:
    """Let every sharded parameter of ``model`` look whole, on the meta device, while the context lasts.

    Yields:
        Id of a stand-in -> stand-in and the parameter it stands for.
    """
    stand_ins: dict[int, nn.Parameter] = {}
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    sharded: dict[int, tuple[nn.Parameter, DTensor]] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if isinstance(param, DTensor):
                stand_in = stand_ins.setdefault(id(param), _stand_in(param))
                sharded[id(stand_in)] = (stand_in, param)
                replaced.append((module, name, param))
    try:
        for module, name, param in replaced:
            module._parameters[name] = stand_ins[id(param)]
        yield sharded
    finally:
        for module, name, param in replaced:
            module._parameters[name] = param


def _stand_in(param: nn.Parameter) -> nn.Parameter:
    whole = nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device="meta"), param.requires_grad)
    for name, value in vars(param).items():
        if name != _FSDP2_MARK:
            setattr(whole, name, value)
    return whole


def _note_dtypes(value: Any, dtypes: dict[str, torch.dtype]) -> None:
    """Add the widest dtype of each key: layers share a key, and of two layers only one may be in an ignored module."""
    if isinstance(value, (ShardedTensor, ShardedTensorFactory)):
        dtypes[value.key] = torch.promote_types(dtypes.get(value.key, value.data.dtype), value.data.dtype)
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            _note_dtypes(item, dtypes)


def _with_shards(
    value: Any, sharded: Mapping[int, tuple[nn.Parameter, DTensor]], dtypes: Mapping[str, torch.dtype]
) -> Any:
    # Whole tensors are described anew as well: within a key Megatron wants all pieces, or none, on a regular grid.
    if isinstance(value, dict):
        return {key: _with_shards(item, sharded, dtypes) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_shards(item, sharded, dtypes) for item in value]
    if not isinstance(value, (ShardedTensor, ShardedTensorFactory)):
        return value
    _, param = sharded.get(id(value.data), (None, value.data))
    return shard_factory(value, param, dtypes[value.key])


def parameter_entries(state: Any, name: str = "") -> dict[int, tuple[str, ShardFactory]]:
    """Return id of a tensor -> its name and description, of all tensors in a sharded model state dict."""
    if isinstance(state, ShardFactory):
        return {id(state.param): (name, state)}
    found: dict[int, tuple[str, ShardFactory]] = {}
    if isinstance(state, (dict, list)):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            found |= parameter_entries(value, f"{name}.{key}" if name else str(key))
    return found
