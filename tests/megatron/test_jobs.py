"""The runner of Megatron jobs itself: a test that trusts it must be able to fail."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.jobs import JobFailure, MegatronJobs


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text("import os, sys, torch\nimport torch.distributed as dist\nrank = int(os.environ['RANK'])\n" + text)
    return path


def test_ranks_meet_and_print_apart(megatron_jobs: MegatronJobs, tmp_path: Path) -> None:
    text = (
        "dist.init_process_group('gloo')\n"
        "value = torch.tensor([rank + 1])\n"
        "dist.all_reduce(value)\n"
        "print(value.item(), sys.argv[1:], os.environ['EXTRA'], __name__)\n"
        "print('to stderr', file=sys.stderr)\n"
    )
    job = megatron_jobs.run(["--a", "b"], world_size=3, script=script(tmp_path, text), env={"EXTRA": "there"})
    assert [rank.stdout for rank in job.ranks] == ["6 ['--a', 'b'] there __main__\n"] * 3
    assert [rank.stderr for rank in job.ranks] == ["to stderr\n"] * 3
    assert [rank.exitcode for rank in job.ranks] == [0, 0, 0]
    assert job.losses == []


def test_failing_rank_ends_the_job_with_its_traceback(megatron_jobs: MegatronJobs, tmp_path: Path) -> None:
    text = (
        "dist.init_process_group('gloo')\n"
        "if rank == 1:\n"
        "    raise KeyError('mine')\n"
        "dist.barrier()\n"  # rank 0 would wait for its whole timeout
    )
    start = time.monotonic()
    with pytest.raises(JobFailure) as caught:
        megatron_jobs.run([], script=script(tmp_path, text), timeout=60)
    assert time.monotonic() - start < 20
    assert "[rank 1] exit code 1" in str(caught.value)
    assert "KeyError: 'mine'" in str(caught.value)
    assert "no end after" not in str(caught.value)


def test_hanging_rank_ends_the_job_with_its_stack(megatron_jobs: MegatronJobs, tmp_path: Path) -> None:
    text = "def stuck():\n    import threading\n    threading.Event().wait()\nif rank == 1:\n    stuck()\n"
    with pytest.raises(JobFailure) as caught:
        megatron_jobs.run([], script=script(tmp_path, text), timeout=2)
    assert str(caught.value).startswith("no end after 2 s\n[rank 0] exit code 0\n")
    assert "[rank 1] exit code -9" in str(caught.value)
    assert "in stuck" in str(caught.value)


def test_exit_codes_and_messages_of_a_script(megatron_jobs: MegatronJobs, tmp_path: Path) -> None:
    job = megatron_jobs.run([], script=script(tmp_path, "sys.exit('no' if rank else 7)"), check=False)
    assert [rank.exitcode for rank in job.ranks] == [7, 1]
    assert job.ranks[1].stderr == "no\n"


def test_jobs_do_not_see_each_other(megatron_jobs: MegatronJobs, tmp_path: Path) -> None:
    text = "print(hasattr(torch, 'left_over'), os.environ.get('LEFT_OVER'))\ntorch.left_over = 1\n"
    first = megatron_jobs.run([], world_size=1, script=script(tmp_path, text), env={"LEFT_OVER": "1"})
    second = megatron_jobs.run([], world_size=1, script=script(tmp_path, text))
    assert first.ranks[0].stdout == "False 1\n"
    assert second.ranks[0].stdout == "False None\n"


def test_hook_runs_first_and_leaves_a_record(megatron_jobs: MegatronJobs, tmp_path: Path) -> None:
    text = "print(torch.from_hook)"
    job = megatron_jobs.run([], script=script(tmp_path, text), hook="tests.megatron.test_jobs:leave_a_record")
    assert [rank.extra for rank in job.ranks] == [{"rank": "0"}, {"rank": "1"}]
    assert [rank.stdout for rank in job.ranks] == ["set\n", "set\n"]


def leave_a_record(extra: dict[str, Any]) -> None:
    import torch

    extra["rank"] = os.environ["RANK"]
    torch.from_hook = "set"


def test_without_the_plugin_its_import_does_nothing(megatron_jobs: MegatronJobs, tmp_path: Path) -> None:
    text = (
        "import mindspeed_fsdp2.megatron_adaptor\n"
        "import megatron.training.arguments as arguments\n"
        "print(arguments.validate_args.__module__, torch.cuda.is_available(), torch.ones(1, device='cuda').device)\n"
    )
    job = megatron_jobs.run([], world_size=1, script=script(tmp_path, text))
    assert job.ranks[0].stdout == "megatron.training.arguments True cpu\n"
