"""examples/finetune_hf.py: stopped and started again it ends where it would have ended, and what it exports loads."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shlex
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
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mindspeed_fsdp2 import FSDP2Error
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
def test_goes_on_on_another_number_of_ranks(
    ranks2: RankPool, ranks4: RankPool, inputs: list[Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ranks2.run(_train, _argv(inputs, out, stop_at=4))
    ranks4.run(_train, _argv(inputs, out, steps=4))
    assert _log(out)[-1]["final_eval_loss"] == pytest.approx(_log(out)[3]["eval_loss"], rel=1e-6)
    ranks4.run(_train, _argv(inputs, out, steps=6))
    assert [line["step"] for line in _log(out)] == [1, 2, 3, 4, 5, 6, 6]


def test_more_steps_export_the_newer_model(ranks2: RankPool, inputs: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    ranks2.run(_train, _argv(inputs, out, steps=2))
    first = load_file(out / "model" / "model.safetensors")
    ranks2.run(_train, _argv(inputs, out, steps=4))
    second = load_file(out / "model" / "model.safetensors")
    assert [line["step"] for line in _log(out)] == [1, 2, 3, 4, 4]
    assert not any(torch.equal(first[name], second[name]) for name in first)


def _train_or_say(argv: list[str]) -> str:
    try:
        _train(argv)
    except (script().UsageError, FSDP2Error) as error:
        return str(error)
    return ""


def test_goes_on_as_it_began_or_not_at_all(ranks2: RankPool, inputs: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    ranks2.run(_train, _argv(inputs, out, stop_at=2))
    text = (
        f"--out: the run in {out} can only go on as it began: --lr 0.01, --warmup 2. Give the same, or another --out."
    )
    assert ranks2.run(_train_or_say, _argv(inputs, out, lr=0.02, warmup=3)) == [text] * 2
    assert (
        ranks2.run(_train_or_say, _argv(inputs[:-2], out))
        == [text.replace("--lr 0.01, --warmup 2", f"--text {inputs[-1]}")] * 2
    )
    assert len(_log(out)) == 2


KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 257, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "qwen3_moe": {**TINY, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_other_models_and_bf16(ranks2: RankPool, inputs: list[Any], tmp_path: Path, kind: str) -> None:
    """GPT-2 has tied weights; its exported model holds what was stored, in fp32, and computes like it."""
    inputs[1].write_text(json.dumps({"model_type": kind, **KINDS[kind]}))
    settings = ["sharding_size: auto", "auto_wrap_policy: TRANSFORMER_BASED_WRAP"]
    for number, more in enumerate(([], ["param_dtype: bf16", "reduce_dtype: fp32"])):
        inputs[3].write_text("\n".join([*settings, *more]))
        out = tmp_path / f"out{number}"
        ranks2.run(_train, _argv(inputs, out))
        log = _log(out)
        assert log[7]["loss"] < log[0]["loss"] - 0.3
        model = AutoModelForCausalLM.from_pretrained(out / "model").eval()
        assert {param.dtype for param in model.parameters()} == {torch.float32}
        sequences = script().read_data(script().options(_argv(inputs, out))).held_out
        with torch.no_grad():
            loss = model(input_ids=sequences, labels=sequences).loss.item()
        assert loss == pytest.approx(log[-1]["final_eval_loss"], rel=1e-2 if more else 1e-6)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"steps": 0}, "--steps: 0 is not a number from 1 on."),
        ({"stop_at": 0}, "--stop-at: 0 is not a number from 1 on."),
        ({"clip": -1}, "--clip: -1.0 is not a number from 0 on."),
        ({"lr": "nan"}, "--lr: nan is not a number from 0 on."),
        ({"length": 1}, "--length: a sequence of one token has no next token to learn."),
        ({"config": "none.yaml"}, "--config: there is no none.yaml."),
        ({"model": "."}, "--model .: has no model.safetensors. Give a directory that save_pretrained wrote."),
    ],
)
def test_wrong_arguments_are_named(
    flags: dict[str, Any],
    text: str,
    inputs: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        script().options(_argv(inputs, tmp_path / "out", **flags))
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"error: {text}")


def test_without_torchrun_it_says_how_to_start(inputs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["finetune_hf.py", *_argv(inputs, Path("out"))])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(
        SystemExit, match="^Start it with torchrun: torchrun --nproc_per_node 2 examples/finetune_hf.py"
    ):
        script().main()


def test_what_does_not_fit_is_named(ranks2: RankPool, inputs: list[Any], tmp_path: Path) -> None:
    out, model, text = tmp_path / "out", inputs[1], inputs[5]

    def said(**flags: Any) -> str:
        first, second = ranks2.run(_train_or_say, _argv(inputs, out, **flags))
        assert first == second
        return first

    too_short = " tokens make less than two sequences of 4000. Give more text, or a shorter --length."
    assert said(length=4000) == f"--text: {len(text.read_bytes()) + 1}{too_short}"
    assert said(length=2100) == "--length: the model reads at most 2048 tokens, not 2100."
    model.write_text(json.dumps({"model_type": "llama", **TINY, "vocab_size": 256}))
    assert said() == (
        f"--model {model}: without a tokenizer bytes are the tokens, and vocab_size 256 is too small for them. Write 257 "
        "or more."
    )
    model.write_text(json.dumps({"model_type": "t5"}))
    assert said().startswith(
        f"--model {model}: no configuration of a causal language model. Unrecognized configuration"
    )
    model.write_text("{")
    assert said().startswith(f"--model {model}: no configuration of a causal language model. ")
    text.write_bytes(b"\xff\xfe")
    assert said().startswith(f"--text {text}: it cannot be read as UTF-8 text (")


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands about fine-tuning on the page about Hugging Face, in a folder with the files that they name."""
    monkeypatch.chdir(tmp_path)
    for name in ("examples", "configs", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "corpus.txt").write_text("".join(f"{number} and {number}.\n" for number in range(900)))
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained("my-model")
    page = (ROOT / "docs" / "en" / "huggingface.md").read_text(encoding="utf-8").replace("\\\n", " ")
    found = [shlex.split(line) for line in page.splitlines() if re.match("(bash|torchrun) .*finetune", line)]
    assert [words[0] for words in found] == ["bash", "bash", "torchrun"]
    return found


def test_the_arguments_on_the_page_are_right(commands: list[list[str]]) -> None:
    for words in commands:
        given = words[2 if words[0] == "bash" else 4 :]
        if "--model" not in given:
            given += ["--model", "examples/models/llama_tiny.json"]
        if "--out" not in given:
            given += ["--out", "finetune-out"]
        assert script().options(given).batch == 8


@pytest.mark.slow
def test_the_command_on_the_page_trains(commands: list[list[str]]) -> None:
    program, *words = commands[2]
    assert program == "torchrun"
    words = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", *words, "--steps", "20"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    log = _log(Path("run2"))
    assert len(log) == 21 and log[19]["loss"] < log[0]["loss"]
    assert AutoModelForCausalLM.from_pretrained("run2/model")


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
