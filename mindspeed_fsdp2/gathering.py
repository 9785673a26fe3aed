"""Gathering and resharding around what FSDP does itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ._torch_older import COMPLETES_FORWARDS, complete_partial_forward
from .hidden_outputs import tensors_in
from .step_state import StepState


def reshard_after_evaluation(state: StepState, module: nn.Module, _args: Any, output: Any) -> None:
    """Reshard every unit of ``module`` after a forward that no backward follows; a forward hook of the root."""
    # What stays gathered for a backward that never comes (the root; every unit that is not resharded, or to fewer
    # ranks) would be used with its old values after the next step, and an optimizer built now would hold dead
    # tensors. A backward in evaluation mode gathers again.
    if state.gathered or (torch.is_grad_enabled() and module.training and not _without_backward(module, output)):
        return
    reshard_all(module)


def _without_backward(module: nn.Module, output: Any) -> bool:
    """Return whether nothing is trainable, as where a generator is frozen while its discriminator learns."""
    if any(param.requires_grad for param in module.parameters()):
        return False
    tensors = list(tensors_in(output, opaque=True))  # without any, the loss may lie in an attribute of the model
    return bool(tensors) and not any(tensor.requires_grad for tensor in tensors)


def reshard_all(module: nn.Module) -> None:
    """Reshard every unit of ``module`` (**in place**); nothing happens to one that is sharded."""
    complete_forwards(module)
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def complete_forwards(module: nn.Module) -> None:
    """Note for every unit that its forward is over, whichever of its modules ran (**in place**)."""
    for unit in () if COMPLETES_FORWARDS else module.modules():
        if isinstance(unit, FSDPModule):
            complete_partial_forward(unit)


class GatherOnce:
    """Makes the gathered parameters exist as normal tensors before the first forward; a forward pre-hook of the root.

    FSDP keeps the tensors of the first gather; made in inference mode, they could never be trained on. And a backward
    that does not reduce fails on a unit that was never gathered, because no micro-batch has run it yet.
    """

    def __init__(self, always: bool) -> None:
        """Prepare the hook.

        Args:
            always: Whether to gather once in training too, not before a forward in inference mode only.
        """
        self._always = always
        self._done = False

    def __call__(self, module: nn.Module, _args: Any) -> None:
        """Gather and reshard unit by unit, the first time only."""
        if self._done:
            return
        self._done = True
        if self._always or torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                for unit in module.modules():
                    if isinstance(unit, FSDPModule):
                        unit.unshard()
                        unit.reshard()
