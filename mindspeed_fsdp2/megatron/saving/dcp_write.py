"""Write a checkpoint in Megatron's torch_dcp format."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...checkpoint.coordination import Coordination
from ...checkpoint.folder import STATE
from ...checkpoint.pieces import piece_of
from ...checkpoint.publish import write_json
from ...checkpoint.rank_state import rank_path
from ...checkpoint.snapshot import Collected, Snapshot, collect_model, conclude, settle
from ...checkpoint.values import fingerprint
from ...checkpoint.write import Destination, write_snapshot
from ...errors import CheckpointError
from .folders import TORCH_DCP, begin_iteration, publish_iteration
from .named_optimizer import NamedOptimizer
from .plain_state import FILE, pack_state
from .random_states import digests, own_state, to_tensor
from .tracker import stage

_ELSEWHERE = ("model", "optimizer", "rng_state")


class MegatronState(dict[str, Any]):
    """What ``generate_state_dict`` returned for torch_dcp; the write of it recognises it by this class.

    Attributes:
        root: The root unit's module, whose state ``model`` is.
    """

    def __init__(self, content: dict[str, Any], root: nn.Module) -> None:
        """Take over ``content``."""
        super().__init__(content)
        self.root = root


@dataclass(frozen=True)
class Prepared:
    """A save that has been collected and compared, and can be written."""

    snapshot: Snapshot
    destination: Destination
    ranks: Coordination

    def write(self) -> Path:
        """Write and publish it, and return its folder (**collective**).

        Raises:
            CheckpointError: It could not be saved. Every rank raises the same error; nothing is published.
        """
        return write_snapshot(self.snapshot, self.destination, self.ranks)

    def staged(self) -> Prepared:
        """Return the same with copies in host memory, which training does not touch."""
        return replace(self, snapshot=self.snapshot.staged())


def prepare_write(state: MegatronState, target: Path, ranks: Coordination, data_parallel_rank: int) -> Prepared:
    """Collect ``state`` for the folder ``target`` (**collective**).

    Args:
        state: From ``generate_state_dict``, with what Megatron has added since.
        target: ``…/iter_0000010``.
        ranks: All ranks.
        data_parallel_rank: This rank's number in what ``get_rng_state`` gathers.

    Raises:
        CheckpointError: Something cannot be saved, or the ranks differ. Every rank raises it.
    """
    random = own_state(state["rng_state"], data_parallel_rank) if "rng_state" in state else None
    every = ranks.gather_all(digests(random) if random is not None else {}, "save_checkpoint")
    alike = sorted(name for name, digest in every[0].items() if all(each.get(name) == digest for each in every))
    snapshot = settle(lambda: _collect(state, random, alike, ranks), ranks)
    plain = {name: value for name, value in state.items() if name not in _ELSEWHERE}
    content = pack_state(plain) if ranks.rank == 0 else b""  # now: the arguments change while a background save writes

    def publish(folder: Path, writers: int) -> Path:
        (folder / FILE).write_bytes(content)
        write_json(folder / STATE, snapshot.document)
        # Before the rename: a disk too full for the tracker must not show after the checkpoint is there.
        stage(target.parent, str(state["iteration"]))
        return publish_iteration(folder, target, TORCH_DCP)

    begin: Callable[[], Path] = functools.partial(begin_iteration, target)
    return Prepared(snapshot, Destination(f"save of {target.name}", target.parent, begin, publish), ranks)


def _collect(state: MegatronState, random: dict[str, Any] | None, alike: list[str], ranks: Coordination) -> Collected:
    if "model" not in state:
        raise CheckpointError(
            "save_checkpoint: more than one model chunk. Train with --pipeline-model-parallel-size 1."
        )
    loose: dict[tuple[str, ...], torch.Tensor] = {}
    model, pieces, document = collect_model(state.root, ranks.rank, ranks.ranks, loose)
    document |= {"ranks": ranks.ranks, "bf16": _bf16(state.get("args")), "optimizer": None, "masters": {}}
    optimizer = state.get("optimizer")
    if isinstance(optimizer, NamedOptimizer):
        found, document["masters"] = optimizer.collect(ranks.rank, ranks.ranks)
        document["optimizer"] = found.document
        pieces += found.pieces
        loose |= found.tensors
    pieces += [piece_of(path, tensor, ranks.rank, ranks.ranks) for path, tensor in loose.items()]
    facts = {".".join(path): fingerprint(tensor) for path, tensor in loose.items()}
    facts["iteration"] = str(state.get("iteration"))
    own = []
    document["rng"] = None
    if random is not None:
        document["rng"] = {"alike": alike}
        own.append(piece_of(rank_path(ranks.rank), to_tensor(random), 0, 1))
    return conclude(model, pieces, own, document, facts)


def _bf16(args: object) -> bool:
    return isinstance(args, Namespace) and bool(getattr(args, "bf16", False))
