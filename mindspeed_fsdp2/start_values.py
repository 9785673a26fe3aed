"""The values that all ranks start from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from .device import current_device


def broadcast_whole(tensors: Iterable[torch.Tensor], device_type: str, group: dist.ProcessGroup | None) -> None:
    """Give every rank of ``group`` the first rank's values of ``tensors`` (**in place**, **collective**)."""
    device = current_device(device_type)
    for tensor in tensors:
        _broadcast(tensor.detach(), device, group)


def equalise_whole(
    root: nn.Module, ignored: Sequence[nn.Module], device: torch.device, group: dist.ProcessGroup | None
) -> None:
    """Give every rank the first rank's values of what is not sharded: ignored parameters and all buffers.

    Args:
        root: The model.
        ignored: Its modules whose parameters stay whole.
        device: This rank's device.
        group: All data-parallel ranks.
    """
    whole: dict[int, torch.Tensor] = {id(t): t for module in ignored for t in module.parameters()}
    whole.update({id(t): t for t in root.buffers() if not t.is_meta})
    broadcast_whole(whole.values(), device.type, group)


def equalise_shards(root: nn.Module, replicas: dist.ProcessGroup) -> None:
    """Give every replica the first replica's shards, whatever the ranks' seeds were (**in place**, **collective**)."""
    for param in root.parameters():
        if isinstance(param, DTensor):
            local = param.to_local().detach()
            _broadcast(local, local.device, replicas)


def store_in(dtype: torch.dtype, members: Sequence[nn.Module], ignored: set[nn.Parameter]) -> None:
    """Bring the trainable parameters that the next ``fully_shard`` takes to ``dtype`` (**in place**).

    Right before it, unit by unit, so that never more than one unit exists in both precisions.
    """
    for module in members:
        for param in module.parameters():
            if param.requires_grad and not isinstance(param, DTensor) and param not in ignored:
                param.data = param.data.to(dtype)


def keep_own_part(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's part of ``whole`` into ``target`` (**in place**)."""
    with torch.no_grad():
        if not isinstance(target, DTensor):
            target.detach().copy_(whole)
            return
        for axis, placement in enumerate(target.placements):
            if isinstance(placement, Shard):
                pieces = whole.chunk(target.device_mesh.size(axis), placement.dim)
                rank = target.device_mesh.get_local_rank(axis)
                whole = pieces[rank] if rank < len(pieces) else whole.narrow(placement.dim, 0, 0)
        target.to_local().detach().copy_(whole)


def _broadcast(tensor: torch.Tensor, device: torch.device, group: dist.ProcessGroup | None) -> None:
    if dist.get_world_size(group) == 1 or tensor.numel() == 0:
        return
    for dim, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape)):
        if stride == 0 and size > 1:  # an expanded buffer, whose copies are one element in memory
            tensor = tensor.narrow(dim, 0, 1)
    buffer = tensor.to(device).contiguous()
    if buffer.dim() and buffer.stride(-1) != 1:  # an axis of one element counts as contiguous with any stride
        buffer = buffer.clone(memory_format=torch.contiguous_format)
    # As bytes, because no backend takes every dtype a buffer may have.
    dist.broadcast(buffer.flatten().view(torch.uint8), group=group, group_src=0)
    if buffer is not tensor:
        tensor.copy_(buffer)
