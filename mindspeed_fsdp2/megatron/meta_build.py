"""Megatron builds its model inside ``meta_init`` where ``--init-model-with-meta-device`` is given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from megatron.training import get_args
from torch import nn

from ..errors import PlanError
from ..materialize.build import find_recording, recording
from ..materialize.fill import settle
from ..materialize.find import deferred_buffers
from ..plan.checks import some
from ..rng import RandomState
from .patcher import Patch


class MetaBuild:
    """Wraps the functions that build a model; one may call the other, so they share what is under way."""

    def __init__(self) -> None:
        """Start outside of both."""
        self._active = False

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a building function that records how the model is initialised, until FSDP2 shards it.

        Megatron's own ``torch.device("meta")`` does not reach its parallel layers, which name their device.
        """

        @functools.wraps(original)
        def build(*rest: Any, **named: Any) -> Any:
            bound = inspect.signature(original).bind(*rest, **named)
            bound.apply_defaults()
            args = get_args()
            wanted = args.use_torch_fsdp2 and getattr(args, "init_model_with_meta_device", False)
            if self._active or not wanted or not bound.arguments.get("wrap_with_ddp", True):
                return original(*rest, **named)
            self._active = True
            try:
                with recording():
                    return original(*rest, **named)
            finally:
                self._active = False

        return build


def end_recording(model: nn.Module) -> None:
    """Record nothing more of ``model``, which is built (**in place**); without a recording nothing happens.

    Raises:
        PlanError: A parameter was built on the accelerator all the same.
    """
    found = find_recording(model)
    if found is None:
        return
    found.recorder.close()
    there = [name for name, param in model.named_parameters() if param.device.type not in ("meta", "cpu")]
    if there:
        raise PlanError(
            f"--init-model-with-meta-device: {some(there)} took memory on the device while the model was built. Make "
            "them with torch.empty, or remove the flag."
        )


def prepare_own_sharding(model: nn.Module, random_states: Sequence[RandomState], device: torch.device) -> None:
    """Give buffers their values, and leave the random generators where ordinary construction would (**in place**).

    For a model that shards and initialises itself, from states that mean something; its ``init_weights()`` knows of
    parameters only. Does nothing without a recording.

    Args:
        model: The built model.
        random_states: Sources with states of their own.
        device: This rank's device.
    """
    buffers, found = deferred_buffers(model), find_recording(model)
    if buffers is not None and found is not None:
        buffers.complete_buffers(device)
        settle(found.recorder.tape, random_states)


def refuse_left_on_meta(model: nn.Module) -> None:
    """Raise if a model that sharded itself has tensors without memory.

    Raises:
        PlanError: Names them.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    if left := [name for name, tensor in tensors if tensor.is_meta]:
        raise PlanError(
            f"--init-model-with-meta-device: the model's own fully_shard() left {some(left)} on the meta device. Call "
            "to_empty() and init_weights() in it, or remove the flag."
        )


_build = MetaBuild()

META: Final[tuple[Patch, ...]] = (
    Patch(
        name="meta-build",
        targets=(
            "megatron.training.training:get_model",
            "megatron.training.models.dist_utils:unimodal_build_distributed_models",
        ),
        make=_build.wrap,
        also_aliases=True,
        why="--init-model-with-meta-device leaves the parallel layers on the device and the rest without values.",
        remove_when="Megatron initialises an FSDP2 model that was built on the meta device.",
    ),
)
