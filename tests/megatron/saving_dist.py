"""Runs that save and load in torch_dist, with FSDP2 and with Megatron's DDP, and what the tests change in them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from tests.megatron import saving_specs, specs
from tests.megatron.jobs import EXAMPLE, JobResult, MegatronJobs
from tests.megatron.tiny import FLAGS

HOOK = "tests.megatron.saving_dist:prepare"
BATCH = 12  # samples of a step, for 1, 2, 3 and 4 data-parallel ranks
AUTO: Mapping[str, Any] = {"sharding_size": "auto"}
Flags = Mapping[str, str | None]


@dataclass(frozen=True)
class Setup:
    """One way to run.

    Attributes:
        ranks: Number of ranks.
        settings: The YAML; None for plain DDP without the plugin.
        flags: Changes to the tiny GPT's flags.
        tensor: Tensor-parallel ranks.
        changes: Names of :data:`CHANGES` and of ``saving_specs.CHANGES``.
        drop: Flags of the tiny GPT to leave out.
        script: The pretrain script.
        env: Variables.
    """

    ranks: int = 2
    settings: Mapping[str, Any] | None = field(default_factory=lambda: AUTO)
    flags: Flags = field(default_factory=dict)
    tensor: int = 1
    changes: str = ""
    drop: tuple[str, ...] = ()
    script: Path = EXAMPLE
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Runs:
    """Runs jobs that share a data set and a folder.

    Attributes:
        jobs: The runner.
        data: Prefix of the data set.
        folder: Where checkpoints and YAML files go.
    """

    jobs: MegatronJobs
    data: str
    folder: Path
    _configs: dict[str, Path] = field(default_factory=dict)
    _sources: list[tuple[Setup, JobResult, JobResult]] = field(default_factory=list)

    def source(self, setup: Setup) -> tuple[JobResult, JobResult]:
        """Return a run that ended after saving at iteration 3, in its folder, and one to iteration 5; kept."""
        for known, saved, whole in self._sources:
            if known == setup:
                return saved, whole
        folder = self.folder / f"source{len(self._sources)}"
        saved = replace(self.run(setup, "--save", str(folder), "--save-interval", "3", steps=3), folder=folder)
        whole = self.run(setup, steps=5)
        self._sources.append((setup, saved, whole))
        return saved, whole

    def run(self, setup: Setup, *extra: str, steps: int = 10, check: bool = True) -> JobResult:
        """Run to iteration ``steps`` of ten, with ``extra`` flags as typed."""
        parallel = setup.ranks // setup.tensor
        size = {"train_iters": "10", "make_vocab_size_divisible_by": "2"} | {
            "global_batch_size": str(BATCH),
            "micro_batch_size": str(BATCH // parallel),
            "tensor_model_parallel_size": str(setup.tensor),
            "ckpt_format": "torch_dist",
        }
        if steps < 10:
            size["exit_interval"] = str(steps)
        changed = {f"--{name.replace('_', '-')}": value for name, value in {**size, **setup.flags}.items()}
        flags = {
            **FLAGS,
            **changed,
            "--train-data-path": f"{self.data}-train",
            "--valid-data-path": f"{self.data}-valid",
        }
        kept = [pair for pair in flags.items() if pair[0] not in setup.drop]
        argv = [part for pair in kept for part in pair if part is not None]
        if setup.settings is not None:
            argv += ["--use-torch-fsdp2", "--fsdp2-config-path", self._config(setup.settings)]
        connections = "1" if setup.settings is None else "8"  # what Megatron wants of each
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": connections, "SAVING": setup.changes, **setup.env}
        return self.jobs.run(
            [*argv, *extra],
            world_size=setup.ranks,
            plugin=setup.settings is not None,
            env=env,
            hook=HOOK,
            check=check,
            script=setup.script,
            timeout=90,
        )

    def _config(self, settings: Mapping[str, Any]) -> str:
        text = yaml.safe_dump(dict(settings))
        if text not in self._configs:
            self._configs[text] = self.folder / f"config{len(self._configs)}.yaml"
            self._configs[text].write_text(text)
        return str(self._configs[text])


def prepare(extra: dict[str, Any]) -> None:
    """Hook of the runner: ``saving_specs.prepare`` with the changes below among its own."""
    saving_specs.CHANGES.update(CHANGES)
    saving_specs.prepare(extra)


# --- models ----------------------------------------------------------------------------------------------------------


def late_and_never() -> None:
    """Give a GPT a weight that takes part from the fourth step on, and one that never does."""
    from megatron.training import get_args

    def scale(model: nn.Module, output: Any) -> Any:
        return output * model.late if get_args().curr_iteration >= 3 else output  # type: ignore[operator]

    def add(model: nn.Module) -> None:
        width = model.config.hidden_size  # type: ignore[union-attr]
        model.late = nn.Parameter(torch.ones(width))  # type: ignore[arg-type]
        model.never = nn.Parameter(torch.ones(width))  # type: ignore[arg-type]
        model.decoder.final_layernorm.register_forward_hook(  # type: ignore[union-attr, operator]
            lambda _module, _args, output: scale(model, output)
        )

    specs._after_init(add)


def _changed_state(change: Callable[[dict[str, Any]], None]) -> None:
    """Let ``change`` have a go at what a GPT's ``sharded_state_dict`` returns."""
    from megatron.core.models.gpt import GPTModel

    original = GPTModel.sharded_state_dict

    @functools.wraps(original)
    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = dict(original(self, *args, **kwargs))
        change(state)
        return state

    GPTModel.sharded_state_dict = sharded_state_dict


FINAL_NORM, QKV = "decoder.final_layernorm.weight", "decoder.layers.0.self_attention.linear_qkv.weight"


def no_method() -> None:
    """Take a GPT its ``sharded_state_dict``."""
    from megatron.core.models.gpt import GPTModel

    GPTModel.sharded_state_dict = None


def other_name() -> None:
    """Return the last norm under another name."""

    def change(state: dict[str, Any]) -> None:
        state["norm"] = state.pop(FINAL_NORM)

    _changed_state(change)


def one_key() -> None:
    """Save the output layer under the key of the embedding."""

    def change(state: dict[str, Any]) -> None:
        state["output_layer.weight"].key = state["embedding.word_embeddings.weight"].key

    _changed_state(change)


def transposed() -> None:
    """Save a weight transposed."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    def build(key: str, data: torch.Tensor, replica_id: Any, _range: Any) -> Any:
        return {"t": ShardedTensor.from_rank_offsets(key, data.t().contiguous(), replica_id=replica_id)}

    def change(state: dict[str, Any]) -> None:
        entry = state["output_layer.weight"]
        state["output_layer.weight"] = ShardedTensorFactory(
            entry.key, entry.data, build, lambda loaded: loaded["t"].t(), entry.replica_id
        )

    _changed_state(change)


def a_copy() -> None:
    """Describe a copy of the last norm, as a state dict without keep_vars holds."""

    def change(state: dict[str, Any]) -> None:
        state[FINAL_NORM].data = state[FINAL_NORM].data.clone()

    _changed_state(change)


def no_copies() -> None:
    """Let tensor-parallel rank 1 write what rank 0 writes too."""

    def change(state: dict[str, Any]) -> None:
        state[FINAL_NORM].replica_id = (0, 0, 0)

    _changed_state(change)


def parallel_load() -> None:
    """Let Megatron's parallel load run in CPU mode: a default argument of it holds the real torch.empty."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    original = ShardedTensor.init_data

    def init_data(self: Any, device: Any, init_fn: Any = None) -> None:
        original(self, device, init_fn or torch.empty)

    ShardedTensor.init_data = init_data


CHANGES: dict[str, Callable[[], None]] = {
    change.__name__: change
    for change in (late_and_never, no_method, other_name, one_key, transposed, a_copy, no_copies, parallel_load)
}
