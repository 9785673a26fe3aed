"""Real Megatron training with FSDP2 equals plain DDP: every row of the matrix, with its measured differences.

``CORRECTNESS_ROWS=FILE`` appends what was measured to FILE, one line of JSON a row (``scripts/correctness_table.py``
makes the documentation's tables out of it).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.megatron.jobs import JobResult, MegatronJobs
from tests.megatron.matrix import ROWS, Differences, Row, check, check_start, compare, config_of, find

HOOK = "tests.megatron.specs:prepare"


@dataclass
class Runs:
    """Runs the jobs of rows; references are kept, because many rows share one.

    Attributes:
        jobs: The runner.
        data: Prefix of the data set.
        folder: Where YAML files go.
    """

    jobs: MegatronJobs
    data: str
    folder: Path
    _kept: dict[tuple[str, ...], JobResult] = field(default_factory=dict)

    def fsdp2(self, row: Row) -> JobResult:
        argv = [*row.argv(self.data), "--use-torch-fsdp2", "--fsdp2-config-path", str(config_of(row, self.folder))]
        return self._run(row, argv, plugin=True)

    def reference(self, row: Row) -> JobResult:
        if row.against:
            other = find(row.against)
            return self._keep((row.against,), lambda: self.fsdp2(other))
        argv = row.argv(self.data)
        return self._keep((*argv, row.specs, str(row.ranks), str(row.script), *row.env.values()), lambda: self._run(row, argv, plugin=False))

    def _keep(self, key, make) -> JobResult:  # type: ignore[no-untyped-def]
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def _run(self, row: Row, argv: list[str], plugin: bool) -> JobResult:
        # Megatron asks for one connection where DDP meets tensor or context parallelism, and refuses it with FSDP2.
        env = {**row.env, "SPECS": row.specs, "CUDA_DEVICE_MAX_CONNECTIONS": "8" if plugin else "1"}
        return self.jobs.run(argv, world_size=row.ranks, plugin=plugin, env=env, script=row.script, hook=HOOK)


@pytest.fixture(scope="module")
def runs(megatron_jobs: MegatronJobs, topics: str, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(megatron_jobs, topics, tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> Iterator[list[tuple[Row, Differences]]]:
    """What each row measured; printed below the tests."""
    rows: list[tuple[Row, Differences]] = []
    yield rows
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print()
        for row, differences in rows:
            numbers = "  ".join(f"{name} {value:.1e}" for name, value in differences._asdict().items())
            print(f"{row.name:<24} {row.ranks} ranks  {numbers}")


def parameters() -> list[object]:
    return [
        pytest.param(family.en, row, id=row.name, marks=[pytest.mark.slow] if row.slow else [])
        for family, rows in ROWS.items()
        for row in rows
    ]


@pytest.mark.parametrize(("family", "row"), parameters())
def test_equals_ddp(runs: Runs, measured: list[tuple[Row, Differences]], family: str, row: Row) -> None:
    reference = runs.reference(row)
    run = runs.fsdp2(row)
    differences = compare(run, reference)
    measured.append((row, differences))
    if path := os.environ.get("CORRECTNESS_ROWS"):
        line = {"family": family, "row": row.name, "ranks": row.ranks, **differences._asdict()}
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")
    found = check(row, run, differences) + check_start(run, reference)
    assert not found, "\n".join(found)


def test_names_are_unique() -> None:
    names = [row.name for rows in ROWS.values() for row in rows]
    assert len(names) == len(set(names))
