"""Runs that are resumed from torch_dist equal runs that were never stopped, on the same ranks and on others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.megatron.jobs import JobResult, MegatronJobs
from tests.megatron.matrix import MOE, SAMPLE, SAMPLE_FP32, TWO_TOWER, UNTIE
from tests.megatron.saving import differences, unequal
from tests.megatron.saving_dist import AUTO, Flags, Runs, Setup

DROPOUT: Flags = {"attention_dropout": "0.1", "hidden_dropout": "0.1"}
BF16: Flags = {"bf16": None}
SGD: Flags = {"optimizer": "sgd", "lr": "0.1"}
HSDP = {"sharding_size": 2}
UNITS = ["decoder.layers.{*}", "output_layer"]
WHOLE = {**AUTO, "sub_modules_to_wrap": UNITS, "ignored_modules": ["embedding", "decoder.layers.0.mlp"]}
DDP = Setup(settings=None)


@pytest.fixture(scope="module")
def runs(megatron_jobs: MegatronJobs, topics: str, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(megatron_jobs, topics, tmp_path_factory.mktemp("saving_dist"))


def table(core: dict[str, Any], slow: dict[str, Any]) -> list[Any]:
    return [pytest.param(name, core[name], id=name) for name in core] + [
        pytest.param(name, slow[name], id=name, marks=pytest.mark.slow) for name in slow
    ]


# --- the same ranks --------------------------------------------------------------------------------------------------

CORE = {
    "adamw": Setup(flags=DROPOUT),
    "bf16-step-in-group": Setup(flags={**DROPOUT, **BF16}, changes="step_in_group"),
    "late-parameters": Setup(flags=DROPOUT, changes="late_and_never"),
}
SLOW = {
    "step-in-group": Setup(flags=DROPOUT, changes="step_in_group"),
    "bf16": Setup(flags={**DROPOUT, **BF16}),
    "bf16-late-parameters": Setup(flags={**DROPOUT, **BF16}, changes="late_and_never"),
    "sgd": Setup(flags={**DROPOUT, **SGD}),
    "sgd-without-momentum": Setup(flags={**DROPOUT, **SGD, "sgd_momentum": "0"}),
    "sgd-bf16": Setup(flags={**DROPOUT, **SGD, **BF16}),
    "moe": Setup(flags={**DROPOUT, **MOE}),
    "moe-bf16-bias": Setup(
        flags={**MOE, **BF16, "moe_router_enable_expert_bias": None, "moe_router_score_function": "sigmoid"}
    ),
    "hsdp": Setup(4, HSDP, DROPOUT),
    "replicas": Setup(2, {"sharding_size": 1}, DROPOUT),
    "tensor-parallel": Setup(4, flags=DROPOUT, tensor=2),
    "tensor-parallel-sgd": Setup(4, flags={**DROPOUT, **SGD}, tensor=2),
    "uneven": Setup(3, flags=DROPOUT),
    "empty-shards": Setup(4, flags={**DROPOUT, "ffn_hidden_size": "3"}),
    "empty-shards-bf16": Setup(4, flags={**DROPOUT, **BF16, "ffn_hidden_size": "3"}),
    "moe-empty-shards": Setup(3, flags={**DROPOUT, **MOE, "num_experts": "2"}),
    "whole": Setup(settings=WHOLE, flags=DROPOUT),
    "whole-bf16": Setup(settings=WHOLE, flags={**DROPOUT, **BF16}),
    "frozen": Setup(flags=DROPOUT, changes="frozen_norm"),
    "tied": Setup(flags=DROPOUT, drop=UNTIE),
    "one-rank": Setup(1, flags=DROPOUT),
    "offload": Setup(settings={**AUTO, "offload_to_cpu": True}, flags=DROPOUT),
    "layernorm-bias": Setup(
        flags={**DROPOUT, "normalization": "LayerNorm"}, drop=("--swiglu", "--disable-bias-linear")
    ),
    "parallel-load": Setup(4, HSDP, {**DROPOUT, "ckpt_fully_parallel_load": None}, changes="parallel_load"),
    "first-rank-saves": Setup(4, HSDP, {**DROPOUT, "no_ckpt_fully_parallel_save": None}),
    "zero2-after-evaluation": Setup(
        settings={**AUTO, "reshard_after_forward": False}, flags={**DROPOUT, "eval_interval": "5", "eval_iters": "1"}
    ),
    "recompute": Setup(settings={**AUTO, "recompute_modules": ["decoder.layers.{*}"]}, flags=DROPOUT),
    "own-fully-shard": Setup(flags=DROPOUT, env={"SPECS": "own_fully_shard"}),
    "lora": Setup(flags=DROPOUT, env={"SPECS": "lora"}),
    "two-towers": Setup(settings=SAMPLE_FP32, script=TWO_TOWER),
    "two-towers-bf16": Setup(settings=SAMPLE, flags=BF16, script=TWO_TOWER),
    "two-towers-frozen": Setup(settings=SAMPLE_FP32, script=TWO_TOWER, env={"FREEZE": "1"}),
}


@pytest.mark.parametrize(("name", "setup"), table(CORE, SLOW))
def test_resuming_is_never_having_stopped(runs: Runs, name: str, setup: Setup) -> None:
    folder = str(runs.folder / name)
    whole = runs.run(setup, "--save", folder, "--save-interval", "5")
    resumed = runs.run(setup, "--load", folder, "--ckpt-step", "5")
    assert len(whole.losses) == 10 and len(resumed.losses) == 5
    assert whole.losses[9] < whole.losses[0]
    assert differences(whole, resumed, 5) == []
    momentum = setup.flags.get("sgd_momentum") != "0"
    for rank in resumed.ranks:
        assert any(isinstance(value, torch.Tensor) for value in rank.extra["optimizer_start"].values()) == momentum
    if "late_and_never" in setup.changes:
        end = resumed.ranks[0].extra["optimizer_end"]
        assert {float(value) for key, value in end.items() if key.endswith(".step")} == {7.0, 10.0}


# --- other ranks, and plain DDP --------------------------------------------------------------------------------------


def started_from(run: JobResult, saved: JobResult, optimizer: bool = True) -> list[str]:
    """Return what ``run`` does not start from as ``saved`` had ended, each rank compared with its counterpart or rank 0."""
    found = []
    for rank in run.ranks:
        other = saved.ranks[rank.rank] if len(saved.ranks) == len(run.ranks) else saved.ranks[0]
        found += unequal(f"rank {rank.rank}: params", rank.extra["start"], other.params)
        if optimizer:
            state = {key: value for key, value in other.extra["optimizer_end"].items() if _tensor(value)}
            assert len(state) > 2 * len(other.params)
            mine = {key: value for key, value in rank.extra["optimizer_start"].items() if _tensor(value)}
            found += unequal(f"rank {rank.rank}: optimizer", mine, state)
    return found


def _tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


# (saved by, loaded by); every parameter and every moment is compared bit for bit.
MOVES_CORE = {"2-3": (Setup(), Setup(3)), "fsdp2-ddp": (Setup(), DDP), "ddp-fsdp2": (DDP, Setup())}
MOE_FEW: Flags = {**MOE, "num_experts": "2"}
MOVES_SLOW = {
    "2-4": (Setup(), Setup(4)),
    "4-1": (Setup(4), Setup(1)),
    "1-3": (Setup(1), Setup(3)),
    "3-2": (Setup(3), Setup()),
    "2-hsdp": (Setup(), Setup(4, HSDP)),
    "hsdp-2": (Setup(4, HSDP), Setup()),
    "hsdp-3": (Setup(4, HSDP), Setup(3)),
    "replicas-3": (Setup(2, {"sharding_size": 1}), Setup(3)),
    "whole-3": (Setup(settings=WHOLE), Setup(3)),
    "2-whole": (Setup(), Setup(settings=WHOLE)),
    "3-ddp": (Setup(3), DDP),
    "ddp-3": (DDP, Setup(3)),
    "hsdp-ddp": (Setup(4, HSDP), DDP),
    "ddp-hsdp": (DDP, Setup(4, HSDP)),
}
KINDS: dict[str, Flags] = {"moe": MOE_FEW, "sgd": SGD, "ffn-3": {"ffn_hidden_size": "3"}, "no-swiglu": {}}
for _kind, _flags in KINDS.items():
    _drop = ("--swiglu",) if _kind == "no-swiglu" else ()
    for _name in ("2-3", "ddp-3") if _kind == "sgd" else ("2-3", "fsdp2-ddp", "ddp-3"):  # DDP cannot load SGD's state
        _saver, _loader = {**MOVES_CORE, **MOVES_SLOW}[_name]
        MOVES_SLOW[f"{_kind}-{_name}"] = (
            replace(_saver, flags=_flags, drop=_drop),
            replace(_loader, flags=_flags, drop=_drop),
        )


@pytest.mark.parametrize(("name", "move"), table(MOVES_CORE, MOVES_SLOW))
def test_other_ranks_start_from_the_same_values(runs: Runs, name: str, move: tuple[Setup, Setup]) -> None:
    saver, loader = move
    saved, whole = runs.source(saver)
    loaded = runs.run(loader, "--load", str(saved.folder), steps=5)
    assert len(loaded.losses) == 2
    assert started_from(loaded, saved, "sgd" not in name) == []
    # Training goes on as it would have: only the order of sums differs.
    assert loaded.losses == pytest.approx(whole.losses[-2:], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("drop", [(), ("--swiglu",)], ids=["swiglu", "no-swiglu"])
def test_tensor_parallel_and_back(runs: Runs, drop: tuple[str, ...]) -> None:
    """The same checkpoint is read by DDP, whose tensor-parallel ranks must hold what those of FSDP2 hold."""
    one, two = Setup(drop=drop), Setup(4, tensor=2, drop=drop)
    for saver, loader in ((one, two), (two, one), (two, two)):
        saved, _ = runs.source(saver)
        folder = str(saved.folder)
        ours = runs.run(loader, "--load", folder, steps=4)
        reference = runs.run(replace(loader, settings=None), "--load", folder, steps=4)
        for mine, theirs in zip(ours.ranks, reference.ranks, strict=True):
            for what in ("start", "optimizer_start"):
                assert unequal(what, mine.extra[what], theirs.extra[what]) == []
        if saver == loader:
            assert started_from(ours, saved) == []
        assert ours.losses == pytest.approx(reference.losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_bf16_and_ddp(runs: Runs, ranks: int) -> None:
    """fp32 main weights and moments go both ways; DDP's own weights are their bf16 values."""
    ours, ddp = Setup(ranks, flags=BF16), replace(DDP, flags=BF16)
    for saver, loader in ((ours, ddp), (ddp, ours)):
        saved, whole = runs.source(saver)
        loaded = runs.run(loader, "--load", str(saved.folder), steps=5)
        start, end = loaded.ranks[0].extra, saved.ranks[0]
        assert unequal("optimizer", start["optimizer_start"], end.extra["optimizer_end"]) == []
        rounded = [{key: value.bfloat16() for key, value in params.items()} for params in (start["start"], end.params)]
        assert unequal("params", *rounded) == []
        # Main weights that had been rounded would move the next losses by 1e-3.
        assert loaded.losses == pytest.approx(whole.losses[-2:], rel=2e-5)


# --- flags -----------------------------------------------------------------------------------------------------------


FLAGS = {
    "no-load-optim": ["--load", "SAVED", "--no-load-optim"],
    "finetune": ["--load", "SAVED", "--finetune"],
    "pretrained": ["--pretrained-checkpoint", "SAVED"],
    "step": ["--load", "SAVED", "--ckpt-step", "2"],
}


@pytest.mark.parametrize("name", ["no-load-optim", *(pytest.param(n, marks=pytest.mark.slow) for n in list(FLAGS)[1:])])
@pytest.mark.parametrize("flags", [{}, pytest.param(BF16, marks=pytest.mark.slow)], ids=["fp32", "bf16"])
def test_flags_mean_what_they_mean_for_ddp(runs: Runs, name: str, flags: Flags) -> None:
    """A checkpoint of a DDP run is loaded by DDP and by FSDP2 with the same flags."""
    folder = runs.folder / f"ddp-flags-{len(flags)}"
    if not folder.exists():
        runs.run(replace(DDP, flags=flags), "--save", str(folder), "--save-interval", "2", steps=4)
    extra = [str(folder) if part == "SAVED" else part for part in FLAGS[name]]
    reference = runs.run(replace(DDP, flags=flags), *extra, steps=6)
    ours = runs.run(Setup(flags=flags), *extra, steps=6)
    assert len(ours.losses) == len(reference.losses) == {"no-load-optim": 2, "step": 4}.get(name, 6)
    mine, theirs = ours.ranks[0].extra, reference.ranks[0].extra
    if name != "step" or not flags:  # DDP shows the bf16 values of the main weights that were loaded
        assert unequal("start", mine["start"], {key: v.float() for key, v in theirs["start"].items()}) == []
    assert unequal("optimizer", mine["optimizer_start"], theirs["optimizer_start"]) == []
    assert ours.losses[0] == pytest.approx(reference.losses[0], rel=1e-6)
    assert ours.losses == pytest.approx(reference.losses, rel=2e-4 if flags else 1e-5)


@pytest.mark.slow
def test_weights_alone(runs: Runs) -> None:
    saved, _ = runs.source(replace(Setup(), flags={"no_save_optim": None}))
    folder = str(saved.folder)
    for setup in (Setup(3), DDP):
        loaded = runs.run(setup, "--load", folder, "--no-load-optim", steps=4)
        assert started_from(loaded, saved, optimizer=False) == []
    failed = runs.run(Setup(), "--load", folder, check=False)
    for rank in failed.ranks:
        assert rank.stderr.rstrip().endswith(
            f"mindspeed_fsdp2: checkpoint {folder}/iter_0000003: it holds no optimizer state (--no-save-optim). Add "
            "--no-load-optim or --finetune."
        )
