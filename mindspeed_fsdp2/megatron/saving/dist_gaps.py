"""torch_dist: whether the pieces that all ranks would write make up whole tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

SHOWN = 8


class Box(NamedTuple):
    """One piece of a tensor in the checkpoint, as one rank would write it.

    Attributes:
        key: Name of the tensor in the checkpoint; layers may share one.
        name: Name in the model's state dict.
        size: Shape of the whole tensor.
        offset: Index of the piece's first element.
        shape: Shape of the piece, without prepended axes of size 1.
    """

    key: str
    name: str
    size: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def find_gaps(boxes: Sequence[Box]) -> list[str]:
    """Return what is wrong with the pieces that all ranks together would write, one text for each key."""
    by_key: dict[str, list[Box]] = {}
    for box in boxes:
        by_key.setdefault(box.key, []).append(box)
    return [text for key, group in by_key.items() if (text := _gap(key, group))]


def _gap(key: str, boxes: list[Box]) -> str | None:
    names = sorted({box.name for box in boxes})
    sizes = sorted({box.size for box in boxes})
    if len(sizes) > 1:
        return f"{key} has the shapes {', '.join(map(str, sizes))}, from {listed(names)}."
    if pair := _overlapping([(tuple(zip(box.offset, box.shape)), box.name) for box in boxes]):
        first, second = sorted(pair)
        if first != second:
            return f"two different tensors would be saved as {key}: {first} and {second}. Rename one of them."
        return f"several ranks would write the same elements of {key} ({first})."
    written = sum(math.prod(box.shape) for box in boxes)
    if written != math.prod(sizes[0]):
        return f"{written} elements of {key} would be written, {math.prod(sizes[0])} make it up ({listed(names)})."
    return None


_Span = tuple[tuple[tuple[int, int], ...], str]  # (offset, length) along each axis, and the name


def _overlapping(spans: Sequence[_Span], axis: int = 0) -> tuple[str, str] | None:
    """Return the names of two ``spans`` that share elements, given that all of them do along the axes before."""
    if len(spans) < 2:
        return None
    if axis == len(spans[0][0]):
        return spans[0][1], spans[1][1]
    for cluster in _clusters(spans, axis):
        if len({span[0][axis] for span in cluster}) == 1:
            pair = _overlapping(cluster, axis + 1)  # pieces on a grid, so never all pairs of all pieces
        else:
            pair = next(
                (
                    (one[1], other[1])
                    for one, other in itertools.combinations(cluster, 2)
                    if all(a < b + m and b < a + n for (a, n), (b, m) in zip(one[0], other[0]))
                ),
                None,
            )
        if pair:
            return pair
    return None


def _clusters(spans: Sequence[_Span], axis: int) -> Iterable[list[_Span]]:
    """Yield groups of ``spans`` whose intervals along ``axis`` do not reach into another group's."""
    cluster: list[_Span] = []
    end = 0
    for span in sorted(spans, key=lambda span: span[0][axis]):
        start, length = span[0][axis]
        if cluster and start >= end:
            yield cluster
            cluster = []
        cluster.append(span)
        end = max(end, start + length)
    yield cluster


def listed(names: Sequence[str]) -> str:
    """Return the first of ``names``, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
