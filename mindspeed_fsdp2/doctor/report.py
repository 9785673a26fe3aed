"""Outcomes of checks over all ranks, and the text of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# In the order in which one rank's verdict outweighs another's.
VERDICTS = ("HANGS", "FAIL", "absent", "skipped", "ok")
_MOST = 3  # ranks that are quoted for one check


@dataclass(frozen=True)
class Outcome:
    """What one rank says of one check.

    Attributes:
        verdict: ``ok``; ``skipped``: nothing to check here; ``absent``: cannot be done, and training does not need it;
            ``FAIL``; ``HANGS``: did not come back in time.
        detail: Why, or what was seen.
    """

    verdict: str
    detail: str = ""


@dataclass(frozen=True)
class Line:
    """One check over all ranks."""

    name: str
    verdict: str
    detail: str = ""


@dataclass
class Report:
    """All that was found.

    Attributes:
        facts: Titled groups of names and values: versions, devices, environment.
        lines: One per check that was run.
        left: Names of checks that were not run any more.
        stuck: Whether a rank of this job did not come back, so that the process can only be ended.
    """

    facts: Mapping[str, Mapping[str, str]]
    lines: list[Line] = field(default_factory=list)
    left: Sequence[str] = ()
    stuck: bool = False

    @property
    def failed(self) -> bool:
        """Whether anything is wrong."""
        return any(line.verdict in ("FAIL", "HANGS") for line in self.lines) or bool(self.left)

    def __str__(self) -> str:
        text = ["mindspeed-fsdp2 doctor"]
        for title, values in self.facts.items():
            text += ["", title]
            width = max((len(name) for name in values), default=0)
            text += [f"  {name:<{width}}  {value}" for name, value in values.items()]
        text += ["", "checks"]
        text += [_line(line) for line in self.lines]
        if self.left:
            text += [f"  not run after that: {len(self.left)} checks, from '{self.left[0]}' on"]
        bad = [line.name for line in self.lines if line.verdict in ("FAIL", "HANGS")]
        passed = sum(line.verdict == "ok" for line in self.lines)
        verdict = f"{len(bad)} wrong: {', '.join(bad)}" if bad else "nothing wrong"
        return "\n".join([*text, "", f"result: {passed} passed, {verdict}"])


def summarise(name: str, outcomes: Sequence[Outcome | None]) -> Line:
    """Return the line for one check.

    Args:
        name: The check's.
        outcomes: By rank; None for a rank that gave no answer at all.
    """
    told = [outcome or Outcome("HANGS", "no answer") for outcome in outcomes]
    verdict = min((outcome.verdict for outcome in told), key=VERDICTS.index)
    if verdict == "absent" and any(outcome.verdict != "absent" for outcome in told):
        verdict = "FAIL"  # one rank cannot do what others can
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, outcome in enumerate(told):
        if outcome.verdict in (verdict, "FAIL", "HANGS", "absent"):
            ranks_of.setdefault((outcome.verdict, outcome.detail), []).append(rank)
    if len(ranks_of) == 1 and len(next(iter(ranks_of.values()))) == len(told):
        return Line(name, verdict, next(iter(ranks_of))[1])
    shown = [
        f"{_ranks(ranks)}: {'hangs, ' if kind == 'HANGS' and detail != 'no answer' else ''}{detail or kind}"
        for (kind, detail), ranks in ranks_of.items()
        if detail or kind in ("FAIL", "HANGS")
    ]
    more = f"; and {len(shown) - _MOST} more" if len(shown) > _MOST else ""
    return Line(name, verdict, "; ".join(shown[:_MOST]) + more)


def outcome_of(value: Any) -> Outcome | None:
    """Return the outcome that a rank wrote on the board, None if it wrote none."""
    return None if value is None else Outcome(value[0], value[1])


def _line(line: Line) -> str:
    detail = line.detail.replace("\n", "\n           ")
    return f"  {line.verdict:<7}  {line.name}" + (f": {detail}" if detail else "")


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}{', …' if len(ranks) > 8 else ''}"
