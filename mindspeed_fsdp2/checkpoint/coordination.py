"""How the ranks agree while they save: over connections of their own, apart from those of training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from ..agreement import exchange
from ..apply import Sharded
from ..errors import CheckpointError, FSDP2Error
from ..torch_compat import new_group_of

T = TypeVar("T")

_HANDLE = "_mindspeed_fsdp2_checkpoint"


class Coordination:
    """The data-parallel ranks, connected by gloo.

    A group of its own lets a save go on beside training: on training's group both would wait for each other. And gloo
    notices at once when another rank dies, while an accelerator's backend waits for its timeout.

    Attributes:
        rank: This rank among the data-parallel ranks.
        ranks: Their number.
    """

    def __init__(self, root: nn.Module, group: dist.ProcessGroup | None) -> None:
        """Connect (**collective** over ``group``).

        Args:
            root: The model that keeps the connections.
            group: The ranks that save; None for all.
        """
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self._root = root
        # Only the members take part: other data-parallel groups make their own.
        self._group: Any = new_group_of(group, backend="gloo")

    def agree(self, build: Callable[[], T], what: str) -> T:
        """Call ``build`` on every rank and return its value, or raise the same error on all (**collective**).

        Args:
            build: Any exception but an ``FSDP2Error`` is a fault: its rank raises it as it is, the others a
                ``CheckpointError`` with its text.
            what: Begins messages.

        Raises:
            CheckpointError: ``build`` raised it on some rank.
        """
        error: FSDP2Error | None = None
        try:
            value = build()
        except FSDP2Error as caught:
            error = caught
        except Exception as fault:
            with contextlib.suppress(FSDP2Error):
                self._exchange(CheckpointError(f"{what}: {type(fault).__name__}: {fault}"), what)
            raise
        self._exchange(error, what)
        return value

    def gather_all(self, value: T, what: str) -> list[T]:
        """Return every rank's ``value`` on every rank (**collective**)."""
        every: list[Any] = [None] * self.ranks
        with self._lost_ranks_explained(what):
            dist.all_gather_object(every, value, group=self._group)
        return every

    def gather(self, value: T, what: str) -> list[T]:
        """Return every rank's ``value`` on the first rank, nothing on the others (**collective**)."""
        every: list[Any] = [None] * self.ranks if self.rank == 0 else []
        with self._lost_ranks_explained(what):
            dist.gather_object(value, every or None, dst=self._first(), group=self._group)
        return every

    def from_first(self, act: Callable[[], T], what: str) -> T:
        """Call ``act`` on the first rank and return its value, or raise its error, on every rank (**collective**).

        Raises:
            CheckpointError: ``act`` raised it.
        """
        value: T | None = None
        error: FSDP2Error | None = None
        if self.rank == 0:
            try:
                value = act()
            except FSDP2Error as caught:
                error = caught
            except Exception as fault:
                with contextlib.suppress(FSDP2Error):
                    self._from_first((None, CheckpointError(f"{what}: {type(fault).__name__}: {fault}")), what)
                raise
        result, error = self._from_first((value, error), what)
        if error is not None:
            raise error
        given: T = result
        return given

    def _from_first(self, mine: tuple[Any, FSDP2Error | None], what: str) -> tuple[Any, FSDP2Error | None]:
        answer = [mine]
        with self._lost_ranks_explained(what):
            dist.broadcast_object_list(answer, src=self._first(), group=self._group)
        return answer[0]

    def _exchange(self, error: FSDP2Error | None, what: str) -> None:
        with self._lost_ranks_explained(what):
            exchange((error, ""), self._group, what)

    @contextlib.contextmanager
    def _lost_ranks_explained(self, what: str) -> Iterator[None]:
        """Turn the failure of the collective inside into a CheckpointError, and make it fail on the other ranks too."""
        try:
            yield
        except FSDP2Error:
            raise
        except RuntimeError as error:
            self.close()
            raise CheckpointError(
                f"{what}: another rank died or left it. The checkpoints before it are untouched, and load_checkpoint "
                "finds the newest complete one: restart the job."
            ) from error

    def close(self) -> None:
        """End the connections; ranks that wait on them get an error instead of waiting on."""
        vars(self._root).pop(_HANDLE, None)
        if self._group is not None:
            group, self._group = self._group, None
            with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # a broken group may not end cleanly
                dist.destroy_process_group(group)

    def _first(self) -> int:
        return dist.get_global_rank(self._group, 0)


def coordination(handle: Sharded) -> Coordination:
    """Return the coordination of a wrapped model, made on first use (**collective** then)."""
    return coordination_of(handle.module, handle.group)


def coordination_of(root: nn.Module, group: dist.ProcessGroup | None) -> Coordination:
    """Return the coordination of the model ``root`` over ``group``, made on first use (**collective** then)."""
    found = vars(root).get(_HANDLE)
    if not isinstance(found, Coordination):
        found = Coordination(root, group)
        vars(root)[_HANDLE] = found
    return found
