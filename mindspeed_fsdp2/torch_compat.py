"""What differs between the supported versions of PyTorch: told apart by names and probes, never by version numbers."""

from __future__ import annotations

import functools
import hashlib
import logging
import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from . import _torch_older as older
from .errors import FSDP2Error
from .mesh import replicate_group, shard_group

logger = logging.getLogger("mindspeed_fsdp2")

_MARK = "_mindspeed_fsdp2_original"


def set_reshard_after_forward(unit: FSDPModule, value: bool) -> None:
    """Set whether ``unit`` alone is resharded, in full, after its forward (**in place**)."""
    if hasattr(unit, "set_reshard_after_forward"):
        unit.set_reshard_after_forward(value, recurse=False)
    elif isinstance(unit, nn.Module):
        older.set_reshard_after_forward(unit, value)


def reset_after_exception(root: nn.Module) -> None:
    """Let FSDP forget a forward or backward that ended with an exception (**in place**).

    Raises:
        FSDP2Error: This version of torch cannot.
    """
    reset: Callable[[], None] | None = getattr(root, "reset_iter_state", None)
    if reset is None:
        raise FSDP2Error(
            "a forward or backward ended with an exception, after which FSDP2 cannot go on before torch 2.13. "
            "Start the run again from its last checkpoint."
        )
    reset()


def new_group_of(group: dist.ProcessGroup | None, backend: str | None = None) -> dist.ProcessGroup:
    """Return a new group with the ranks of ``group`` (**collective** over ``group`` alone).

    Ranks meet under the new group's name. Up to torch 2.13 that depends on how many groups a rank belongs to, and where
    those numbers differ they would wait for each other forever.

    Args:
        group: None for all ranks.
        backend: None for that of the default group.
    """
    ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
    names = [older.group_name(ranks)] * len(ranks)
    dist.all_gather_object(names, names[0], group=group)
    agreed = hashlib.sha256("".join(names).encode()).hexdigest()
    with nullcontext() if len(set(names)) == 1 else older.groups_named(agreed):
        own = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    if not isinstance(own, dist.ProcessGroup):
        raise RuntimeError("this rank is not among the ranks of its own group")
    return own


def mend_averages(root: nn.Module, mesh: DeviceMesh, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Let every unit sum gradients and divide, where its backend averages wrongly (**in place**, **collective**).

    On gloo of torch 2.7 the average over a shard group comes out as the sum, without an error, and the one over
    replicas raises. FSDP's two collectives are tried on ones, which costs as many numbers as there are ranks.
    Backends other than gloo are left alone.

    Args:
        root: The root unit's module, every unit sharded.
        mesh: Shape ``(shards,)`` or ``(replicas, shards)``.
        group: All data-parallel ranks, which decide alike.
        device: Where their collectives run.

    Raises:
        FSDP2Error: Averages are wrong, and this version of torch knows no other way.
    """
    if dist.get_world_size(group) == 1 or f"{device.type}:gloo" not in dist.get_backend_config(group):
        return
    right = _scatters_average(shard_group(mesh), device), _reduces_average(replicate_group(mesh), device)
    wrong = torch.tensor([not all(right)], dtype=torch.int32, device=device)
    dist.all_reduce(wrong, op=dist.ReduceOp.MAX, group=group)
    if wrong.item():
        sum_and_divide(root)


def sum_and_divide(root: nn.Module) -> None:
    """Let every unit sum gradients and divide them, rather than ask the backend for an average (**in place**).

    Never by a premultiplied sum: gloo and HCCL have none, and that of NCCL gives zeros in bf16 up to torch 2.13.

    Raises:
        FSDP2Error: This version of torch knows no way.
    """
    units = [unit for unit in root.modules() if isinstance(unit, FSDPModule)]
    if all(hasattr(unit, "set_force_sum_reduction_for_comms") for unit in units):
        for unit in units:
            unit.set_force_sum_reduction_for_comms(True)
        return
    for row in REBOUND:
        if row.held is None:
            raise FSDP2Error(f"process_group: {row.why} Use gloo with torch 2.8 or newer, or another backend.")
        row.install()


def _scatters_average(group: dist.ProcessGroup, device: torch.device) -> bool:
    ones = torch.ones(dist.get_world_size(group), device=device)
    mine = torch.zeros(1, device=device)
    # torch 2.13 brought the first name, and warns at the second.
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    try:
        reduce_scatter(mine, ones, op=dist.ReduceOp.AVG, group=group)
    except (RuntimeError, ValueError):  # before anything is sent, on every rank alike
        return False
    return mine.item() == 1


def _reduces_average(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    if group is None:
        return True
    one = torch.ones(1, device=device)
    try:
        dist.all_reduce(one, op=dist.ReduceOp.AVG, group=group)
    except (RuntimeError, ValueError):
        return False
    return one.item() == 1


@dataclass(frozen=True)
class Rebound:
    """A function of torch that this package replaces where a version of torch leaves no other way.

    Attributes:
        module: The module that holds it.
        name: Its name there.
        make: Given the function, returns its replacement.
        why: What goes wrong without it.
        remove_when: What makes it unnecessary.
    """

    module: types.ModuleType
    name: str
    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    why: str
    remove_when: str

    @property
    def held(self) -> Any:
        """What the name holds now; None where this version of torch has no such name."""
        return getattr(self.module, self.name, None)

    def install(self) -> None:
        """Put the replacement in its place (**in place**); a second call changes nothing."""
        if self.held is not None and not hasattr(self.held, _MARK):
            replacement = self.make(self.held)
            setattr(replacement, _MARK, (replacement, self.held))
            setattr(self.module, self.name, replacement)
            logger.warning("torch: %s It is mended for every model of this process that is sharded by FSDP2.", self.why)

    def uninstall(self) -> None:
        """Put the function back (**in place**), unless somebody else has replaced ours."""
        ours, original = getattr(self.held, _MARK, (None, None))
        if ours is not None and ours is self.held:  # functools.wraps copies the mark to wrappers around ours
            setattr(self.module, self.name, original)


def _sums_on_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def divide_factors(
        reduce_scatter_group: dist.ProcessGroup,
        all_reduce_group: dist.ProcessGroup | None,
        reduce_dtype: torch.dtype,
        device_type: str = "",
    ) -> Any:
        factors = original(reduce_scatter_group, all_reduce_group, reduce_dtype, device_type)
        if factors != (None, None) or f"{device_type}:gloo" not in dist.get_backend_config(reduce_scatter_group):
            return factors
        ranks = reduce_scatter_group.size() * (1 if all_reduce_group is None else all_reduce_group.size())
        return 1.0, float(ranks)  # before and after the sum; FSDP asks for an average where there are none

    return divide_factors


# Every function of torch that is ever replaced. A row is installed by the first model that needs it.
REBOUND: tuple[Rebound, ...] = (
    Rebound(
        *older.DIVIDE_FACTORS,
        make=_sums_on_gloo,
        why="On gloo of torch 2.7 an averaging reduce-scatter returns the sum, and an averaging all-reduce raises.",
        remove_when="torch 2.7 is no longer supported: FSDPModule.set_force_sum_reduction_for_comms is there from 2.8.",
    ),
)
