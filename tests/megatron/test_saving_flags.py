"""Flags about checkpoints mean under FSDP2 what they mean for DDP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron.jobs import JobResult, MegatronJobs
from tests.megatron.saving import Runs, unequal

MODEL_FLAGS = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--max-position-embeddings")


@pytest.fixture(scope="module")
def runs(megatron_jobs: MegatronJobs, topics: str, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(megatron_jobs, topics, tmp_path_factory.mktemp("flags"))


def five_steps(folder: str) -> list[str]:
    return ["--save", folder, "--save-interval", "5", "--exit-interval", "5"]


@pytest.fixture(scope="module")
def saved(runs: Runs) -> tuple[str, JobResult]:
    """A checkpoint of FSDP2 after five steps, and the run that saved it."""
    folder = str(runs.folder / "saved")
    return folder, runs.fsdp2(*five_steps(folder))


@pytest.fixture(scope="module")
def legacy(runs: Runs) -> str:
    """The same of DDP in the format torch."""
    folder = str(runs.folder / "legacy")
    runs.ddp(*five_steps(folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--no-load-optim"], ["--finetune"]], ids=lambda flags: flags[0])
def test_weights_alone_as_ddp_loads_them(
    runs: Runs, saved: tuple[str, JobResult], legacy: str, flags: Sequence[str]
) -> None:
    ddp = runs.ddp("--load", legacy, *flags)
    assert len(ddp.losses) == (10 if flags == ["--finetune"] else 5)
    for folder in (saved[0], legacy):
        run = runs.fsdp2("--load", folder, *flags)
        assert run.losses[0] == pytest.approx(ddp.losses[0], rel=1e-6)
        assert run.losses == pytest.approx(ddp.losses, rel=1e-5)
        assert not [name for name in run.ranks[0].extra["optimizer_start"] if "exp_avg" in name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ckpt_format", "sharding_size", "specs"),
    [
        ("torch_dcp", "auto", ""),
        ("torch_dcp", 1, ""),
        ("torch_dist", "auto", ""),
        ("torch_dcp", "auto", "own_fully_shard"),
    ],
)
def test_pretrained_weights_of_ddp(
    runs: Runs, legacy: str, ckpt_format: str, sharding_size: str | int, specs: str
) -> None:
    ddp = runs.ddp("--pretrained-checkpoint", legacy)
    options: dict[str, Any] = {"settings": {"sharding_size": sharding_size}, "env": {"SPECS": specs}}
    run = runs.fsdp2("--pretrained-checkpoint", legacy, ckpt_format=ckpt_format, **options)
    assert len(run.losses) == len(ddp.losses) == 10
    assert run.losses == pytest.approx(ddp.losses, rel=1e-5)
    assert run.losses[0] == pytest.approx(ddp.losses[0], rel=1e-6)


@pytest.mark.slow
def test_weights_of_megatrons_own_fsdp2(runs: Runs, tmp_path: Path) -> None:
    stock = runs.stock(*five_steps(str(tmp_path)))
    run = runs.fsdp2("--load", str(tmp_path), "--finetune", "--exit-interval", "1", ranks=3)
    assert unequal("params", run.ranks[0].extra["start"], stock.ranks[0].params) == []


@pytest.mark.slow
def test_what_was_not_saved_is_not_loaded(runs: Runs) -> None:
    folder = str(runs.folder / "less")
    run = runs.fsdp2(*five_steps(folder), "--no-save-optim", "--no-save-rng")
    more = runs.fsdp2("--load", folder, "--no-load-optim", "--no-load-rng")
    assert len(more.losses) == 5
    assert unequal("params", more.ranks[0].extra["start"], run.ranks[0].params) == []


@pytest.mark.slow
def test_random_states_only_where_asked_for(runs: Runs) -> None:
    folder = str(runs.folder / "random")
    flags = {"hidden_dropout": "0.1"}
    runs.fsdp2(*five_steps(folder), flags=flags)
    exact = runs.fsdp2("--load", folder, flags=flags)
    other = runs.fsdp2("--load", folder, "--no-load-rng", flags=flags)
    assert len(other.losses) == 5
    assert exact.losses[0] != other.losses[0]


@pytest.mark.slow
def test_arguments_of_the_checkpoint(runs: Runs, saved: tuple[str, JobResult]) -> None:
    whole = runs.fsdp2("--load", saved[0])
    run = runs.fsdp2("--load", saved[0], "--use-checkpoint-args", drop=MODEL_FLAGS)
    assert run.losses == whole.losses
    assert "Setting num_layers to 2 from checkpoint" in run.ranks[0].stdout


@pytest.mark.slow
def test_a_missing_checkpoint(runs: Runs) -> None:
    nothing = str(runs.folder / "nothing")
    fresh = runs.fsdp2("--load", nothing, flags={"train_iters": "2"})
    assert len(fresh.losses) == 2
    ended = runs.fsdp2("--load", nothing, "--exit-on-missing-checkpoint", check=False)
    assert [rank.exitcode for rank in ended.ranks] == [0, 0]
    assert ended.losses == []


@pytest.mark.slow
def test_what_fits_on_request(runs: Runs, saved: tuple[str, JobResult]) -> None:
    argv = ["--load", saved[0], "--finetune", "--dist-ckpt-strictness", "log_all", "--exit-interval", "1"]
    run = runs.fsdp2(*argv, flags={"num_layers": "3", "ffn_hidden_size": "96"})
    start, values = run.ranks[0].extra["start"], saved[1].ranks[0].params
    fitting = {name for name in values if ".mlp." not in name}
    assert unequal("params", {name: start[name] for name in fitting}, {name: values[name] for name in fitting}) == []
    assert "missing in the checkpoint: decoder.layers.2.input_layernorm.weight, " in run.ranks[0].stdout
    assert "other shape: decoder.layers.0.mlp.linear_fc1.weight is (192, 64) here and " in run.ranks[0].stdout


@pytest.mark.slow
@pytest.mark.parametrize("background", [[], ["--async-save", "--use-persistent-ckpt-worker"]], ids=["sync", "async"])
def test_retention(runs: Runs, tmp_path: Path, background: list[str]) -> None:
    argv = ["--save", str(tmp_path), "--save-interval", "2", "--save-retain-interval", "4", *background]
    runs.fsdp2(*argv)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["iter_0000004", "iter_0000008", "iter_0000010", "latest_checkpointed_iteration.txt"]
    assert len(runs.fsdp2("--load", str(tmp_path), "--ckpt-step", "8").losses) == 2


@pytest.mark.slow
def test_another_schedule_on_request(runs: Runs, saved: tuple[str, JobResult]) -> None:
    run = runs.fsdp2("--load", saved[0], "--override-opt_param-scheduler", flags={"lr": "3e-3"})
    start = run.ranks[0].extra["optimizer_start"]
    assert start["0.0.max_lr"] == 3e-3
    assert float(start["0.0.step"]) == 5


def test_downcast(runs: Runs, saved: tuple[str, JobResult]) -> None:
    values = saved[1].ranks[0].params
    resumed = runs.fsdp2("--load", saved[0], "--downcast-to-bf16", "--exit-interval", "6")
    assert unequal("params", resumed.ranks[0].extra["start"], values) == []
    assert (
        "--downcast-to-bf16: nothing is rounded, because the optimizer state was loaded too" in resumed.ranks[0].stdout
    )
    tuned = runs.fsdp2("--load", saved[0], "--downcast-to-bf16", "--finetune", "--exit-interval", "1")
    rounded = {name: value.bfloat16().float() for name, value in values.items()}
    assert unequal("params", tuned.ranks[0].extra["start"], rounded) == []
    assert not all(torch.equal(values[name], rounded[name]) for name in values)


@pytest.mark.slow
@pytest.mark.parametrize("flag", [{}, {"bf16": None}], ids=["to_bf16", "from_bf16"])
def test_bf16_may_change_with_the_weights_alone(runs: Runs, flag: dict[str, str | None], tmp_path: Path) -> None:
    first = runs.fsdp2(*five_steps(str(tmp_path)), flags=flag)
    other: dict[str, str | None] = {} if flag else {"bf16": None}
    run = runs.fsdp2("--load", str(tmp_path), "--no-load-optim", "--exit-interval", "6", flags=other)
    assert unequal("params", run.ranks[0].extra["start"], first.ranks[0].params) == []
