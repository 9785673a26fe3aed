"""``mindspeed-fsdp2 doctor``: check this machine's collectives, memory and FSDP2 itself, and print a report."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..doctor.report import Report

TIMEOUT_S = 60.0
INTERRUPTED = 130  # the exit status of shells for a command ended by Ctrl-C


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``doctor`` to the parser of the ``mindspeed-fsdp2`` command (**in place**)."""
    about = "check the collectives, the memory and FSDP2 itself on this machine, and print a report"
    parser = commands.add_parser(
        "doctor",
        help=about,
        description=f"{about[0].upper()}{about[1:]}. Starts its own ranks, or is one rank under a launcher: torchrun "
        "--nproc_per_node 8 -m mindspeed_fsdp2.cli doctor. The exit status is 0 if nothing is wrong, else 1.",
    )
    parser.add_argument(
        "--ranks", type=_positive, metavar="N", help="ranks to start on this machine; without it 2, or 1 on one device"
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=TIMEOUT_S, metavar="S", help="seconds for one check (default: %(default)g)"
    )
    parser.add_argument("--device-type", choices=("npu", "cuda", "cpu"), help="without it the accelerator found")
    parser.add_argument(
        "--folder", metavar="DIR", help="where to write a checkpoint; on several nodes, a directory they all share"
    )
    parser.add_argument("--store", help=argparse.SUPPRESS)  # how ranks that this command starts find each other
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the checks; print the report to stdout, on rank 0; return 0 if nothing is wrong, else 1, 130 after Ctrl-C.

    Raises:
        ConfigError: PyTorch, the device or the folder asked for cannot be used, or the arguments contradict the
            launcher.
        FSDP2Error: A rank is missing or has ended.
    """
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("mindspeed-fsdp2 doctor: interrupted", file=sys.stderr)
        if arguments.store is not None or "RANK" in os.environ:  # tidying up would wait for the other ranks
            _end(INTERRUPTED)
        return INTERRUPTED


def _run(arguments: argparse.Namespace) -> int:
    try:
        import torch.distributed  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"torch: it cannot be imported ({type(error).__name__}: {error}). Where torch_npu is installed, importing "
            "torch loads it: source the CANN environment (set_env.sh) first."
        ) from error
    from ..doctor.launch import default_ranks, run_ranks
    from ..doctor.rank import Options, check_folder, examine, place

    where = place(stored=arguments.store is not None)
    folder = None if arguments.folder is None else Path(arguments.folder)
    if where is None or (arguments.store is None and "MASTER_ADDR" not in os.environ):
        default = default_ranks(arguments.device_type)
        if folder is not None:
            check_folder(folder)
        return run_ranks(arguments.ranks or default, _arguments_for_ranks(arguments), arguments.timeout)
    if arguments.ranks is not None:
        raise ConfigError(f"--ranks: a launcher has started {where.ranks} ranks already. Leave it out.")
    options = Options(
        arguments.timeout,
        arguments.device_type,
        folder,
        None if arguments.store is None else Path(arguments.store),
    )
    well, stuck = examine(where, options, _show)
    if stuck:  # another rank is inside a collective that this one has left: tidying up would wait for it
        _end(1)
    return 0 if well else 1


def _end(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _show(report: Report) -> None:
    print(report, flush=True)


def _arguments_for_ranks(arguments: argparse.Namespace) -> list[str]:
    given = ["--timeout", str(arguments.timeout)]
    if arguments.device_type is not None:
        given += ["--device-type", arguments.device_type]
    if arguments.folder is not None:
        given += ["--folder", arguments.folder]
    return given


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks. Write 1 or more.")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time. Write seconds above 0.")
    return seconds
