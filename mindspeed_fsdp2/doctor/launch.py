"""Start ranks on this machine, for those who have no launcher at hand."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ..device import device_module, find_device_type

_END_S = 30.0  # how long the others may take once a rank has ended


def default_ranks(device_type: str | None) -> int:
    """Return 2, or 1 on a machine with a single accelerator."""
    found = find_device_type() if device_type is None else device_type
    return 2 if found == "cpu" else min(2, max(1, int(device_module(found).device_count())))


def run_ranks(ranks: int, arguments: Sequence[str]) -> int:
    """Run ``mindspeed-fsdp2 doctor`` with ``arguments`` on ``ranks`` processes and return its exit status.

    Ranks that do not end after the first one has ended are killed; the status is then 1.
    """
    with tempfile.TemporaryDirectory(prefix="mindspeed_fsdp2_doctor_") as folder:
        store = Path(folder) / "store"
        command = [sys.executable, "-m", "mindspeed_fsdp2.cli", "doctor", "--folder", folder, *arguments]
        command += ["--store", str(store)]
        processes = [
            subprocess.Popen(command, env={**os.environ, **_place(rank, ranks)}, stdin=subprocess.DEVNULL)
            for rank in range(ranks)
        ]
        try:
            return _wait(processes)
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


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    deadline: float | None = None
    while any(process.poll() is None for process in processes):
        if deadline is None and any(process.returncode is not None for process in processes):
            deadline = time.monotonic() + _END_S
        if deadline is not None and time.monotonic() > deadline:
            return 1
        time.sleep(0.05)
    return int(any(process.returncode != 0 for process in processes))
