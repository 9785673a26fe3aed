"""What a fault report has to say of a machine: versions, devices, environment variables."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import metadata

import torch
import torch.distributed as dist

from ..device import device_module, library_versions

PACKAGES = (
    "mindspeed_fsdp2",
    "torch",
    "torch_npu",
    "numpy",
    "megatron-core",
    "mindspeed",
    "mindspeed-mm",
    "mindspeed-llm",
    "transformers",
    "accelerate",
)
# Only names that configure what is checked here: a report is sent to strangers.
_PREFIXES = (
    "ASCEND_",
    "HCCL_",
    "NCCL_",
    "GLOO_",
    "PYTORCH_",
    "TORCH_",
    "CUDA_",
    "NPU_",
    "TASK_QUEUE_",
    "COMBINED_",
    "CPU_AFFINITY_",
    "STREAMS_PER_DEVICE",
    "MULTI_STREAM_MEMORY_REUSE",
    "OMP_NUM_THREADS",
)
_SILENT = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def collect_facts(device: torch.device, ranks: int) -> dict[str, dict[str, str]]:
    """Return titled groups of facts about this rank's machine."""
    return {
        "versions": {**_versions(), **library_versions(device.type)},
        "devices": _devices(device, ranks),
        "environment": relevant(os.environ) or {"(none)": "no variable that matters is set"},
    }


def relevant(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter here, without any whose name sounds like a secret."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if name.startswith(_PREFIXES) and not any(word in name for word in _SILENT)
    }


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    found["torch"] = torch.__version__  # the build too, which the package's version leaves out
    return found


def _devices(device: torch.device, ranks: int) -> dict[str, str]:
    found = {"ranks": str(ranks), "device type": device.type, "backends": dist.get_backend_config()}
    if device.type == "cpu":
        found["processors"] = str(os.cpu_count())
        return found
    module = device_module(device.type)
    found["devices seen"] = str(module.device_count())
    found["name"] = str(module.get_device_name(device.index))
    free, total = module.mem_get_info()
    found["memory"] = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free on rank 0's device"
    return found
