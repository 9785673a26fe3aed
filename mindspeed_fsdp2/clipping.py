"""Gradient clipping for any wrapped model."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .apply import sharded
from .errors import FSDP2Error
from .gathering import reshard_all
from .grad_sync import grad_norm


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients of ``model`` so that their norm is at most ``max_norm`` (**in place**, **collective**).

    Args:
        model: A wrapped model after the backward of a step's last micro-batch; an unwrapped one counts as replicated.
        max_norm: Upper bound, a number from 0 on; ``inf`` only measures.
        norm_type: ``p`` of the p-norm, a number above 0; ``inf`` is the largest entry.

    Returns:
        The norm before clipping, a plain scalar tensor, the same on every rank.

    Raises:
        FSDP2Error: ``norm_type`` is no norm, ``max_norm`` no bound, or gradients are not reduced yet.
    """
    if isinstance(max_norm, (str, bool)) or not max_norm >= 0:  # a negative one would turn the gradients around
        raise FSDP2Error(f"clip_grad_norm_: max_norm {max_norm!r} is no bound. Write a number from 0 on or math.inf.")
    if isinstance(norm_type, (str, bool)) or not norm_type > 0:
        raise FSDP2Error(f"clip_grad_norm_: norm_type {norm_type!r} is no norm. Write a number above 0 or math.inf.")
    handle = sharded(model)
    if handle is not None:
        if handle.state.unfinished:
            raise FSDP2Error(
                "clip_grad_norm_: it came after a micro-batch that is not its step's last, so gradients are not "
                "reduced yet. Run the last micro-batch of every step in accumulate(model, last=True)."
            )
        reshard_all(handle.module)  # after a forward without a backward parameters() would be gathered ones
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    total = grad_norm(grads, norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local.mul_(factor.to(local.device))
    return total
