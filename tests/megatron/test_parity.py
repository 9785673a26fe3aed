"""Real Megatron training with FSDP2 equals plain DDP: every row of the matrix, with its measured differences.

``CORRECTNESS_ROWS=FILE`` appends what was measured to FILE, one line of JSON a row (``scripts/correctness_table.py``
makes the documentation's tables out of it).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.megatron.comparison import Differences, Text, check_end, check_start, compare, too_large
from tests.megatron.jobs import JobResult, MegatronJobs
from tests.megatron.matrix import MICRO4, ROWS, ZERO3, Flags, Row, config_of, find

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
        return self._keep(
            (*argv, row.specs, str(row.ranks), str(row.script), *row.env.values()),
            lambda: self._run(row, argv, plugin=False),
        )

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
    found = too_large(differences, row.tolerance) + check_start(run, reference)
    found += check_end(run, row.whole, row.tensor)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("settings", "gathers", "scatters"),
    [({}, 32, 16), ({"reduce_grads": "last_microbatch"}, 8, 4), ({"reshard_after_forward": False}, 16, 16)],
    ids=["every_microbatch", "last_microbatch", "zero2"],
)
def test_what_four_micro_batches_cost(runs: Runs, settings: dict[str, str], gathers: int, scatters: int) -> None:
    # Four units hold parameters: the embedding, two layers, the head. The last micro-batch's backward ends with one
    # gather for nothing, because torch gathers ahead what the micro-batch before it ended with.
    row = Row("traffic", Text("", ""), {**ZERO3, **settings}, {**MICRO4, "train_iters": "3"}, env={"TRAFFIC": "1"})
    for rank in runs.fsdp2(row).ranks:
        assert rank.extra["traffic"][1:] == [{"gathers": gathers + 1, "scatters": scatters}] * 2


SHARP = Row(
    "sharp",
    Text("", ""),
    {**ZERO3, "param_dtype": "bf16", "reduce_dtype": "fp32"},
    {"train_iters": "2", "seq_length": "1024", "max_position_embeddings": "1024", "micro_batch_size": "1"}
    | {"global_batch_size": "2", "num_layers": "1"},
    specs="sharp_attention",
)


@pytest.mark.parametrize("flags", [{}, {"bf16": None}], ids=["param_dtype", "--bf16"])
def test_bf16_is_as_exact_as_megatrons(runs: Runs, flags: Flags) -> None:
    # Rotary angles rounded to bf16 would show here: at position 1000 they are off by up to 2.
    exact = runs.reference(SHARP).ranks[0].extra["logits"]
    megatron = runs.reference(replace(SHARP, flags={**SHARP.flags, "bf16": None})).ranks[0].extra["logits"]
    ours = runs.fsdp2(replace(SHARP, flags={**SHARP.flags, **flags})).ranks[0].extra["logits"]
    error, allowed = ((logits - exact).norm() / exact.norm() for logits in (ours, megatron))
    print(f"logits off by {error:.4f}, with Megatron's own bf16 by {allowed:.4f}")
    assert 0.001 < allowed < 0.5
    assert error <= 1.2 * allowed


def test_names_are_unique() -> None:
    names = [row.name for rows in ROWS.values() for row in rows]
    assert len(names) == len(set(names))
