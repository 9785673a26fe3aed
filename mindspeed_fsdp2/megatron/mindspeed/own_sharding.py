"""Models that shard themselves through a ``fully_shard()`` of their own, as MindSpeed-MM's do."""

from __future__ import annotations

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from ...errors import ConflictError, PlanError
from ...mesh import replicate_group
from ...plan.checks import some
from ...start_values import broadcast_whole, equalise_shards, equalise_whole


def check_own_sharding(root: nn.Module, kind: str) -> None:
    """Refuse what would train wrongly without any error.

    Args:
        root: The model below its wrappers, after its ``fully_shard()``.
        kind: Name of its class.

    Raises:
        PlanError: Trainable parameters stayed whole: nothing averages their gradients over the ranks.
        ConflictError: Attention dropout is recomputed without Megatron's random states, so with other masks.
    """
    whole = [name for name, p in root.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if whole:
        raise PlanError(
            f"{kind}.fully_shard(): these trainable parameters stay whole, and nothing averages their gradients over "
            f"the data-parallel ranks: {some(whole)}. Freeze them, or take their modules out of ignored_modules."
        )
    for module in root.modules():
        if not type(module).__name__.endswith("CheckpointWrapper"):
            continue
        for inner in module.modules():
            if isinstance(inner, DotProductAttention) and inner.attention_dropout.p > 0:
                raise ConflictError(
                    f"--attention-dropout {inner.attention_dropout.p:g}: {kind}.fully_shard() recomputes attention "
                    "without Megatron's random states, so with other masks than in the forward. Set it to 0, or leave "
                    "recompute_modules out."
                )


def equalise_own(root: nn.Module, device: torch.device, group: ProcessGroup) -> None:
    """Let all ranks start from the same values (**in place**, **collective**), whatever their seeds were.

    Args:
        root: The model below its wrappers, after its ``fully_shard()``.
        device: This rank's device.
        group: The data-parallel group.
    """
    meshes = [param.device_mesh for param in root.parameters() if isinstance(param, DTensor)]
    replicas = replicate_group(meshes[0]) if meshes else None
    if replicas is not None:
        equalise_shards(root, replicas)
    broadcast_whole((p for p in root.parameters() if not isinstance(p, DTensor)), device.type, group)
    equalise_whole(root, (), device, group)
