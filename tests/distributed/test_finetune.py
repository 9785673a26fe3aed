"""examples/finetune_hf.py: stopped and started again it ends where it would have ended, and what it exports loads."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.distributed.ranks import RankPool

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "finetune_hf.py"
TINY = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": 0.1,
    "tie_word_embeddings": False,
}
FLAGS = {
    "--steps": 8,
    "--batch": 2,
    "--accumulate": 2,
    "--length": 32,
    "--eval-every": 2,
    "--save-every": 2,
    "--warmup": 2,
    "--lr": 0.01,
}


@functools.cache
def script() -> ModuleType:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("finetune_hf", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["finetune_hf"] = module  # its dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def _train(argv: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = script().options(argv)
        args.out.mkdir(parents=True, exist_ok=True)
        script().Trainer(args).run()


@pytest.fixture
def inputs(tmp_path: Path) -> list[Any]:
    """A model's configuration, a YAML file and a text."""
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **TINY}
    (tmp_path / "model.json").write_text(json.dumps(model))
    (tmp_path / "cfg.yaml").write_text(
        "sharding_size: auto\nauto_wrap_policy: TRANSFORMER_BASED_WRAP\nrecompute_modules: ['model.layers.{*}']\n"
    )
    text = "".join(f"{number} times {number} is {number * number}.\n" for number in range(200))
    (tmp_path / "text.txt").write_text(text)
    return ["--model", tmp_path / "model.json", "--config", tmp_path / "cfg.yaml", "--text", tmp_path / "text.txt"]


def _argv(inputs: list[Any], out: Path, **flags: Any) -> list[str]:
    given = {**FLAGS, **{f"--{name.replace('_', '-')}": value for name, value in flags.items()}}
    return [str(part) for part in (*inputs, "--out", out, *(part for pair in given.items() for part in pair))]


def _log(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_goes_on_exactly_and_exports_what_it_evaluated(ranks2: RankPool, inputs: list[Any], tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    ranks2.run(_train, _argv(inputs, whole))
    ranks2.run(_train, _argv(inputs, halves, stop_at=3))  # one step after a checkpoint
    assert [line["step"] for line in _log(halves)] == [1, 2, 3]
    assert not (halves / "model").exists()
    ranks2.run(_train, _argv(inputs, halves))
    log = _log(whole)
    assert [line["step"] for line in log] == [*range(1, 9), 8]
    assert log[7]["loss"] < log[0]["loss"] - 0.5
    assert _log(halves) == log
    weights = load_file(whole / "model" / "model.safetensors")
    again = load_file(halves / "model" / "model.safetensors")
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    model = AutoModelForCausalLM.from_pretrained(whole / "model").eval()
    sequences = script().read_data(script().options(_argv(inputs, whole))).held_out
    with torch.no_grad():
        loss = model(input_ids=sequences, labels=sequences).loss.item()
    assert loss == pytest.approx(log[-1]["final_eval_loss"], rel=1e-6)
    assert log[-1]["final_eval_loss"] == min(line["eval_loss"] for line in log if "eval_loss" in line)


def test_stops_early_and_returns_to_the_best_weights(ranks2: RankPool, inputs: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    ranks2.run(_train, _argv(inputs, out, steps=40, lr=1.0, warmup=1, eval_every=1, patience=2, clip=0))
    log = _log(out)
    losses = [line["eval_loss"] for line in log[:-1]]
    best = losses.index(min(losses))
    assert len(losses) == best + 3 < 40
    assert log[-1]["final_eval_loss"] == losses[best]
    ranks2.run(_train, _argv(inputs, out, steps=40, lr=1.0, warmup=1, eval_every=1, patience=2, clip=0))
    assert _log(out) == log  # started again it only evaluates


def test_starts_from_a_directory(ranks2: RankPool, inputs: list[Any], tmp_path: Path) -> None:
    ranks2.run(_train, _argv(inputs, tmp_path / "first", steps=4))
    final = _log(tmp_path / "first")[-1]["final_eval_loss"]
    second = [*inputs]
    second[1] = tmp_path / "first" / "model"
    ranks2.run(_train, _argv(second, tmp_path / "second", steps=1, lr=0.0, warmup=0, eval_every=1))
    assert _log(tmp_path / "second")[0]["eval_loss"] == final


@pytest.mark.slow
def test_killed_under_torchrun_it_goes_on(inputs: list[Any], tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def start(out: Path) -> subprocess.Popen[str]:
        argv = [*command, str(SCRIPT), *_argv(inputs, out, steps=24), "--tensorboard"]
        return subprocess.Popen(argv, env=env, text=True, stderr=subprocess.PIPE)

    with start(tmp_path / "whole") as whole:
        assert whole.wait(300) == 0, whole.stderr and whole.stderr.read()
    log = tmp_path / "killed" / "log.jsonl"
    with start(tmp_path / "killed") as killed:
        while killed.poll() is None and not (log.exists() and log.read_text().count("\n") >= 5):
            time.sleep(0.02)
        for process in (killed, *psutil.Process(killed.pid).children(recursive=True)):
            process.kill()
    assert len(_log(tmp_path / "killed")) < 24
    with start(tmp_path / "killed") as again:
        assert again.wait(300) == 0, again.stderr and again.stderr.read()
    assert _log(tmp_path / "killed") == _log(tmp_path / "whole")
    assert list((tmp_path / "killed" / "tensorboard").iterdir())
