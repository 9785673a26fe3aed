"""Runs that are resumed from torch_dcp equal runs that were never stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.megatron.jobs import MegatronJobs
from tests.megatron.matrix import MOE
from tests.megatron.saving import Flags, Runs, differences, unequal

DROPOUT: Flags = {"attention_dropout": "0.1", "hidden_dropout": "0.1"}


@pytest.fixture(scope="module")
def runs(megatron_jobs: MegatronJobs, topics: str, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(megatron_jobs, topics, tmp_path_factory.mktemp("saving"))


@dataclass(frozen=True)
class Row:
    """A run of ten steps that saves at the fifth, and one that goes on from there.

    Attributes:
        name: Identifier.
        flags: Changes to the flags of both.
        settings: The YAML of both.
        saving: Changes of ``saving_specs`` to both.
        specs: Changes of ``specs`` to both.
        ranks: Number of ranks.
        drop: Flags of the tiny GPT that both leave out.
        core: Whether it always runs.
    """

    name: str
    flags: Flags = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=lambda: {"sharding_size": "auto"})
    saving: str = ""
    specs: str = ""
    ranks: int = 2
    drop: tuple[str, ...] = ()
    core: bool = False


WHOLE = {"sharding_size": "auto", "ignored_modules": ["embedding", "decoder.final_layernorm"]}
TIED = {"sharding_size": "auto", "sub_modules_to_wrap": [["embedding", "output_layer"], "decoder.layers.{*}"]}
ROWS = (
    Row("adamw", DROPOUT, core=True),
    Row("step-in-group-bf16", {**DROPOUT, "bf16": None}, saving="step_in_group", core=True),
    Row("step-in-group", DROPOUT, saving="step_in_group"),
    Row("bf16", {**DROPOUT, "bf16": None}),
    Row("sgd", {**DROPOUT, "optimizer": "sgd", "lr": "0.1"}),
    Row("sgd-without-momentum", {**DROPOUT, "optimizer": "sgd", "lr": "0.1", "sgd_momentum": "0"}),
    Row("moe", {**DROPOUT, **MOE}),
    Row(
        "moe-bf16-bias",
        {**MOE, "bf16": None, "moe_router_enable_expert_bias": None, "moe_router_score_function": "sigmoid"},
    ),
    Row("own-random-states", DROPOUT, saving="own_seeds"),
    Row("random-init", {**DROPOUT, "data_parallel_random_init": None}),
    Row("hsdp", DROPOUT, {"sharding_size": 2}, ranks=4),
    Row("replicas", DROPOUT, {"sharding_size": 1}),
    Row("whole-bf16", {**DROPOUT, "bf16": None}, WHOLE),
    Row("micro-batches", {**DROPOUT, "micro_batch_size": "2", "lr_warmup_iters": "4", "lr_decay_style": "cosine"}),
    Row("one-rank", DROPOUT, ranks=1),
    Row("extra-state", saving="extra_state"),
    Row("sharded-by-itself", DROPOUT, specs="own_fully_shard"),
    Row("frozen", {"bf16": None}, specs="frozen_embedding"),
    Row("tied", DROPOUT, TIED, drop=("--untie-embeddings-and-output-weights",)),
    Row("zero2", DROPOUT, {"sharding_size": "auto", "reshard_after_forward": False}),
    Row("offload", DROPOUT, {"sharding_size": "auto", "offload_to_cpu": True}),
    Row("after-evaluation", {**DROPOUT, "eval_interval": "5", "eval_iters": "2"}),
)


@pytest.mark.parametrize("row", [pytest.param(r, id=r.name, marks=[] if r.core else [pytest.mark.slow]) for r in ROWS])
def test_resuming_is_never_having_stopped(runs: Runs, row: Row) -> None:
    folder = str(runs.folder / row.name)
    options: dict[str, Any] = {"settings": row.settings, "saving": row.saving, "ranks": row.ranks}
    options |= {"env": {"SPECS": row.specs}, "drop": row.drop}
    whole = runs.fsdp2("--save", folder, "--save-interval", "5", flags=row.flags, **options)
    resumed = runs.fsdp2("--load", folder, "--ckpt-step", "5", flags=row.flags, **options)
    assert len(whole.losses) == 10 and len(resumed.losses) == 5
    assert whole.losses[9] < whole.losses[0]
    assert differences(whole, resumed, 5) == []
    for rank in resumed.ranks:
        assert rank.extra["optimizer_start"]  # it was there before the first step


@pytest.mark.slow
def test_saving_changes_nothing(runs: Runs) -> None:
    saved = runs.fsdp2("--save", str(runs.folder / "often"), "--save-interval", "2", flags=DROPOUT)
    assert differences(saved, runs.fsdp2(flags=DROPOUT), 10) == []


LAYOUTS = {
    "adamw": ({}, ""),
    "bf16-step-in-group": ({"bf16": None}, "step_in_group"),
    "moe": ({**MOE, "num_experts": "2"}, ""),  # two experts on three and four ranks: some hold nothing of the router
}
CHAIN: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {"sharding_size": "auto"}),
    (4, {"sharding_size": 2}),
    (1, {"sharding_size": "auto"}),
    (3, {"sharding_size": "auto"}),
    (4, {"sharding_size": 4}),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_other_layouts(runs: Runs, name: str) -> None:
    """Each run goes on where the one before it, on other ranks, had stopped: bit for bit, the optimizer too."""
    flags, saving = LAYOUTS[name]
    folder = str(runs.folder / f"layouts-{name}")
    before, losses = None, []
    for number, (ranks, settings) in enumerate(CHAIN):
        stop = str(2 * (number + 1))
        argv = ["--save", folder, "--save-interval", "2", "--exit-interval", stop] + (
            ["--load", folder] if number else []
        )
        run = runs.fsdp2(*argv, flags=flags, settings=settings, ranks=ranks, saving=saving)
        assert len(run.losses) == 2
        if before is not None:
            start, end = run.ranks[0].extra, before.ranks[0]
            assert unequal("params", start["start"], end.params) == []
            assert unequal("optimizer", start["optimizer_start"], end.extra["optimizer_end"]) == []
        losses += run.losses
        before = run
    whole = runs.fsdp2(flags=flags, saving=saving)
    tolerance = 2e-3 if "bf16" in flags else 1e-5
    assert losses == pytest.approx(whole.losses, rel=tolerance)


@pytest.mark.slow
def test_own_random_states_on_other_ranks_stay_as_seeded(runs: Runs) -> None:
    folder = str(runs.folder / "seeds")
    runs.fsdp2("--save", folder, "--save-interval", "2", "--exit-interval", "2", saving="own_seeds")
    more = runs.fsdp2("--load", folder, "--exit-interval", "3", ranks=3, saving="own_seeds")
    assert "saved by 2 ranks and loaded by 3: " in more.ranks[0].stdout
    assert len({str(rank.extra["random_start"][0]) for rank in more.ranks}) == 3
