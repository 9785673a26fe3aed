"""One rank of the self-check: join the group, look at the machine, run the checks."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # documented, but not re-exported for checkers
from torch.distributed.rendezvous import rendezvous

from ..backends import DUAL_BACKENDS
from ..device import current_device, device_module, resolve_device_type
from ..errors import ConfigError, FSDP2Error
from .board import Board, file_connection, launched_connection
from .checks import Check, Context, all_checks
from .facts import collect_facts
from .report import Report
from .runner import GRACE_S, Runner

_GROUP_FACTOR = 10  # the group's own time-out comes long after ours, which can say more
_MEETING_FACTOR = 2  # ranks start at different times
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_LAST_PORT = 65535


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


def place(stored: bool = False) -> Place | None:
    """Return this process's place, or None where no launcher has put one into the environment.

    Args:
        stored: Whether the ranks meet in a file, so that ``MASTER_ADDR`` and ``MASTER_PORT`` do not matter.

    Raises:
        ConfigError: The launcher's variables cannot be used.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    launched = not stored and "MASTER_ADDR" in os.environ
    names = [*_NUMBERS, "MASTER_PORT"] if launched else _NUMBERS
    given = {name: os.environ[name] for name in names if name in os.environ}
    wrong = [f"{name}={value!r} is no number" for name, value in given.items() if not _is_number(value)]
    if launched and "MASTER_PORT" not in given:
        wrong.append("MASTER_PORT is missing")
    if not wrong and int(given["RANK"]) >= int(given["WORLD_SIZE"]):
        wrong.append(f"RANK={given['RANK']} is not below WORLD_SIZE={given['WORLD_SIZE']}")
    if not wrong and int(given.get("MASTER_PORT", 0)) > _LAST_PORT:
        wrong.append(f"MASTER_PORT={given['MASTER_PORT']} is above {_LAST_PORT}")
    if wrong:
        raise ConfigError(
            f"environment: {'; '.join(wrong)}. Start the command with torchrun, which sets these variables, or unset "
            "RANK and WORLD_SIZE."
        )
    rank, ranks = int(given["RANK"]), int(given["WORLD_SIZE"])
    return Place(rank, ranks, int(given.get("LOCAL_RANK", rank)), int(given.get("LOCAL_WORLD_SIZE", ranks)))


def check_folder(folder: Path) -> None:
    """Raise unless files can be written in ``folder``, which is made where it is missing.

    Raises:
        ConfigError: It cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"--folder: {str(folder)!r} cannot be written to ({type(error).__name__}: {error.strerror}). Name a "
            "directory that can."
        ) from error


def met_file(store: Path) -> Path:
    """Return the file by which rank 0 says that all ranks have met, for who has started them."""
    return store.with_name("met")


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
        ConfigError: The device or the folder asked for cannot be used.
        FSDP2Error: The ranks do not find each other.
    """
    device_type = _take_device(where, options)
    if options.folder is not None:
        check_folder(options.folder)  # on every rank: none is left waiting for one that cannot write
    store, board = _join(where, options, device_type)
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


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _take_device(where: Place, options: Options) -> str:
    device_type = resolve_device_type(options.device_type)
    if device_type != "cpu":
        try:
            device_module(device_type).set_device(where.local_rank)
        except (RuntimeError, AssertionError, ValueError) as error:  # as the device's part of torch sees fit
            raise ConfigError(
                f"rank {where.rank}: {device_type}:{where.local_rank} cannot be used ({_first_line(error)}). Start no "
                "more ranks than there are devices, or take another --device-type."
            ) from error
    return device_type


def _join(where: Place, options: Options, device_type: str) -> tuple[Store, Board]:
    limit = timedelta(seconds=options.seconds * _GROUP_FACTOR)
    try:
        store = _connect(where, options)
        board = Board(
            launched_connection(where.ranks, options.seconds)
            if options.store is None
            else file_connection(options.store, where.ranks)
        )
        _meet(board, where, options.seconds * _MEETING_FACTOR)
        store.set_timeout(limit)
        backend = DUAL_BACKENDS.get(device_type, "gloo")
        dist.init_process_group(backend, store=store, rank=where.rank, world_size=where.ranks, timeout=limit)
    except RuntimeError as error:  # torch's errors of stores and networks are such
        raise FSDP2Error(
            f"rank {where.rank}: the {where.ranks} ranks do not find each other ({_first_line(error)}). Look at "
            "MASTER_ADDR, MASTER_PORT and the network, and whether every rank was started."
        ) from error
    if where.rank == 0 and options.store is not None:
        met_file(options.store).touch()
    return store, board


def _connect(where: Place, options: Options) -> Store:
    if options.store is not None:
        return file_connection(options.store, where.ranks)()
    store: Store
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=options.seconds * _MEETING_FACTOR)))
    return store


def _meet(board: Board, where: Place, seconds: float) -> None:
    """Wait for all ranks, so that one that never comes is named, which the process group's start cannot do."""
    if where.rank == 0:
        end = time.monotonic() + seconds
        arrivals = {rank: board.get(f"arrived/{rank}", end - time.monotonic()) for rank in range(1, where.ranks)}
        missing = [rank for rank, arrived in arrivals.items() if arrived is None]
        board.put("missing", missing)
    else:
        board.put(f"arrived/{where.rank}", True)
        missing = board.get("missing", seconds + GRACE_S)
        missing = [0] if missing is None else missing
    if missing:
        who = ", ".join(map(str, missing))
        raise FSDP2Error(
            f"rank {where.rank}: {seconds:g} s after the start there is nothing from rank {who}. Look at what was said "
            "there, and at the network."
        )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _make_folder(where: Place, options: Options) -> Path | None:
    if where.rank != 0 or (options.folder is None and where.local_ranks != where.ranks):
        return None
    return Path(tempfile.mkdtemp(prefix="mindspeed_fsdp2_doctor_", dir=options.folder))


def _told(board: Board, where: Place, made: Path | None, seconds: float) -> Path | None:
    if where.rank == 0:
        board.put("folder", "" if made is None else str(made))
        return made
    folder = board.get("folder", seconds)
    return Path(folder) if folder else None
