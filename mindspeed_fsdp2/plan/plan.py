"""What is decided: an FSDP2Plan and its units."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..config import FSDP2Config

_NAMED_AT_MOST = 6


@dataclass(frozen=True)
class Unit:
    """One FSDP unit: modules whose parameters are gathered and reduced together.

    Attributes:
        fqns: Its modules; ``("",)`` is the root.
        kind: Class name of the first module.
        numel: Elements of the parameters it owns, those of nested units and ignored modules excluded.
        stored_dtype: dtype of its trainable shards, None if it has none.
        param_dtype: dtype of gather and compute, None for the stored one.
        reduce_dtype: dtype of gradient reduction, None for the compute dtype.
        output_dtype: dtype of its floating outputs, None leaves them; the root's, unless overridden.
        cast_inputs: Whether its floating inputs are cast to ``param_dtype``.
        reshard: What becomes of gathered parameters after forward; the root leaves that to torch.
        offload: Whether its shards, their gradients and optimizer state live in host memory.
    """

    fqns: tuple[str, ...]
    kind: str
    numel: int
    stored_dtype: torch.dtype | None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_inputs: bool = True
    reshard: bool | int = True
    offload: bool = False

    @property
    def name(self) -> str:
        """Its fqns joined for messages, see :func:`unit_name`."""
        return unit_name(self.fqns)


def unit_name(fqns: Sequence[str]) -> str:
    """Return how messages and records call a unit; no two units of a plan have one name.

    The root is called ``(root)``, and of a unit of many modules only the first few are named.
    """
    more = len(fqns) - _NAMED_AT_MOST
    shown = [fqn or "(root)" for fqn in fqns[: _NAMED_AT_MOST if more > 1 else len(fqns)]]
    return " + ".join([*shown, f"{more} more"] if more > 1 else shown)


@dataclass(frozen=True)
class FSDP2Plan:
    """What will be done to a model. Everything after the plan acts and decides nothing.

    Attributes:
        config: The settings the plan follows.
        units: In the order of application: nested units before the units around them, the root last.
        ignored: Modules whose parameters stay whole.
        recompute: Modules whose activations are recomputed.
        whole_trainable: Trainable parameters that stay whole; their gradients are averaged over all ranks.
        parameterless: Modules without parameters of their own or below, whose outputs keep their dtype.
        root_casts_inputs: False when ignored modules compute in another precision on the caller's own values.
        cast_leaves: Modules with parameters in the root unit that cast their own inputs when the root does not.
        recomputed: Names of units inside recomputed modules. They gather nothing ahead in forward, because
            recomputation would do so again for nothing.
        main_grads: Whether the host takes fp32 gradients of whole parameters from ``param.main_grad``.
        layout: Digest of all parameters and buffers.
        shard_size: Ranks per shard group, None while the number of ranks is unknown.
        data_parallel_size: Data-parallel ranks, context parallelism included; None while unknown.
        notices: What the user should read once.
    """

    config: FSDP2Config
    units: tuple[Unit, ...]
    ignored: tuple[str, ...]
    recompute: tuple[str, ...]
    whole_trainable: tuple[str, ...]
    parameterless: tuple[str, ...]
    root_casts_inputs: bool
    cast_leaves: tuple[str, ...]
    recomputed: tuple[str, ...]
    main_grads: bool
    layout: str
    shard_size: int | None
    data_parallel_size: int | None
    notices: tuple[str, ...]

    @property
    def assumed_order(self) -> tuple[Unit, ...]:
        """The units in registration order, root first: the execution order as long as none was recorded."""
        return tuple(reversed(self.units))

    def digest(self) -> str:
        """Return a short digest; ranks whose digests differ would wait for each other in a collective."""
        units = [unit.fqns for unit in self.units]
        text = json.dumps([self.config.digest(), units, self.layout, self.ignored, self.recompute, self.shard_size])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        from .table import plan_table

        return plan_table(self)
