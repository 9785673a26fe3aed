"""What MindSpeed changes about collectives that a run must not depend on."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ...device import current_device, find_device_type
from ...errors import ConflictError
from ...plan.checks import some


def check_float64(module: nn.Module, group: dist.ProcessGroup, device_type: str | None) -> None:
    """Refuse trainable float64 parameters where ``all_reduce`` leaves such tensors as they are.

    MindSpeed lets it reduce a float32 copy and drops the result, because HCCL has no float64. Replicas and whole
    parameters would each keep their own gradient. **Collective** over ``group`` if there are such parameters.

    Raises:
        ConflictError: On every rank alike.
    """
    double = [name for name, p in module.named_parameters() if p.requires_grad and p.dtype == torch.float64]
    if not double:
        return
    device = current_device(device_type or find_device_type())
    ones = torch.ones(1, dtype=torch.float64, device=device)
    dist.all_reduce(ones, group=group)
    if ones.item() != dist.get_world_size(group):
        raise ConflictError(
            f"these parameters are float64: {some(double)}. Here torch.distributed.all_reduce leaves float64 tensors "
            "unreduced, as MindSpeed has it, so gradients would differ between ranks. Convert the model to float32."
        )
