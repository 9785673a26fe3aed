"""Gradient norm and clipping over sharded and plain gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .mesh import shard_group


def grad_norm(grads: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients as if they were one vector (**collective** over every shard group).

    A DTensor's squares are summed over its shard group only: replicas hold equal gradients, so the replicate axis
    must not count. Plain gradients are equal on every rank and count once.

    Args:
        grads: DTensors of shape ``(dp_shard,)`` or ``(dp_replicate, dp_shard)`` meshes, and plain tensors.
        norm_type: ``p`` of the p-norm, ``inf`` included.

    Returns:
        Scalar on the gradients' device, float32 (float64 if a gradient is); 0 without gradients.
    """
    by_group: dict[dist.ProcessGroup | None, list[torch.Tensor]] = {}
    for grad in grads:
        group = shard_group(grad.device_mesh) if isinstance(grad, DTensor) else None
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        by_group.setdefault(group, []).append(local)
    infinite = math.isinf(norm_type)
    dtype = torch.float32
    for local in chain.from_iterable(by_group.values()):
        dtype = torch.promote_types(dtype, local.dtype)
    total: torch.Tensor | None = None
    for group, locals_ in by_group.items():
        part = torch.stack([_power(local, norm_type).to(dtype) for local in locals_])
        part = part.max() if infinite else part.sum()
        if group is not None:
            dist.all_reduce(part, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
        total = part if total is None else torch.maximum(total, part) if infinite else total + part
    if total is None:
        return torch.zeros(())
    return total if infinite else total ** (1.0 / norm_type)


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients of ``model`` so that their norm is at most ``max_norm`` (**in place**, **collective**).

    Args:
        model: A wrapped model after its backward.
        max_norm: Upper bound; ``inf`` only measures.
        norm_type: ``p`` of the p-norm.

    Returns:
        The norm before clipping, a plain scalar tensor, the same on every rank.
    """
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    total = grad_norm(grads, norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local.mul_(factor.to(local.device))
    return total


def _power(local: torch.Tensor, norm_type: float) -> torch.Tensor:
    if local.numel() == 0:  # a rank without a piece of this parameter
        return torch.zeros((), device=local.device)
    norm = torch.linalg.vector_norm(local, norm_type, dtype=torch.promote_types(local.dtype, torch.float32))
    return norm if math.isinf(norm_type) else torch.pow(norm, norm_type)
