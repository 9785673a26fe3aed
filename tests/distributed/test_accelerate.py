"""Accelerate and transformers.Trainer: the same losses as theirs, and our models in their hands."""

from __future__ import annotations

import contextlib
import json
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from mindspeed_fsdp2 import wrap_model
from tests.distributed.ranks import RankPool
from tests.distributed.test_checkpoint_docs import blocks
from tests.distributed.test_finetune import ROOT, TINY, script
from tests.distributed.test_refusals import message, same_on_all
from tests.distributed.training import full

STEPS = 6
YAML = {"sharding_size": "auto", "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reduce_grads": "last_microbatch"}
UNITS = {"", "model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"}
REFUSED = (
    "Accelerator.prepare: this model was sharded by wrap_model already, and Accelerate would wrap it again or save one "
    "rank's part of it. Choose its FSDP 2, which takes the model as it is: "
    'FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP"), or in TrainingArguments fsdp=True, '
    'fsdp_config={"version": 2, "auto_wrap_policy": "NO_WRAP"}. Without Accelerate: the loop of '
    "examples/finetune_hf.py."
)


@dataclass
class Run:
    """What a rank saw: the units and the kinds of parameters it trained, and how that went."""

    units: set[str]
    kinds: set[str]
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    params: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> Run:
        units = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        return cls(units, {type(param).__name__ for param in model.parameters()})


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Two ranks of their own: Accelerate keeps its state in the process and reads its environment."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    return _argv(tmp_path, YAML)


def _argv(folder: Path, config: dict[str, Any], **flags: Any) -> list[str]:
    """Return arguments of examples/finetune_hf.py."""
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **TINY, "attention_dropout": 0.0}
    (folder / "model.json").write_text(json.dumps(model))
    (folder / "cfg.yaml").write_text(json.dumps(config))
    (folder / "text.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(200)))
    given = {
        "steps": STEPS,
        "batch": 2,
        "accumulate": 2,
        "length": 32,
        "warmup": 2,
        "lr": 0.01,
        "weight_decay": 0.01,
        **flags,
    }
    paths = {"model": folder / "model.json", "config": folder / "cfg.yaml", "text": folder / "text.txt"}
    pairs = {**paths, "out": folder / "out", **given}
    return [str(part) for name, value in pairs.items() for part in (f"--{name.replace('_', '-')}", value)]


def on_the_page(name: str) -> Any:
    """Return a function of the page about Hugging Face."""
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "docs" / "en" / "huggingface.md", "python"):
        exec(compile(block, "huggingface.md", "exec"), names)
    return names[name]


def _accelerate(kind: str) -> Any:
    """Start Accelerate in this rank and return the package; ``kind`` is what it takes the machine for.

    With CPUs only it does not look at its FSDP settings and puts DDP around everything.
    """
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world})
    os.environ["OMP_NUM_THREADS"] = "1"
    import accelerate
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState(cpu=True).distributed_type = DistributedType[kind]
    return accelerate


def _accelerator(kind: str = "MULTI_GPU", version: int = 2, args: Any = None, **options: Any) -> Any:
    accelerate = _accelerate(kind)
    precision = options.pop("mixed_precision", None)
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=version, **options) if version else None
    accelerator = accelerate.Accelerator(
        fsdp_plugin=plugin,
        gradient_accumulation_steps=args.accumulate if args else 1,
        mixed_precision=precision,
        step_scheduler_with_optimizer=False,
    )
    assert accelerator.is_fsdp2 == (kind == "MULTI_GPU" and version == 2)
    return accelerator


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out the warnings of Transformers and Accelerate."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- the loops --------------------------------------------------------------------------------------------------------


def _example(argv: list[str]) -> Run:
    """Train as examples/finetune_hf.py does."""
    with _quiet():
        args = script().options(argv)
        trainer = script().Trainer(args)
        run = Run.of(trainer.model)
        for trainer.step in range(args.steps):
            numbers = trainer.train_step()
            run.losses.append(numbers["loss"])
            run.norms.append(numbers["grad_norm"])
        run.params = {name: full(param) for name, param in trainer.model.named_parameters()}
    return run


class Loop:
    """The loop of Accelerate's documentation, on the data of examples/finetune_hf.py."""

    def __init__(self, argv: list[str], wrapped: bool, options: dict[str, Any]) -> None:
        self.args = script().options(argv)
        model = _plain(self.args)
        if wrapped and not options:
            _accelerate("MULTI_GPU")
            more = {"gradient_accumulation_steps": self.args.accumulate, "step_scheduler_with_optimizer": False}
            prepared = on_the_page("prepare")(model, self.args.config, self.args.lr, **more)
            self.accelerator, self.model, self.optimizer = prepared
        else:
            policy = "NO_WRAP" if wrapped else "TRANSFORMER_BASED_WRAP"
            self.accelerator = _accelerator(args=self.args, auto_wrap_policy=policy, **options)
            if wrapped:
                wrap_model(model, self.args.config)
            optimizer = torch.optim.AdamW(model.parameters(), lr=self.args.lr, weight_decay=self.args.weight_decay)
            self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        assert self.model is model and self.accelerator.is_fsdp2
        args = self.args
        schedule = script().get_scheduler(args.schedule, self.optimizer, args.warmup, args.steps)
        self.schedule = self.accelerator.prepare(schedule)
        self.data = script().read_data(args)
        self.run = Run.of(self.model)

    def train(self, steps: range) -> Run:
        for step in steps:
            total = torch.zeros(())
            for tokens in script().micro_batches(self.data, step, self.args):
                with self.accelerator.accumulate(self.model):
                    loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
                    total += loss.detach().float() / self.args.accumulate
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.args.clip or math.inf)
                        self.run.norms.append(full(norm).item())
                    self.optimizer.step()
                    if self.accelerator.sync_gradients:
                        self.schedule.step()
                    self.optimizer.zero_grad()
            dist.all_reduce(total)
            self.run.losses.append(total.item() / dist.get_world_size())
        self.run.params = {name: full(param) for name, param in self.model.named_parameters()}
        return self.run


def _plain(args: Any) -> nn.Module:
    torch.manual_seed(args.seed)
    config = script().AutoConfig.from_pretrained(args.model)
    model: nn.Module = script().AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    return model


def _loop(argv: list[str], wrapped: bool, options: dict[str, Any]) -> Run:
    with _quiet():
        return Loop(argv, wrapped, options).train(range(STEPS))


def _interrupted(argv: list[str], folder: str, options: dict[str, Any]) -> Run:
    """Train half, save, start anew, load and train the rest."""
    with _quiet():
        first = Loop(argv, True, options)
        first.train(range(STEPS // 2))
        first.accelerator.save_state(folder)
        second = Loop([*argv, "--seed", "5"], True, options)
        second.args.seed = first.args.seed  # of the data; the weights are to come from the files
        second.accelerator.load_state(folder)
        second.run.losses, second.run.norms = first.run.losses, first.run.norms
        return second.train(range(STEPS // 2, STEPS))


def _equal(got: list[Run], want: list[Run], rel: float) -> None:
    """Compare what every rank saw; ``rel`` 0 is bit for bit, but for the norms, which are summed in another order."""
    for one, other in zip(got, want):
        assert one.losses == pytest.approx(other.losses, rel=rel, abs=0)
        assert one.norms == pytest.approx(other.norms, rel=1e-6, abs=0)
        assert one.params.keys() == other.params.keys()
        for name, param in other.params.items():
            torch.testing.assert_close(one.params[name], param, rtol=rel, atol=rel)
        assert other.losses[-1] < other.losses[0] - 0.5


# --- the same as Accelerate -------------------------------------------------------------------------------------------

WRAPPER = "._checkpoint_wrapped_module"
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("config", "options", "clip", "rel"),
    [
        pytest.param({}, {}, 0, 0.0, id="bit for bit"),
        pytest.param({}, {}, 1, 1e-6, id="clipped"),
        pytest.param(
            {"recompute_modules": ["model.layers.{*}"], "use_reentrant": False},
            {"activation_checkpointing": True},
            0,
            0.0,
            id="recompute",
            marks=SLOW,
        ),
        pytest.param(
            {"param_dtype": "bf16", "reduce_dtype": "bf16", "output_dtype": "bf16"},
            {"mixed_precision": "bf16"},
            0,
            0.0,
            id="bf16",
            marks=SLOW,
        ),
    ],
)
def test_trains_as_fsdp2_of_accelerate(
    ranks: RankPool, tmp_path: Path, config: dict[str, Any], options: dict[str, Any], clip: float, rel: float
) -> None:
    argv = _argv(tmp_path, {**YAML, **config}, clip=clip)
    theirs = ranks.run(_loop, argv, False, options)
    for run in theirs:
        run.units = {name.replace(WRAPPER, "") for name in run.units}
        run.params = {name.replace(WRAPPER, ""): value for name, value in run.params.items()}
    ours = ranks.run(_example, argv)
    for run in (*theirs, *ours):
        assert run.kinds == {"DTensor"}
        assert run.units == UNITS
    _equal(ours, theirs, rel)


# --- our models in the hands of Accelerate ----------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_fsdp2_of_accelerate_takes_our_model_as_it_is(ranks: RankPool, tmp_path: Path, state: str) -> None:
    argv = _argv(tmp_path, YAML, clip=0)
    want = ranks.run(_example, argv)
    got = ranks.run(_interrupted, argv, str(tmp_path / "state"), {"state_dict_type": state})
    assert all(run.units == UNITS for run in got)
    _equal(got, want, 0.0)


@pytest.fixture(scope="module")
def more_ranks() -> Iterator[RankPool]:
    """Four such ranks."""
    pool = RankPool(4)
    yield pool
    pool.close()


GPT2 = {"model_type": "gpt2", "vocab_size": 257, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
DROPLESS = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("state", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"sharding_size": 2}, id="replicas"),
        pytest.param({"ignored_modules": ["model.norm", "model.embed_tokens"]}, id="whole"),
        pytest.param({"offload_to_cpu": True, "num_to_forward_prefetch": 1}, id="offload"),
        pytest.param({"param_dtype": "bf16", "recompute_modules": ["model.layers.{*}"]}, id="bf16"),
        pytest.param({}, id="tied"),
    ],
)
def test_whatever_the_yaml_file_says(
    more_ranks: RankPool,
    tmp_path: Path,
    config: dict[str, Any],
    state: str,
    request: pytest.FixtureRequest,
) -> None:
    argv = _argv(tmp_path, {**YAML, **config}, clip=0)
    if request.node.callspec.id.startswith("tied"):
        (tmp_path / "model.json").write_text(json.dumps(GPT2 | DROPLESS))
    want = more_ranks.run(_example, argv)
    got = more_ranks.run(_interrupted, argv, str(tmp_path / "state"), {"state_dict_type": state})
    # Accelerate does not hold back the reduction of whole gradients, so they are summed in another order.
    _equal(got, want, 1e-6 if "ignored_modules" in config else 0.0)


def test_accelerate_clips_and_accumulates_our_model(ranks: RankPool, tmp_path: Path) -> None:
    """With our default, which reduces every micro-batch, too."""
    argv = _argv(tmp_path, {**YAML, "reduce_grads": "every_microbatch"})
    _equal(ranks.run(_loop, argv, True, {}), ranks.run(_example, argv), 1e-6)


def _refusals(argv: list[str], kind: str, version: int) -> tuple[list[str], list[float]]:
    """Return every error, and the losses that the model, left as it was, then gives in our loop."""
    with _quiet():
        args = script().options(argv)
        trainer = script().Trainer(args)
        accelerator = _accelerator(kind, version)
        texts = [
            message(lambda: accelerator.prepare(trainer.model, trainer.optimizer))[1],
            message(lambda: accelerator.prepare(trainer.model))[1],
            message(lambda: accelerator.prepare_model(trainer.model, evaluation_mode=True))[1],
        ]
        losses = []
        for trainer.step in range(3):
            losses.append(trainer.train_step()["loss"])
    return texts, losses


@pytest.mark.parametrize(
    ("kind", "version"), [("MULTI_CPU", 0), ("MULTI_CPU", 2), ("MULTI_GPU", 0), ("MULTI_NPU", 0), ("MULTI_GPU", 1)]
)
def test_all_else_is_refused_before_it_touches_the_model(
    ranks: RankPool, argv: list[str], kind: str, version: int
) -> None:
    want = ranks.run(_example, argv)[0].losses[:3]
    assert ranks.run(_refusals, argv, kind, version) == [([REFUSED] * 3, want)] * 2


def _other_order(kind: str, version: int) -> tuple[str, str]:
    accelerator = _accelerator(kind, version)
    with _quiet():
        model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        assert isinstance(model, FSDPModule if version == 2 else DistributedDataParallel)
        return message(lambda: wrap_model(model, YAML | {"auto_wrap_policy": "NO_WRAP"}))


@pytest.mark.parametrize(("kind", "version"), [("MULTI_GPU", 2), ("MULTI_CPU", 0)])
def test_wrap_model_after_prepare_is_refused(ranks: RankPool, kind: str, version: int) -> None:
    assert same_on_all(ranks.run(_other_order, kind, version)) == (
        "PlanError",
        "model: Accelerator.prepare had it first. Call wrap_model before prepare, and give Accelerate "
        'FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP"), which takes the model as it is.',
    )


class Head(nn.Module):
    """A model whose head has one row, so that all ranks but the first have nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def _prepared(config: dict[str, Any], options: dict[str, Any]) -> tuple[str, str]:
    """Return what the first forward of a model of ours says that Accelerate has prepared, and the second."""
    with _quiet():
        accelerator = _accelerator(**options)
        model = wrap_model(Head(), {"sharding_size": "auto", **config})
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        return message(lambda: model(torch.ones(2, 8)).sum().backward())


ROWS = (
    "Accelerator.prepare: it takes parameters without rows on some rank for one and the same: head.weight, head.bias. "
    "List their modules in ignored_modules, or use fewer ranks in sharding_size."
)
PRECISION = (
    "Accelerator: mixed_precision 'bf16' does not reach a model of wrap_model, whose param_dtype is {}. Write "
    "param_dtype: bf16 in the YAML file, or leave mixed_precision out (in TrainingArguments bf16 and fp16)."
)
OFFLOAD = (
    "Accelerator: cpu_offload does not reach a model of wrap_model. Write offload_to_cpu: true in the YAML file, or "
    "leave cpu_offload out."
)
AROUND = (
    "Accelerator.prepare: it put something around units, body among them, as for activation checkpointing. Leave "
    "activation_checkpointing out there and list the modules in recompute_modules."
)
WHOLE = {"sub_modules_to_wrap": ["body"], "ignored_modules": ["head"]}


@pytest.mark.parametrize(
    ("config", "options", "problems"),
    [
        (WHOLE, {}, []),
        ({"sub_modules_to_wrap": []}, {}, [ROWS]),
        (WHOLE, {"mixed_precision": "bf16"}, [PRECISION.format("absent")]),
        ({**WHOLE, "param_dtype": "fp32"}, {"mixed_precision": "bf16"}, [PRECISION.format("fp32")]),
        ({**WHOLE, "param_dtype": "bf16"}, {"mixed_precision": "bf16"}, []),
        (WHOLE, {"cpu_offload": True}, [OFFLOAD]),
        ({**WHOLE, "offload_to_cpu": True}, {"cpu_offload": True}, []),
        (
            WHOLE,
            {
                "mixed_precision": "bf16",
                "auto_wrap_policy": "SIZE_BASED_WRAP",
                "min_num_params": 20,
                "activation_checkpointing": True,
            },
            [AROUND, PRECISION.format("absent")],
        ),
    ],
)
def test_what_accelerate_cannot_do_to_our_model_is_said_before_the_first_step(
    ranks: RankPool, config: dict[str, Any], options: dict[str, Any], problems: list[str]
) -> None:
    kind, text = same_on_all(ranks.run(_prepared, config, options))
    assert text == "\n".join(problems)
    assert kind == ("FSDP2Error" if problems else "nothing")


# --- transformers.Trainer ---------------------------------------------------------------------------------------------

PLAIN = {"version": 2, "auto_wrap_policy": "NO_WRAP"}  # as on the page


def _trainer(argv: list[str], out: str, kind: str, model_seed: int, fsdp_config: dict[str, Any] | None) -> Any:
    """Return a transformers.Trainer with a model of ours and the data of examples/finetune_hf.py in its order."""
    _accelerate(kind)
    from transformers import Trainer, TrainingArguments

    args = script().options(argv)
    train = script().read_data(args).train
    sequences = train[script().order(len(train), args.seed)]
    data = [{"input_ids": tokens, "labels": tokens} for tokens in sequences]
    settings: dict[str, Any] = {
        "use_cpu": True,
        "accelerator_config": {"use_configured_state": True},
        "per_device_train_batch_size": args.batch,
        "gradient_accumulation_steps": args.accumulate,
        "max_steps": args.steps,
        "learning_rate": args.lr,
        "weight_decay": args.weight_decay,
        "lr_scheduler_type": args.schedule,
        "warmup_steps": args.warmup,
        "max_grad_norm": args.clip,
        "optim": "adamw_torch",
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_steps": STEPS // 2,
        "report_to": [],
        "disable_tqdm": True,
    }
    args.seed = model_seed
    model = _plain(args)
    if fsdp_config == PLAIN:
        return on_the_page("make_trainer")(model, args.config, data, out, **settings)
    if fsdp_config is not None:
        settings |= {"fsdp": True, "fsdp_config": dict(fsdp_config)}
    arguments = TrainingArguments(out, **settings)
    return Trainer(wrap_model(model, args.config), arguments, train_dataset=data, eval_dataset=data)


def _trained(argv: list[str], out: str, fsdp_config: dict[str, Any], start: str | None) -> tuple[Run, float]:
    with _quiet():
        trainer = _trainer(argv, out, "MULTI_GPU", 5 if start else 1234, fsdp_config)
        run = Run.of(trainer.model)
        trainer.train(resume_from_checkpoint=start)
        lines = [line for line in trainer.state.log_history if "loss" in line]
        run.losses, run.norms = [line["loss"] for line in lines], [line["grad_norm"] for line in lines]
        eval_loss = trainer.evaluate(trainer.train_dataset[:4])["eval_loss"]
        run.params = {name: full(param) for name, param in trainer.model.named_parameters()}
        assert Run.of(trainer.model_wrapped).units == run.units
    return run, eval_loss


@pytest.mark.parametrize("state", [None, pytest.param("SHARDED_STATE_DICT", marks=SLOW)])
def test_transformers_trainer_trains_saves_and_resumes(ranks: RankPool, tmp_path: Path, state: str | None) -> None:
    argv = _argv(tmp_path, YAML, weight_decay=0)
    want = ranks.run(_example, argv)
    options = {**PLAIN, "state_dict_type": state} if state else PLAIN
    results = ranks.run(_trained, argv, str(tmp_path / "whole"), options, None)
    whole = [run for run, _ in results]
    assert all(run.units == UNITS for run in whole)
    _equal(whole, want, 2e-6)  # Trainer divides the sum of the losses by the number of tokens
    start = str(tmp_path / "whole" / f"checkpoint-{STEPS // 2}")
    halves = [run for run, _ in ranks.run(_trained, argv, str(tmp_path / "halves"), options, start)]
    assert [run.losses for run in halves] == [run.losses for run in whole]
    assert [run.norms for run in halves] == [run.norms for run in whole]
    for one, other in zip(halves, whole):
        assert all(torch.equal(one.params[name], param) for name, param in other.params.items())
    if state is None:  # whole tensors are Trainer's default
        with _quiet():
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / f"checkpoint-{STEPS}").eval()
        assert all(torch.equal(param, whole[0].params[name]) for name, param in model.named_parameters())
        args = script().options(argv)
        train = script().read_data(args).train
        tokens = train[script().order(len(train), args.seed)][:4]
        with torch.no_grad():
            assert results[0][1] == pytest.approx(model(input_ids=tokens, labels=tokens).loss.item(), rel=1e-6)


def _refused_trainer(argv: list[str], out: str, kind: str) -> list[str]:
    with _quiet():
        trainer = _trainer(argv, out, kind, 1234, None)
        return [message(trainer.train)[1], message(trainer.evaluate)[1]]


@pytest.mark.parametrize("kind", ["MULTI_CPU", "MULTI_GPU"])
def test_transformers_trainer_without_fsdp2_is_refused(
    ranks: RankPool, argv: list[str], tmp_path: Path, kind: str
) -> None:
    assert ranks.run(_refused_trainer, argv, str(tmp_path / "trainer"), kind) == [[REFUSED] * 2] * 2
    assert not list((tmp_path / "trainer").glob("checkpoint*"))
