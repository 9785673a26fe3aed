"""The code and the commands on the page about Hugging Face."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_fsdp2 import save_checkpoint, wrap_model
from mindspeed_fsdp2.checkpoint import list_checkpoints
from mindspeed_fsdp2.cli import main
from tests.distributed.hf_models import build, different, loaded
from tests.distributed.ranks import RankPool
from tests.distributed.test_checkpoint_docs import blocks, code

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / language / "huggingface.md" for language in ("en", "zh")]
CONFIG = {"sharding_size": "auto"}


def _examples(sources: list[str], folder: str) -> list[bool]:
    names: dict[str, Any] = {}
    for source in sources:
        exec(compile(source, "page", "exec"), names)
    model = wrap_model(build("llama"), CONFIG)
    names["publish"](model, folder)
    save_checkpoint(Path(folder, "ckpt"), model, step=3)
    if dist.get_rank() == 0:
        build("llama").save_pretrained(Path(folder, "llama"))
    dist.barrier()
    other = names["start"](lambda: build("llama", seed=4), CONFIG, Path(folder, "as stored"))
    return [torch.equal(a.to_local(), b.to_local()) for a, b in zip(model.parameters(), other.parameters())]


def test_the_page(
    ranks2: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [code(page) for page in PAGES[1:]] == [code(PAGES[0])]
    assert blocks(PAGES[0], "bash") == blocks(PAGES[1], "bash")
    equal = ranks2.run(_examples, blocks(PAGES[0], "python"), os.fspath(tmp_path))
    assert all(all(each) for each in equal) and len(equal[0]) == 21
    expected = build("llama")
    assert different(loaded(tmp_path / "as stored"), expected) == []
    assert different(loaded(tmp_path / "half"), build("llama").bfloat16()) == []
    monkeypatch.chdir(tmp_path)
    about_files = [block for block in blocks(PAGES[0], "bash") if " checkpoint " in block]
    commands, (together,) = (block.splitlines() for block in about_files)
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "mindspeed-fsdp2"
        assert main(arguments) == 0, capsys.readouterr().err
    assert different(loaded("out"), build("llama").bfloat16()) == []
    assert [info.step for info in list_checkpoints("start")] == [0]
    program, *arguments = shlex.split(together)
    assert program == "torchrun"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.fspath(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path}/out2: written.\n"
    assert different(loaded("out2"), expected) == []
