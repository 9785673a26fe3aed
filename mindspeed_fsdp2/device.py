"""Which accelerator this process uses. The only file that imports torch_npu."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from .errors import ConfigError

DEVICE_TYPES = ("npu", "cuda", "cpu")


def find_device_type() -> str:
    """Return the device type to train on: ``"npu"`` before ``"cuda"`` before ``"cpu"``.

    torch_npu is imported when it is installed, because only its import makes ``torch.npu`` exist.

    Raises:
        ConfigError: torch_npu is installed but its import fails; the message carries what it said.
    """
    if _npu_available():
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device_type(device_type: str) -> None:
    """Raise unless ``device_type`` is one this package can shard on.

    Raises:
        ConfigError: Unknown device type.
    """
    if device_type not in DEVICE_TYPES:
        raise ConfigError(f"device_type: {device_type!r} is not a device type. Use one of {', '.join(DEVICE_TYPES)}.")


def current_device(device_type: str) -> torch.device:
    """Return the device that this rank computes on, e.g. ``cuda:3``; ``cpu`` has no index."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, device_module(device_type).current_device())


def device_module(device_type: str) -> Any:
    """Return ``torch.npu``, ``torch.cuda`` or ``torch.cpu``.

    Their common part (current device, generator state) has no common type in torch, hence ``Any``.
    """
    return getattr(torch, device_type)


def _npu_available() -> bool:
    if importlib.util.find_spec("torch_npu") is None:
        return False
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"torch_npu is installed but cannot be imported: {error}. "
            "Source the CANN environment (set_env.sh), or uninstall torch_npu on machines without an NPU."
        ) from error
    return bool(device_module("npu").is_available())
