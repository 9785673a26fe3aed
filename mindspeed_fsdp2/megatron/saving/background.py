"""``--async-save`` for torch_dcp: one of Megatron's strategies, which writes in a thread instead of a process.

Everything is compared and copied to host memory before training goes on. The thread agrees over connections of its own;
on those of training both would wait for each other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.training import get_args

from ...checkpoint.save import AsyncSave
from ..startup import megatron_device_type
from .dcp_write import Prepared

NAME = "mindspeed_fsdp2"


class _Call(NamedTuple):
    number: int
    save: AsyncSave
    request: Any


class Queue:
    """What Megatron calls ``AsyncCallsQueue``: the saves under way, and what is due when they are complete."""

    def __init__(self, persistent: bool = False) -> None:
        """Start empty.

        Args:
            persistent: Megatron's wish for a process that stays; a thread for each save needs none.
        """
        self._calls: deque[_Call] = deque()
        self._scheduled = 0

    @classmethod
    def warmup_persistent_caller(cls, rank: int, cpu_priority: int = 10, io_priority: int | None = None) -> None:
        """Nothing: there is no process to start."""

    def schedule_async_request(self, async_request: Any) -> int:
        """Start a save (**collective**) and return its number."""
        request = async_request.freeze()
        self._scheduled += 1
        (prepared,) = request.async_fn_args
        self._calls.append(
            _Call(self._scheduled, AsyncSave(prepared.write, self._scheduled, time.monotonic()), request)
        )
        return self._scheduled

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Do what is due after the saves that every rank has finished, and return their numbers (**collective**).

        Args:
            blocking: Whether all saves are waited for.
            no_dist: Megatron's wish not to ask the other ranks; they are asked all the same.

        Raises:
            CheckpointError: A save failed; the same on every rank.
        """
        finalized = []
        while self._calls and (blocking or _done_everywhere(self._calls[0].save)):
            number, save, request = self._calls.popleft()
            save.wait()
            for act in request.finalize_fns:
                act()
            finalized.append(number)
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """Return how many saves are under way or not finalized yet."""
        return len(self._calls)

    def close(self, abort: bool = False) -> None:
        """Finalize all saves, unless ``abort``."""
        if not abort:
            self.maybe_finalize_async_calls(blocking=True)


def _done_everywhere(save: AsyncSave) -> bool:
    left = torch.tensor(0.0 if save.done() else 1.0, device=megatron_device_type(get_args()) or "cuda")
    dist.all_reduce(left, op=dist.ReduceOp.MAX)
    return not left.item()


class Writer:
    """What Megatron calls ``FileSystemWriterAsync``: carries the collected state to :class:`Queue`.

    Attributes:
        path: Folder of the checkpoint.
    """

    def __init__(self, path: Any, thread_count: int = 1, use_msc: bool = False) -> None:
        """Note ``path``; the rest is about Megatron's own writer."""
        self.path = Path(path)
        self.prepared: Prepared | None = None

    def get_save_function_and_args(self) -> tuple[Callable[..., Any], None, tuple[Prepared | None]]:
        """Return what Megatron makes its request of: function, function to copy first, arguments."""
        return Prepared.write, None, (self.prepared,)


def strategy(prepare: Callable[[Any, Path], Prepared]) -> dict[str, Any]:
    """Return the parts of a strategy, by the names that Megatron looks them up by.

    Args:
        prepare: Given the state and the folder, collects and compares (**collective**).
    """

    def save_state_dict_async_plan(state_dict: Any, storage_writer: Writer, *_rest: Any, **_named: Any) -> tuple[()]:
        storage_writer.prepared = prepare(state_dict, storage_writer.path).staged()
        return ()

    def save_state_dict_async_finalize() -> None:
        """Nothing: the checkpoint was published by the thread."""

    def get_write_results_queue(mp_mode: str = "spawn") -> None:
        """Nothing: no process answers."""

    return {
        "AsyncCallsQueue": Queue,
        "AsyncRequest": AsyncRequest,
        "FileSystemWriterAsync": Writer,
        "get_write_results_queue": get_write_results_queue,
        "save_state_dict_async_plan": save_state_dict_async_plan,
        "save_state_dict_async_finalize": save_state_dict_async_finalize,
    }
