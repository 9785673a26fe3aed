"""The code and the text on the page about checkpoints."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mindspeed_fsdp2 import CheckpointError, wrap_model
from mindspeed_fsdp2.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from tests.distributed.models import build, tokens_of
from tests.distributed.ranks import RankPool

PAGES = [Path(__file__).parents[2] / "docs" / language / "checkpoints.md" for language in ("en", "zh")]


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def code(page: Path) -> list[str]:
    """Return the page's Python code without docstrings, which are translated."""
    trees = [ast.parse(block) for block in blocks(page, "python")]
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                del node.body[0]
    return [ast.dump(tree) for tree in trees]


def _example(sources: list[str], directory: str) -> Any:
    namespace: dict[str, Any] = {}
    for source in sources:
        exec(compile(source, "page", "exec"), namespace)
    rank = dist.get_rank()
    batches = [tokens_of(step, rank) for step in range(25)]

    def job(where: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = wrap_model(build(dropout=0.2), {"sharding_size": "auto", "sub_modules_to_wrap": ["layers.{*}"]})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 12, 0.1)
        torch.manual_seed(rank)
        namespace["train"](model, optimizer, scheduler, batches, where, steps)
        return model, optimizer

    job(f"{directory}/two", 20)
    (one, optimizer), (two, _) = job(f"{directory}/one", 25), job(f"{directory}/two", 25)
    equal = all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(one.parameters(), two.parameters()))
    pending = namespace["save_and_go_on"](f"{directory}/two", one, optimizer, 25)
    return equal, pending.wait().name


def test_the_trainer_on_the_page_resumes_exactly(ranks2: RankPool, tmp_path: Path) -> None:
    assert code(PAGES[0]) == code(PAGES[1])
    answer = (True, "step-00000025")
    assert ranks2.run(_example, blocks(PAGES[0], "python"), str(tmp_path)) == [answer, answer]
    assert [info.step for info in list_checkpoints(tmp_path / "two")] == [10, 20, 25]


class Saved(nn.Module):
    def __init__(self, vocab: int, head: str, bias: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, 16)
        self.head = nn.Linear(16, 4, bias=head == "head")
        if head == "new_head":
            self.new_head = nn.Linear(16, 2)


def _does_not_fit(directory: str) -> str:
    config = {"sharding_size": "auto", "sub_modules_to_wrap": []}
    save_checkpoint(directory, wrap_model(Saved(33, "head", True), config), step=10)
    try:
        load_checkpoint(directory, wrap_model(Saved(40, "new_head", False), config))
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("page", PAGES, ids=["en", "zh"])
def test_the_error_on_the_page_is_the_real_one(ranks2: RankPool, tmp_path: Path, page: Path) -> None:
    (text,) = blocks(page, "text")
    (found, _) = ranks2.run(_does_not_fit, str(tmp_path))
    assert found.replace(str(tmp_path), "ckpt") + "\n" == text


def _save(directory: str) -> dict[str, list[Any]]:
    model = wrap_model(build(), {"sharding_size": "auto", "sub_modules_to_wrap": []})
    save_checkpoint(directory, model, step=10)
    return {name: param.full_tensor().tolist() for name, param in model.named_parameters()}


def test_the_conversion_command(ranks2: RankPool, tmp_path: Path) -> None:
    (command,) = blocks(PAGES[0], "bash")
    assert blocks(PAGES[1], "bash") == [command]
    values, _ = ranks2.run(_save, str(tmp_path / "ckpt"))
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)["model"]
    assert {name: tensor.tolist() for name, tensor in plain.items()} == values
