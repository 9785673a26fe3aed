"""Look at, or change, the whole parameters of a wrapped model for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

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
    as they are. What is changed in place, equally on every rank, is written back to the shards. For a state dict of
    whole tensors read ``named_parameters()`` and ``named_buffers()``: ``state_dict()`` would shard the model again.

    Args:
        model: A wrapped model, outside of forward and backward.

    Raises:
        PlanError: ``model`` is not wrapped.
        FSDP2Error: ``model`` is inside ``full_parameters`` already. Or a parameter was changed although it is gathered
            in another dtype than it is stored in, so the stored value would be rounded. Or units were sharded again
            inside, by a backward, say, and what was changed before is lost. ``state_dict`` and ``load_state_dict`` of
            the model raise inside.
    """
    handle = sharded(model)
    if handle is None:
        raise PlanError("full_parameters: the model is not wrapped. Call wrap_model first.")
    if handle.state.gathered:
        raise FSDP2Error(
            "full_parameters: the model is inside full_parameters already, and leaving the inner one would shard it "
            "for the outer one too. Enter it once, around both uses."
        )
    units = [module for module in handle.module.modules() if isinstance(module, FSDPModule)]
    shards = dict(handle.module.named_parameters())
    with torch.no_grad():
        for unit in units:
            unit.unshard()
    handle.state.gathered = True
    reshard_after_forward(handle, False)
    try:
        with _state_dicts_refused(handle.module):
            yield
        _write_back(shards, dict(handle.module.named_parameters()))
    finally:
        handle.state.gathered = False
        reshard_after_forward(handle, True)
        for unit in units:
            unit.reshard()


@contextmanager
def _state_dicts_refused(root: nn.Module) -> Iterator[None]:
    """Refuse what FSDP answers by sharding every unit again, as long as the context lasts."""

    def state_dict(*_args: Any, **_options: Any) -> NoReturn:
        raise FSDP2Error(
            "full_parameters: state_dict() inside would shard the model again and return shards. Take whole tensors "
            "with {name: p.detach().clone() for name, p in model.named_parameters()}, or call state_dict() outside for "
            "the shards."
        )

    def load_state_dict(*_args: Any, **_options: Any) -> NoReturn:
        raise FSDP2Error(
            "full_parameters: load_state_dict() inside would shard the model again. Call it outside: whole tensors are "
            "cut into shards there."
        )

    own = vars(root)
    before: dict[str, Any] = {name: own[name] for name in ("state_dict", "load_state_dict") if name in own}
    own["state_dict"], own["load_state_dict"] = state_dict, load_state_dict
    try:
        yield
    finally:
        del own["state_dict"], own["load_state_dict"]
        own.update(before)


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
