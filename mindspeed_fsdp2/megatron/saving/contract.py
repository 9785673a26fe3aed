"""What torch_dcp needs of a model, checked when it is built rather than at its first save."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from torch import nn

from ...errors import CheckpointError
from .folders import TORCH_DCP

_METHOD = "state_dict_for_save_checkpoint"


def check_contract(model: nn.Module, args: Namespace) -> None:
    """Refuse a model whose checkpoint would not hold its ``state_dict()``, in a run that saves or loads torch_dcp.

    Args:
        model: The sharded model below its wrappers.
        args: Megatron's arguments.

    Raises:
        CheckpointError: The method is missing, or returns other keys or shapes; names them.
    """
    asked = args.save is not None or args.load is not None or getattr(args, "pretrained_checkpoint", None) is not None
    if args.ckpt_format != TORCH_DCP or not asked:
        return
    kind = type(model).__name__.removeprefix("FSDP")
    method = getattr(model, _METHOD, None)
    if not callable(method):
        raise CheckpointError(
            f"{kind}: it has no {_METHOD}(), which Megatron saves torch_dcp checkpoints with. Derive it from "
            "MegatronModule, or define the method: return self.state_dict(prefix=prefix, keep_vars=keep_vars)."
        )
    own, saved = model.state_dict(), method()
    lines = _differences(own, saved) if isinstance(saved, dict) else [f"it returns a {type(saved).__name__}"]
    if lines:
        listed = "\n  ".join(lines)
        raise CheckpointError(
            f"{kind}.{_METHOD}(): it must return what state_dict() returns, for torch_dcp loads by these keys:\n  "
            f"{listed}\nReturn self.state_dict(prefix=prefix, keep_vars=keep_vars), or write --ckpt-format torch_dist."
        )


def _differences(own: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    lines = []
    if lacking := [key for key in own if key not in saved]:
        lines.append(f"it lacks {_shown(lacking)}")
    if strange := [key for key in saved if key not in own]:
        lines.append(f"state_dict() lacks {_shown(strange)}")
    for key, value in own.items():
        other = saved.get(key)
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor) and value.shape != other.shape:
            lines.append(f"{key} is {tuple(other.shape)}, in state_dict() {tuple(value.shape)}")
    return lines[:20]


def _shown(names: list[Any]) -> str:
    more = f", and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(map(str, names[:10])) + more
