"""A save killed at any moment leaves the last complete checkpoint, and it is found without being asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron.jobs import JobResult, MegatronJobs
from tests.megatron.saving import Runs, differences
from tests.megatron.saving_specs import MOMENTS
from tests.megatron.test_refusals import refused

ALWAYS = ("shards",)
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="module")
def runs(megatron_jobs: MegatronJobs, topics: str, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(megatron_jobs, topics, tmp_path_factory.mktemp("crashes"))


@pytest.fixture(scope="module")
def whole(runs: Runs) -> JobResult:
    return runs.fsdp2()


def moments() -> list[object]:
    return [pytest.param(moment, id=moment, marks=[] if moment in ALWAYS else [pytest.mark.slow]) for moment in MOMENTS]


@pytest.mark.parametrize("moment", moments())
def test_killed_while_it_saves(runs: Runs, whole: JobResult, moment: str, tmp_path: Path) -> None:
    argv = ["--save", str(tmp_path), "--save-interval", "4"]
    ckpt_format = "torch_dist" if moment.startswith("dist-") else "torch_dcp"
    killed = runs.fsdp2(*argv, env={"KILL_AT": moment}, check=False, ckpt_format=ckpt_format)
    assert -9 in [rank.exitcode for rank in killed.ranks]
    last = 8 if moment == "tracker" else 4
    assert (tmp_path / TRACKER).read_text() == str(last)
    left = [path.name for path in tmp_path.iterdir() if path.name not in ("iter_0000004", "iter_0000008", TRACKER)]
    resumed = runs.fsdp2(*argv, "--load", str(tmp_path), ckpt_format=ckpt_format)
    assert differences(whole, resumed, 10 - last) == []
    for name in left:
        if name.startswith(".saving-"):
            assert f"{name} is an unfinished save; it is not loaded." in resumed.ranks[0].stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000004",
        "iter_0000008",
        "iter_0000010",
        TRACKER,
    ]


ASYNC = ("--async-save", "--use-persistent-ckpt-worker")


@pytest.mark.slow
def test_saving_in_the_background(runs: Runs, whole: JobResult, tmp_path: Path) -> None:
    run = runs.fsdp2("--save", str(tmp_path), "--save-interval", "4", *ASYNC)
    assert differences(run, whole, 10) == []
    for rank in run.ranks:
        assert len(rank.extra["threads"]) == 3 and "MainThread" not in rank.extra["threads"]
    assert (tmp_path / TRACKER).read_text() == "10"
    assert differences(runs.fsdp2("--load", str(tmp_path), "--ckpt-step", "4"), whole, 6) == []
    assert differences(runs.fsdp2("--load", str(tmp_path), "--ckpt-step", "8"), whole, 2) == []


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["shards", "renamed"])
def test_killed_while_it_saves_in_the_background(runs: Runs, whole: JobResult, moment: str, tmp_path: Path) -> None:
    argv = ["--save", str(tmp_path), "--save-interval", "4", *ASYNC]
    killed = runs.fsdp2(*argv, env={"KILL_AT": moment}, check=False)
    assert -9 in [rank.exitcode for rank in killed.ranks]
    assert (tmp_path / TRACKER).read_text() == "4"
    assert differences(whole, runs.fsdp2(*argv, "--load", str(tmp_path)), 6) == []
    assert (tmp_path / TRACKER).read_text() == "10"


@pytest.mark.slow
def test_a_background_save_that_fails_ends_all_ranks(runs: Runs, tmp_path: Path) -> None:
    argv = ["--save", str(tmp_path), "--save-interval", "4", *ASYNC]
    text = refused(runs.fsdp2(*argv, saving="small_disk_on_rank_1", check=False))
    assert text.startswith("on rank 1 of 2: ") and "Nothing is published" in text
    assert not (tmp_path / TRACKER).exists()


@pytest.mark.slow
def test_half_a_checkpoint_is_not_picked_by_its_number(runs: Runs, tmp_path: Path) -> None:
    argv = ["--save", str(tmp_path), "--save-interval", "4"]
    runs.fsdp2(*argv, env={"KILL_AT": "shards"}, check=False)
    text = refused(runs.fsdp2("--load", str(tmp_path), "--ckpt-step", "8", check=False))
    assert text.startswith(f"{tmp_path}/iter_0000008: ")
    assert text.endswith("Complete are iter_0000004: write --ckpt-step 4 for the last of them.")


@pytest.mark.slow
def test_replacing_a_checkpoint_killed_between_two_renames(runs: Runs, whole: JobResult, tmp_path: Path) -> None:
    argv = ["--save", str(tmp_path), "--save-interval", "4"]
    runs.fsdp2(*argv)
    # Back to step 4, and on to 8 once more: the checkpoint that the tracker names is replaced.
    again = [*argv, "--load", str(tmp_path), "--ckpt-step", "4"]
    killed = runs.fsdp2(*again, saving="kill_between_renames", check=False)
    assert -9 in [rank.exitcode for rank in killed.ranks]
    assert not (tmp_path / "iter_0000008").exists()
    (tmp_path / TRACKER).write_text("8")
    resumed = runs.fsdp2("--load", str(tmp_path))
    assert differences(whole, resumed, 2) == []
