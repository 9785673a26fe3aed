"""Load whole or sharded values into an FSDP2 model: what ``load_state_dict`` of Megatron's wrapper leaves undone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...checkpoint.pieces import piece_of
from ...errors import CheckpointError

logger = logging.getLogger("mindspeed_fsdp2")

_EXTRA = "_extra_state"
_SHOWN = 20


def load_values(module: nn.Module, values: Mapping[str, Any], strict: bool, first_rank: bool) -> None:
    """Load ``values`` into ``module`` (**in place**).

    Args:
        module: The model below the data-parallel wrapper.
        values: Key of the unwrapped model -> whole tensor, equal on all ranks, or DTensor; extra state as it is.
        strict: Whether the keys must be those of the model. Extra state may be missing all the same: versions of
            Transformer Engine differ in it.
        first_rank: Whether this rank warns.

    Raises:
        CheckpointError: Keys or shapes do not fit; lists all of them. Nothing is loaded then.
    """
    own = module.state_dict()
    missing = [key for key in own if key not in values]
    unexpected = [key for key in values if key not in own]
    lines = []
    wrong = [
        f"{key} is {tuple(tensor.shape)} here and {tuple(values[key].shape)} in the checkpoint"
        for key, tensor in own.items()
        if isinstance(tensor, torch.Tensor) and isinstance(values.get(key), torch.Tensor)
        # The extra state of Transformer Engine is a tensor of bytes of any length.
        if not key.endswith(_EXTRA) and tensor.shape != values[key].shape
    ]
    tensors_missing = [key for key in missing if not key.endswith(_EXTRA)]
    tensors_unexpected = [key for key in unexpected if not key.endswith(_EXTRA)]
    if wrong:
        lines.append(f"other shape: {_shown(wrong)}")
    if strict and tensors_missing:
        lines.append(f"missing in the checkpoint: {_shown(tensors_missing)}")
    if strict and tensors_unexpected:
        lines.append(f"only in the checkpoint: {_shown(tensors_unexpected)}")
    if lines:
        listed = "\n  ".join(lines)
        raise CheckpointError(
            f"load_state_dict: the values do not fit the model:\n  {listed}\nBuild the model with the flags that they "
            "were saved with."
        )
    missing = [key for key in missing if own[key] is not None]  # Megatron's local layers answer None for extra state
    if (missing or unexpected) and first_rank:
        logger.warning(
            "load_state_dict: kept as they were: %s; not used: %s",
            _shown(missing) or "none",
            _shown(unexpected) or "none",
        )
    fitting = {key: _like(own[key], value) for key, value in values.items() if key in own}
    module.load_state_dict(fitting, strict=False)


def _like(own: Any, value: Any) -> Any:
    """Return ``value`` in the layout of ``own``: this rank's shard of it where that is one."""
    if not isinstance(own, torch.Tensor) or not isinstance(value, torch.Tensor):
        return value
    if not isinstance(own, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    if isinstance(value, DTensor):
        if value.device_mesh == own.device_mesh and value.placements == own.placements:
            return value
        value = value.full_tensor()
    piece = piece_of(("",), own, 0, 1)
    local = value
    for dim, (start, length) in enumerate(zip(piece.offset, piece.tensor.shape)):
        local = local.narrow(dim, min(start, local.shape[dim]), length)
    local = local.to(device=piece.tensor.device, dtype=own.dtype)
    return DTensor.from_local(
        local, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
    )


def round_to_bf16(module: nn.Module) -> int:
    """Round every floating parameter to what bf16 can hold (**in place**), and return how many there are."""
    count = 0
    with torch.no_grad():
        for param in module.parameters():
            if param.is_floating_point():
                local = param.to_local() if isinstance(param, DTensor) else param
                local.copy_(local.to(torch.bfloat16))
                count += 1
    return count


def _shown(names: list[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
