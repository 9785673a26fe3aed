"""Norms over sharded and plain tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .mesh import shard_group


def grad_norm(grads: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients as if they were one vector (**collective** over every shard group).

    Args:
        grads: DTensors of shape ``(dp_shard,)`` or ``(dp_replicate, dp_shard)`` meshes, and plain tensors.
        norm_type: ``p`` of the p-norm, ``inf`` included.

    Returns:
        Scalar float32 tensor; 0 without gradients.
    """
    total = power_sum(grads, norm_type)
    return total if math.isinf(norm_type) else total ** (1.0 / norm_type)


def power_sum(tensors: Iterable[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the sum of ``|x| ** norm_type`` over all elements, or their maximum for ``inf`` (**collective**).

    A DTensor's elements are summed over its shard group only: replicas hold equal values, so the replicate axis
    must not count. Plain tensors are equal on every rank and count once.

    Args:
        tensors: DTensors of shape ``(dp_shard,)`` or ``(dp_replicate, dp_shard)`` meshes, and plain tensors.
        norm_type: ``p`` of the p-norm, ``inf`` included.

    Returns:
        Scalar float32 tensor; 0 without tensors.
    """
    by_group: dict[dist.ProcessGroup | None, list[torch.Tensor]] = {}
    for tensor in tensors:
        group = shard_group(tensor.device_mesh) if isinstance(tensor, DTensor) else None
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        by_group.setdefault(group, []).append(local)
    infinite = math.isinf(norm_type)
    total: torch.Tensor | None = None
    for group, locals_ in by_group.items():
        # Per-unit offload leaves some shards on the host: add up where the first one lies.
        part = torch.stack([_power(local, norm_type).to(locals_[0].device) for local in locals_])
        part = part.max() if infinite else part.sum()
        if group is not None and infinite:
            part = _maximum_over(part, group)
        elif group is not None:
            dist.all_reduce(part, group=group)
        if total is None:
            total = part
        else:
            part = part.to(total.device)
            total = torch.maximum(total, part) if infinite else total + part
    return torch.zeros(()) if total is None else total


def _maximum_over(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    # Backends compare numbers, so the maximum of NaN and 1 is 1 on some of them: NaN travels as a flag of its own.
    both = torch.stack([part.nan_to_num(nan=math.inf, posinf=math.inf), part.isnan().to(part.dtype)])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return torch.where(both[1] > 0, math.nan, both[0])


def _power(local: torch.Tensor, norm_type: float) -> torch.Tensor:
    if local.numel() == 0:  # a rank without a piece of this parameter
        return torch.zeros((), device=local.device)
    norm = torch.linalg.vector_norm(local, norm_type, dtype=torch.promote_types(local.dtype, torch.float32))
    return norm if math.isinf(norm_type) else torch.pow(norm, norm_type)
