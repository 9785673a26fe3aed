"""Write the weights of a wrapped model as Transformers reads them."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..apply import Sharded
from ..errors import CheckpointError
from ..full_files import INDEX
from ..start_values import broadcast_whole
from .coordination import Coordination
from .hf_config import describe_model, most_used_dtype, tied_on_load
from .hf_shards import (
    Weight,
    WeightFile,
    converted,
    index_of,
    parse_dtype,
    parse_size,
    plan_files,
    plan_weights,
    too_large,
)
from .hf_work import FileWriter, WorkFolder
from .model_state import ModelState, model_state
from .progress import Progress
from .save import ready
from .values import digest, fingerprint
from .write import explained

logger = logging.getLogger("mindspeed_fsdp2")


@dataclass(frozen=True)
class _Plan:
    """What is written.

    Attributes:
        state: The model's tensors.
        files: The files of weights.
        texts: Name -> content of the files beside them.
    """

    state: ModelState
    files: list[WeightFile]
    texts: dict[str, str]


def export_hf(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
) -> Path:
    """Write the weights into ``directory`` as Transformers reads them, and return it (**collective** over all ranks).

    Call it between steps. Tensor by tensor is gathered and written, each file by another rank, so beside its shards no
    rank holds more than the few largest tensors. The directory is complete or absent.

    Args:
        model: A wrapped model. One of Transformers gets its ``config.json`` and ``generation_config.json`` too.
        directory: On storage that all ranks share; it may not exist yet, or is empty.
        dtype: Convert floating-point tensors: ``torch.bfloat16`` or ``"bf16"``, ``"fp16"``, ``"fp32"``. None keeps what
            is stored, whatever the model computes in.
        max_shard_size: Bytes of tensors in a file, or text such as ``"5GB"``.

    Returns:
        The directory. A tensor with several names is written once, where loading gives it all its names.

    Raises:
        CheckpointError: It could not be written, or the ranks differ. Every rank raises the same error; the directory
            is as it was.
    """
    handle, ranks = ready(model, "export_hf")
    target = Path(os.path.abspath(directory))
    plan = ranks.agree(lambda: _plan(handle, dtype, max_shard_size), "export_hf")
    differing = _differing(plan, target, ranks)
    work = WorkFolder(target)
    # The layout is no reason to go on with what an earlier call has left: the values are others by now.
    ranks.from_first(lambda: explained(target.parent, lambda: work.begin({}, resume=False)), "export_hf")
    total = sum(weight.nbytes for file in plan.files for weight in file.weights)
    progress = Progress(f"exporting to {target}", total, ranks.rank == 0)
    try:
        ranks.agree(lambda: _check_seen(work), "export_hf")
        for first in range(0, len(plan.files), ranks.ranks):
            _write_files(plan.files[first : first + ranks.ranks], plan.state, differing, handle, ranks, work, progress)
        texts = {**plan.texts, **({INDEX: index_of(plan.files)} if len(plan.files) > 1 else {})}
        about = {"format": "mindspeed_fsdp2 export", "source": "export_hf"}
        ranks.from_first(lambda: explained(target, lambda: work.publish(texts, {}, about)), "export_hf")
    except CheckpointError:
        if ranks.rank == 0:
            work.discard()
        raise
    finally:
        work.release()
    progress.finish()
    return target


def _plan(handle: Sharded, dtype: torch.dtype | str | None, size: int | str) -> _Plan:
    wanted, most = parse_dtype(dtype), parse_size(size)
    if handle.state.gathered:
        raise CheckpointError("export_hf: the model is inside full_parameters. Export outside.")
    state = model_state(handle.module)
    tied = tied_on_load(handle.module)
    twice = {name for name, key in state.ties.items() if not tied(name, key)}
    tensors = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in state.tensors.items()}
    weights, also = plan_weights(tensors, state.ties, twice, wanted)
    main = most_used_dtype((weight.dtype, math.prod(weight.shape)) for weight in weights)
    return _Plan(state, plan_files(weights, also, most), describe_model(handle.module, main))


def _differing(plan: _Plan, target: Path, ranks: Coordination) -> set[str]:
    """Return the keys of buffers that are not the same on every rank (**collective**).

    Raises:
        CheckpointError: The ranks mean different exports, or parameters that are not sharded have drifted apart.
    """
    layout = [[file.name, file.header().hex()] for file in plan.files]
    mine = digest([layout, plan.texts, os.fspath(target)])
    watched = {key: fingerprint(plan.state.tensors[key]) for key in plan.state.watched}
    everyone = ranks.gather_all((mine, watched), "export_hf")
    if others := [rank for rank, (each, _) in enumerate(everyone) if each != everyone[0][0]]:
        raise CheckpointError(
            f"export_hf: rank {others[0]} would write other files than rank 0. Pass the same model, directory and "
            "arguments on every rank."
        )
    differing = {key for key in watched if len({values[key] for _, values in everyone}) > 1}
    if drifted := sorted(differing - plan.state.buffers):
        raise CheckpointError(
            f"export_hf: {', '.join(drifted[:3])} has other values on each rank although it is not sharded. Change "
            "parameters equally on every rank."
        )
    if ranks.rank == 0:
        if differing:
            logger.warning("export_hf: rank 0's values, of several, are written: %s", ", ".join(sorted(differing)[:20]))
        if plan.state.extra:
            logger.warning("export_hf: no tensors of the model, left out: %s", ", ".join(list(plan.state.extra)[:20]))
    return differing


def _check_seen(work: WorkFolder) -> None:
    if not work.files.is_dir():
        raise CheckpointError(
            f"{work.target.parent}: this rank does not see the folder that rank 0 made in it. Export to storage that "
            "all nodes share."
        )


def _write_files(
    files: list[WeightFile],
    state: ModelState,
    differing: set[str],
    handle: Sharded,
    ranks: Coordination,
    work: WorkFolder,
    progress: Progress,
) -> None:
    """Write one file on each rank (**collective**)."""
    mine = files[ranks.rank] if ranks.rank < len(files) else None
    writer = ranks.agree(lambda: explained(work.files, lambda: FileWriter(work, mine) if mine else None), "export_hf")
    lost: list[str] = []
    failed: OSError | RuntimeError | None = None
    # A tensor of each file in turn, so that all ranks write while the next tensors are gathered.
    for row in zip_longest(*(file.weights for file in files)):
        for owner, weight in enumerate(row):
            if weight is None:
                continue
            whole, infinite = _gather(state.tensors[weight.key], weight, weight.key in differing, handle)
            progress.add(weight.nbytes)
            lost += [weight.name] * infinite
            if owner == ranks.rank and writer is not None and failed is None:
                try:
                    writer.put(whole)
                except (OSError, RuntimeError) as error:  # told below: the other ranks wait in the next gathering
                    failed = error

    def finish() -> None:
        if writer is not None and (lost or failed):
            writer.close()
        if lost:
            raise too_large(lost)
        if failed is not None:
            raise failed
        if writer is not None:
            writer.finish()

    ranks.agree(lambda: explained(work.files, finish), "export_hf")


def _gather(tensor: torch.Tensor, weight: Weight, first: bool, handle: Sharded) -> tuple[torch.Tensor, bool]:
    """Return the whole tensor in its dtype in the files, and whether values have become infinite (**collective**)."""
    with torch.no_grad():
        if not isinstance(tensor, DTensor):
            if first:
                tensor = tensor.detach().clone()
                broadcast_whole([tensor], handle.mesh.device_type, handle.group)
            return converted(tensor.detach(), weight.dtype)
        # Converted before it is sent: as many bytes fewer.
        local, infinite = converted(tensor.to_local(), weight.dtype)
        part = DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
        return part.full_tensor(), infinite
