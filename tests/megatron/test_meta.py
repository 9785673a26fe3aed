"""``--init-model-with-meta-device`` starts from the same values and trains on as a run without it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.megatron.jobs import EXAMPLE, JobResult, MegatronJobs
from tests.megatron.matrix import MOE, TWO_TOWER
from tests.megatron.saving import Flags, unequal
from tests.megatron.tiny import tiny_gpt

META = "--init-model-with-meta-device"
HOOK = "tests.megatron.meta_specs:prepare"
DROPOUT: Flags = {"attention_dropout": "0.1", "hidden_dropout": "0.1"}
LEARNED: Flags = {"position_embedding_type": "learned_absolute"}


@dataclass
class Runs:
    """Runs jobs of a few steps."""

    jobs: MegatronJobs
    data: str
    folder: Path
    _count: int = 0

    def __call__(
        self,
        *extra: str,
        flags: Flags | None = None,
        settings: dict[str, Any] | None = None,
        ranks: int = 2,
        specs: str = "",
        drop: Sequence[str] = (),
        check: bool = True,
        env: Mapping[str, str] | None = None,
        script: Path = EXAMPLE,
    ) -> JobResult:
        """Run a tiny GPT with FSDP2; see ``saving.Runs.fsdp2``."""
        self._count += 1
        config = self.folder / f"cfg{self._count}.yaml"
        config.write_text(yaml.safe_dump(settings or {"sharding_size": "auto"}))
        size = {"train_iters": "4", "global_batch_size": "8", "micro_batch_size": "2"}
        argv = [flag for flag in tiny_gpt(self.data, **{**size, **(flags or {})}) if flag not in drop]
        argv += ["--use-torch-fsdp2", "--fsdp2-config-path", os.fspath(config), *extra]
        variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "SPECS": specs, "SAVING": "", **(env or {})}
        return self.jobs.run(
            argv, world_size=ranks, plugin=True, env=variables, script=script, hook=HOOK, check=check, timeout=90
        )


@pytest.fixture(scope="module")
def run(megatron_jobs: MegatronJobs, topics: str, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(megatron_jobs, topics, tmp_path_factory.mktemp("meta"))


@dataclass(frozen=True)
class Row:
    """Two runs, one of them with the flag.

    Attributes:
        name: Identifier.
        flags: Changes to the flags of both.
        settings: The YAML of both.
        extra: Further flags of both.
        ranks: Number of ranks.
        specs: Changes of ``specs`` to both.
        drop: Flags of the tiny GPT to leave out.
        core: Whether it always runs.
        env: Variables of both.
        script: What both run.
    """

    name: str
    flags: Flags = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=lambda: {"sharding_size": "auto"})
    extra: tuple[str, ...] = ()
    ranks: int = 2
    specs: str = ""
    drop: tuple[str, ...] = ()
    core: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    script: Path = EXAMPLE


TP2: Flags = {"tensor_model_parallel_size": "2", "ckpt_format": "torch_dist"}
WHOLE = {"sharding_size": "auto", "ignored_modules": ["embedding", "decoder.final_layernorm"]}
TOWERS = {
    "sharding_size": "auto",
    "sub_modules_to_wrap": ["text_decoder.decoder.layers.{*}"],
    "ignored_modules": ["image_encoder"],
}
ROWS = (
    Row("tensor-parallel", {**DROPOUT, **TP2}, ranks=4, core=True),
    Row("bf16", {**DROPOUT, **LEARNED, "bf16": None}, core=True),
    Row(
        "moe-bf16",
        {**DROPOUT, **MOE, "bf16": None, "moe_router_enable_expert_bias": None, "moe_router_score_function": "sigmoid"},
    ),
    Row("tied", DROPOUT, drop=("--untie-embeddings-and-output-weights",)),
    Row(
        "sequence-parallel",
        {**DROPOUT, **TP2, "sequence_parallel": None},
        ranks=4,
        specs="own_layers",
    ),
    Row("declined-fully-shard", DROPOUT, specs="declined_fully_shard"),
    Row("one-rank", DROPOUT, ranks=1),
    Row("three-ranks", {**DROPOUT, "global_batch_size": "6"}, ranks=3),
    Row("hsdp", DROPOUT, {"sharding_size": 2}, ranks=4),
    Row("random-init", {**DROPOUT, "data_parallel_random_init": None}),
    Row("cpu-initialization", {**DROPOUT, "use_cpu_initialization": None}),
    Row("ignored", DROPOUT, WHOLE),
    Row("offload", DROPOUT, {"sharding_size": "auto", "offload_to_cpu": True, "pin_memory": False}),
    Row("two-towers", {**DROPOUT, "bf16": None}, TOWERS, env={"ENCODER": "bfloat16"}, script=TWO_TOWER),
    Row("recompute", DROPOUT, {"sharding_size": "auto", "recompute_modules": ["decoder.layers.{*}"]}),
)


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=() if row.core else pytest.mark.slow) for row in ROWS]
)
def test_starts_and_trains_as_without_the_flag(run: Runs, row: Row) -> None:
    options: dict[str, Any] = {
        "flags": row.flags,
        "settings": row.settings,
        "ranks": row.ranks,
        "specs": row.specs,
        "drop": row.drop,
        "env": row.env,
        "script": row.script,
    }
    ordinary = run(*row.extra, **options)
    meta = run(META, *row.extra, **options)
    assert len(meta.losses) == 4 and meta.losses == ordinary.losses
    assert meta.grad_norms == ordinary.grad_norms
    for one, other in zip(ordinary.ranks, meta.ranks):
        assert other.extra["real_bytes"] == 0 and other.extra["meta_bytes"] > 100_000
        assert one.extra["real_bytes"] > 100_000 and one.extra["meta_bytes"] == 0
        for what in ("start", "buffers"):
            assert unequal(what, one.extra[what], other.extra[what]) == []
        assert unequal("params", one.params, other.params) == []
        assert unequal("params", one.params, one.extra["start"]) != []


def test_weights_without_value_are_refused_and_loaded_ones_train(run: Runs, tmp_path: Path) -> None:
    dcp = ("--ckpt-format", "torch_dcp")
    run(*dcp, "--save", os.fspath(tmp_path), "--save-interval", "2", "--exit-interval", "2")
    resumed = run(*dcp, "--load", os.fspath(tmp_path))
    loaded = run(*dcp, META, "--no-initialization", "--load", os.fspath(tmp_path))
    assert len(loaded.losses) == 2 and loaded.losses == resumed.losses
    failed = run(*dcp, META, "--no-initialization", check=False)
    assert [rank.exitcode for rank in failed.ranks] == [1, 1]
    for rank in failed.ranks:
        assert (
            "mindspeed_fsdp2: model: nothing initialised or loaded embedding.word_embeddings.weight, "
            "decoder.layers.0.self_attention.linear_proj.weight, decoder.layers.0.self_attention.linear_qkv.weight, "
            "decoder.layers.0.mlp.linear_fc1.weight, decoder.layers.0.mlp.linear_fc2.weight, "
            "decoder.layers.1.self_attention.linear_proj.weight, decoder.layers.1.self_attention.linear_qkv.weight, "
            "decoder.layers.1.mlp.linear_fc1.weight and 2 more, so it cannot run yet. "
        ) in rank.stderr
        assert not rank.losses


@pytest.mark.slow
def test_a_model_that_shards_itself_must_leave_nothing_on_meta(run: Runs) -> None:
    failed = run(META, specs="own_fully_shard", check=False)
    for rank in failed.ranks:
        assert rank.exitcode == 1 and not rank.losses
        assert (
            "mindspeed_fsdp2: --init-model-with-meta-device: the model's own fully_shard() left "
            "embedding.word_embeddings.weight, "
        ) in rank.stderr
