"""Run a function on every rank of a long-lived gloo group (CPU, no torchrun)."""

from __future__ import annotations

import os
import queue
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

STARTUP_S = 240  # importing torch on a loaded two-core machine is slow
RUN_S = 120
GROUPS = 40  # bodies leave process groups behind, each with threads of its own; too many slow everything down
GRACE_S = 3  # after one rank failed, how long the others get to answer


class RankFailure(AssertionError):
    """At least one rank raised or did not answer; carries every failing rank's traceback."""


class RankPool:
    """``world_size`` processes that share one gloo group and outlive a test.

    A body is a module-level function; it returns data and the test asserts on what every rank returned.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._procs: list[Any] = []

    def run(self, body: Callable[..., Any], *args: Any, timeout: float = RUN_S) -> list[Any]:
        """Call ``body(*args)`` on every rank; return the results by rank."""
        if not self._procs:
            self._start()
        for inbox in self._inboxes:
            inbox.put((body, args))
        replies = self._collect(timeout)
        failures = {rank: value for rank, (ok, value) in replies.items() if not ok}
        missing = sorted(set(range(self.world_size)) - replies.keys())
        if failures or missing:
            self.close(force=True)  # a group that lost a collective cannot be used again
            texts = [f"[rank {rank}]\n{text}" for rank, text in sorted(failures.items())]
            if missing:
                texts.append(f"no answer from ranks {missing} after {timeout:.0f} s")
            raise RankFailure("\n".join(texts))
        answers = [replies[rank][1] for rank in range(self.world_size)]
        if answers[0][1] > GROUPS:
            self.close()
        return [value for value, _groups in answers]

    def close(self, force: bool = False) -> None:
        """Stop the ranks; the next :meth:`run` starts new ones."""
        for proc, inbox in zip(self._procs, self._inboxes if self._procs else []):
            if force:
                proc.kill()
            else:
                inbox.put(None)
        for proc in self._procs:
            proc.join(20)
        self._procs = []

    def _collect(self, timeout: float) -> dict[int, tuple[bool, Any]]:
        replies: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(replies) < self.world_size:
            try:
                rank, ok, value = self._outbox.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                break
            replies[rank] = (ok, value)
            if not ok:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        return replies

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.fsdp", "mindspeed_fsdp2.wrap"])  # import torch once
        self._outbox = context.Queue()
        self._inboxes = [context.Queue() for _ in range(self.world_size)]
        rendezvous = os.path.join(tempfile.mkdtemp(), "rendezvous")
        self._procs = [
            context.Process(target=_serve, args=(rank, self.world_size, rendezvous, inbox, self._outbox), daemon=True)
            for rank, inbox in enumerate(self._inboxes)
        ]
        for proc in self._procs:
            proc.start()
        ready = self._collect(STARTUP_S)
        if len(ready) < self.world_size:
            self.close(force=True)
            raise RankFailure(f"only ranks {sorted(ready)} of {self.world_size} started")


def _serve(rank: int, world_size: int, rendezvous: str, inbox: Any, outbox: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    outbox.put((rank, True, "ready"))
    while (job := inbox.get()) is not None:
        body, args = job
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for text in ALLOWED_WARNINGS:
                    warnings.filterwarnings("ignore", message=text)
                value = body(*args)
            outbox.put((rank, True, (value, len(dist.distributed_c10d._world.pg_map))))
        except BaseException:  # noqa: BLE001 - every failure, an exit included, must reach the test
            outbox.put((rank, False, traceback.format_exc()))
    dist.destroy_process_group()


# Warnings of PyTorch itself that say nothing about this package.
ALLOWED_WARNINGS: tuple[str, ...] = (
    "TypedStorage is deprecated",  # torch.distributed.checkpoint of torch 2.7
    r"The epoch parameter in `scheduler\.step\(\)`",  # SequentialLR of torch 2.7
)
