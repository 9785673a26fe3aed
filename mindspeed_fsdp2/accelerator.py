"""A wrapped model in the hands of Hugging Face Accelerate, and of ``transformers.Trainer``, which goes through it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from .apply import Sharded, sharded
from .errors import FSDP2Error, PlanError

_MARK = "_is_accelerate_prepared"  # set by Accelerate on what it prepared, and asked for before it wraps a model
_PLUGIN = 'FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP")'
_SETTINGS = 'fsdp=True, fsdp_config={"version": 2, "auto_wrap_policy": "NO_WRAP"}'


class _Unprepared:
    """Stands for the mark of a model that Accelerate has not prepared.

    Accelerate's FSDP 2 takes a sharded model as it is, without asking for the mark, and sets it. All else would put
    DDP or FSDP 1 around the model, and save one rank's shards of the optimizer state as if they were the whole.
    """

    def __bool__(self) -> bool:
        raise FSDP2Error(
            "Accelerator.prepare: this model was sharded by wrap_model already, and Accelerate would wrap it again or "
            f"save one rank's part of it. Choose its FSDP 2, which takes the model as it is: {_PLUGIN}, or in "
            f"TrainingArguments {_SETTINGS}. Without Accelerate: the loop of examples/finetune_hf.py."
        )


def check_unprepared(model: nn.Module) -> None:
    """Check that Accelerate does not have the model yet.

    Raises:
        PlanError: It has wrapped or sharded it.
    """
    if vars(model).get(_MARK) is True and sharded(model) is None:
        raise PlanError(
            "model: Accelerator.prepare had it first. Call wrap_model before prepare, and give Accelerate "
            f"{_PLUGIN}, which takes the model as it is."
        )


def guard_accelerate(handle: Sharded) -> None:
    """Let Accelerate take the model as it is, or not at all (**in place**; every unit is sharded)."""
    names = {fqn: handle.module.get_submodule(fqn) for unit in handle.plan.units for fqn in unit.fqns}

    def check(model: nn.Module, _args: Any) -> None:
        if vars(model).get(_MARK) is not True:
            return
        first.remove()
        problems = [*_changes(model, names), *_unread_settings(handle), *_mixed_up(model)]
        if problems:
            raise FSDP2Error("\n".join(problems))

    setattr(handle.module, _MARK, _Unprepared())
    # FSDP 2 of Accelerate asks the model for nothing while it prepares. Before FSDP's own, which gathers.
    first = handle.module.register_forward_pre_hook(check, prepend=True)


def _changes(model: nn.Module, names: dict[str, nn.Module]) -> Iterator[str]:
    found = dict(model.named_modules(remove_duplicate=False))
    moved = [fqn for fqn, module in names.items() if found.get(fqn) is not module]
    if moved:
        yield (
            f"Accelerator.prepare: it put something around units, {moved[0]} among them, as for activation "
            "checkpointing. Leave activation_checkpointing out there and list the modules in recompute_modules."
        )


def _unread_settings(handle: Sharded) -> Iterator[str]:
    """Yield what was asked of Accelerate and never reaches a model that is sharded already."""
    module = sys.modules.get("accelerate.state")
    if module is None:
        return
    state: Any = module.AcceleratorState()
    config = handle.plan.config
    if state.mixed_precision not in ("no", config.param_dtype):
        here = "absent" if config.param_dtype is None else config.param_dtype
        yield (
            f"Accelerator: mixed_precision {state.mixed_precision!r} does not reach a model of wrap_model, whose "
            f"param_dtype is {here}. Write param_dtype: {state.mixed_precision} in the YAML file, or leave "
            "mixed_precision out (in TrainingArguments bf16 and fp16)."
        )
    if isinstance(state.fsdp_plugin.cpu_offload, CPUOffloadPolicy) and not any(u.offload for u in handle.plan.units):
        yield (
            "Accelerator: cpu_offload does not reach a model of wrap_model. Write offload_to_cpu: true in the YAML "
            "file, or leave cpu_offload out."
        )


def _mixed_up(model: nn.Module) -> Iterator[str]:
    """Yield what the optimizer has lost: Accelerate finds parameters again by their address, which empty ones share."""
    empty = [name for name, param in model.named_parameters() if isinstance(param, DTensor) and _has_empty(param)]
    if len(empty) > 1:
        more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
        yield (
            f"Accelerator.prepare: it takes parameters without rows on some rank for one and the same: "
            f"{', '.join(empty[:3])}{more}. List their modules in ignored_modules, or use fewer ranks in "
            "sharding_size."
        )


def _has_empty(param: DTensor) -> bool:
    """Return whether the last of the ranks, which has the fewest rows, has none."""
    ranks = param.device_mesh.size(param.device_mesh.ndim - 1)
    rows = -(-param.shape[0] // ranks)
    return rows * (ranks - 1) >= param.shape[0]
