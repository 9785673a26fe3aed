"""What cannot work ends every rank alike: with our message, exit code 1, no traceback, and soon."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.megatron.jobs import EXAMPLE, ROOT, JobResult, MegatronJobs, RankResult
from tests.megatron.matrix import TWO_TOWER
from tests.megatron.tiny import tiny_gpt

HOOK = "tests.megatron.specs:prepare"
SOON = 20.0  # seconds from start-up to the end of all ranks
MISTAKES = """\
sharding_size: 0
sub_modules_to_wrap: [embedding, 3]
reshard_after_forward: maybe
param_dtype: bf17
num_to_forward_prefech: 1
"""


def message(text: str) -> str:
    """Return our message in what a rank printed; torch puts the rank before each line once there is a group."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in text.splitlines()]
    starts = [number for number, line in enumerate(lines) if line.startswith("mindspeed_fsdp2: ")]
    assert len(starts) == 1, text[-3000:]
    return "\n".join(lines[starts[0] :]).removeprefix("mindspeed_fsdp2: ").strip()


def refused(job: JobResult) -> str:
    """Return the message that ended every rank."""
    texts = {_message_of(rank) for rank in job.ranks}
    assert len(texts) == 1, texts
    assert job.seconds < SOON
    return texts.pop()


def _message_of(rank: RankResult) -> str:
    assert rank.exitcode == 1, rank.stderr[-3000:]
    assert "Traceback" not in rank.stderr
    return message(rank.stderr)


def fsdp2(config: str | Path) -> list[str]:
    return ["--use-torch-fsdp2", "--fsdp2-config-path", str(config)]


def run(
    jobs: MegatronJobs, folder: Path, settings: dict[str, Any], argv: Sequence[str], specs: str = "", **options: Any
) -> JobResult:
    """Run a job that is to fail, with ``cfg.yaml`` of ``settings`` in its folder."""
    (folder / "cfg.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    env = {"SPECS": specs, "CUDA_DEVICE_MAX_CONNECTIONS": "8", **options.pop("env", {})}
    argv = [*argv, *fsdp2(folder / "cfg.yaml")]
    return jobs.run(argv, plugin=True, check=False, hook=HOOK, env=env, **options)


def test_five_mistakes_in_one_error(megatron_jobs: MegatronJobs, topics: str, tmp_path: Path) -> None:
    (tmp_path / "cfg.yaml").write_text(MISTAKES)
    argv = [*tiny_gpt(topics), *fsdp2(tmp_path / "cfg.yaml")]
    lines = refused(megatron_jobs.run(argv, plugin=True, check=False)).splitlines()
    assert [line.removeprefix(f"{tmp_path}/").split(": ")[:2] for line in lines] == [
        ["cfg.yaml:1", "sharding_size"],
        ["cfg.yaml:2", "sub_modules_to_wrap[1]"],
        ["cfg.yaml:3", "reshard_after_forward"],
        ["cfg.yaml:4", "param_dtype"],
        ["cfg.yaml:5", "num_to_forward_prefech"],
    ]


def folders(folder: Path, *texts: str | None) -> dict[str, str]:
    """Write one ``cfg.yaml`` per rank, none where the text is None; return the variables that lead ranks there."""
    for rank, text in enumerate(texts):
        (folder / f"rank{rank}").mkdir()
        if text is not None:
            (folder / f"rank{rank}" / "cfg.yaml").write_text(text)
    return {"SPECS": "own_folders", "FOLDERS": str(folder)}


def test_file_missing_on_one_rank(megatron_jobs: MegatronJobs, topics: str, tmp_path: Path) -> None:
    env = folders(tmp_path, "sharding_size: auto\n", None)
    argv = [*tiny_gpt(topics), *fsdp2("cfg.yaml")]
    text = refused(megatron_jobs.run(argv, plugin=True, check=False, hook=HOOK, env=env))
    assert text.startswith("on rank 1 of 2: cfg.yaml: ")
    assert len(text.splitlines()) == 1


def test_another_file_on_one_rank(megatron_jobs: MegatronJobs, topics: str, tmp_path: Path) -> None:
    env = folders(tmp_path, "sharding_size: auto\n", "sharding_size: 2\n")
    argv = [*tiny_gpt(topics), *fsdp2("cfg.yaml")]
    text = refused(megatron_jobs.run(argv, plugin=True, check=False, hook=HOOK, env=env))
    assert re.fullmatch(
        r"--fsdp2-config-path cfg.yaml: the ranks do not agree \(\w+ on rank 0; \w+ on rank 1\). "
        r"Give every rank the same YAML file, model and flags.",
        text,
    )


def test_the_same_settings_in_another_layout_agree(megatron_jobs: MegatronJobs, topics: str, tmp_path: Path) -> None:
    env = folders(tmp_path, "sharding_size: auto\n", "# a comment\nuse_reentrant: true\nsharding_size:   auto\n")
    argv = [*tiny_gpt(topics, train_iters="2"), *fsdp2("cfg.yaml")]
    job = megatron_jobs.run(argv, plugin=True, hook=HOOK, env=env)
    assert len(job.losses) == 2


def test_all_conflicts_before_megatrons_assertions(megatron_jobs: MegatronJobs, topics: str, tmp_path: Path) -> None:
    argv = tiny_gpt(topics, "--use-distributed-optimizer", "--recompute-granularity", "full", "--fp16")
    argv += ["--pipeline-model-parallel-size", "2", "--ckpt-format", "torch"]
    argv.remove("--no-gradient-accumulation-fusion")
    job = run(megatron_jobs, tmp_path, {}, argv, env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert sorted(line.split(": ")[0] for line in refused(job).splitlines()) == [
        "--ckpt-format torch",
        "--fp16",
        "--no-gradient-accumulation-fusion is missing",
        "--pipeline-model-parallel-size 2",
        "--recompute-granularity full",
        "--use-distributed-optimizer",
        "CUDA_DEVICE_MAX_CONNECTIONS=1",
    ]


def test_conflicts_and_mistakes_of_the_file_together(megatron_jobs: MegatronJobs, topics: str, tmp_path: Path) -> None:
    job = run(megatron_jobs, tmp_path, {"sharding_size": 0}, tiny_gpt(topics, "--fp16"))
    first, second = refused(job).splitlines()
    assert first.startswith("--fp16: ")
    assert second.startswith(f"{tmp_path}/cfg.yaml:1: sharding_size: ")


def test_config_without_fsdp2(megatron_jobs: MegatronJobs, topics: str) -> None:
    argv = tiny_gpt(topics, "--fsdp2-config-path", "cfg.yaml")
    job = megatron_jobs.run(argv, plugin=True, check=False, world_size=1)
    expected = "--fsdp2-config-path cfg.yaml: the file is read with --use-torch-fsdp2 only. "
    assert refused(job) == expected + "Add --use-torch-fsdp2, or remove it."


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"sharding_size": "auto", "sub_modules_to_wrap": ["decoder.layer.{*}", "embeding"]},
            ["cfg.yaml:3: sub_modules_to_wrap[0]: ", "cfg.yaml:4: sub_modules_to_wrap[1]: "],
        ),
        (
            {"sharding_size": 3},
            ["cfg.yaml:1: sharding_size: 3 does not divide the 2 data-parallel ranks. Use one of 1, 2, or auto."],
        ),
        ({"sharding_size": "auto", "ignored_modules": ["decoder.layers.{0-7}"]}, ["cfg.yaml:3: ignored_modules[0]: "]),
    ],
)
def test_what_does_not_fit_the_model(
    megatron_jobs: MegatronJobs, topics: str, tmp_path: Path, settings: dict[str, Any], expected: list[str]
) -> None:
    lines = refused(run(megatron_jobs, tmp_path, settings, tiny_gpt(topics))).splitlines()
    assert len(lines) == len(expected)
    assert all(line.startswith(f"{tmp_path}/{start}") for line, start in zip(lines, expected)), lines


def test_models_that_differ_between_ranks(megatron_jobs: MegatronJobs, topics: str, tmp_path: Path) -> None:
    job = run(megatron_jobs, tmp_path, {"sharding_size": "auto"}, tiny_gpt(topics), "frozen_on_rank_1")
    assert refused(job).startswith("FSDP2 plan: the ranks do not agree (")


def test_a_rank_that_skips_a_unit(megatron_jobs: MegatronJobs, topics: str, tmp_path: Path) -> None:
    units = ["text_decoder.decoder.layers.{*}", "image_encoder.layers.{*}"]
    settings = {"sharding_size": "auto", "sub_modules_to_wrap": units}
    job = run(megatron_jobs, tmp_path, settings, tiny_gpt(topics), env={"SKIP": "1"}, script=TWO_TOWER)
    text = refused(job)
    assert re.match(r"the ranks run different units: [\w.]+ on rank [01]; [\w.]+ on rank [01]\. ", text), text
    assert "image_encoder.layers.0 on rank 1" in text and "text_decoder.decoder.layers.0 on rank 0" in text
    assert "optional_modules" in text


def test_reentrant_recompute_behind_a_frozen_embedding(
    megatron_jobs: MegatronJobs, topics: str, tmp_path: Path
) -> None:
    settings = {"sharding_size": "auto", "recompute_modules": ["decoder.layers.{*}"]}
    job = run(megatron_jobs, tmp_path, settings, tiny_gpt(topics), "frozen_embedding")
    assert refused(job) == (
        "recompute_modules: 'decoder.layers.0' is recomputed reentrantly but none of its inputs requires grad, so its "
        "parameters would silently get no gradient. Set use_reentrant: false, or do not recompute it."
    )


def test_a_nan_gradient_ends_all_ranks(megatron_jobs: MegatronJobs, topics: str, tmp_path: Path) -> None:
    job = run(megatron_jobs, tmp_path, {"sharding_size": "auto"}, tiny_gpt(topics), "nan_gradient_on_rank_1")
    assert [rank.exitcode for rank in job.ranks] == [1, 1]
    for rank in job.ranks:
        assert "RuntimeError: a gradient is NaN or infinite after the backward." in rank.stderr
    ddp = megatron_jobs.run(tiny_gpt(topics), check=False, hook=HOOK, env={"SPECS": "nan_gradient_on_rank_1"})
    assert 1 in [rank.exitcode for rank in ddp.ranks]  # what DDP does, too
    argv = tiny_gpt(topics, "--no-check-for-nan-in-loss-and-grad", train_iters="2")
    unchecked = run(megatron_jobs, tmp_path, {"sharding_size": "auto"}, argv, "nan_gradient_on_rank_1")
    assert [rank.exitcode for rank in unchecked.ranks] == [0, 0]


@pytest.mark.slow
def test_launcher_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "cfg.yaml").write_text(MISTAKES)
    plain = Path(__file__).with_name("scripts") / "plain_pretrain.py"
    argv = tiny_gpt("")
    launched = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        + ["--log-dir", str(tmp_path / "log"), "--redirects", "3", "-m", "mindspeed_fsdp2.run", str(plain)]
        + [*argv[: argv.index("--train-data-path")], "--fp16", *fsdp2("cfg.yaml")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert launched.returncode == 1
    logs = sorted(tmp_path.glob("log/**/stderr.log"))
    assert len(logs) == 2
    for log in logs:
        text = log.read_text()
        assert "Traceback" not in text
        assert len(message(text).splitlines()) == 6


def test_one_line_import_in_a_process_of_its_own(tmp_path: Path) -> None:
    argv = tiny_gpt("nowhere", "--fp16")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *argv, *fsdp2("missing.yaml")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    first, second = message(done.stderr).splitlines()
    assert first.startswith("--fp16: Megatron has no fp16 training with FSDP2.")
    assert second.startswith("missing.yaml: ")
