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

    torch_npu is imported when it is installed, because only its import makes ``torch.npu`` exist. NPUs come first
    because torch_npu's ``transfer_to_npu`` lets ``torch.cuda`` answer for them.

    Raises:
        ConfigError: torch_npu is installed but its import fails; the message carries what it said.
    """
    if _import_torch_npu() and device_module("npu").is_available():
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def resolve_device_type(asked: str | None) -> str:
    """Return the device type that ``asked`` stands for on this machine.

    Args:
        asked: ``"npu"``, ``"cuda"`` or ``"cpu"``; None takes the accelerator found.

    Returns:
        ``asked``; ``"npu"`` for ``"cuda"`` where ``transfer_to_npu`` is in force: it turns the ``cuda`` of tensor
        calls and of meshes into ``npu`` but leaves ``torch.device("cuda")`` as it is, and one model cannot be on both.

    Raises:
        ConfigError: Unknown device type, or an NPU is asked for where none can be used.
    """
    if asked is None:
        return find_device_type()
    check_device_type(asked)
    if asked == "npu":
        if not _import_torch_npu():
            raise ConfigError(
                "device_type: 'npu' needs torch_npu, which is not installed. Install the version that belongs to "
                f"torch {torch.__version__}, or use cuda or cpu."
            )
        if not device_module("npu").is_available():
            raise ConfigError(
                "device_type: 'npu' is asked for, but torch_npu sees no NPU. Look at `npu-smi info` and at "
                "ASCEND_RT_VISIBLE_DEVICES, or use cpu."
            )
    return "npu" if asked == "cuda" and cuda_means_npu() else asked


def check_device_type(device_type: str) -> None:
    """Raise unless ``device_type`` is one this package can shard on.

    Raises:
        ConfigError: Unknown device type.
    """
    if device_type not in DEVICE_TYPES:
        raise ConfigError(f"device_type: {device_type!r} is not a device type. Use one of {', '.join(DEVICE_TYPES)}.")


def cuda_means_npu() -> bool:
    """Return whether ``transfer_to_npu`` is in force, by which ``torch.cuda`` answers for NPUs."""
    npu = getattr(torch, "npu", None)
    return npu is not None and torch.cuda.is_available is npu.is_available


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


def supports_bf16(device_type: str) -> bool:
    """Return whether the device computes and reduces in bf16; the first NPUs for training do not."""
    return device_type != "npu" or bool(device_module("npu").is_bf16_supported())


def library_versions(device_type: str) -> dict[str, str]:
    """Return the versions of the libraries below torch that a fault report needs: CANN, or CUDA and NCCL."""
    if device_type == "npu":
        return {"CANN": str(device_module("npu").utils.get_cann_version())}
    if device_type == "cuda":
        nccl: Any = torch.cuda.nccl
        return {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, nccl.version()))}
    return {}


def _import_torch_npu() -> bool:
    """Import torch_npu where it is installed; return whether it is."""
    try:
        if importlib.util.find_spec("torch_npu") is None:
            return False
    except ValueError:  # a module without a spec: somebody made it by hand, so it is there
        return True
    try:
        importlib.import_module("torch_npu")
    except Exception as error:  # whatever it raises is what the user has to read
        raise ConfigError(
            f"torch_npu is installed but cannot be imported ({type(error).__name__}: {error}). Source the CANN "
            "environment (set_env.sh), install the torch_npu that belongs to this torch, or uninstall torch_npu on "
            "machines without an NPU."
        ) from error
    return True
