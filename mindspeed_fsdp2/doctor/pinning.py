"""Pinned host memory, from which copies to the device run in the background."""

from __future__ import annotations

import torch

from ..device import device_module
from .checks import Check, Context, NotApplicable, WrongResult

_COUNT = 1 << 20


def checks() -> list[Check]:
    """Return the checks of this module."""
    return [Check("pinned memory", _pinned)]


def _pinned(context: Context) -> str:
    if context.device.type == "cpu":
        raise NotApplicable("no accelerator")
    source = torch.arange(_COUNT, dtype=torch.float32, device="cpu")
    pinned = source.pin_memory()
    if not pinned.is_pinned():
        raise WrongResult("pin_memory() returned memory that is not pinned. Set pin_memory: false")
    if not torch.equal(pinned, source):
        raise WrongResult("pin_memory() changed the values")
    module = device_module(context.device.type)
    there = pinned.to(context.device, non_blocking=True)
    back = torch.empty(_COUNT, pin_memory=True, device="cpu")
    back.copy_(there, non_blocking=True)
    module.synchronize()
    if not torch.equal(back, source):
        raise WrongResult("values changed on the way to the device and back")
    return ""
