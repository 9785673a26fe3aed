"""Processes that are killed at chosen moments of a save."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import queue
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_fsdp2 import CheckpointError, wrap_model
from mindspeed_fsdp2.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint, save_checkpoint_async

END_S = 60

# Everything a save does to the disk passes through one of these.
EVENTS = (
    (os, "mkdir"),
    (os, "rename"),
    (os, "unlink"),
    (os, "fsync"),
    (io, "open"),
    (torch, "save"),
    (shutil, "rmtree"),
)


class Two(nn.Module):
    """Two linear modules, the second with fewer rows than some worlds have ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8, bias=False)
        self.two = nn.Linear(8, 1, bias=False)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the wrapped model and its optimizer, with state."""
    model = wrap_model(Two(), {"sharding_size": "auto", "sub_modules_to_wrap": ["one"]})
    optimizer = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        optimizer.state[param] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(param)}
    return model, optimizer


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Make every value tell the step."""
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(step)
            optimizer.state[param]["exp_avg"].fill_(-step)
            optimizer.state[param]["step"].fill_(step)


def told(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[float]:
    """Return the steps that the values tell; one if all of them come from one save."""
    steps: set[float] = set()
    for param in model.parameters():
        state = optimizer.state[param]
        for tensor, sign in ((param, 1), (state["exp_avg"], -1), (state["step"], 1)):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            steps |= set((sign * local.detach()).flatten().tolist())
    return steps


@contextlib.contextmanager
def counted(happens: Callable[[int, str, Any], None]) -> Iterator[None]:
    """Call ``happens(number, name, first argument)`` before every event inside, from 0."""
    number = iter(range(10**6))

    def before(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name != "open" or (len(args) > 1 and set(str(args[1])) & set("wxa+")):
            happens(next(number), name, args[0])
        return original(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for owner, name in EVENTS:
            original = getattr(owner, name)
            stack.enter_context(mock.patch.object(owner, name, functools.partial(before, name, original)))
        yield


def attempt(
    rank: int, world: int, rendezvous: str, directory: str, kill: tuple[int, ...], at: int, later: bool, outbox: Any
) -> None:
    """Load the newest checkpoint, save the next step and be killed at event ``at`` if ``rank`` is in ``kill``."""
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
        model, optimizer = build()
        known = list_checkpoints(directory)
        loaded = load_checkpoint(directory, model, optimizer) if known else None
        step = loaded.step if loaded is not None else 0
        if loaded is not None and told(model, optimizer) != {float(step)}:
            raise ValueError(f"step {step} holds values of {told(model, optimizer)}")
        dist.barrier()
        fill(model, optimizer, step + 1)
        names: list[str] = []

        def happens(number: int, name: str, _first: Any) -> None:
            names.append(name)
            if rank in kill and number == at:
                outbox.put((rank, "killed", step, list(names)))
                outbox.close()
                outbox.join_thread()  # or the message dies with the process
                os.kill(os.getpid(), signal.SIGKILL)

        with counted(happens):
            try:
                if later:
                    save_checkpoint_async(directory, model, optimizer, step=step + 1).wait()
                else:
                    save_checkpoint(directory, model, optimizer, step=step + 1)
            except CheckpointError as error:
                outbox.put((rank, str(error), step, names))
                return
        outbox.put((rank, "saved", step, names))
    except BaseException:  # noqa: BLE001 - the test shows it
        outbox.put((rank, traceback.format_exc(), -1, []))


def attempts(
    world: int, folder: Path, directory: Path, kill: tuple[int, ...], at: int, later: bool = False
) -> dict[int, tuple[str, int, list[str]]]:
    """Run :func:`attempt` on ``world`` new processes; return what each says, by rank.

    A rank that says nothing within the time limit is missing from the answer.
    """
    context = mp.get_context("forkserver")
    # fully_shard imports torch._dynamo on first use, which takes longer than all the rest of an attempt.
    context.set_forkserver_preload(["torch._dynamo", "mindspeed_fsdp2.wrap", "mindspeed_fsdp2.checkpoint"])
    outbox = context.Queue()
    rendezvous = folder / f"rendezvous-{len(list(folder.iterdir()))}-{at}-{later}"
    processes = [
        context.Process(
            target=attempt, args=(rank, world, str(rendezvous), str(directory), kill, at, later, outbox), daemon=True
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    answers: dict[int, tuple[str, int, list[str]]] = {}
    with contextlib.suppress(queue.Empty):
        while len(answers) < world:
            rank, text, step, names = outbox.get(timeout=END_S)
            answers[rank] = (text, step, names)
    for process in processes:
        process.join(END_S)
        process.kill()
    return answers
