"""Read every byte of a checkpoint, or of Hugging Face weights, and say what is wrong."""

from __future__ import annotations

import io
import math
import pickle
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from ..errors import CheckpointError
from .coordination import Coordination
from .folder import published, read_manifest
from .hf_names import names_in_model
from .hf_read import differs, read_into, written_sums
from .hf_source import HFWeights, Saved, compare_with, open_hf, open_saved
from .model_state import model_state
from .values import dtype_name

_BLOCK = 1 << 24  # bytes


class Verified(NamedTuple):
    """What was looked at.

    Attributes:
        tensors: How many tensors.
        nbytes: How many bytes were read.
        problems: What is wrong, one line each; empty if nothing is.
    """

    tensors: int
    nbytes: int
    problems: list[str]


def verify_saved(path: Path, step: int | None, model: nn.Module | None, ranks: Coordination) -> Verified:
    """Look at the newest checkpoint of a directory, or at that of ``step`` (**collective**).

    Every tensor of it, those of the optimizer too, must be there whole, with the shape and dtype of the index and the
    checksum that it was written with.

    Args:
        path: What ``save_checkpoint`` got, or the folder of one checkpoint.
        step: None for the newest.
        model: Compared with the tensors of the model, if given.
        ranks: The processes that share the work.

    Raises:
        CheckpointError: There is no complete checkpoint, or nothing of it can be read.
    """
    saved = ranks.agree(lambda: open_saved(path, step), "verify")
    places = _places(saved)
    problems: list[str] = []
    nbytes = 0
    for key, entry, index in places[ranks.rank :: ranks.ranks]:
        where = saved.index.storage_data[index]
        nbytes += where.length
        if wrong := _wrong_piece(saved.info.path / where.relative_path, where, entry, index):
            problems.append(f"{saved.info.path / where.relative_path}: {key}: {wrong}")
    every = ranks.gather_all((nbytes, problems), "verify")
    found = [] if read_manifest(path) is not None else _incomplete(path, step)
    found += _gaps(saved)
    found += [problem for _, told in every for problem in told]
    if model is not None:
        different, names = compare_with(model, saved.tensors, saved.ties)
        found += [f"{saved.info.path}: {each}" for each in different + _both(names, saved.tensors)]
    return Verified(len({key for key, _, _ in places}), sum(count for count, _ in every), found)


def _places(saved: Saved) -> list[tuple[str, TensorStorageMetadata, MetadataIndex]]:
    """Return each saved piece once: key, what the index says of the tensor, and where the piece is found."""
    places, seen = [], set()
    for index, where in saved.index.storage_data.items():
        entry = saved.index.state_dict_metadata.get(index.fqn)
        if isinstance(entry, TensorStorageMetadata) and (spot := (where.relative_path, where.offset)) not in seen:
            seen.add(spot)  # the further names of a tensor lead to the same bytes
            places.append((index.fqn, entry, index))

    def order(place: tuple[str, TensorStorageMetadata, MetadataIndex]) -> tuple[str, int]:
        where = saved.index.storage_data[place[2]]
        return where.relative_path, where.offset

    return sorted(places, key=order)


def _wrong_piece(file: Path, where: Any, entry: TensorStorageMetadata, index: MetadataIndex) -> str:
    memory = bytearray(where.length)
    try:
        with file.open("rb", buffering=0) as stream:
            stream.seek(where.offset)
            read_into(stream, memoryview(memory))
        # PyTorch reads without comparing the checksums that it has written.
        if bad := zipfile.ZipFile(io.BytesIO(memory)).testzip():
            return f"{bad} has another checksum than was written"
        tensor = torch.load(io.BytesIO(memory), map_location="cpu", weights_only=True)
    except (
        OSError,
        EOFError,
        RuntimeError,
        ValueError,
        zipfile.BadZipFile,
        zlib.error,
        pickle.UnpicklingError,
    ) as error:
        return f"it cannot be read: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    sizes = [chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset] or [entry.size]
    if not isinstance(tensor, torch.Tensor):
        return f"it is a {type(tensor).__name__} and no tensor"
    if tensor.size() != sizes[0] or tensor.dtype != entry.properties.dtype:
        there = f"{tuple(tensor.shape)} {dtype_name(tensor.dtype)}"
        return f"it is {there}, not {tuple(sizes[0])} {dtype_name(entry.properties.dtype)} as the index says"
    return ""


def _incomplete(path: Path, step: int | None) -> list[str]:
    return [
        f"{info.path}: it lacks {lacking} or has it in another size"
        for info in published(path)
        if (step is None or info.step == step) and (lacking := info.lacks())
    ]


def _gaps(saved: Saved) -> list[str]:
    problems = []
    stored = {(index.fqn, index.offset) for index in saved.index.storage_data}
    for key, entry in saved.index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        here = sum(math.prod(chunk.sizes) for chunk in entry.chunks if (key, chunk.offsets) in stored)
        if here != math.prod(entry.size):
            problems.append(f"{saved.info.path}: {key}: {here} of {math.prod(entry.size)} elements are there")
    return problems


def _both(names: dict[str, str], tensors: dict[str, Any]) -> list[str]:
    return [
        f"{name} and {first} are one tensor in the model and two here"
        for name, first in names.items()
        if name in tensors
    ]


def verify_hf(path: Path, model: nn.Module | None, ranks: Coordination) -> Verified:
    """Look at Hugging Face weights (**collective**).

    Every tensor of the index must be in its file, the tensors fill the files without gaps, and every byte can be read.
    Files that this package has exported must have the checksums that they were written with.

    Args:
        path: A directory, an index or a file.
        model: Compared with the tensors, if given.
        ranks: The processes that share the work.

    Raises:
        CheckpointError: There are none.
    """
    weights = ranks.agree(lambda: open_hf(path), "verify")
    written = written_sums(weights.folder)
    problems = [
        f"{weights.folder / name}: {wrong}"
        for name in list(weights.headers)[ranks.rank :: ranks.ranks]
        for wrong in _wrong_file(weights.folder / name, written.get(name))
    ]
    every = ranks.gather_all(problems, "verify")
    found = [*weights.problems, *(problem for told in every for problem in told)]
    told = "; ".join(weights.problems)
    lost = [name for name in written if name not in told and not (weights.folder / name).exists()]
    found += [f"{weights.folder / name}: it is missing" for name in lost]
    if model is not None:
        try:
            found += [f"{weights.folder}: {each}" for each in _compared(weights, model)]
        except CheckpointError as error:  # listed with what else is wrong
            found.append(str(error))
    return Verified(len(weights.entries), sum(header.size for header in weights.headers.values()), found)


def _compared(weights: HFWeights, model: nn.Module) -> list[str]:
    state = model_state(model)
    named = names_in_model(model, {*state.tensors, *state.ties}, weights.entries, str(weights.folder))
    held = {name: (weights.entries[key].dtype, weights.entries[key].shape) for key, name in named.items()}
    ties = {name: named[key] for name, key in weights.ties.items() if key in named}
    different, names = compare_with(model, held, ties)
    keys = {name: key for key, name in named.items()}
    # Both names of a tied weight may be there, as long as loading cannot pick the wrong one.
    twice = {name: first for name, first in names.items() if name in held}
    unequal = {n: f for n, f in twice.items() if not torch.equal(weights.read(keys[n]), weights.read(keys[f]))}
    return different + _both(unequal, held)


def _wrong_file(file: Path, written: str | None) -> Iterable[str]:
    checksum, memory = 0, bytearray(_BLOCK)
    try:
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(memory):
                checksum = zlib.crc32(memoryview(memory)[:count], checksum)
    except OSError as error:
        yield f"it cannot be read: {error.strerror}"
        return
    if written is not None and written != f"{checksum:08x}":
        yield differs(f"{checksum:08x}", written)


def raise_if_wrong(found: Verified, path: Path) -> None:
    """Raise if something is wrong.

    Raises:
        CheckpointError: Lists all of it.
    """
    if found.problems:
        count = f"{len(found.problems)} problem{'s' * (len(found.problems) > 1)}"
        listed = "\n".join(found.problems)
        raise CheckpointError(f"{listed}\n{path}: {count}. Copy or export it again, or use another checkpoint.")
