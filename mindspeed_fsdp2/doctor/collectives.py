"""Collectives by dtype and reduction, with values that show a missing rank or a wrong factor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from .checks import Check, Context, NotApplicable, NotNeeded, WrongResult

COUNT = 1031  # elements; odd, so that no kernel gets by with whole blocks

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Gradients are averaged in these, whole numbers tell what the ranks did, and bytes carry buffers and objects.
_REDUCTIONS: tuple[tuple[torch.dtype, tuple[str, ...]], ...] = (
    (torch.float32, ("SUM", "AVG", "MAX")),
    (torch.bfloat16, ("SUM", "AVG", "MAX")),
    (torch.float16, ("SUM", "AVG", "MAX")),
    (torch.int32, ("SUM", "MAX")),
    (torch.int64, ("SUM", "MAX")),
    (torch.float64, ("SUM", "MAX")),
)
_NOT_NEEDED = {
    *(("float16", op) for op in ("AVG", "MAX")),  # FSDP sums fp16 and divides by itself
    *(("float64", op) for op in ("SUM", "MAX")),
    *(("bfloat16", op) for op in ("MAX",)),
}


def checks() -> list[Check]:
    """Return the checks of this module."""
    found: list[Check] = []
    for dtype, ops in _REDUCTIONS:
        for op in ops:
            needed = (_name(dtype), op) not in _NOT_NEEDED
            found.append(Check(f"all_reduce {op} {_name(dtype)}", partial(_all_reduce, dtype, op), needed))
    for dtype in (*_FLOATS, torch.int64, torch.float64):
        for op in ("SUM", "AVG") if dtype in _FLOATS else ("SUM",):
            needed = dtype in _FLOATS and (_name(dtype), op) not in _NOT_NEEDED
            found.append(Check(f"reduce_scatter {op} {_name(dtype)}", partial(_reduce_scatter, dtype, op), needed))
    for dtype in (*_FLOATS, torch.int64, torch.uint8, torch.float64):
        needed = dtype is not torch.float64
        found.append(Check(f"all_gather {_name(dtype)}", partial(_all_gather, dtype), needed))
        found.append(Check(f"broadcast {_name(dtype)}", partial(_broadcast, dtype), needed))
    found.append(Check("all_gather of objects", _objects))
    found.append(Check("all_reduce SUM float32 in host memory", partial(_host_reduce, "SUM")))
    found.append(Check("all_reduce MAX float32 in host memory", partial(_host_reduce, "MAX")))
    return found


def values_of(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what ``rank`` contributes, on the host: whole numbers from 1 to 7, no two of seven neighbours alike.

    Sums of up to 36 ranks are exact in bf16, the coarsest dtype here, and no two of the wrong answers looked for (one
    rank missing, the own values, a sum for an average) are right by chance.
    """
    return (1 + (torch.arange(count) + 3 * rank) % 7).to(dtype)


def expected(ranks: int, count: int, op: str) -> torch.Tensor:
    """Return the reduction of :func:`values_of` over all ranks, in float64 on the host."""
    every = torch.stack([values_of(rank, count, torch.float64) for rank in range(ranks)])
    if op == "MAX":
        return every.amax(0)
    return every.sum(0) if op == "SUM" else every.mean(0)


def compare(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Raise unless ``got`` is ``want`` to the precision of its dtype.

    Raises:
        WrongResult: Names the first element that differs.
    """
    found = got.detach().cpu().to(torch.float64)
    slack = 0.0
    if got.is_floating_point():
        rounding = torch.finfo(got.dtype).eps * float(want.abs().max())
        exact = bool((want == want.round()).all()) and rounding <= 2  # whole numbers that the dtype can hold
        slack = 0.0 if exact else rounding
    wrong = ~((found - want).abs() <= slack)  # not-a-number is wrong too
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0, 0])
        raise WrongResult(
            f"{what}: element {at} is {found[at].item():g} and should be {want[at].item():g} "
            f"({int(wrong.sum())} of {wrong.numel()} are wrong)"
        )


def _all_reduce(dtype: torch.dtype, op: str, context: Context) -> str:
    _check_average_is_asked_for(op, context)
    tensor = values_of(context.rank, COUNT, dtype).to(context.device)
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    compare(tensor, expected(context.ranks, COUNT, op), "the result")
    return ""


def _reduce_scatter(dtype: torch.dtype, op: str, context: Context) -> str:
    _check_average_is_asked_for(op, context)
    whole = COUNT * context.ranks
    source = values_of(context.rank, whole, dtype).to(context.device)
    target = torch.empty(COUNT, dtype=dtype, device=context.device)
    _either("reduce_scatter_single", "reduce_scatter_tensor")(target, source, op=getattr(dist.ReduceOp, op))
    compare(target, expected(context.ranks, whole, op).chunk(context.ranks)[context.rank], "this rank's part")
    return ""


def _check_average_is_asked_for(op: str, context: Context) -> None:
    """Raise where the backend cannot average and training, which tries it first, sums and divides instead."""
    if op == "AVG" and context.ranks > 1 and not asks_for_averages(context):
        raise NotNeeded("gloo of this PyTorch cannot average; training sums and divides instead")


def asks_for_averages(context: Context) -> bool:
    """Return whether FSDP asks the backend for averages: everywhere but on a gloo that gets those of ones wrong."""
    if f"{context.device.type}:gloo" not in dist.get_backend_config():
        return True
    ones, mine = torch.ones(context.ranks, device=context.device), torch.zeros(1, device=context.device)
    try:
        _either("reduce_scatter_single", "reduce_scatter_tensor")(mine, ones, op=dist.ReduceOp.AVG)
        dist.all_reduce(ones, op=dist.ReduceOp.AVG)
    except (RuntimeError, ValueError):  # before anything is sent, on every rank alike
        return False
    return mine.item() == 1 and bool((ones == 1).all())


def _all_gather(dtype: torch.dtype, context: Context) -> str:
    source = values_of(context.rank, COUNT, dtype).to(context.device)
    target = torch.empty(COUNT * context.ranks, dtype=dtype, device=context.device)
    _either("all_gather_single", "all_gather_into_tensor")(target, source)
    want = torch.cat([values_of(rank, COUNT, torch.float64) for rank in range(context.ranks)])
    compare(target, want, "the result")
    return ""


def _broadcast(dtype: torch.dtype, context: Context) -> str:
    last = context.ranks - 1
    tensor = values_of(context.rank, COUNT, dtype).to(context.device)
    dist.broadcast(tensor, src=last)
    compare(tensor, values_of(last, COUNT, torch.float64), f"what rank {last} sent")
    return ""


def _objects(context: Context) -> str:
    every: list[object] = [None] * context.ranks
    dist.all_gather_object(every, {"rank": context.rank})
    want = [{"rank": rank} for rank in range(context.ranks)]
    if every != want:
        raise WrongResult(f"the result is {every} and should be {want}")
    return ""


def _host_reduce(op: str, context: Context) -> str:
    if not context.host_backend:
        raise NotApplicable("no accelerator: the checks above are in host memory")
    tensor = values_of(context.rank, COUNT, torch.float32)
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    compare(tensor, expected(context.ranks, COUNT, op), "the result")
    return ""


def _either(new: str, old: str) -> Callable[..., object]:
    """Return the collective under its new name, which is torch's from 2.14 on, or under the old one."""
    found: Callable[..., object] = getattr(dist, new, None) or getattr(dist, old)
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
