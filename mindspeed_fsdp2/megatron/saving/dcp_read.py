"""Read a checkpoint in Megatron's torch_dcp format, into any number of ranks and any sharding."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ...checkpoint.compare import Comparison, compare_model
from ...checkpoint.coordination import Coordination
from ...checkpoint.folder import STATE, read_json
from ...checkpoint.index import read_index
from ...checkpoint.model_state import SECTION, ModelState, model_state
from ...checkpoint.optimizer_load import OptimizerTarget, build_target, install
from ...checkpoint.pieces import Piece, piece_of
from ...checkpoint.progress import Progress
from ...checkpoint.rank_state import rank_path
from ...checkpoint.snapshot import buffer_path
from ...checkpoint.store import read_pieces
from ...checkpoint.values import on_host, tensor_keys, unpack
from ...errors import CheckpointError
from .dcp_fit import check_fit, compare_optimizers
from .folders import manifest_of
from .named_optimizer import MASTERS, NamedOptimizer, keep_schedule
from .plain_state import read_state
from .random_states import from_tensor

logger = logging.getLogger("mindspeed_fsdp2")


@dataclass(frozen=True)
class Wanted:
    """What Megatron's flags ask for.

    Attributes:
        optimizer: Whether the optimizer's state is loaded.
        random_states: Whether random states are loaded.
        bf16: Whether this run has ``--bf16``.
        partial: Whether what does not fit is left out.
        own_schedule: Whether learning rates and decays stay those of the command line.
    """

    optimizer: bool
    random_states: bool
    bf16: bool
    partial: bool
    own_schedule: bool


@dataclass
class _Plan:
    index: Metadata
    document: dict[str, Any]
    model: ModelState
    found: Comparison
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    loose: dict[str, torch.Tensor] = field(default_factory=dict)
    random: tuple[int, torch.Tensor] | None = None
    fqns: set[str] = field(default_factory=set)
    target: OptimizerTarget | None = None
    masters: dict[str, torch.Tensor] = field(default_factory=dict)

    def pieces(self, rank: int, ranks: int) -> list[Piece]:
        named: dict[tuple[str, ...], torch.Tensor] = {}
        for key in sorted(self.found.fitting - self.buffers.keys()):
            named[SECTION, key] = self.model.tensors[key]
        named.update((buffer_path(rank, key), tensor) for key, tensor in self.buffers.items())
        named.update(((key,), tensor) for key, tensor in self.loose.items())
        named.update((("optimizer", MASTERS, fqn), tensor) for fqn, tensor in self.masters.items())
        if self.random is not None:
            named[rank_path(self.random[0])] = self.random[1]
        pieces = [piece_of(path, tensor, rank, ranks) for path, tensor in named.items()]
        return pieces + (self.target.pieces if self.target is not None else [])


def read(template: dict[str, Any], folder: Path, ranks: Coordination, wanted: Wanted) -> None:
    """Fill ``template``, which Megatron made for loading, from ``folder`` (**in place**, **collective**).

    The tensors of the model are read into the model; of the optimizer nothing changes before Megatron loads it.

    Args:
        template: Holds a NamedOptimizer as ``optimizer`` and this rank's random states as ``rng_state``.
        folder: A complete checkpoint.
        ranks: All ranks.
        wanted: What is asked for.

    Raises:
        CheckpointError: It does not fit or cannot be read; every rank raises the same error.
    """
    named: NamedOptimizer = template["optimizer"]
    what = f"load of {folder.name}"
    plan = ranks.agree(lambda: _plan(named, folder, ranks, wanted), what)
    pieces = plan.pieces(ranks.rank, ranks.ranks)
    progress = Progress(f"loading {folder}", sum(piece.tensor.nbytes for piece in pieces), ranks.rank == 0)
    ranks.agree(lambda: read_pieces(pieces, folder, plan.index, progress), what)
    progress.finish()
    template.update(ranks.agree(lambda: read_state(folder), what))
    template["model"] = _model_values(plan)
    template["optimizer"] = _installer(named, plan, wanted)
    if plan.random is not None:
        states = from_tensor(plan.random[1], str(folder))
        if plan.document["ranks"] != ranks.ranks:
            alike = set(plan.document["rng"]["alike"])
            states = {name: states[name] if name in alike else own for name, own in template["rng_state"][0].items()}
        template["rng_state"] = [states] * ranks.ranks  # whichever entry Megatron takes, it is this rank's
    for line in plan.found.report().lines() if ranks.rank == 0 else ():
        logger.warning("%s: %s", folder, line)


def _plan(named: NamedOptimizer, folder: Path, ranks: Coordination, wanted: Wanted) -> _Plan:
    manifest, document = manifest_of(folder), read_json(folder / STATE)
    if manifest is None or not isinstance(document, dict):
        raise CheckpointError(f"{folder}: this rank cannot read it. Load from storage that all nodes share.")
    index = read_index(folder, set(manifest["files"]))
    state = model_state(named.root)
    plan = _Plan(index, document, state, compare_model(state, index, document))
    differing = [key for key in document["differing"] if key in plan.found.fitting]
    if document["ranks"] == ranks.ranks:
        plan.buffers = {key: state.tensors[key] for key in differing}
    elif differing:
        plan.found.notes.append(f"rank 0's values, of several, are loaded on all ranks: {', '.join(differing[:20])}")
    check_fit(plan.found, str(folder), wanted.partial, cast=not wanted.optimizer)
    _plan_random(plan, folder, ranks, wanted)
    keys = list(tensor_keys(document["model_extra"]))
    if wanted.optimizer and not named.is_stub_optimizer:
        params = named.params()
        plan.fqns = compare_optimizers(named, params, document, plan.found, str(folder), wanted.bf16, wanted.partial)
        plan.target = build_target(document["optimizer"], params, plan.fqns, index, ranks.ranks)
        plan.masters = {fqn: tensor for fqn, tensor in named.masters().items() if fqn in document["masters"]}
        keys += tensor_keys(document["optimizer"])
    plan.loose = {key: _empty(index, key) for key in keys}
    return plan


def _plan_random(plan: _Plan, folder: Path, ranks: Coordination, wanted: Wanted) -> None:
    if not wanted.random_states:
        return
    saved = plan.document["rng"]
    if saved is None:
        raise CheckpointError(
            f"{folder}: it holds no random states: it was saved with --no-save-rng. Add --no-load-rng or --finetune."
        )
    same = plan.document["ranks"] == ranks.ranks
    rank = ranks.rank if same else 0
    plan.random = (rank, _empty(plan.index, ".".join(rank_path(rank))))
    if not same:
        lost = {"random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states"}
        if lost := lost - set(saved["alike"]):
            plan.found.notes.append(
                f"saved by {plan.document['ranks']} ranks and loaded by {ranks.ranks}: {', '.join(sorted(lost))} "
                "differed between ranks and stay as they were seeded"
            )


def _model_values(plan: _Plan) -> dict[str, Any]:
    values: dict[str, Any] = {key: plan.model.tensors[key] for key in plan.found.fitting}
    values |= {key: values[first] for key, first in plan.model.ties.items() if first in values}
    saved = plan.document["model_extra"]
    return values | {key: unpack(saved[key], plan.loose, on_host) for key in plan.model.extra if key in saved}


def _installer(named: NamedOptimizer, plan: _Plan, wanted: Wanted) -> Callable[[], None]:
    """Return what gives the optimizer its state, called where Megatron loads it."""

    def load() -> None:
        if plan.target is None:
            return
        restore_schedule = keep_schedule(named.param_groups)
        params = named.params()
        for single in named.singles:
            install(single.optimizer, plan.document["optimizer"], params, plan.fqns, plan.target, plan.loose)
        if wanted.own_schedule:
            restore_schedule()

    return load


def _empty(index: Metadata, key: str) -> torch.Tensor:
    entry = index.state_dict_metadata.get(key)
    if not isinstance(entry, TensorStorageMetadata):
        raise CheckpointError(f"checkpoint: it lacks {key!r}. Load another checkpoint.")
    return torch.empty(entry.size, dtype=entry.properties.dtype)
