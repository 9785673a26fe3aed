"""One rank of the self-check: join the group, look at the machine, run the checks."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # documented, but not re-exported for checkers
from torch.distributed.rendezvous import rendezvous

from ..backends import DUAL_BACKENDS
from ..device import current_device, device_module, resolve_device_type
from .board import Board, file_connection, launched_connection
from .checks import Check, Context, all_checks
from .facts import collect_facts
from .report import Report
from .runner import Runner

_GROUP_FACTOR = 10  # the group's own time-out comes long after ours, which can say more


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Attributes:
        seconds: Time-out of one check.
        device_type: See ``resolve_device_type``.
        folder: Directory on storage that all ranks share, None for a temporary one where all ranks are on one node.
        store: File of the ranks' store; None where a launcher brings one.
    """

    seconds: float
    device_type: str | None = None
    folder: Path | None = None
    store: Path | None = None


@dataclass(frozen=True)
class Place:
    """This process's place among the ranks, as launchers put it into the environment."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int


def place() -> Place | None:
    """Return this process's place, or None where no launcher has put one into the environment."""
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_RANK", rank))
    return Place(rank, ranks, local, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))


def examine(
    where: Place, options: Options, emit: Callable[[Report], None], checks: Sequence[Check] | None = None
) -> tuple[bool, bool]:
    """Run the checks as rank ``where`` (**collective** over all ranks).

    Args:
        where: This process's place.
        options: What the user asked for.
        emit: Shows the report, on rank 0.
        checks: Those to run, None for all.

    Returns:
        Whether all is well, and whether a rank is stuck, so that this process can only be ended.

    Raises:
        ConfigError: The device asked for cannot be used.
    """
    device_type = resolve_device_type(options.device_type)
    if device_type != "cpu":
        device_module(device_type).set_device(where.local_rank)
    store = _join(where, options, device_type)
    board = Board(
        launched_connection(where.ranks, options.seconds)
        if options.store is None
        else file_connection(options.store, where.ranks)
    )
    device = current_device(device_type)
    made = _make_folder(where, options)
    told = _told(board, where, made, options.seconds)
    context = Context(where.rank, where.ranks, device, device_type != "cpu", told)
    report = Report(collect_facts(device, where.ranks) if where.rank == 0 else {})

    def show(found: Report) -> None:
        emit(found)
        if found.stuck and made is not None:  # this process may end before it comes to the lines below
            shutil.rmtree(made, ignore_errors=True)

    try:
        runner = Runner(context, board, options.seconds, report, show)
        well = runner.run(all_checks() if checks is None else checks)
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
    if not report.stuck:
        dist.destroy_process_group()
    del store
    return well, report.stuck


def _join(where: Place, options: Options, device_type: str) -> Store:
    limit = timedelta(seconds=options.seconds * _GROUP_FACTOR)
    if options.store is None:
        store: Store
        store, _, _ = next(rendezvous("env://", timeout=limit))
    else:
        store = file_connection(options.store, where.ranks)()
    backend = DUAL_BACKENDS.get(device_type, "gloo")
    dist.init_process_group(backend, store=store, rank=where.rank, world_size=where.ranks, timeout=limit)
    return store


def _make_folder(where: Place, options: Options) -> Path | None:
    if where.rank != 0 or (options.folder is None and where.local_ranks != where.ranks):
        return None
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="mindspeed_fsdp2_doctor_", dir=options.folder))


def _told(board: Board, where: Place, made: Path | None, seconds: float) -> Path | None:
    if where.rank == 0:
        board.put("folder", "" if made is None else str(made))
        return made
    folder = board.get("folder", seconds)
    return Path(folder) if folder else None
