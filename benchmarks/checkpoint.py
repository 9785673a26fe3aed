"""Saving and loading against plain writes and reads of the same bytes, side by side in one run.

    python benchmarks/checkpoint.py [MEGABYTES] [RANKS] [DIRECTORY]

Trains one step of a model whose parameters and Adam state take about MEGABYTES (default 200) on RANKS (2) gloo ranks on
CPU. Prints medians of five rounds: seconds, and the ratio to the plain synced write (or uncached read) of that round.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn

from mindspeed_fsdp2 import wrap_model
from mindspeed_fsdp2.checkpoint import load_checkpoint, save_checkpoint, save_checkpoint_async

ROUNDS = 5
WIDTH = 512


@dataclass
class Took:
    """Seconds until the slowest rank had finished, and CPU seconds of this rank."""

    wall: float
    cpu: float


def took(action: Callable[[], Any]) -> Took:
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    cpu = time.process_time() - cpu
    dist.barrier()
    return Took(time.perf_counter() - wall, cpu)


def write_plainly(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def forget(folder: Path) -> None:
    """Drop the files of ``folder`` from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def flat_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the same tensors as a plain dictionary for torch.distributed.checkpoint."""
    names = {param: name for name, param in model.named_parameters()}
    state: dict[str, Any] = {"model": model.state_dict()}
    state["optimizer"] = {names[param]: values for param, values in optimizer.state.items()}
    return state


def bench(rank: int, world: int, megabytes: int, place: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/rendezvous", rank=rank, world_size=world)
    layers = max(1, megabytes * 10**6 // (WIDTH * WIDTH * 4 * 3))
    model = wrap_model(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))),
        {"sharding_size": "auto", "sub_modules_to_wrap": ["{*}"]},
    )
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    root = Path(place)
    mine = sum(p.to_local().nbytes for p in model.parameters()) * 3
    data = os.urandom(mine)
    plain, flat = root / f"plain-{rank}", flat_state(model, optimizer)
    found: dict[str, list[Took]] = {}
    ratios: dict[str, list[float]] = {}

    def note(name: str, value: Took, base: Took) -> None:
        found.setdefault(name, []).append(value)
        ratios.setdefault(name, []).append(value.wall / base.wall)

    for step in range(1, ROUNDS + 1):

        def save(step: int = step) -> None:
            save_checkpoint(root / "ours", model, optimizer, step=step, keep=1)

        def save_by_torch(step: int = step) -> None:
            dcp.save(flat, checkpoint_id=root / "dcp" / str(step))

        def load_by_torch(step: int = step) -> None:
            dcp.load(flat, checkpoint_id=root / "dcp" / str(step))

        base = took(lambda: write_plainly(plain, data))
        note("plain write", base, base)
        note("save_checkpoint", took(save), base)
        note("dcp.save", took(save_by_torch), base)
        pending = save_checkpoint_async(root / "ours", model, optimizer, step=step, keep=1)
        pending.wait()
        note("async, blocking", Took(pending.blocking_seconds, float("nan")), base)
        note("async, in all", Took(pending.total_seconds, float("nan")), base)
        dist.barrier()
        if rank == 0:
            os.sync()
            forget(root)
        base = took(plain.read_bytes)
        note("plain read", base, base)
        note("load_checkpoint", took(lambda: load_checkpoint(root / "ours", model, optimizer)), base)
        note("dcp.load", took(load_by_torch), base)
        if rank == 0:
            shutil.rmtree(root / "dcp")
        dist.barrier()
    if rank == 0:
        print(f"torch {torch.__version__}, {world} ranks, {mine * world / 1e6:.1f} MB, {2 * layers} parameters")
        report(root / "ours", mine * world, found, ratios)
    dist.destroy_process_group()


def report(folder: Path, size: int, found: dict[str, list[Took]], ratios: dict[str, list[float]]) -> None:
    (newest,) = folder.iterdir()
    disk = sum(path.stat().st_size for path in newest.iterdir())
    print(f"on disk {disk / 1e6:.1f} MB, {disk / size - 1:+.2%}; load average {os.getloadavg()[0]:.1f}")
    for name, values in found.items():
        wall, cpu = (statistics.median(getattr(value, kind) for value in values) for kind in ("wall", "cpu"))
        ratio, low, high = statistics.median(ratios[name]), min(ratios[name]), max(ratios[name])
        print(f"  {name:<16} {wall:7.3f} s  {cpu:7.3f} s CPU  {ratio:6.2f} x plain [{low:.2f}, {high:.2f}]")


def main() -> None:
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    world = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    with tempfile.TemporaryDirectory(dir=sys.argv[3] if len(sys.argv) > 3 else None) as place:
        mp.spawn(bench, (world, megabytes, place), nprocs=world)


if __name__ == "__main__":
    main()
