"""Start ranks on this machine, for those who have no launcher at hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..device import device_module, resolve_device_type
from ..errors import FSDP2Error
from .rank import met_file

_EARLY_S = 5.0  # how long the others may take once a rank has ended before all had met: they wait for it in vain
_END_S = 30.0  # the same later on, where rank 0 may have its time-out besides, to see it and to write the report


def default_ranks(device_type: str | None) -> int:
    """Return 2, or 1 on a machine with a single accelerator.

    Raises:
        ConfigError: The device asked for cannot be used.
    """
    found = resolve_device_type(device_type)
    return 2 if found == "cpu" else min(2, max(1, int(device_module(found).device_count())))


def run_ranks(ranks: int, arguments: Sequence[str], seconds: float) -> int:
    """Run ``mindspeed-fsdp2 doctor`` with ``arguments`` on ``ranks`` processes and return its exit status.

    Args:
        ranks: Processes to start.
        arguments: Of the command.
        seconds: Time-out of one check.

    Raises:
        FSDP2Error: A rank was ended by a signal, or the others did not end after one had; those are killed.
    """
    with tempfile.TemporaryDirectory(prefix="mindspeed_fsdp2_doctor_") as folder:
        store = Path(folder) / "store"
        command = [sys.executable, "-m", "mindspeed_fsdp2.cli", "doctor", "--folder", folder, *arguments]
        command += ["--store", str(store)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                with _interrupts_ignored():
                    environment = {**os.environ, **_place(rank, ranks)}
                    processes.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
            return _wait(processes, met_file(store), seconds)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _place(rank: int, ranks: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # as torchrun does
    }


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Let processes that are started in here ignore Ctrl-C, which a terminal sends to them too: we end them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _wait(processes: Sequence[subprocess.Popen[bytes]], met: Path, seconds: float) -> int:
    ended, since = 0, time.monotonic()
    while True:
        codes = [process.poll() for process in processes]  # of all: any() would ask none after the first that lives
        now = time.monotonic()
        if ended != len(codes) - codes.count(None):
            ended, since = len(codes) - codes.count(None), now
        if ended == len(codes):
            break
        if ended and now > since + _patience(codes, met, seconds):
            raise FSDP2Error(f"{_ends(codes)}. The other ranks did not end by themselves and were stopped.")
        time.sleep(0.05)
    if any(code is not None and code < 0 for code in codes):
        raise FSDP2Error(f"{_ends(codes)}.")
    return int(any(codes))


def _patience(codes: Sequence[int | None], met: Path, seconds: float) -> float:
    if not met.exists():
        return _EARLY_S
    return _END_S + (seconds if codes[0] is None else 0.0)


def _ends(codes: Sequence[int | None]) -> str:
    ends = [
        f"rank {rank}: ended by signal {-code}" if code < 0 else f"rank {rank}: ended with exit status {code}"
        for rank, code in enumerate(codes)
        if code is not None
    ]
    return "; ".join(ends)
