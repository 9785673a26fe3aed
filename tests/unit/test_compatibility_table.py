"""scripts/compatibility_table.py: cells of several reports become one table a language."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = """# Page

<!-- compatibility: begin, written by scripts/compatibility_table.py -->
old
<!-- compatibility: end -->
after
"""


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compatibility_table", ROOT / "scripts" / "compatibility_table.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for language in ("en", "zh"):
        page = tmp_path / "docs" / language / "compatibility.md"
        page.parent.mkdir(parents=True)
        page.write_text(PAGE, encoding="utf-8")
    reports = tmp_path / "build" / "compatibility"
    reports.mkdir(parents=True)
    (reports / "a.tsv").write_text(
        "3.12.1\t2.14.1+cpu\t0.19.2+c6b0ddc\twheel\ttrains\tpass\t\n3.12.1\t2.14.1+cpu\t0.19.2\twheel\tTP 2\tWRONG\tnorm\n",
        encoding="utf-8",
    )
    (reports / "b.tsv").write_text(
        "3.11.7\t2.7.1\t0.12.3\tcheckout\ttrains\tpass\t\n3.11.7\t2.7.1\t0.12.3\tcheckout\tmeta\trefused\tsay `why`\n",
        encoding="utf-8",
    )
    return tmp_path


def test_writes_both_pages(script: ModuleType, project: Path) -> None:
    assert script.main(["--date", "2026-11-29"], project) == 0
    assert (project / "docs" / "en" / "compatibility.md").read_text(encoding="utf-8") == PAGE.replace(
        "old\n",
        """
Measured on 2026-11-29.

| Megatron, torch, Python | trains | meta | TP 2 |
| --- | --- | --- | --- |
| 0.12.3 (checkout), 2.7.1, 3.11 | pass | refused (1) | – |
| 0.19.2 (wheel), 2.14.1, 3.12 | pass | – | **wrong** (2) |

Why:

1. `say 'why'`
2. `norm`

""",
    )
    chinese = (project / "docs" / "zh" / "compatibility.md").read_text(encoding="utf-8")
    assert "| 0.12.3 (源码), 2.7.1, 3.11 | 通过 | 拒绝 (1) | – |\n" in chinese


def test_a_broken_report_changes_nothing(script: ModuleType, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = project / "build" / "compatibility" / "c.tsv"
    path.write_text("3.11.7\t2.7.1\n", encoding="utf-8")
    assert script.main([], project) == 1
    assert capsys.readouterr().err == f"{path}:1: 2 fields instead of 7. Run it again.\n"
    assert (project / "docs" / "en" / "compatibility.md").read_text(encoding="utf-8") == PAGE


def test_no_report(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--reports", str(tmp_path)], tmp_path) == 1
    assert capsys.readouterr().err == f"{tmp_path}: no reports. Run bash scripts/test_matrix.sh first.\n"
