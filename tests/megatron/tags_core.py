"""The same cells for a megatron-core wheel without ``megatron.training``: what can be trained there by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.megatron.jobs import ROOT, JobFailure

SCRIPT = Path(__file__).parent / "scripts" / "core_only.py"
TIMEOUT_S = 240.0
AUTO: Mapping[str, Any] = {"sharding_size": "auto"}
NOT_THERE = "this wheel has no megatron.training; there is no pretrain script and no checkpoint code to run"
LOSSES, NORMS, GRADS, PARAMS = 1e-5, 5e-5, 1e-6, 1e-4  # relative; see comparison.Tolerance


@dataclass
class CoreRuns:
    """Runs ``scripts/core_only.py``.

    Attributes:
        folder: Where the runs leave what they recorded.
    """

    folder: Path
    _count: int = field(default=0)

    def run(self, *jobs: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
        """Return what each rank of each run recorded.

        Raises:
            JobFailure: A rank failed.
        """
        self._count += 1
        folder = self.folder / f"core{self._count}"
        folder.mkdir()
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        ended = subprocess.run(
            [sys.executable, "-W", "ignore", str(SCRIPT), str(folder), *map(json.dumps, jobs)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
        if ended.returncode:
            raise JobFailure(ended.stdout[-8000:])
        return [
            [torch.load(folder / f"run{number}-rank{rank}.pt") for rank in range(job["ranks"])]
            for number, job in enumerate(jobs)
        ]


def _equal(runs: CoreRuns, settings: Mapping[str, Any], **setup: Any) -> list[str]:
    job = {"ranks": 2, "tensor": 1, "sgd": False, "dropout": 0.0, **setup}
    mine, theirs = runs.run({**job, "settings": settings}, {**job, "settings": None})
    found = []
    for rank, (own, reference) in enumerate(zip(mine, theirs, strict=True)):
        if set(own["kinds"].values()) != {"DTensor"} or set(reference["kinds"].values()) != {"Parameter"}:
            found.append(f"rank {rank}: parameters are {own['kinds']} and {reference['kinds']}")
        for what, allowed in (("losses", LOSSES), ("norms", NORMS)):
            far = max(abs(a - b) / (abs(b) or 1.0) for a, b in zip(own[what], reference[what], strict=True))
            if not far <= allowed:
                found.append(f"rank {rank}: {what} {own[what]} instead of {reference[what]}")
        for what, allowed in (("grads", GRADS), ("params", PARAMS)):
            for name, value in reference[what].items():
                if not float((own[what][name] - value).abs().max()) <= allowed * float(value.abs().max()):
                    found.append(f"rank {rank}: {what} of {name}")
    return found


CORE_CELLS: dict[str, Callable[[CoreRuns], list[str]]] = {
    "trains = DDP (AdamW)": lambda runs: _equal(runs, AUTO),
    "trains = DDP (SGD, clip 0)": lambda runs: _equal(runs, AUTO, sgd=True),
    "HSDP, 4 ranks": lambda runs: _equal(runs, {"sharding_size": 2}, sgd=True, ranks=4),
    "TP 2": lambda runs: _equal(runs, AUTO, ranks=4, tensor=2),
    "recompute + dropout": lambda runs: _equal(
        runs, {**AUTO, "recompute_modules": ["decoder.layers.{*}"]}, dropout=0.1
    ),
}
