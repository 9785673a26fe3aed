"""How two runs of a job are compared: plain DDP and FSDP2, or FSDP2 with and without recompute."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from tests.megatron.jobs import JobResult, RankResult


class Text(NamedTuple):
    """What the documentation calls something, in both of its languages."""

    en: str
    zh: str


@dataclass(frozen=True)
class Tolerance:
    """Largest relative differences allowed.

    Attributes:
        losses: Of every step's and every evaluation's loss.
        norms: Of every step's gradient norm, and of the parameters' norm where it is logged.
        grads: Of full gradients of step 1, relative to the tensor's largest entry.
        params: Of parameters after the last step, likewise.
        counts: Of every step's count of zeros in the gradient, where it is logged.
        why: Why a row needs more than the rule for fp32.
    """

    losses: float = 1e-5
    norms: float = 5e-5
    grads: float = 1e-6
    params: float = 1e-4
    counts: float = 0.0
    why: Text = Text("", "")


FP32 = Tolerance()
BITWISE = Tolerance(0.0, 1e-6, 0.0, 0.0)  # the norm is a sum of squares over ranks, added up in another order
BF16 = Tolerance(
    2e-4,
    5e-3,
    1e-2,
    2e-1,
    1e-3,
    Text(
        "bf16 keeps 8 bits: DDP rounds the gradients of weights to bf16 before it sums them, FSDP2 rounds the same "
        "products in another order; where a gradient is little more than rounding, Adam makes a full step of it.",
        "bf16 只有 8 位有效位：DDP 先把权重梯度舍入到 bf16 再求和，FSDP2 舍入的次序不同；梯度与舍入误差相当处，Adam 仍走完整的一步。",
    ),
)

# Where the two runs round alike, one difference would give away that sums over ranks or micro-batches are not in fp32.
BF16_SUMMED_IN_FP32 = replace(BF16, grads=1e-6)
BF16_AGAINST_FP32 = Tolerance(
    2e-3,
    2e-2,
    5e-2,
    4e-1,
    why=Text(
        "the reference computes in fp32: DDP with --bf16 would start from rounded weights.",
        "参照用 fp32 计算：DDP 加 --bf16 会从舍入后的权重开始。",
    ),
)


class Differences(NamedTuple):
    """The largest relative differences of one row; the fields are those of :class:`Tolerance`."""

    losses: float
    norms: float
    grads: float
    params: float
    counts: float


def compare(run: JobResult, reference: JobResult) -> Differences:
    """Return how far ``run`` is from ``reference``, each rank compared with its counterpart."""
    pairs = list(zip(run.ranks, reference.ranks, strict=True))
    for mine, theirs in pairs:
        assert mine.grads.keys() == theirs.grads.keys() and mine.params.keys() == theirs.params.keys()
        assert mine.grads and len(mine.losses) == len(theirs.losses) > 1
        assert len(mine.valid_losses) == len(theirs.valid_losses)
    return Differences(
        max(_series(_losses(mine), _losses(theirs)) for mine, theirs in pairs),
        max(_series(_norms(mine), _norms(theirs)) for mine, theirs in pairs),
        max(_entries(mine.grads, theirs.grads) for mine, theirs in pairs),
        max(_entries(mine.params, theirs.params) for mine, theirs in pairs),
        max(_series(_counts(mine), _counts(theirs)) for mine, theirs in pairs),
    )


def too_large(differences: Differences, tolerance: Tolerance) -> list[str]:
    """Return which of the ``differences`` are not allowed."""
    return [
        f"{name}: {value:.2e} instead of at most {allowed:.0e}"
        for name, value in differences._asdict().items()
        if not value <= (allowed := getattr(tolerance, name))
    ]


def check_end(run: JobResult, whole: tuple[str, ...], tensor: int) -> list[str]:
    """Return what is wrong with the end of ``run``: with what the ranks hold, apart from any reference.

    Args:
        run: A run under FSDP2.
        whole: Beginnings of the names of trainable parameters that stay whole.
        tensor: Tensor-parallel ranks; consecutive ones.
    """
    found = []
    for rank in run.ranks:
        plain = {name for name, kind in rank.local_types.items() if kind != "DTensor"}
        if plain != {name for name in rank.local_types if name.startswith(whole or "-")}:
            found.append(f"rank {rank.rank}: these are no DTensors: {sorted(plain)}")
        start = rank.extra["start"]
        if still := [name for name, value in rank.params.items() if torch.equal(value, start[name])]:
            found.append(f"rank {rank.rank}: these did not move: {still}")
        twin = run.ranks[rank.rank % tensor]
        found += _unequal(rank, twin, list(rank.params))
        found += _unequal(rank, run.ranks[0], [name for name in rank.params if "norm" in name or "router" in name])
        if (rank.losses, rank.grad_norms) != (run.ranks[0].losses, run.ranks[0].grad_norms):
            found.append(f"rank {rank.rank}: losses or norms are not those of rank 0")
    return found


def check_start(run: JobResult, reference: JobResult) -> list[str]:
    """Return which ranks do not start from the reference's values, bit for bit."""
    return [
        f"rank {mine.rank}: {name} starts from other values"
        for mine, theirs in zip(run.ranks, reference.ranks, strict=True)
        for name, value in theirs.extra["start"].items()
        if not torch.equal(mine.extra["start"][name].float(), value.float())
    ]


def _unequal(rank: RankResult, other: RankResult, names: list[str]) -> list[str]:
    buffers = rank.extra["buffers"], other.extra["buffers"]
    wrong = [name for name in names if not torch.equal(rank.params[name], other.params[name])]
    wrong += [name for name in buffers[0] if not torch.equal(buffers[0][name], buffers[1][name])]
    return [f"ranks {other.rank} and {rank.rank} end with different values of {wrong}"] if wrong else []


def _losses(rank: RankResult) -> list[float]:
    return [*rank.losses, *(loss for evaluated in rank.valid_losses for loss in evaluated.values())]


def _norms(rank: RankResult) -> list[float]:
    return [*(norm or 0.0 for norm in rank.grad_norms), *rank.extra["params_norms"]]


def _counts(rank: RankResult) -> list[float]:
    return [count or 0.0 for count in rank.num_zeros]


def _series(mine: list[float], theirs: list[float]) -> float:
    return max(_relative(abs(a - b), abs(b)) for a, b in zip(mine, theirs, strict=True))


def _entries(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    return max(_entry(mine[name].double(), value.double()) for name, value in theirs.items())


def _entry(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    assert mine.shape == theirs.shape
    return _relative(float((mine - theirs).abs().max()), float(theirs.abs().max()))


def _relative(difference: float, size: float) -> float:
    if math.isnan(difference):  # max() would pass over it
        return math.inf
    return difference / size if size else float(difference > 0)
