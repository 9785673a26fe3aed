"""A checkpoint of the small model, saved and loaded again."""

from __future__ import annotations

import torch

from ..checkpoint import load_checkpoint, save_checkpoint
from ..wrap import wrap_model
from .checks import Check, Context, NotApplicable, WrongResult
from .training import STEPS, UNITS, build, full, train


def checks() -> list[Check]:
    """Return the checks of this module."""
    return [Check("checkpoint saved and loaded again", _round_trip)]


def _round_trip(context: Context) -> str:
    if context.folder is None:
        raise NotApplicable("several nodes: give --folder a directory that all of them share")
    settings = {**UNITS, "sharding_size": "auto"}
    model = wrap_model(build(), settings, device_type=context.device.type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, context)
    save_checkpoint(context.folder, model, optimizer, step=STEPS)
    other = wrap_model(build(seed=4), settings, device_type=context.device.type)
    resumed = torch.optim.AdamW(other.parameters(), lr=0.01)
    if (step := load_checkpoint(context.folder, other, resumed).step) != STEPS:
        raise WrongResult(f"step {step} was loaded instead of {STEPS}")
    want = {name: full(param) for name, param in model.named_parameters()}
    for name, param in other.named_parameters():
        if not torch.equal(full(param), want[name]):
            raise WrongResult(f"{name} has other values than before")
    moments = [full(state["exp_avg"]) for state in optimizer.state.values()]
    for number, state in enumerate(resumed.state.values()):
        if not torch.equal(full(state["exp_avg"]), moments[number]):
            raise WrongResult(f"the optimizer state of parameter {number} has other values than before")
    if not moments:
        raise WrongResult("there is no optimizer state")
    return f"{sum(value.numel() for value in want.values())} elements equal to the last bit"
