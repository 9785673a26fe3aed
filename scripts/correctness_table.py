"""Measure how far FSDP2 is from plain DDP and write the tables of docs/en/correctness.md and docs/zh/correctness.md.

    python scripts/correctness_table.py               run the rows of tests/megatron and tests/distributed, write both
    python scripts/correctness_table.py --rows FILE   write them from what an earlier run left in FILE

The tests do the measuring: ``CORRECTNESS_ROWS=FILE`` makes them append one line of JSON per row. Needs what the tests
need: pip install -e ".[megatron,dev]".
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]  # so that a checkout needs no installation

from markers import between_markers  # noqa: E402

from tests.megatron.comparison import FP32, Tolerance  # noqa: E402
from tests.megatron.matrix import ROWS, Row  # noqa: E402

Language = Literal["en", "zh"]
Measured = Mapping[str, Mapping[str, float]]

SCRIPT: Final = "scripts/correctness_table.py"
TEST: Final = "tests/megatron/test_parity.py"
PLAIN_TESTS: Final = tuple(
    f"tests/distributed/test_{name}.py"
    for name in ("parity", "accumulation", "unused", "gradients", "offload_overrides", "ties", "architectures")
)
PLAIN: Final[dict[str, dict[Language, str]]] = {
    "sharding": {
        "en": "Sharding, recompute, prefetch, clipping (AdamW unless named; against plain data parallel)",
        "zh": "切分、重计算、预取、裁剪（除注明外用 AdamW；与普通数据并行比较）",
    },
    "accumulation": {"en": "Gradient accumulation", "zh": "梯度累积"},
    "partly run": {"en": "Parts that only some micro-batches run", "zh": "只有部分 micro-batch 运行的模块"},
    "unused": {"en": "Parts of a unit that only some ranks use", "zh": "只有部分进程使用的单元内模块"},
    "whole": {"en": "Trainable ignored and optional modules", "zh": "可训练的 ignored_modules 与 optional_modules"},
    "mixed": {"en": "Frozen and adapted parameters", "zh": "冻结参数与适配器"},
    "offload": {"en": "Offload to host memory", "zh": "卸载到主机内存"},
    "overrides": {"en": "Overrides", "zh": "overrides"},
    "ties": {"en": "Tied weights", "zh": "共享权重"},
    "architectures": {"en": "Transformers architectures", "zh": "Transformers 架构"},
}
COLUMNS: Final = ("losses", "norms", "grads", "params")
HEADS: Final[dict[Language, tuple[str, ...]]] = {
    "en": ("Run", "Ranks", "Losses", "Norms", "Gradients", "Parameters"),
    "zh": ("训练", "进程", "损失", "范数", "梯度", "参数"),
}
RULE: Final[dict[Language, str]] = {
    "en": "- fp32: losses {losses}, norms {norms}, gradients {grads}, parameters {params}.\n",
    "zh": "- fp32：损失 {losses}，范数 {norms}，梯度 {grads}，参数 {params}。\n",
}
EXCEPTION: Final[dict[Language, str]] = {
    "en": "- {rows}: losses {losses}, norms {norms}, gradients {grads}, parameters {params}. {why}\n",
    "zh": "- {rows}：损失 {losses}，范数 {norms}，梯度 {grads}，参数 {params}。{why}\n",
}
WITH: Final[dict[Language, str]] = {
    "en": "With torch {torch} and megatron-core {megatron}.\n",
    "zh": "torch {torch}，megatron-core {megatron}。\n",
}


def limits(language: Language) -> str:
    """Return what is allowed: the rule for fp32, and one line per tolerance that has a reason of its own."""
    rows_of: dict[Tolerance, list[str]] = {}
    for row in (row for rows in ROWS.values() for row in rows):
        if row.tolerance.why.en:
            rows_of.setdefault(row.tolerance, []).append(getattr(row.text, language))
    separator = {"en": "; ", "zh": "；"}[language]
    return RULE[language].format(**allowed(FP32)) + "".join(
        EXCEPTION[language].format(
            rows=separator.join(names), why=getattr(tolerance.why, language), **allowed(tolerance)
        )
        for tolerance, names in rows_of.items()
    )


def allowed(tolerance: Tolerance) -> dict[str, str]:
    """Return the limits of ``tolerance`` as text."""
    return {column: f"{getattr(tolerance, column):.0e}".replace("e-0", "e-") for column in COLUMNS}


def tables(measured: Measured, language: Language) -> str:
    """Return the heading and the table of every family.

    Raises:
        ValueError: A row of the matrix was not measured.
    """
    missing = [row.name for rows in ROWS.values() for row in rows if row.name not in measured]
    if missing:
        raise ValueError(f"not measured: {', '.join(missing)}. Run the whole matrix.")
    versions = {"torch": release("torch"), "megatron": release("megatron-core")}
    parts = [WITH[language].format(**versions)]
    parts += [f"### {getattr(family, language)}\n\n{table(rows, measured, language)}" for family, rows in ROWS.items()]
    return "\n".join(parts)


def plain_tables(lines: Sequence[Mapping[str, Any]], language: Language) -> str:
    """Return a heading and a table for every family of rows on plain PyTorch models.

    Raises:
        ValueError: A family was not measured, or has no heading here.
    """
    rows_of: dict[str, dict[str, Mapping[str, Any]]] = {}
    for line in lines:
        rows_of.setdefault(line["plain"], {})[line["row"]] = line
    if rows_of.keys() != PLAIN.keys():
        raise ValueError(f"not measured, or without a heading: {', '.join(sorted(rows_of.keys() ^ PLAIN.keys()))}.")
    return "\n".join(
        f"### {texts[language]}\n\n" + markdown(language, rows_of[family].values()) for family, texts in PLAIN.items()
    )


def table(rows: Sequence[Row], measured: Measured, language: Language) -> str:
    """Return the Markdown table of one family."""
    lines = ({**measured[row.name], "row": getattr(row.text, language), "ranks": row.ranks} for row in rows)
    return markdown(language, lines)


def markdown(language: Language, rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a Markdown table; equal bit for bit is written as 0."""
    head = HEADS[language]
    lines = [head, ("---", *["--:"] * (len(head) - 1))]
    for row in rows:
        numbers = (f"{row[column]:.1e}" if row[column] else "0" for column in COLUMNS)
        lines.append((row["row"], str(row["ranks"]), *numbers))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def release(package: str) -> str:
    """Return the installed version without the build."""
    return importlib.metadata.version(package).partition("+")[0]


def measure(path: Path) -> int:
    """Run the tests, which append to ``path``; return their exit status."""
    command = [sys.executable, "-m", "pytest", "-q", TEST, *PLAIN_TESTS]
    paths = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    env = {**os.environ, "CORRECTNESS_ROWS": str(path), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or read what was measured, and write both pages; return the exit status."""
    parser = argparse.ArgumentParser(description="Write the tables of docs/*/correctness.md from what tests measure.")
    parser.add_argument("--rows", type=Path, help="what an earlier run left; without it the tests are run")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        path = options.rows or Path(folder, "rows")
        if options.rows is None and (status := measure(path)):
            return status
        lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    measured = {line["row"]: line for line in lines if "plain" not in line}
    plain = [line for line in lines if "plain" in line]
    for language in HEADS:
        target = ROOT / "docs" / language / "correctness.md"
        text = target.read_text(encoding="utf-8")
        try:
            text = between_markers(text, "limits", limits(language), SCRIPT)
            text = between_markers(text, "measured", tables(measured, language), SCRIPT)
            text = between_markers(text, "plain", plain_tables(plain, language), SCRIPT)
        except ValueError as error:
            print(f"{target.relative_to(ROOT)}: {error}", file=sys.stderr)
            return 1
        target.write_text(text, encoding="utf-8")
        print(f"{target.relative_to(ROOT)}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
