"""Lay the data-parallel ranks out as a device mesh."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .errors import PlanError

REPLICATE = "dp_replicate"
SHARD = "dp_shard"


def build_mesh(shard_size: int, process_group: dist.ProcessGroup | None, device_type: str) -> DeviceMesh:
    """Return the mesh FSDP shards and replicates over (**collective** over the world).

    Consecutive ranks of ``process_group`` share a shard group: with 8 ranks and ``shard_size=4`` parameters are
    sharded over ranks 0-3 and over ranks 4-7, and gradients are averaged between ranks *i* and *i + 4* as well.

    Args:
        shard_size: Ranks per shard group; divides the size of ``process_group`` (the plan has checked that).
        process_group: Data-parallel group, context parallelism included; None means all ranks. Every rank of the
            world calls this function, each with its own group.
        device_type: ``"npu"``, ``"cuda"`` or ``"cpu"``.

    Returns:
        Shape ``(ranks,)``, axis ``dp_shard``, when one shard group covers the data-parallel group; otherwise shape
        ``(ranks // shard_size, shard_size)``, axes ``(dp_replicate, dp_shard)``. A shard group of one rank keeps the
        replicate axis, because a lone one-rank mesh would train every rank by itself.

    Raises:
        PlanError: There is no process group yet.
    """
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None:
        raise PlanError("process_group: torch.distributed is not initialised. Call init_process_group() first.")
    if shard_size == dist.get_world_size(group):
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=(SHARD,))
    # All data-parallel groups go into one mesh: process groups are created by the whole world in one order, so
    # one 2-D mesh per group deadlocks as soon as there are two groups (seen with TP 2 x DP 2).
    mine = dist.get_process_group_ranks(group)
    every: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, mine)
    groups = sorted({tuple(ranks) for ranks in every})
    layout = torch.tensor(groups, dtype=torch.int).view(len(groups), -1, shard_size)
    world = DeviceMesh(device_type, layout, mesh_dim_names=("dp_group", REPLICATE, SHARD))
    return world[REPLICATE, SHARD]


def shard_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group that holds the shards of one replica: the last axis of ``mesh``."""
    return mesh.get_group(mesh.ndim - 1)


def replicate_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the group that holds equal copies of this rank's shard, or None on a 1-D mesh."""
    return mesh.get_group(0) if mesh.ndim == 2 else None
