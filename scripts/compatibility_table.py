"""Write the tables of docs/en/compatibility.md and docs/zh/compatibility.md from what scripts/test_matrix.sh measured.

    python scripts/compatibility_table.py                 from build/compatibility/*.tsv
    python scripts/compatibility_table.py --reports DIR   from the files in another folder

Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from markers import between_markers  # noqa: E402

Language = Literal["en", "zh"]
SCRIPT: Final = "scripts/compatibility_table.py"
FIELDS: Final = ("python", "torch", "core", "source", "cell", "verdict", "message")
WORDS: Final[dict[Language, dict[str, str]]] = {
    "en": {
        "pass": "pass",
        "refused": "refused",
        "upstream cannot": "upstream cannot",
        "WRONG": "**wrong**",
        "wheel": "wheel",
        "checkout": "checkout",
        "cell": "Megatron, torch, Python",
        "measured": "Measured on {date}.",
        "why": "Why:",
    },
    "zh": {
        "pass": "通过",
        "refused": "拒绝",
        "upstream cannot": "上游不支持",
        "WRONG": "**错误**",
        "wheel": "wheel",
        "checkout": "源码",
        "cell": "Megatron、torch、Python",
        "measured": "测于 {date}。",
        "why": "原因：",
    },
}


class Column(NamedTuple):
    """One combination of versions."""

    core: str
    torch: str
    python: str
    source: str


Cells = Mapping[Column, Mapping[str, tuple[str, str]]]


def read(paths: Iterable[Path]) -> dict[Column, dict[str, tuple[str, str]]]:
    """Return verdict and message of every cell of every combination, in the order of versions.

    Raises:
        ValueError: A line has another number of fields.
    """
    found: dict[Column, dict[str, tuple[str, str]]] = {}
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            for number, line in enumerate(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), 1):
                if len(line) != len(FIELDS):
                    raise ValueError(f"{path}:{number}: {len(line)} fields instead of {len(FIELDS)}. Run it again.")
                python, torch, core, source, cell, verdict, message = line
                column = Column(
                    core.partition("+")[0], torch.partition("+")[0], ".".join(python.split(".")[:2]), source
                )
                found.setdefault(column, {})[cell] = (verdict, message)
    return dict(sorted(found.items(), key=lambda item: [_numbers(item[0].core), _numbers(item[0].torch), item[0]]))


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def table(cells: Cells, language: Language, date: str) -> str:
    """Return the Markdown table, one line per combination, with the reasons below it."""
    words = WORDS[language]
    names = list(dict.fromkeys(name for column in cells.values() for name in column))
    reasons: dict[str, int] = {}
    lines = [(words["cell"], *names), ("---",) * (len(names) + 1)]
    for column, verdicts in cells.items():
        head = f"{column.core} ({words[column.source]}), {column.torch}, {column.python}"
        lines.append((head, *(_cell(verdicts.get(name), words, reasons) for name in names)))
    parts = [f"{words['measured'].format(date=date)}\n", "".join(f"| {' | '.join(line)} |\n" for line in lines)]
    if reasons:
        parts += [f"{words['why']}\n", "".join(f"{number}. {_escaped(text)}\n" for text, number in reasons.items())]
    return "\n".join(parts)


def _cell(verdict: tuple[str, str] | None, words: Mapping[str, str], reasons: dict[str, int]) -> str:
    if verdict is None:
        return "–"
    kind, message = verdict
    if not message:
        return words[kind]
    return f"{words[kind]} ({reasons.setdefault(message, len(reasons) + 1)})"


def _escaped(text: str) -> str:
    return f"`{text.replace('`', chr(39))}`"


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Write both pages under ``root``; return the exit status."""
    parser = argparse.ArgumentParser(description="Write the tables of docs/*/compatibility.md.")
    parser.add_argument("--reports", type=Path, default=root / "build" / "compatibility", help="folder of the reports")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="when they were measured")
    options = parser.parse_args(argv)
    paths = sorted(options.reports.glob("*.tsv"))
    if not paths:
        print(f"{options.reports}: no reports. Run bash scripts/test_matrix.sh first.", file=sys.stderr)
        return 1
    try:
        cells = read(paths)
        for language in WORDS:
            target = root / "docs" / language / "compatibility.md"
            text = target.read_text(encoding="utf-8")
            new = between_markers(text, "compatibility", table(cells, language, options.date), SCRIPT)
            target.write_text(new, encoding="utf-8")
            print(f"{target.relative_to(root)}: written")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
