"""Look at, or change, the whole parameters of a wrapped model for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from .apply import reshard_after_forward, sharded
from .errors import FSDP2Error, PlanError


@contextmanager
def full_parameters(model: nn.Module) -> Iterator[None]:
    """Gather every unit of ``model`` inside (**collective**; needs memory for the whole model on each rank).

    Inside, parameters are plain tensors in the compute dtype, and forwards, of the model or of parts of it, use them
    as they are. What is changed in place, equally on every rank, is written back to the shards.

    Args:
        model: A wrapped model, outside of forward and backward.

    Raises:
        PlanError: ``model`` is not wrapped.
        FSDP2Error: A parameter was changed although it is gathered in another dtype than it is stored in, so the
            stored value would be rounded. Or units were sharded again inside, by a backward, say, and what was
            changed before is lost.
    """
    handle = sharded(model)
    if handle is None:
        raise PlanError("full_parameters: the model is not wrapped. Call wrap_model first.")
    units = [module for module in handle.module.modules() if isinstance(module, FSDPModule)]
    shards = dict(handle.module.named_parameters())
    with torch.no_grad():
        for unit in units:
            unit.unshard()
    handle.state.gathered = True
    reshard_after_forward(handle, False)
    try:
        yield
        _write_back(shards, dict(handle.module.named_parameters()))
    finally:
        handle.state.gathered = False
        reshard_after_forward(handle, True)
        for unit in units:
            unit.reshard()


def _write_back(shards: dict[str, nn.Parameter], whole: dict[str, nn.Parameter]) -> None:
    sharded_again = [name for name, param in whole.items() if isinstance(param, DTensor)]
    if sharded_again:
        raise FSDP2Error(
            f"full_parameters: {_some(sharded_again)} sharded again inside, by a backward or by a forward with a "
            "number as reshard_after_forward, and changes made before are lost. Run those outside."
        )
    rounded = []
    with torch.no_grad():
        for name, shard in shards.items():
            if not isinstance(shard, DTensor):
                continue
            # Each rank cuts out its own piece: nothing is sent.
            mine = distribute_tensor(whole[name].detach(), shard.device_mesh, shard.placements, src_data_rank=None)
            if mine.dtype == shard.dtype:
                shard.to_local().copy_(mine.to_local())
            elif not torch.equal(mine.to_local().to(shard.device), shard.to_local().to(mine.dtype)):
                rounded.append(name)
    if rounded:
        raise FSDP2Error(
            f"full_parameters: {_some(rounded)} changed in the compute dtype, which would round the stored value. "
            "Change weights before wrap_model, or wrap without param_dtype."
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more + (" was" if len(names) == 1 else " were")
