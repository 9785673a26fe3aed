"""A Megatron optimizer as Megatron's checkpoint code sees it, its state keyed by the names of parameters.

Megatron keys it by position: freezing a layer or another grouping of parameters would give every later parameter the
moments of its neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ...checkpoint.model_state import parameter_names
from ...checkpoint.optimizer_state import SECTION, OptimizerState, optimizer_state
from ...checkpoint.pieces import Piece, piece_of
from ...errors import CheckpointError

MASTERS = "masters"

# What --override-opt_param-scheduler takes from the command line, where Megatron keeps it in the param groups.
_SCHEDULE = ("max_lr", "min_lr", "start_wd", "end_wd", "wd_mult", "lr_mult")


class NamedOptimizer:
    """Stands in for the optimizer in ``generate_state_dict`` and ``load_checkpoint``.

    Its state is neither copied nor made up: reading it before the first step finds none, and changes nothing.

    Attributes:
        root: The root unit's module.
        singles: Megatron's single optimizers, those of a chain one by one.
    """

    def __init__(self, optimizer: Any, root: nn.Module) -> None:
        """Look through ``optimizer``, which may be None."""
        chained = getattr(optimizer, "chained_optimizers", None)
        every = chained if chained is not None else [optimizer] if optimizer is not None else []
        self.root = root
        self.singles: list[Any] = [each for each in every if not getattr(each, "is_stub_optimizer", False)]
        self._optimizer = optimizer

    @property
    def is_stub_optimizer(self) -> bool:
        """Whether there is nothing to save or load."""
        return not self.singles

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all torch optimizers."""
        return [group for single in self.singles for group in single.optimizer.param_groups]

    def state_dict(self, is_loading: bool = False) -> NamedOptimizer:
        """Return itself; what it holds is collected where it is written, and filled in where it is read."""
        return self

    def load_state_dict(self, state_dict: Callable[[], None]) -> None:
        """Install what was read.

        Args:
            state_dict: What the read left in the optimizer's place.
        """
        state_dict()

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Let the optimizer's main copies follow weights that were loaded without it."""
        if self._optimizer is not None:
            self._optimizer.reload_model_params()

    def params(self) -> dict[str, nn.Parameter]:
        """Return fqn -> what the torch optimizers step on: the parameter itself, or its main copy.

        Raises:
            CheckpointError: A trained parameter has no key in the state dict.
        """
        held = {id(param) for group in self.param_groups for param in group["params"]}
        found: dict[str, nn.Parameter] = {}
        trained = [p for p in self.root.parameters() if not held.isdisjoint((id(p), id(getattr(p, "main_param", p))))]
        for fqn, param in parameter_names(self.root, trained).items():
            main = getattr(param, "main_param", None)
            found[fqn] = main if id(param) not in held and main is not None and id(main) in held else param
        return found

    def masters(self) -> dict[str, torch.Tensor]:
        """Return fqn -> fp32 copy of each parameter that the model holds in another dtype."""
        own = parameter_names(self.root)
        return {fqn: param for fqn, param in self.params().items() if param is not own[fqn]}

    def collect(self, rank: int, ranks: int) -> tuple[OptimizerState, dict[str, Any]]:
        """Return the state of all torch optimizers as one, and the document of the main copies.

        Args:
            rank: This rank among those that save.
            ranks: Their number.

        Raises:
            CheckpointError: Something cannot be saved.
        """
        params = self.params()
        merged: dict[str, Any] = {"class": type(self.singles[0].optimizer).__name__, "groups": [], "state": {}}
        pieces: list[Piece] = []
        loose: dict[tuple[str, ...], torch.Tensor] = {}
        for number, single in enumerate(self.singles):
            found = optimizer_state(single.optimizer, params, rank, ranks)
            if found.tensors and number:
                raise CheckpointError(
                    "optimizer: a param group of the second optimizer holds tensors, which cannot be saved. Turn them "
                    "into numbers."
                )
            if found.document["class"] != merged["class"]:
                raise CheckpointError(
                    f"optimizer: {merged['class']} and {found.document['class']} in one chain cannot be saved. Use "
                    "one class for all parameters."
                )
            merged["groups"] += found.document["groups"]
            merged["state"] |= found.document["state"]
            pieces += found.pieces
            loose |= found.tensors
        masters = self.masters()
        pieces += [piece_of((SECTION, MASTERS, fqn), tensor, rank, ranks) for fqn, tensor in masters.items()]
        return OptimizerState(merged, pieces, loose), {fqn: str(tensor.dtype) for fqn, tensor in masters.items()}


def keep_schedule(groups: list[dict[str, Any]]) -> Callable[[], None]:
    """Return a function that gives ``groups`` back the learning rates and decays they have now (**in place**)."""
    kept: list[Mapping[str, Any]] = [{key: group[key] for key in _SCHEDULE if key in group} for group in groups]

    def restore() -> None:
        for group, values in zip(groups, kept):
            group.update(values)

    return restore
