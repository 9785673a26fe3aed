"""The example under torchrun: killed in a save, started again with the same command, it ends where it would have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron.jobs import EXAMPLE, ROOT
from tests.megatron.tiny import tiny_gpt

KILLED = Path(__file__).with_name("scripts") / "killed_pretrain.py"
FLAGS = {"attention_dropout": "0.1", "hidden_dropout": "0.1", "train_iters": "6", "log_interval": "1"}


def torchrun(script: Path, argv: list[str], folder: Path, **env: str) -> tuple[int, list[str]]:
    """Return the exit status, and the loss and norm of each iteration as logged."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), *argv],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "8", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )
    found = re.findall(r"iteration +(\d+)/.*lm loss: (\S+) .*grad norm: (\S+)", done.stdout)
    assert found, done.stdout[-3000:]
    return done.returncode, [" ".join(each) for each in found]


@pytest.mark.slow
def test_killed_and_started_again(topics: str, tmp_path: Path) -> None:
    (tmp_path / "cfg.yaml").write_text("sharding_size: auto\n")
    argv = tiny_gpt(
        topics, "--use-torch-fsdp2", "--fsdp2-config-path", "cfg.yaml", "--ckpt-format", "torch_dcp", **FLAGS
    )
    status, whole = torchrun(EXAMPLE, argv, tmp_path)
    assert status == 0 and len(whole) == 6
    saving = [*argv, "--save", "ckpt", "--load", "ckpt", "--save-interval", "2"]
    status, before = torchrun(KILLED, saving, tmp_path, KILL_AT="shards")
    assert status != 0 and before == whole[: len(before)]
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "2"
    status, after = torchrun(EXAMPLE, saving, tmp_path)
    assert status == 0 and len(after) == 4
    # Megatron logs the mean of the first two losses of a process as the second.
    assert [after[0], *after[2:]] == [whole[2], *whole[4:]]
    assert after[1].split()[-1] == whole[3].split()[-1]
