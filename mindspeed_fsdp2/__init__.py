"""PyTorch FSDP2 for Megatron/MindSpeed users, driven by one YAML file.

Public names load on first use, so that ``import mindspeed_fsdp2`` needs neither torch nor Megatron.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accumulation import accumulate
    from .checkpoint import export_hf, list_checkpoints, load_checkpoint, save_checkpoint, save_checkpoint_async
    from .clipping import clip_grad_norm_
    from .config import FSDP2Config, load_config
    from .errors import (
        CheckpointError,
        ConfigError,
        ConflictError,
        FSDP2Error,
        ModulePathError,
        PatchError,
        PlanError,
    )
    from .full_params import full_parameters
    from .full_state import load_full_state_dict
    from .materialize import meta_init
    from .plan import FSDP2Plan, build_plan
    from .wrap import wrap_model

__version__ = "0.1.0"

_HOME = {
    "accumulate": "accumulation",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "ConflictError": "errors",
    "FSDP2Config": "config",
    "FSDP2Error": "errors",
    "FSDP2Plan": "plan",
    "ModulePathError": "errors",
    "PatchError": "errors",
    "PlanError": "errors",
    "build_plan": "plan",
    "clip_grad_norm_": "clipping",
    "export_hf": "checkpoint",
    "full_parameters": "full_params",
    "list_checkpoints": "checkpoint",
    "load_checkpoint": "checkpoint",
    "load_config": "config",
    "load_full_state_dict": "full_state",
    "meta_init": "materialize",
    "save_checkpoint": "checkpoint",
    "save_checkpoint_async": "checkpoint",
    "wrap_model": "wrap",
}

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ConflictError",
    "FSDP2Config",
    "FSDP2Error",
    "FSDP2Plan",
    "ModulePathError",
    "PatchError",
    "PlanError",
    "accumulate",
    "build_plan",
    "clip_grad_norm_",
    "export_hf",
    "full_parameters",
    "list_checkpoints",
    "load_checkpoint",
    "load_config",
    "load_full_state_dict",
    "meta_init",
    "save_checkpoint",
    "save_checkpoint_async",
    "wrap_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
