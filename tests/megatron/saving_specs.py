"""Changes to the ranks of a job that saves or loads: other optimizers, own random states, faults at chosen moments.

A job names them in the variable ``SAVING``; the runner's hook, :func:`prepare`, makes them before the script starts.
"""

from __future__ import annotations

import functools
import importlib
import os
import random
import resource
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.megatron import specs


def prepare(extra: dict[str, Any]) -> None:
    """Hook of the runner: what ``specs.prepare`` does, the changes of ``SAVING``, and a note of the optimizer."""
    specs.prepare(extra)
    _note_optimizer(extra)
    _note_threads(extra)
    for name in os.environ.get("SAVING", "").split():
        CHANGES[name]()
    if point := os.environ.get("KILL_AT"):
        kill_at(point)


def _note_optimizer(extra: dict[str, Any]) -> None:
    """Keep the optimizer's full state before training and after it, by number of the parameter."""
    from megatron.training import training

    original = training.train

    @functools.wraps(original)
    def train(forward_step: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        extra["optimizer_start"] = full_state(optimizer)
        extra["random_start"] = [random.getstate(), torch.get_rng_state()]
        try:
            result = original(forward_step, model, optimizer, *args, **kwargs)
            extra["flops"] = result[1]
            return result
        finally:  # --exit-interval leaves from inside the loop
            extra["optimizer_end"] = full_state(optimizer)

    training.train = train


def _note_threads(extra: dict[str, Any]) -> None:
    """Keep the names of the threads that wrote shards."""
    from mindspeed_fsdp2.checkpoint import write

    original = write.write_pieces
    extra["threads"] = []

    @functools.wraps(original)
    def write_pieces(*args: Any, **kwargs: Any) -> Any:
        extra["threads"].append(threading.current_thread().name)
        return original(*args, **kwargs)

    write.write_pieces = write_pieces


def full_state(optimizer: Any) -> dict[str, Any]:
    """Return place of each value -> value, DTensors whole."""
    found: dict[str, Any] = {}
    for number, single in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        inner = single.optimizer
        count = 0
        for place, group in enumerate(inner.param_groups):
            found |= {f"{number}.{place}.{key}": value for key, value in group.items() if key != "params"}
            for param in group["params"]:
                for key, value in inner.state.get(param, {}).items():
                    whole = value.full_tensor() if isinstance(value, DTensor) else value
                    found[f"{number}.{count}.{key}"] = whole.clone() if isinstance(whole, torch.Tensor) else whole
                count += 1
    return found


class StepInGroup(torch.optim.Optimizer):
    """AdamW that counts steps in the param group, as the fused ones of Transformer Engine and Apex do."""

    def __init__(self, params: Any, lr: float, betas: Any, eps: float, weight_decay: float, **_named: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
                state["exp_avg"].mul_(first).add_(param.grad, alpha=1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(param.grad, param.grad, value=1 - second)
                scale = group["lr"] / (1 - first ** group["step"])
                root = (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt().add_(group["eps"])
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.addcdiv_(state["exp_avg"], root, value=-scale)


def step_in_group() -> None:
    """Let Megatron take that optimizer for the one of Transformer Engine."""
    from megatron.core import optimizer

    optimizer.USING_PYTORCH_OPTIMIZER = False
    optimizer.Adam = StepInGroup


def own_seeds() -> None:
    """Give each rank random states of its own, and let training draw from them."""
    from megatron.training import training

    original = training.setup_model_and_optimizer

    @functools.wraps(original)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        rank = int(os.environ["RANK"])
        random.seed(rank)
        torch.manual_seed(100 + rank)
        return original(*args, **kwargs)

    training.setup_model_and_optimizer = setup_model_and_optimizer


def frozen_norm() -> None:
    """Freeze the last norm."""

    def freeze(model: nn.Module) -> None:
        model.decoder.final_layernorm.weight.requires_grad = False  # type: ignore[union-attr]

    specs._after_init(freeze)


def extra_state() -> None:
    """Give two norms the extra state that Transformer Engine's layers have: bytes, or none of them."""

    def add(model: nn.Module) -> None:
        norm = type(model.decoder.final_layernorm)  # type: ignore[union-attr]

        def get_extra_state(self: nn.Module) -> torch.Tensor:
            return torch.arange(3 * (self is model.decoder.final_layernorm), dtype=torch.uint8)  # type: ignore[union-attr]

        def set_extra_state(self: nn.Module, state: torch.Tensor) -> None:
            if state.tolist() != get_extra_state(self).tolist():
                raise ValueError(f"extra state {state}")

        norm.get_extra_state, norm.set_extra_state = get_extra_state, set_extra_state  # type: ignore[method-assign]

    specs._after_init(add)


def other_names() -> None:
    """Let the model return other keys to save."""
    from megatron.core.models.gpt import GPTModel

    original = GPTModel.state_dict_for_save_checkpoint

    def state_dict_for_save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = dict(original(self, *args, **kwargs))
        found["last_norm"] = found.pop("decoder.final_layernorm.weight")
        return found

    GPTModel.state_dict_for_save_checkpoint = state_dict_for_save_checkpoint


def small_disk_on_rank_1() -> None:
    """Let rank 1 write no more than 256 KiB of its shards."""
    from mindspeed_fsdp2.checkpoint import write

    original = write.write_pieces

    @functools.wraps(original)
    def write_pieces(*args: Any, **kwargs: Any) -> Any:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, limit[1]))
        try:
            return original(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    if os.environ["RANK"] == "1":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        write.write_pieces = write_pieces


# --- killed at a moment of the second save ---------------------------------------------------------------------------

# moment -> (module, function, rank that dies, whether it dies after the call)
MOMENTS: dict[str, tuple[str, str, int, bool]] = {
    "clearing": ("mindspeed_fsdp2.megatron.saving.save_seams", "prepare", 0, True),
    "folder": ("mindspeed_fsdp2.megatron.saving.dcp_write", "begin_iteration", 0, True),
    "shards": ("mindspeed_fsdp2.checkpoint.write", "write_pieces", 1, False),
    "shards-written": ("mindspeed_fsdp2.checkpoint.write", "write_pieces", 1, True),
    "index": ("mindspeed_fsdp2.checkpoint.write", "write_index", 0, True),
    "tracker-staged": ("mindspeed_fsdp2.megatron.saving.dcp_write", "stage", 0, True),
    "manifest": ("mindspeed_fsdp2.megatron.saving.folders", "seal", 0, True),
    "renamed": ("mindspeed_fsdp2.megatron.saving.dcp_write", "publish_iteration", 0, True),
    "tracker": ("mindspeed_fsdp2.megatron.saving.tracker", "sync_folder", 0, True),
    "dist-folder": ("mindspeed_fsdp2.megatron.saving.save_seams", "begin_iteration", 0, True),
    "dist-renamed": ("mindspeed_fsdp2.megatron.saving.save_seams", "publish_iteration", 0, True),
    "dist-manifest": ("mindspeed_fsdp2.megatron.saving.folders", "seal", 0, True),
}


def kill_at(moment: str) -> None:
    """End one rank with SIGKILL at ``moment`` of the second save."""
    module, name, rank, after = MOMENTS[moment]
    if int(os.environ["RANK"]) != rank:
        return
    owner = importlib.import_module(module)
    original = getattr(owner, name)
    calls = 0

    @functools.wraps(original)
    def deadly(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


def kill_between_renames() -> None:
    """End rank 0 with SIGKILL right after it has moved the old checkpoint aside."""
    from pathlib import Path

    if os.environ["RANK"] != "0":
        return
    original = Path.rename

    def rename(self: Path, target: Any) -> Path:
        result = original(self, target)
        if Path(target).name.startswith(".removing-"):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    Path.rename = rename  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[], None]] = {
    change.__name__: change
    for change in (
        extra_state,
        step_in_group,
        own_seeds,
        frozen_norm,
        other_names,
        small_disk_on_rank_1,
        kill_between_renames,
    )
}
