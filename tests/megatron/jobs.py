"""Megatron jobs in seconds: ranks are forked from a process that has imported torch and Megatron already.

:class:`MegatronJobs` keeps that process (``jobs_zygote``); :meth:`MegatronJobs.run` forks the ranks of one job from it.
Each rank runs a pretrain script unchanged; probes (``jobs_probes``) wrap Megatron's ``train_step``, ``train`` and
``evaluate`` in the rank only and record what the test compares. A rank that fails or hangs ends the job, and the error
carries what every rank printed, its traceback included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "pretrain_gpt.py"
STARTUP_S = 240  # importing Megatron on a loaded two-core machine is slow
TAIL = 4000  # characters of each stream shown in an error


class JobFailure(AssertionError):
    """A rank failed or did not end in time; the message shows every rank."""


@dataclass
class RankResult:
    """What one rank recorded.

    Attributes:
        rank: Its global rank.
        exitcode: 0 after a full run; negative for the signal that ended it.
        losses: Loss of every iteration as logged (averaged over the ranks), on the last pipeline stage.
        grad_norms: Norm before clipping of every iteration.
        num_zeros: Zeros in the gradient of every iteration; None without ``--log-num-zeros-in-grad``.
        grads: Gradients of the first iteration, reduced and unclipped, by parameter name. Full over the data-parallel
            group, this rank's part under tensor parallelism.
        params: Parameters after training, likewise.
        valid_losses: What each evaluation returned, in order.
        step_seconds: Wall time of every iteration.
        local_types: Type of each trained parameter by name, ``Parameter`` or ``DTensor``: tells what a run trained.
        extra: What the job's hook left there.
        stdout: Everything the rank printed.
        stderr: Log and traceback.
    """

    rank: int
    exitcode: int = -1
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    num_zeros: list[float | None] = field(default_factory=list)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    params: dict[str, torch.Tensor] = field(default_factory=dict)
    valid_losses: list[dict[str, float]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    local_types: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    stdout: str = ""
    stderr: str = ""


@dataclass
class JobResult:
    """One finished job: its ranks in order, and its working folder."""

    ranks: list[RankResult]
    folder: Path
    seconds: float

    @property
    def losses(self) -> list[float]:
        """Losses of the last rank, which is on the last pipeline stage."""
        return self.ranks[-1].losses

    @property
    def grad_norms(self) -> list[float | None]:
        """Gradient norms of rank 0; they are equal on all ranks."""
        return self.ranks[0].grad_norms

    def describe(self) -> str:
        """Return what every rank printed last."""
        return "\n".join(
            f"[rank {rank.rank}] exit code {rank.exitcode}\n{rank.stdout[-TAIL:]}\n{rank.stderr[-TAIL:]}"
            for rank in self.ranks
        )


class MegatronJobs:
    """The preloaded process, started by the first :meth:`run` and kept until :meth:`close`.

    Args:
        checkout: Folder of a Megatron-LM checkout to import Megatron from; None takes what is installed.
    """

    def __init__(self, checkout: Path | None = None) -> None:
        self._paths = [str(ROOT), *([str(checkout)] if checkout else [])]
        self._zygote: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="megatron_jobs_")
        self._count = 0

    def run(
        self,
        argv: Sequence[str],
        *,
        world_size: int = 2,
        plugin: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
        script: str | os.PathLike[str] = EXAMPLE,
        hook: str | None = None,
        check: bool = True,
    ) -> JobResult:
        """Run ``script`` on ``world_size`` ranks and wait for them.

        Args:
            argv: The script's arguments.
            world_size: Number of ranks.
            plugin: Whether ``mindspeed_fsdp2.megatron_adaptor`` is imported first. False runs plain Megatron: only CPU
                mode is on, and an import of the adaptor in the script does nothing.
            env: Environment variables of the ranks, on top of this process's.
            timeout: Seconds until the ranks are ended.
            script: Path of the script that each rank runs as ``__main__``.
            hook: ``"module:function"``, called in each rank before the script with the dict that becomes ``extra``.
            check: Whether a rank that does not end with 0 is an error.

        Raises:
            JobFailure: A rank failed or did not end in time (only with ``check``), or the process could not start.
        """
        zygote = self._start()
        self._count += 1
        folder = Path(self._folder.name) / f"job{self._count}"
        folder.mkdir()
        job = {
            "argv": [str(arg) for arg in argv],
            "world_size": world_size,
            "plugin": plugin,
            "env": dict(env or {}),
            "timeout": timeout,
            "script": os.fspath(script),
            "hook": hook,
            "folder": str(folder),
        }
        assert zygote.stdin is not None
        zygote.stdin.write(json.dumps(job).encode() + b"\n")
        zygote.stdin.flush()
        reply = self._read()
        ranks = [_load(folder, rank, code) for rank, code in enumerate(reply["exitcodes"])]
        result = JobResult(ranks, folder, reply["seconds"])
        if check and any(reply["exitcodes"]):
            late = f"no end after {timeout:.0f} s\n" if reply["timed_out"] else ""
            raise JobFailure(late + result.describe())
        return result

    def close(self) -> None:
        """End the preloaded process and remove what the jobs wrote."""
        if self._zygote is not None:
            self._zygote.communicate(timeout=30)  # end of input ends it
            self._zygote = None
        self._folder.cleanup()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._zygote is None:
            paths = [*self._paths, os.environ.get("PYTHONPATH", "")]
            env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
            self._log = Path(self._folder.name) / "zygote.log"
            with self._log.open("wb") as log:
                self._zygote = subprocess.Popen(
                    [sys.executable, "-m", "tests.megatron.jobs_zygote"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=self._folder.name,
                    env=env,
                )
            self._read()  # it says when it is ready
        return self._zygote

    def _read(self) -> dict[str, Any]:
        assert self._zygote is not None and self._zygote.stdout is not None
        line = self._zygote.stdout.readline()
        if not line:
            self._zygote.wait()
            self._zygote = None
            raise JobFailure("the preloaded process ended:\n" + self._log.read_text(errors="replace")[-TAIL:])
        return json.loads(line)


def _load(folder: Path, rank: int, exitcode: int) -> RankResult:
    record = folder / f"rank{rank}.pt"
    fields = torch.load(record, weights_only=False) if record.exists() else {}
    texts = {name: (folder / f"rank{rank}.{name}").read_text(errors="replace") for name in ("stdout", "stderr")}
    return RankResult(rank=rank, exitcode=exitcode, **fields, **texts)
