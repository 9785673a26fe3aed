"""Every Megatron named by ``MEGATRON_LM_TAGS`` trains, saves and resumes with FSDP2 as its own DDP does.

``MEGATRON_LM_TAGS`` is a folder with one Megatron-LM checkout a subfolder, the word ``installed`` for the installed
megatron-core wheel, or both, joined as in ``PATH``; without it nothing is collected. ``MEGATRON_LM_REPORT=FILE`` appends
one line a cell to FILE, separated by tabs: python, torch, core, source, cell, verdict, message.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.megatron.jobs import ROOT, MegatronJobs
from tests.megatron.tags import ALLOWED, CELLS, INSTALLED, Runs, Source, Verdict, judge, sources
from tests.megatron.tags_core import CoreRuns

SOURCES = sources(os.environ.get("MEGATRON_LM_TAGS", ""))
CASES = [pytest.param(source, cell, id=f"{source.name}-{cell}") for source in SOURCES for cell in CELLS]


@pytest.fixture(scope="module")
def runs_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Source], Runs | CoreRuns]]:
    """Returns the runs of a source; only one source's preloaded process is kept at a time."""
    kept: dict[str, Runs | CoreRuns] = {}

    def close() -> None:
        for runs in kept.values():
            if isinstance(runs, Runs):
                runs.jobs.close()
        kept.clear()

    def runs_of(source: Source) -> Runs | CoreRuns:
        if source.name not in kept:
            close()
            kept[source.name] = start(source, tmp_path_factory.mktemp(source.name))
        return kept[source.name]

    yield runs_of
    close()


def start(source: Source, folder: Path) -> Runs | CoreRuns:
    if source.core_only:
        return CoreRuns(folder)
    runs = Runs(MegatronJobs(source.folder), source, str(folder / "topics"), folder)
    if not source.fault:
        runs.jobs.run([runs.data], script=ROOT / "examples" / "make_dataset.py", world_size=1)
    return runs


def report(source: Source, cell: str, verdict: Verdict) -> None:
    if path := os.environ.get("MEGATRON_LM_REPORT"):
        kind = "wheel" if source.name == INSTALLED else "checkout"
        message = " ".join(verdict.message.split())[:300]
        fields = (platform.python_version(), torch.__version__, source.version, kind, cell, verdict.kind, message)
        with open(path, "a", encoding="utf-8") as file:
            file.write("\t".join(fields) + "\n")


if CASES:  # an empty list would be collected as one skipped test

    @pytest.mark.parametrize(("source", "cell"), CASES)
    def test_cell(source: Source, cell: str, runs_of: Callable[[Source], Runs | CoreRuns]) -> None:
        verdict = judge(cell, runs_of(source))
        report(source, cell, verdict)
        known = any(text in verdict.message for text in ALLOWED.get(cell, ())) or verdict.kind == "upstream cannot"
        assert verdict.kind == "pass" or known, f"{verdict.kind}: {verdict.message}"
