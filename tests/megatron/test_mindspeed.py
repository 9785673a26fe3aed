"""Beside MindSpeed: its real sources where ``MINDSPEED_PATH`` and ``MINDSPEED_MM_PATH`` say where they are.

They need a Megatron of their own version on ``PYTHONPATH``; without them a stand-in takes their place. To run this file
on them, with checkouts of MindSpeed 26.0.0, MindSpeed-MM 26.0.0 and Megatron-LM core_v0.12.3:

    MINDSPEED_PATH=../MindSpeed MINDSPEED_MM_PATH=../MindSpeed-MM PYTHONPATH=../Megatron-LM \
        python -m pytest tests/megatron/test_mindspeed.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.megatron.comparison import FP32, compare, too_large
from tests.megatron.jobs import JobResult, MegatronJobs
from tests.megatron.mindspeed_host import MM_SOURCES, SOURCES
from tests.megatron.tiny import tiny_gpt

SCRIPTS = Path(__file__).with_name("scripts")
FLAGS = ["--use-torch-fsdp2", "--fsdp2-config-path", "x.yaml"]
REAL = SOURCES is not None
OWN = [
    "megatron.core.distributed.DistributedDataParallelConfig.__init__",
    "megatron.core.distributed.TorchFullyShardedDataParallel.__init__",
    "megatron.core.utils.get_data_parallel_group_if_dtensor",
    "megatron.training.arguments._add_distributed_args",
    "megatron.training.checkpointing.generate_state_dict",
    "megatron.training.checkpointing.load_checkpoint",
    "megatron.training.training.get_model",
]
SAID = (
    "MindSpeed's own FSDP2 feature (--use-torch-fsdp2) stands aside: mindspeed_fsdp2 shards the model and keeps its "
    "checkpoints. MindSpeed's other features stay as they are."
)


def facts(jobs: MegatronJobs, order: str, *flags: str) -> dict[str, Any]:
    # The wrapper of another feature around generate_state_dict, which the stand-in always has.
    other = ["--optimizer-selection", "fused_ema_adamw"] if REAL else []
    job = jobs.run([order, *flags, *other], script=SCRIPTS / "beside_mindspeed.py", world_size=1)
    return json.loads(job.ranks[0].stdout.partition("FACTS ")[2])


BESIDE = {
    "installed": True,
    "own": [],
    "class": "FSDP2DataParallel",
    "get_model": ["ours", "megatron"],
    "generate_state_dict": ["ours", "mindspeed", "megatron"],
}
PARSED = ["x.yaml", True, "npu:hccl,cpu:gloo", 2]


def test_mindspeed_first(megatron_jobs: MegatronJobs) -> None:
    seen = facts(megatron_jobs, "mindspeed-first", *FLAGS)
    assert seen["before"] == OWN
    assert seen["beside"] == BESIDE | {"said": [SAID]}
    assert seen["parsed"] == PARSED
    # Nothing else of MindSpeed's records has changed, but the one that lay over one of them.
    assert [name for name in seen["changed"] if name not in OWN] == seen["over"]
    assert seen["not given back"] == []
    assert seen["again"] == BESIDE | {"said": [SAID] * 2}
    assert_later(seen, [SAID] * 2)


def test_plugin_first(megatron_jobs: MegatronJobs) -> None:
    seen = facts(megatron_jobs, "plugin-first", *FLAGS)
    assert seen["beside"] == BESIDE | {"said": [SAID]}
    assert seen["parsed"] == PARSED
    assert_later(seen, [SAID])


def assert_later(seen: dict[str, Any], said: list[str]) -> None:
    assert seen["repatched"] == BESIDE | {"said": said}
    assert seen["parsed again"] == PARSED
    assert seen["uninstalled"] == ["mindspeed", OWN]
    assert seen["repatched without FSDP2"] == [["megatron"], ["mindspeed", "megatron"], []]
    assert seen["back"] == BESIDE | {"said": said}
    assert seen["finders"] == []


@pytest.mark.parametrize("order", ["mindspeed-first", "plugin-first"])
def test_without_the_flag_nothing_is_said(megatron_jobs: MegatronJobs, order: str) -> None:
    seen = facts(megatron_jobs, order)
    assert seen["beside"] == BESIDE | {"said": []}
    assert seen.get("changed", []) == seen.get("not given back", []) == []


@pytest.mark.parametrize("order", ["feature", "feature-beside-own"])
def test_as_a_feature_of_mindspeed(megatron_jobs: MegatronJobs, order: str) -> None:
    seen = facts(megatron_jobs, order, *FLAGS)
    assert seen["beside"] == BESIDE | {"said": [SAID] if order == "feature-beside-own" else []}
    assert seen["parsed"] == PARSED
    assert seen["refused"] == [
        "--fsdp2-config-path: it is read with --use-torch-fsdp2 only. Add --use-torch-fsdp2, or remove it.",
        "--use-torch-fsdp2: MindSpeed has not applied it, so Megatron's own FSDP2 would run and --fsdp2-config-path be "
        "ignored; --optimization-level is 1. Write --optimization-level 2, or import mindspeed_fsdp2.megatron_adaptor in "
        "the script.",
    ]


# Training


def train(jobs: MegatronJobs, topics: str, config: Path | None, order: str, **options: Any) -> JobResult:
    flags = ["--use-torch-fsdp2", "--fsdp2-config-path", str(config)] if config is not None else []
    return jobs.run(
        [*tiny_gpt(topics, train_iters="4"), *flags],
        script=SCRIPTS / "mindspeed_pretrain.py",
        plugin=order == "plugin",
        hook="tests.megatron.specs:prepare",
        env={"BESIDE": order},
        **options,
    )


@pytest.mark.parametrize("order", ["mindspeed", pytest.param("plugin", marks=pytest.mark.slow)])
def test_trains_as_ddp_beside_mindspeed(megatron_jobs: MegatronJobs, topics: str, tmp_path: Path, order: str) -> None:
    config = tmp_path / "auto.yaml"
    config.write_text("sharding_size: auto\n")
    ddp = train(megatron_jobs, topics, None, "nothing")
    run = train(megatron_jobs, topics, config, order)
    assert set(run.ranks[0].local_types.values()) == {"DTensor"}
    assert [(rank.stdout + rank.stderr).count(SAID) for rank in run.ranks] == [1, 0]
    assert not too_large(compare(run, ddp), FP32)


# MindSpeed-MM's contract

UNITS = {"sub_modules_to_wrap": ["decoder.layers.{*}"]}


def mixin(
    jobs: MegatronJobs, topics: str, tmp_path: Path, kind: str, settings: dict[str, Any], *flags: str, **options: Any
) -> JobResult:
    config = tmp_path / "cfg.yaml"
    config.write_text(yaml.safe_dump(UNITS | settings))
    plugin = kind != "plain"
    extra = ["--use-torch-fsdp2", "--fsdp2-config-path", str(config)] if plugin else []
    argv = [*tiny_gpt(topics, train_iters="4", micro_batch_size="2"), *extra, *flags]
    return jobs.run(argv, plugin=plugin, hook="tests.megatron.mixin_specs:prepare", env={"MIXIN": kind}, **options)


@pytest.mark.parametrize(
    ("settings", "flags", "ranks"),
    [
        ({"sharding_size": "auto"}, [], 2),
        ({"sharding_size": "auto"}, ["--init-model-with-meta-device"], 2),
        pytest.param({"sharding_size": 2}, [], 4, marks=pytest.mark.slow),
    ],
    ids=["auto", "meta", "hsdp"],
)
def test_mixin_model_shards_itself(
    megatron_jobs: MegatronJobs, topics: str, tmp_path: Path, settings: dict[str, Any], flags: list[str], ranks: int
) -> None:
    kind = "mixin-meta" if flags else "mixin"
    ddp = mixin(megatron_jobs, topics, tmp_path, "plain", {}, world_size=ranks)
    run = mixin(megatron_jobs, topics, tmp_path, kind, settings, *flags, world_size=ranks)
    for rank in run.ranks:
        assert [rank.stdout.count(f"{name}\n") for name in ("init_weights", "post_meta_init")] == [bool(flags)] * 2
        assert set(rank.local_types.values()) == {"DTensor"}
    assert "FSDP2: GPTModel sharded itself through its own fully_shard().\n" in run.ranks[0].stdout
    assert not too_large(compare(run, ddp), FP32)


def test_mixin_model_with_whole_trainable_parameters_is_refused(
    megatron_jobs: MegatronJobs, topics: str, tmp_path: Path
) -> None:
    settings = {"sharding_size": "auto", "ignored_modules": ["output_layer"]}
    job = mixin(megatron_jobs, topics, tmp_path, "mixin", settings, check=False)
    for rank in job.ranks:
        assert rank.exitcode == 1 and not rank.losses
        assert rank.stderr.endswith(
            "mindspeed_fsdp2: GPTModel.fully_shard(): these trainable parameters stay whole, and nothing averages their "
            "gradients over the data-parallel ranks: output_layer.weight. Freeze them, or take their modules out of "
            "ignored_modules.\n"
        )


@pytest.mark.slow
def test_mixin_model_that_recomputes_attention_dropout_is_refused(
    megatron_jobs: MegatronJobs, topics: str, tmp_path: Path
) -> None:
    settings = {"sharding_size": "auto", "recompute_modules": ["decoder.layers.{*}"]}
    job = mixin(megatron_jobs, topics, tmp_path, "mixin", settings, "--attention-dropout", "0.1", check=False)
    for rank in job.ranks:
        assert rank.exitcode == 1 and not rank.losses
        assert (
            "mindspeed_fsdp2: --attention-dropout 0.1: GPTModel.fully_shard() recomputes attention without Megatron's "
            "random states, so with other masks than in the forward. Set it to 0, or leave recompute_modules out.\n"
        ) in rank.stderr


def test_expert_parallel_files_are_refused(megatron_jobs: MegatronJobs, topics: str, tmp_path: Path) -> None:
    settings = {"sharding_size": "auto", "expert_parallel_size": 2}
    job = mixin(megatron_jobs, topics, tmp_path, "mixin", settings, check=False)
    for rank in job.ranks:
        assert rank.exitcode == 1
        assert "expert_parallel_size: 2 is not supported yet. Write 1 or remove the key.\n" in rank.stderr


if MM_SOURCES is not None:  # without it there is nothing to read

    def test_gpt_args_of_a_yaml_file(megatron_jobs: MegatronJobs, tmp_path: Path) -> None:
        config = tmp_path / "model.yaml"
        args = {"use_torch_fsdp2": True, "fsdp2_config_path": "x.yaml", "optimizer_selection": "fused_ema_adamw"}
        config.write_text(yaml.safe_dump({"gpt_args": args, "MM_TOOL_PATH": "tools.json"}))
        seen = facts(megatron_jobs, "gpt-args", str(config))
        assert seen["parsed"] == PARSED and seen["beside"] == BESIDE | {"said": [SAID]}
