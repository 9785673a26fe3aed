"""What the process group's backends must carry: checked before any collective of the work itself."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from .device import supports_bf16
from .errors import ConfigError
from .plan import FSDP2Plan

DUAL_BACKENDS = {"npu": "npu:hccl,cpu:gloo", "cuda": "cuda:nccl,cpu:gloo"}

# What torch_npu lets HCCL reduce (ProcessGroupHCCL, 2.7 to 2.14). Gathering and broadcasting take every dtype.
# Averages are sums that torch_npu divides; there is no premultiplied sum.
HCCL_REDUCES = frozenset(
    {torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.bfloat16}
)


def check_backends(plan: FSDP2Plan, group: dist.ProcessGroup | None, device_type: str) -> None:
    """Raise unless the process group can carry what the plan's units will ask of it.

    Raises:
        ConfigError: No backend for the device or for offloaded units, no pinned memory for these, or gradients in a
            dtype that HCCL cannot reduce.
    """
    if device_type == "cpu":
        return
    backends = dist.get_backend_config(group)
    if f"{device_type}:" not in backends:
        raise ConfigError(
            f"process_group: its backends {backends!r} carry no tensors of {device_type} devices. Initialise "
            f"torch.distributed with {DUAL_BACKENDS[device_type]!r}."
        )
    check_offload_backend(plan, group, device_type)
    _check_pinning(plan)
    if device_type == "npu":
        _check_dtypes(plan)


def check_offload_backend(plan: FSDP2Plan, group: dist.ProcessGroup | None, device_type: str) -> None:
    """Raise unless gradients in host memory can be reduced: norms and zero counts of them need a CPU backend.

    Raises:
        ConfigError: Units are offloaded but the process group has no backend for CPU tensors.
    """
    if device_type == "cpu" or not any(unit.offload for unit in plan.units):
        return
    backends = dist.get_backend_config(group)
    if "cpu:" not in backends:
        raise ConfigError(
            f"{plan.config.where('offload_to_cpu')}: true needs a backend for CPU tensors beside {backends!r}. "
            f"Initialise torch.distributed with {DUAL_BACKENDS[device_type]!r}."
        )


def _check_pinning(plan: FSDP2Plan) -> None:
    # Where pin_memory() pins nothing, FSDP pins anew and trains on a copy that the optimizer does not see.
    if not plan.config.pin_memory or not any(unit.offload for unit in plan.units):
        return
    try:
        probe = torch.empty(1, device="cpu").pin_memory()
        said = "" if probe.is_pinned() else "pin_memory() returns memory that is not pinned"
    except RuntimeError as error:
        said = str(error).split("\n")[0]
    if said:
        raise ConfigError(
            f"{plan.config.where('pin_memory')}: true cannot be had on this machine ({said}). Set pin_memory: false."
        )


def _check_dtypes(plan: FSDP2Plan) -> None:
    # What is reduced are gradients in the reduce dtype, and their norms in the stored one or fp32.
    trained = [unit for unit in plan.units if unit.stored_dtype is not None]
    wrong = {unit.name: unit.stored_dtype for unit in trained if unit.stored_dtype not in HCCL_REDUCES}
    problems: list[str] = []
    if wrong:
        kinds = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in wrong.values()}))
        problems.append(
            f"model: HCCL cannot reduce {kinds} gradients or their norms (of {_some(wrong)}). Load the model in fp32."
        )
    reduced = {unit.name: unit.reduce_dtype or unit.param_dtype or unit.stored_dtype for unit in trained}
    rounded = [unit.name for unit in plan.units if torch.bfloat16 in (unit.param_dtype, reduced.get(unit.name))]
    if rounded and not supports_bf16("npu"):
        problems.append(
            f"{plan.config.where('param_dtype')}: this NPU does not support bf16 (used by {_some(rounded)}). Use fp16 "
            "or fp32 for param_dtype and reduce_dtype, and load the model in one of them."
        )
    if problems:
        raise ConfigError("\n".join(problems))


def _some(names: Iterable[str]) -> str:
    first, *rest = names
    return f"unit {first} and {len(rest)} more" if rest else f"unit {first}"
