"""The weights inside of a checkpoint, or of a directory of Hugging Face, whoever reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..errors import CheckpointError
from ..full_files import Entry, Header, read_header, weight_map, weights_in
from ..module_path import nearest
from .folder import CheckpointInfo, choose, names_in, published, read_manifest, read_state
from .foreign import describe_other_format
from .hf_read import Checksums, read_tensor, written_sums
from .index import read_index
from .model_state import SECTION, model_state
from .pieces import Piece
from .progress import Progress
from .store import read_pieces
from .values import dtype_name, tensor_keys

_SHOWN = 10


@dataclass(frozen=True)
class Saved:
    """The model inside of a checkpoint that ``save_checkpoint`` wrote.

    Attributes:
        info: The checkpoint.
        index: Its index.
        document: What it holds beside tensors.
        tensors: Key -> dtype and shape of the model's tensors, further names left out.
        ties: Further name -> key.
        passed: What was passed over to find it, damaged newer checkpoints above all.
    """

    info: CheckpointInfo
    index: Metadata
    document: dict[str, Any]
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    ties: dict[str, str]
    passed: list[str]

    def read(self, key: str) -> torch.Tensor:
        """Return one tensor; beside it memory for one saved part of it is needed.

        Raises:
            CheckpointError: It cannot be read.
        """
        dtype, shape = self.tensors[key]
        tensor = torch.empty(shape, dtype=dtype)
        piece = Piece((SECTION, key), tensor, tensor.size(), torch.Size([0] * tensor.dim()), 1, 0)
        read_pieces([piece], self.info.path, self.index, Progress("", 0, False))
        return tensor


@dataclass(frozen=True)
class HFWeights:
    """A directory, or a file, of Hugging Face weights.

    Attributes:
        folder: The directory.
        entries: Key -> place of the tensor.
        headers: Name of a file -> what it says about itself.
        ties: Further name that the files do not hold -> key, as far as the files tell.
        problems: What is wrong with the files.
    """

    folder: Path
    entries: dict[str, Entry]
    headers: dict[str, Header]
    ties: dict[str, str]
    problems: list[str] = field(default_factory=list)

    def read(self, key: str) -> torch.Tensor:
        """Return one tensor, read from its file now.

        Raises:
            CheckpointError: It cannot be read.
        """
        return read_tensor(self.entries[key], key)


def kind_of(path: Path) -> str:
    """Return ``"dcp"`` for what ``save_checkpoint`` wrote, ``"hf"`` for Hugging Face weights.

    Raises:
        CheckpointError: It is neither, or does not exist.
    """
    if path.is_file() and (path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")):
        return "hf"
    if path.is_file():
        raise CheckpointError(
            f"{path}: it is a file. Pass a directory of save_checkpoint or of Hugging Face weights, or a .safetensors."
        )
    names = names_in(path)
    if read_manifest(path) is not None or published(path):
        return "dcp"
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return "hf"
    if any(name.startswith("pytorch_model") for name in names):
        weights_in(path)  # says which format is needed
    if not path.exists():
        near = nearest(path.name, [other.name for other in path.parent.glob("*")] if path.parent.is_dir() else [], 1)
        more = f" There is {path.parent / near[0]}." if near else " Look at the path."
        raise CheckpointError(f"{path}: it does not exist.{more}")
    what = describe_other_format(names) or "it is empty."
    raise CheckpointError(f"{path}: {what} This command reads what save_checkpoint or save_pretrained() wrote.")


def open_saved(path: Path, step: int | None) -> Saved:
    """Return the newest complete checkpoint of a directory, or that of ``step``.

    Raises:
        CheckpointError: There is none, or it cannot be read.
    """
    info, passed = choose(path, step)
    document = read_state(info)
    index = read_index(info.path, set(info.files))
    ties: dict[str, str] = document["ties"]
    inside_extra = set(tensor_keys(document["model_extra"]))
    start = f"{SECTION}."
    tensors = {
        key.removeprefix(start): (entry.properties.dtype, tuple(entry.size))
        for key, entry in index.state_dict_metadata.items()
        if key.startswith(start) and key not in inside_extra and isinstance(entry, TensorStorageMetadata)
    }
    return Saved(info, index, document, {key: told for key, told in tensors.items() if key not in ties}, ties, passed)


def open_hf(path: Path) -> HFWeights:
    """Return the weights of a directory, of an index or of a file, with everything that is wrong with them.

    Raises:
        CheckpointError: There are none.
    """
    file = weights_in(path) if path.is_dir() else path
    folder, problems = file.parent, list[str]()
    files: dict[str, str] | None = None
    if file.name.endswith(".index.json"):
        try:
            files = weight_map(file)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: it cannot be read: {error}. Get the file again.") from error
    headers: dict[str, Header] = {}
    for name in sorted(set(files.values())) if files is not None else [file.name]:
        try:
            headers[name] = read_header(folder / name)
        except FileNotFoundError:
            problems.append(f"{folder / name}: it is missing, though the index names it")
        except (OSError, ValueError) as error:
            problems.append(f"{folder / name}: it cannot be read: {error}")
        else:
            problems += [f"{folder / name}: {wrong}" for wrong in headers[name].gaps()]
    found = {key: entry for header in headers.values() for key, entry in header.entries.items()}
    if files is not None:
        problems += [
            f"{folder / name}: it lacks {key!r}, which the index places there"
            for key, name in files.items()
            if name in headers and key not in headers[name].entries
        ]
        found = {key: headers[name].entries[key] for key, name in files.items() if key in _keys(headers, name)}
        for name, header in headers.items():
            for key in header.entries:
                if files.get(key) != name:
                    problems.append(f"{folder / name}: it holds {key!r}, which the index does not place there")
    if not found and not problems:
        problems.append(f"{file}: it holds no tensors")
    said = {new: old for header in headers.values() for new, old in header.metadata.items()}
    ties = {new: old for new, old in said.items() if old in found and new not in found}
    return HFWeights(folder, found, headers, ties, problems)


def checksums_of(path: Path) -> Checksums | None:
    """Return what to compare the tensors in ``path`` with, None unless an export has noted it.

    Raises:
        CheckpointError: Files of an export are wrong in another way.
    """
    if not path.is_dir() and not path.name.endswith((".safetensors", ".safetensors.index.json")):
        return None
    if not written_sums(path if path.is_dir() else path.parent):
        return None
    weights = open_hf(path)
    if weights.problems:
        raise CheckpointError("\n".join(weights.problems))
    return Checksums(weights.folder, weights.headers)


def _keys(headers: Mapping[str, Header], name: str) -> Mapping[str, Entry]:
    return headers[name].entries if name in headers else {}


def compare_with(
    model: nn.Module, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], ties: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return how tensors differ from those of ``model``, and its further names -> the key among ``tensors``.

    Args:
        model: Possibly on the meta device.
        tensors: Key -> dtype and shape.
        ties: Further names that stand for one of them.
    """
    own = model_state(model)
    group: dict[str, str] = {**{key: key for key in own.tensors}, **own.ties}
    held: dict[str, str] = {}  # the model's first name of a tensor -> a name that is there
    for key in (*tensors, *ties):
        if key in group:
            held.setdefault(group[key], ties.get(key, key))
    problems = []
    if missing := [key for key in own.tensors if key not in held]:
        problems.append(f"missing: {shown(missing)}")
    if unknown := [key for key in (*tensors, *ties) if key not in group]:
        near = nearest(unknown[0], missing, 1)
        more = f" ({unknown[0]} may be {near[0]})" if near else ""
        problems.append(f"not in the model: {shown(unknown)}{more}")
    for key, there in held.items():
        dtype, shape = tensors[there]
        mine = own.tensors[key]
        if shape != tuple(mine.shape):
            problems.append(f"{there} is {shape} and {tuple(mine.shape)} in the model")
        elif dtype.is_floating_point != mine.dtype.is_floating_point:
            problems.append(f"{there} is {dtype_name(dtype)} and {dtype_name(mine.dtype)} in the model")
    names = {name: held[first] for name, first in group.items() if first in held and held[first] != name}
    return problems, names


def shown(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
