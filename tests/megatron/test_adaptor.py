"""The plugin as a whole: coming and going, scripts that do not know it, models that shard themselves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron.comparison import FP32, compare, too_large
from tests.megatron.jobs import ROOT, JobResult, MegatronJobs
from tests.megatron.tiny import tiny_gpt

SCRIPTS = Path(__file__).with_name("scripts")
PLAIN = SCRIPTS / "plain_pretrain.py"
HOOK = "tests.megatron.specs:prepare"
LOSS = re.compile(r"lm loss: (\S+)")


def fsdp2(config: Path) -> list[str]:
    return ["--use-torch-fsdp2", "--fsdp2-config-path", str(config)]


def without_data(argv: list[str]) -> list[str]:
    """Leave out the data set, which the plain script makes itself."""
    return argv[: argv.index("--train-data-path")]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "auto.yaml"
    path.write_text("sharding_size: auto\n")
    return path


def test_uninstall_gives_every_name_back(megatron_jobs: MegatronJobs, topics: str, config: Path) -> None:
    argv = [*tiny_gpt(topics, train_iters="2"), *fsdp2(config)]
    script = SCRIPTS / "install_and_uninstall.py"
    job = megatron_jobs.run(argv, plugin=True, script=script, world_size=1)
    assert set(job.ranks[0].local_types.values()) == {"DTensor"}
    said = re.findall(r"^(installed|a second time|CPU mode|uninstalled): (.*)$", job.ranks[0].stdout, re.MULTILINE)
    assert dict(said) == {
        "installed": "True True",
        "a second time": "[]",
        "CPU mode": "True True",
        # torch.distributed has wrapped the hook in the meantime; taking its wrapper away would not be ours to do.
        "uninstalled": "True ['sys:excepthook'] True torch.distributed.distributed_c10d",
    }


def test_script_that_does_not_know_the_plugin(megatron_jobs: MegatronJobs, config: Path) -> None:
    argv = without_data(tiny_gpt("", train_iters="4"))
    ddp = megatron_jobs.run(argv, script=PLAIN, hook=HOOK)
    run = megatron_jobs.run([*argv, *fsdp2(config)], script=PLAIN, plugin=True, hook=HOOK)
    assert set(run.ranks[0].local_types.values()) == {"DTensor"}
    assert not too_large(compare(run, ddp), FP32)


@pytest.mark.slow
def test_script_that_does_not_know_the_plugin_under_torchrun(
    megatron_jobs: MegatronJobs, config: Path, tmp_path: Path
) -> None:
    argv = [*without_data(tiny_gpt("", train_iters="4")), *fsdp2(config)]
    launched = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
        + ["mindspeed_fsdp2.run", str(PLAIN), *argv],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert launched.returncode == 0, launched.stderr[-4000:]
    assert "FSDP2 plan" in launched.stdout
    forked = megatron_jobs.run(argv, script=PLAIN, plugin=True)
    assert LOSS.findall(launched.stdout) == LOSS.findall(forked.ranks[1].stdout)
    assert len(LOSS.findall(launched.stdout)) == 4


def own(jobs: MegatronJobs, topics: str, config: Path, specs: str) -> tuple[JobResult, JobResult]:
    argv = tiny_gpt(topics, train_iters="4")
    run = jobs.run([*argv, *fsdp2(config)], plugin=True, hook=HOOK, env={"SPECS": specs})
    return jobs.run(argv, hook=HOOK), run


def test_model_that_shards_itself(megatron_jobs: MegatronJobs, topics: str, config: Path) -> None:
    ddp, run = own(megatron_jobs, topics, config, "own_fully_shard")
    for rank in run.ranks:
        assert rank.stdout.count("own fully_shard: 2 ranks, auto.yaml\n") == 1
        assert "FSDP2 plan" not in rank.stdout
        assert set(rank.local_types.values()) == {"DTensor"}
    assert "FSDP2: GPTModel sharded itself through its own fully_shard().\n" in run.ranks[0].stdout
    assert not too_large(compare(run, ddp), FP32)


def test_model_that_declines_is_sharded_by_the_plan(megatron_jobs: MegatronJobs, topics: str, config: Path) -> None:
    ddp, run = own(megatron_jobs, topics, config, "declined_fully_shard")
    assert [rank.stdout.count("own fully_shard: 2 ranks, auto.yaml\n") for rank in run.ranks] == [1, 1]
    assert "FSDP2 plan" in run.ranks[0].stdout
    assert "sharded itself" not in run.ranks[0].stdout
    assert not too_large(compare(run, ddp), FP32)


def test_without_fsdp_flags_the_plugin_leaves_ddp_alone(megatron_jobs: MegatronJobs, topics: str) -> None:
    argv = tiny_gpt(topics, train_iters="4")
    with_plugin = megatron_jobs.run(argv, plugin=True, hook=HOOK)
    without = megatron_jobs.run(argv, hook=HOOK)
    assert set(with_plugin.ranks[0].local_types.values()) == {"Parameter"}
    assert compare(with_plugin, without) == (0, 0, 0, 0, 0)
