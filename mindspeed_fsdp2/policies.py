"""dtype names of the YAML -> PyTorch's precision policy."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def to_dtype(name: str | None) -> torch.dtype | None:
    """Return the torch dtype of a normalised YAML name; None stays None (unchanged)."""
    return None if name is None else _DTYPES[name]


def build_precision(
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    output_dtype: torch.dtype | None,
    stored_dtype: torch.dtype | None,
) -> MixedPrecisionPolicy:
    """Return the policy of one unit.

    Args:
        param_dtype: dtype of all-gather and compute, or None for the stored one.
        reduce_dtype: dtype of gradient reduction, or None for the compute dtype.
        output_dtype: dtype of floating outputs, or None. Given for the outermost unit only: on inner units it would
            widen the activations between them.
        stored_dtype: dtype of the unit's trainable shards; None when it has none.
    """
    # reduce_dtype is always passed: torch 2.15 changes what None means. The input cast is ours (see casts.py).
    return MixedPrecisionPolicy(
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype or param_dtype or stored_dtype,
        output_dtype=output_dtype,
        cast_forward_inputs=False,
    )


def build_offload(offload: bool, pin_memory: bool, device_type: str) -> OffloadPolicy:
    """Return where the shards of one unit live.

    Args:
        offload: Whether they live in host memory.
        pin_memory: Whether that memory is pinned; without an accelerator nothing can be.
        device_type: The mesh's device.
    """
    return CPUOffloadPolicy(pin_memory=pin_memory and device_type != "cpu") if offload else OffloadPolicy()
