"""What cannot be saved in torch_dist is refused before training, what cannot be loaded before anything is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.megatron.jobs import MegatronJobs, RankResult
from tests.megatron.saving import unequal
from tests.megatron.saving_dist import Flags, Runs, Setup


@pytest.fixture(scope="module")
def runs(megatron_jobs: MegatronJobs, topics: str, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(megatron_jobs, topics, tmp_path_factory.mktemp("saving_dist_refusals"))


def said(rank: RankResult) -> str:
    """Return what a rank wrote, without the rank that PyTorch puts before each line."""
    return rank.stderr.replace(f"[rank{rank.rank}]: ", "").rstrip()


METHOD = "GPTModel.sharded_state_dict()"
NORM = "decoder.final_layernorm.weight"
AT_START = {
    "no_method": f"{METHOD} does not exist, and --ckpt-format torch_dist saves what it returns. Derive the model from "
    "MegatronModule, or write --ckpt-format torch_dcp.",
    "other_name": f"{METHOD}: it leaves out {NORM}, which state_dict() has.\n"
    f"{METHOD}: it returns norm, which state_dict() has not.",
    "one_key": f"{METHOD}: two different tensors would be saved as embedding.word_embeddings.weight: "
    "embedding.word_embeddings.weight and output_layer.weight. Rename one of them. Write --ckpt-format torch_dcp.",
    "transposed": "output_layer.weight: its sharded_state_dict() describes a tensor that is no set of rows of the "
    "parameter. Write --ckpt-format torch_dcp.",
    "a_copy": f"{METHOD}: what it returns for {NORM} is not that parameter itself (keep_vars=True).",
}


@pytest.mark.parametrize("change", [*AT_START, pytest.param("no_copies", marks=pytest.mark.slow)])
def test_refused_before_training(runs: Runs, change: str) -> None:
    setup = replace(Setup(), changes=change)
    expected = AT_START.get(change)
    if change == "no_copies":
        setup = replace(setup, ranks=4, tensor=2)
        expected = (
            f"{METHOD}: several ranks would write the same elements of {NORM} ({NORM}). Write --ckpt-format torch_dcp."
        )
    job = runs.run(setup, "--save", str(runs.folder / change), "--save-interval", "5", check=False)
    for rank in job.ranks:
        assert rank.exitcode == 1 and not rank.losses
        assert said(rank).endswith(f"mindspeed_fsdp2: {expected}")


def test_what_is_never_saved_is_not_checked(runs: Runs) -> None:
    assert len(runs.run(replace(Setup(), changes="other_name"), steps=1).losses) == 1


LAYERS = "decoder.layers"
QK: Flags = {"qk_layernorm": None}
BF16: Flags = {"bf16": None}
NORMS = f"{LAYERS}.self_attention.k_layernorm.weight, {LAYERS}.self_attention.q_layernorm.weight"
PRECISION = "Resume with the same precision, or add --no-load-optim or --finetune."
PARTIAL = "Use the flags it was saved with, or add --dist-ckpt-strictness log_all to load what fits."
STATES = (
    "decoder.final_layernorm.weight",
    f"{LAYERS}.mlp.linear_fc1.layer_norm_weight",
    f"{LAYERS}.mlp.linear_fc1.weight",
    f"{LAYERS}.mlp.linear_fc2.weight",
    f"{LAYERS}.self_attention.linear_proj.weight",
    f"{LAYERS}.self_attention.linear_qkv.layer_norm_weight",
)


def _states(kind: str) -> str:
    return ", ".join(f"optimizer.state.{kind}.{name}" for name in STATES)


# name -> flags of the run that saved and of the one that loads, what it says
AT_LOAD: dict[str, tuple[Flags, Flags, list[str]]] = {
    "bf16": ({}, BF16, [f"this run has --bf16, the checkpoint has not. {PRECISION}"]),
    "fp32": (BF16, {}, [f"the checkpoint has --bf16, this run has not. {PRECISION}"]),
    "missing": ({}, QK, [f"the checkpoint lacks {NORMS}, which this run has. {PARTIAL}"]),
    "unexpected": (QK, {}, [f"this run lacks {NORMS}, which the checkpoint has. {PARTIAL}"]),
    "shape": (
        {},
        {"ffn_hidden_size": "100"},
        [
            f"{LAYERS}.mlp.linear_fc1.weight is (2, 256, 64) in the checkpoint and (2, 200, 64) in this run, "
            f"{LAYERS}.mlp.linear_fc2.weight is (2, 64, 128) in the checkpoint and (2, 64, 100) in this run. Use the "
            "flags it was saved with."
        ],
    ),
    "optimizer": (
        {},
        {"optimizer": "sgd"},
        [
            f"the checkpoint lacks {_states('momentum_buffer')} and 3 more, which this run has. Use the same "
            "optimizer, or add --no-load-optim or --finetune.",
            f"this run lacks {_states('exp_avg')} and 12 more, which the checkpoint has. Use the same optimizer, or "
            "add --no-load-optim or --finetune.",
        ],
    ),
}
SLOW = ("fp32", "unexpected", "optimizer")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in AT_LOAD])
def test_refused_before_anything_is_read(runs: Runs, name: str) -> None:
    saved_with, flags, expected = AT_LOAD[name]
    folder = runs.folder / "-".join(["saved", *saved_with])
    if not folder.exists():
        runs.run(Setup(flags=saved_with), "--save", str(folder), "--save-interval", "1", steps=1)
    job = runs.run(Setup(flags=flags), "--load", str(folder), check=False)
    lines = "\n".join(f"checkpoint {folder}/iter_0000001: {text}" for text in expected)
    for rank in job.ranks:
        assert rank.exitcode == 1 and not rank.losses
        assert said(rank).endswith(f"mindspeed_fsdp2: {lines}")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [[], ["--dist-ckpt-optim-fully-reshardable"]], ids=["buckets", "model-space"])
def test_distributed_optimizer_of_ddp(runs: Runs, layout: list[str]) -> None:
    folder = str(runs.folder / f"distributed{len(layout)}")
    flags = ["--use-distributed-optimizer", *layout, "--save", folder, "--save-interval", "2"]
    saved = runs.run(Setup(settings=None), *flags, steps=2)
    failed = runs.run(Setup(), "--load", folder, check=False)
    for rank in failed.ranks:
        assert said(rank).endswith(
            f"mindspeed_fsdp2: checkpoint {folder}/iter_0000002: its optimizer state is that of "
            "--use-distributed-optimizer, which only such a run can load. Add --no-load-optim or --finetune."
        )
    loaded = runs.run(Setup(3), "--load", folder, "--no-load-optim", steps=3)
    assert unequal("params", loaded.ranks[2].extra["start"], saved.ranks[0].params) == []
    # A released checkpoint is loaded without optimizer state whatever it holds.
    Path(folder, "iter_0000002").rename(Path(folder, "release"))
    Path(folder, "latest_checkpointed_iteration.txt").write_text("release")
    released = runs.run(Setup(), "--load", folder, steps=1)
    assert unequal("params", released.ranks[0].extra["start"], saved.ranks[0].params) == []


@pytest.mark.slow
def test_what_fits_is_loaded_on_request(runs: Runs) -> None:
    """A new part of the model keeps its initial values; everything else, optimizer state too, is loaded."""
    folder = str(runs.folder / "partial")
    saved = runs.run(Setup(), "--save", folder, "--save-interval", "2", steps=2)
    loaded = runs.run(Setup(flags=QK), "--load", folder, "--dist-ckpt-strictness", "log_all", steps=3)
    start = loaded.ranks[0].extra["start"]
    new = {name: value for name, value in start.items() if name not in saved.ranks[0].params}
    assert len(new) == 4 and all(bool((value == 1).all()) for value in new.values())
    assert unequal("params", {n: v for n, v in start.items() if n not in new}, saved.ranks[0].params) == []
    assert (
        f"checkpoint {folder}/iter_0000002: the checkpoint lacks {NORMS}, which this run has; the rest is loaded "
        "(--dist-ckpt-strictness)." in loaded.ranks[0].stdout
    )
