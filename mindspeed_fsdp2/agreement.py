"""Every rank continues, or every rank raises the same error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch.distributed as dist

from .errors import FSDP2Error, PlanError

T = TypeVar("T")


def agree(build: Callable[[], T], digest: Callable[[T], str], group: dist.ProcessGroup | None, what: str) -> T:
    """Call ``build`` on every rank and return its value, if all ranks made the same (**collective** over ``group``).

    Args:
        build: Makes the value; may raise ``FSDP2Error``. Any other exception is a fault: its rank raises it as it
            is, the other ranks raise a ``PlanError`` with its text.
        digest: Equal exactly when the values are.
        group: The ranks that compare; None means all.
        what: Noun for the message, e.g. ``"FSDP2 plan"``.

    Raises:
        FSDP2Error: The first failing rank's error (by rank), on every rank, with the ranks that failed.
        PlanError: The ranks built different values.
    """
    error: FSDP2Error | None = None
    value: T | None = None
    try:
        value = build()
    except FSDP2Error as caught:
        error = caught
    except Exception as fault:
        with suppress(FSDP2Error):  # the others learn of it before this rank leaves with its own traceback
            exchange((PlanError(f"{what}: {type(fault).__name__}: {fault}"), ""), group, what)
        raise
    mine = (error, "" if value is None else digest(value))
    exchange(mine, group, what)
    if value is None:  # unreachable after exchange(), which raises wherever a rank failed
        raise PlanError(f"{what}: nothing was built.")
    return value


def exchange(mine: tuple[FSDP2Error | None, str], group: dist.ProcessGroup | None, what: str) -> None:
    """Tell all ranks this rank's error and digest; raise on all of them alike (**collective** over ``group``).

    Raises:
        FSDP2Error: Some rank has an error.
        PlanError: No rank has an error but the digests differ.
    """
    world = dist.get_world_size(group)
    if world == 1:
        if mine[0] is not None:
            raise mine[0]
        return
    every: list[tuple[FSDP2Error | None, str]] = [(None, "")] * world
    dist.all_gather_object(every, mine, group=group)
    ranks = dist.get_process_group_ranks(group) if group is not None else list(range(world))
    failed = [(rank, error) for rank, (error, _) in zip(ranks, every) if error is not None]
    if failed:
        first = failed[0][1]
        if len(failed) == world and len({str(error) for _, error in failed}) == 1:
            raise first
        texts: dict[str, list[int]] = {}
        for rank, error in failed:
            texts.setdefault(str(error), []).append(rank)
        lines = [f"on {_ranks(at)} of {world}: {text}" for text, at in texts.items()]
        raise type(first)("\n".join(lines)) from first
    by_digest: dict[str, list[int]] = {}
    for rank, (_, digest) in zip(ranks, every):
        by_digest.setdefault(digest, []).append(rank)
    if len(by_digest) > 1:
        groups = "; ".join(f"{digest} on {_ranks(at)}" for digest, at in by_digest.items())
        raise PlanError(
            f"{what}: the ranks do not agree ({groups}). Give every rank the same YAML file, model and flags."
        )


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:16])) + (", …" if len(ranks) > 16 else "")
    return f"ranks {shown}"
