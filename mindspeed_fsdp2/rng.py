"""Random states that recomputation keeps and restores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .device import device_module


@dataclass(frozen=True)
class RandomState:
    """One source of random numbers: ``get`` returns a copy of its state, ``set`` puts one back.

    The type of a state is the source's own business, hence ``Any``.
    """

    get: Callable[[], Any]
    set: Callable[[Any], None]


def random_states(device_type: str) -> tuple[RandomState, ...]:
    """Return the CPU generator and the generator of the mesh's device.

    The device is named by the mesh, never inferred from a module's arguments as torch.utils.checkpoint does: a
    module that is called with CPU tensors may still draw dropout masks on the device.
    """
    cpu = RandomState(torch.get_rng_state, torch.set_rng_state)
    if device_type == "cpu":
        return (cpu,)
    module = device_module(device_type)
    return (cpu, RandomState(module.get_rng_state, module.set_rng_state))


def snapshot(states: Sequence[RandomState]) -> list[Any]:
    """Return the current state of every source."""
    return [state.get() for state in states]


def restore(states: Sequence[RandomState], values: Sequence[Any]) -> None:
    """Put every source back to the state recorded in ``values`` (**in place**)."""
    for state, value in zip(states, values):
        state.set(value)
