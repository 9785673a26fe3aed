"""The group segment of a module path: ``{*}``, ``{3}`` or ``{0-20,22-40}``, both ends included."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_SPAN = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class IndexGroup:
    """Which children of a module are meant.

    Attributes:
        spans: Inclusive ranges, sorted and merged, so that equal groups compare equal; ``None`` means every child.
    """

    spans: Spans | None

    @classmethod
    def parse(cls, body: str) -> IndexGroup:
        """Parse what stands between the braces.

        Raises:
            ValueError: An entry is neither an index nor a range, or a range runs backwards. The caller adds where.
        """
        if body.strip() == "*":
            return cls(None)
        spans = []
        for part in body.split(","):
            match = _SPAN.fullmatch(part.replace(" ", ""))
            if match is None:
                raise ValueError(
                    f"{part!r} is not an index or a range. Write {{*}}, {{3}}, {{0-20}} or {{0-20,22-40}}."
                )
            low, high = int(match[1]), int(match[2] or match[1])
            if low > high:
                raise ValueError(f"the range {low}-{high} runs backwards. Write {high}-{low}.")
            spans.append((low, high))
        return cls(_merge(spans))

    def __str__(self) -> str:
        return "{*}" if self.spans is None else f"{{{format_spans(self.spans)}}}"

    def __contains__(self, name: str) -> bool:
        return self.spans is None or (is_index(name) and any(low <= int(name) <= high for low, high in self.spans))

    def absent(self, present: Spans) -> Spans:
        """Return the indices written out in this group that are not in ``present``.

        Works on ranges: ``{0-900000000}`` costs no more than ``{0-9}``.
        """
        absent = []
        for low, high in self.spans or ():
            for have_low, have_high in present:
                if have_high < low or have_low > high:
                    continue
                if have_low > low:
                    absent.append((low, have_low - 1))
                low = have_high + 1
            if low <= high:
                absent.append((low, high))
        return tuple(absent)


def is_index(name: str) -> bool:
    """Return whether a child's name is an index, as in a ``ModuleList``."""
    return name.isascii() and name.isdigit()


def index_spans(names: Iterable[str]) -> Spans:
    """Return the indices among ``names`` as sorted inclusive ranges."""
    return _merge((int(name), int(name)) for name in names if is_index(name))


def format_spans(spans: Spans) -> str:
    """Write ranges the way a YAML does: ``0-3,7``."""
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def _merge(spans: Iterable[tuple[int, int]]) -> Spans:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)
