"""What of a checkpoint fits a model and an optimizer, and how it is told."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..errors import CheckpointError
from .model_state import SECTION, ModelState
from .values import dtype_name, tensor_keys

_SHOWN = 20


@dataclass(frozen=True)
class LoadReport:
    """What was not loaded as it is, or at all. Empty in a complete load of a checkpoint with the same parts.

    Attributes:
        missing: Names that the checkpoint lacks; they keep the values they had.
        unexpected: Names in the checkpoint that the model or the optimizer lacks.
        reshaped: Names with another shape in the checkpoint, with both shapes; not loaded.
        converted: Names whose values were converted to another dtype, with both dtypes.
        notes: What else a reader of the log should know.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self.lines()) or "everything was loaded"

    def lines(self) -> list[str]:
        """Return one line for each kind of difference."""
        kinds = {
            "missing in the checkpoint": self.missing,
            "only in the checkpoint": self.unexpected,
            "other shape": self.reshaped,
            "other dtype": self.converted,
        }
        return [f"{kind}: {_shown(names)}" for kind, names in kinds.items() if names] + list(self.notes)


@dataclass
class Comparison:
    """Collects differences; see :class:`LoadReport`.

    Attributes:
        fitting: Keys of the model's state dict that can be loaded.
        problems: Differences that are errors unless a partial load is asked for, beside the lists.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)
    fitting: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def report(self) -> LoadReport:
        """Return what was found."""
        return LoadReport(
            tuple(self.missing),
            tuple(self.unexpected),
            tuple(self.reshaped),
            tuple(self.converted),
            (*self.problems, *self.notes),
        )


def compare_model(state: ModelState, index: Metadata, document: Mapping[str, Any]) -> Comparison:
    """Compare the keys, shapes and dtypes of the model with those of a checkpoint.

    Args:
        state: The model's.
        index: The checkpoint's tensors.
        document: What it holds beside tensors.
    """
    saved_ties, saved_extra = document["ties"], document["model_extra"]
    found = Comparison()
    start, inside_extra = f"{SECTION}.", set(tensor_keys(saved_extra))
    saved = {
        key.removeprefix(start): entry
        for key, entry in index.state_dict_metadata.items()
        if key.startswith(start) and key not in inside_extra
    }
    for key, tensor in state.tensors.items():
        _compare_tensor(key, tensor, saved.get(key), found)
    for key, first in state.ties.items():
        if key not in saved:
            found.missing.append(key)
        elif saved_ties.get(key, key) != saved_ties.get(first, first):
            found.problems.append(f"{key} and {first} are one tensor in the model and two in the checkpoint")
    found.missing += [key for key in state.extra if key not in saved_extra]
    own = {*state.tensors, *state.ties}
    found.unexpected += sorted(saved.keys() - own)
    found.unexpected += [key for key in saved_extra if key not in state.extra]
    return found


def _compare_tensor(key: str, tensor: torch.Tensor, entry: object, found: Comparison) -> None:
    if not isinstance(entry, TensorStorageMetadata):
        found.missing.append(key)
    elif entry.size != tensor.shape:
        found.reshaped.append(f"{key} is {tuple(tensor.shape)} here and {tuple(entry.size)} in the checkpoint")
    else:
        found.fitting.add(key)
        if entry.properties.dtype != tensor.dtype:
            here, there = dtype_name(tensor.dtype), dtype_name(entry.properties.dtype)
            found.converted.append(f"{key} is {here} here and {there} in the checkpoint")


def check_fits(found: Comparison, where: str, partial: bool, cast: bool) -> None:
    """Raise unless what was found may be loaded.

    Raises:
        CheckpointError: Lists every difference that was not allowed.
    """
    report = found.report()
    wrong = LoadReport(
        missing=() if partial else report.missing,
        unexpected=() if partial else report.unexpected,
        reshaped=() if partial else report.reshaped,
        converted=() if cast else report.converted,
        notes=() if partial else tuple(found.problems),
    )
    if not found.fitting:
        raise CheckpointError(
            f"{where}: no tensor of it fits the model: the model has {_shown(found.missing or found.reshaped, 3)}, the "
            f"checkpoint {_shown(found.unexpected, 3) or 'none else'}. Pass the checkpoint of this model."
        )
    if lines := wrong.lines():
        ways = []
        if wrong.missing or wrong.unexpected or wrong.reshaped or wrong.notes:
            ways.append("build the model and the optimizer as they were saved, or pass partial=True to load what fits")
        if wrong.converted:
            ways.append("pass cast=True to convert to the model's dtypes")
        text = "; ".join(ways)
        listed = "\n  ".join(lines)
        raise CheckpointError(f"{where}: the checkpoint does not fit:\n  {listed}\n{text[0].upper()}{text[1:]}.")


def _shown(names: Collection[str], count: int = _SHOWN) -> str:
    listed = list(names)
    more = f", and {len(listed) - count} more" if len(listed) > count else ""
    return ", ".join(listed[:count]) + more
