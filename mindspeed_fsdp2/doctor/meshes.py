"""The meshes that FSDP shards over: who is in which group, and whether their collectives stay inside."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..mesh import build_mesh, replicate_group, shard_group
from .checks import Check, Context, NotApplicable, WrongResult


def checks() -> list[Check]:
    """Return the checks of this module."""
    return [
        Check("mesh of one shard group", _one_group),
        Check("mesh of replicas of one rank", _all_replicas),
        Check("mesh of replicas and shards (HSDP)", _both),
    ]


def hsdp_size(ranks: int) -> int | None:
    """Return half of an even number of ranks from 4 on: a shard group size that leaves two replicas."""
    return ranks // 2 if ranks >= 4 and ranks % 2 == 0 else None


def _one_group(context: Context) -> str:
    return _check(build_mesh(context.ranks, None, context.device.type), context.ranks, context)


def _all_replicas(context: Context) -> str:
    if context.ranks == 1:
        raise NotApplicable("one rank only")
    return _check(build_mesh(1, None, context.device.type), 1, context)


def _both(context: Context) -> str:
    size = hsdp_size(context.ranks)
    if size is None:
        raise NotApplicable(f"needs an even number of ranks from 4 on, not {context.ranks}")
    return _check(build_mesh(size, None, context.device.type), size, context)


def _check(mesh: DeviceMesh, size: int, context: Context) -> str:
    first = context.rank // size * size
    _sum_of_ranks(shard_group(mesh), range(first, first + size), "shard group", context)
    replicas = replicate_group(mesh)
    if replicas is not None:
        _sum_of_ranks(replicas, range(context.rank % size, context.ranks, size), "replicate group", context)
    return f"shape {tuple(mesh.shape)}"


def _sum_of_ranks(group: dist.ProcessGroup, members: range, what: str, context: Context) -> None:
    total = torch.tensor([float(context.rank), 1.0], device=context.device)
    dist.all_reduce(total, group=group)
    want = [float(sum(members)), float(len(members))]
    if total.tolist() != want:
        raise WrongResult(
            f"{what}: sum of ranks and their number are {total.tolist()} and should be {want}, for ranks "
            f"{', '.join(map(str, members))}"
        )
