"""The weights of a torch_dcp checkpoint that Megatron wrote without this package."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ...checkpoint.compare import Comparison, compare_model
from ...checkpoint.coordination import Coordination
from ...checkpoint.folder import names_in
from ...checkpoint.index import read_index
from ...checkpoint.model_state import SECTION, ModelState, model_state
from ...checkpoint.pieces import Piece, piece_of
from ...checkpoint.progress import Progress
from ...checkpoint.store import read_pieces
from .dcp_fit import check_fit
from .named_optimizer import NamedOptimizer

logger = logging.getLogger("mindspeed_fsdp2")

_VERSION = 3.0  # of Megatron's checkpoints; what it decides has not changed since


def read_weights(template: dict[str, Any], folder: Path, ranks: Coordination, partial: bool) -> None:
    """Read the model's tensors into the model (**in place**, **collective**); the rest is pickled or by position.

    Args:
        template: What Megatron made for loading with ``--finetune``, a NamedOptimizer as its ``optimizer``.
        folder: A complete checkpoint.
        ranks: All ranks.
        partial: Whether what does not fit is left out.

    Raises:
        CheckpointError: It does not fit or cannot be read; every rank raises the same error.
    """
    named: NamedOptimizer = template["optimizer"]
    what = f"load of {folder.name}"

    def plan() -> tuple[Any, ModelState, Comparison, list[Piece]]:
        index = read_index(folder, set(names_in(folder)), skip_objects=True)
        state = model_state(named.root)
        found = compare_model(state, index, {"ties": {}, "model_extra": {}})
        check_fit(found, str(folder), partial, cast=True)
        tensors = [((SECTION, key), state.tensors[key]) for key in sorted(found.fitting)]
        return index, state, found, [piece_of(path, tensor, ranks.rank, ranks.ranks) for path, tensor in tensors]

    index, state, found, pieces = ranks.agree(plan, what)
    progress = Progress(f"loading {folder}", sum(piece.tensor.nbytes for piece in pieces), ranks.rank == 0)
    ranks.agree(lambda: read_pieces(pieces, folder, index, progress), what)
    progress.finish()
    values = {key: state.tensors[key] for key in found.fitting}
    values |= {key: values[first] for key, first in state.ties.items() if first in values}
    template.update(model=values, checkpoint_version=_VERSION)
    for line in found.report().lines() if ranks.rank == 0 else ():
        logger.warning("%s: %s", folder, line)
