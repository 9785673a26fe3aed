"""Load whole weights, which one process reads, into the shards of all ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .agreement import agree
from .apply import sharded
from .checkpoint.hf_names import names_in_model
from .checkpoint.hf_read import Checksums
from .checkpoint.hf_source import checksums_of
from .checkpoint.model_state import ModelState, model_state
from .device import current_device
from .errors import CheckpointError, PlanError
from .full_files import open_file
from .start_values import broadcast_whole, keep_own_part

logger = logging.getLogger("mindspeed_fsdp2")

_SHOWN = 10
_EXTRA = "_extra_state"

Source = Mapping[str, torch.Tensor] | str | os.PathLike[str] | None


class LoadReport(NamedTuple):
    """What was not loaded.

    Attributes:
        missing: Keys of the model that the source lacks; they keep their values.
        unexpected: Keys of the source that the model lacks, and those of extra state, which is never loaded.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class _Given(NamedTuple):
    """The source on the first rank.

    Attributes:
        values: Name in the model -> whole tensor.
        keys: Name in the model -> key in the files, if it comes from files.
        sums: What they were exported with, if they tell.
    """

    values: Mapping[str, torch.Tensor]
    keys: Mapping[str, str]
    sums: Checksums | None

    def read(self, name: str) -> torch.Tensor:
        """Return a value and note its checksum."""
        value = self.values[name]
        if self.sums is not None:
            self.sums.add(self.keys[name], value)
        return value

    def check(self) -> bool:
        """Return True, or raise unless all files were as they were exported."""
        if self.sums is not None:
            self.sums.raise_if_changed(self.sums.found, " Damaged values are loaded: load again before training.")
        return True


def load_full_state_dict(model: torch.nn.Module, source: Source, *, strict: bool = True) -> LoadReport:
    """Give a wrapped model the values of ``source``, which only the first data-parallel rank reads.

    **In place**, **collective**. Tensor by tensor, the first rank sends a whole value and each rank keeps its part, so
    no rank holds more than one whole tensor beside its shards. Together with ``meta_init`` a model that fits no single
    device starts from a pretrained one.

    Args:
        model: A wrapped model, outside of forward and backward.
        source: Key of the unwrapped model's state dict -> whole tensor; or the path of a directory that
            ``save_pretrained`` or ``export_hf`` wrote, of a ``.safetensors`` file, of a ``.safetensors.index.json``, or
            of a file that ``torch.save`` wrote. Read on the first data-parallel rank; other ranks may pass None.
        strict: Whether the keys must be those of the model. A second name of a tied weight may be missing all the same.

    Returns:
        What was not loaded, the same on every rank.

    Raises:
        PlanError: ``model`` is not wrapped.
        CheckpointError: The source cannot be read, or its keys or shapes do not fit; lists all of them, on every rank.
            Nothing is loaded then. Or, found only in the end, a file of ``export_hf`` has another checksum than was
            written: do not train with what was loaded.
    """
    handle = sharded(model)
    if handle is None:
        raise PlanError("load_full_state_dict: the model is not wrapped. Call wrap_model first.")
    if handle.state.gathered:
        raise CheckpointError(
            "load_full_state_dict: the model is inside full_parameters, which would write its own values back. Load "
            "outside."
        )
    group, device = handle.group, current_device(handle.mesh.device_type)
    first = dist.get_rank(group) == 0
    own = model_state(handle.module)

    def check() -> tuple[_Given, LoadReport]:
        nothing = _Given({}, {}, None), LoadReport((), ())
        return _checked(source, handle.module, own, strict) if first else nothing

    given, report = agree(check, lambda _: "", group, "load_full_state_dict")
    if first and (report.missing or report.unexpected):
        logger.warning(
            "load_full_state_dict: kept as they were: %s; not used: %s",
            _some(report.missing) or "none",
            _some(report.unexpected) or "none",
        )
    told: list[Any] = [report]
    dist.broadcast_object_list(told, group=group, group_src=0)
    report = LoadReport(*told[0])
    skipped = set(report.missing)
    targets = {key: tensor for key, tensor in own.tensors.items() if key not in skipped}
    # One piece of memory for all: a backend may hold on to what it sent for a while.
    most = max((tensor.numel() * tensor.itemsize for tensor in targets.values()), default=0)
    memory = torch.empty(most, dtype=torch.uint8, device=device)
    with torch.no_grad():
        for key, target in targets.items():
            whole = memory[: target.numel() * target.itemsize].view(target.dtype).view(target.shape)
            _read(whole, given, _name(key, given.values, own.ties), first, group)
            broadcast_whole([whole], device.type, group)
            keep_own_part(target, whole)
    agree(given.check, lambda _: "", group, "load_full_state_dict")
    return report


def _read(whole: torch.Tensor, given: _Given, name: str, first: bool, group: dist.ProcessGroup | None) -> None:
    """Fill ``whole`` on the first rank; where that fails every rank raises (**collective**)."""
    failed: Exception | None = None
    if first:
        try:
            whole.copy_(given.read(name))
        except (OSError, RuntimeError, KeyError) as error:  # a file that ends early, a lazy mapping
            failed = error
    flag = torch.tensor([float(failed is not None)], device=whole.device)
    dist.broadcast(flag, group=group, group_src=0)
    if flag.item():
        raise CheckpointError(
            f"load_full_state_dict: {name} could not be read on the first data-parallel rank"
            f"{f' ({type(failed).__name__}: {failed})' if failed else ''}. What comes before it is loaded already: "
            "load again from a good source before training."
        ) from failed


def _checked(source: Source, model: torch.nn.Module, own: ModelState, strict: bool) -> tuple[_Given, LoadReport]:
    tensors, ties = own.tensors, own.ties
    if source is None:
        raise CheckpointError(
            "load_full_state_dict: no source on the first data-parallel rank. Pass a mapping or a path there."
        )
    left_out: list[str] = []
    if isinstance(source, Mapping):
        given = _Given(source, {}, None)
    else:
        given, left_out = _from_file(source, model, {*tensors, *ties})
    values = given.values
    where = "load_full_state_dict" if isinstance(source, Mapping) else os.fspath(source)
    if other := [k for k, v in values.items() if not isinstance(v, torch.Tensor) and not k.endswith(_EXTRA)]:
        raise CheckpointError(
            f"{where}: {_some(other)} hold no tensors. Pass the state dict itself, not what it is part of."
        )
    if unusable := [k for k, v in values.items() if isinstance(v, torch.Tensor) and _unusable(v)]:
        raise CheckpointError(
            f"{where}: {_some(unusable)} are no whole dense tensors (sharded, sparse, quantized or on the meta "
            "device). Pass whole values, as the state_dict() of an unwrapped model has them."
        )
    missing = [key for key in tensors if _name(key, values, ties) not in values]
    extra = [key for key in values if key.endswith(_EXTRA) and key not in tensors]
    unexpected = [key for key in values if key not in tensors and key not in ties and key not in extra]
    wrong, kinds = [], []
    for key, tensor in tensors.items():
        value = values.get(_name(key, values, ties))
        if value is not None and value.shape != tensor.shape:
            wrong.append(f"{key} is {tuple(tensor.shape)} here and {tuple(value.shape)} there")
        elif value is not None and _kind(value.dtype) != _kind(tensor.dtype):
            kinds.append(f"{key} is {_short(tensor.dtype)} here and {_short(value.dtype)} there")
    untied = [
        f"{name} and {holder}"
        for name, holder in ties.items()
        if name in values and holder in values and not torch.equal(values[name], values[holder])
    ]
    lines = [
        f"{what}: {_some(found)}"
        for what, found in (("other shape", wrong), ("other dtype", kinds), ("one tensor here, two there", untied))
        if found
    ]
    if strict and missing:
        lines.append(f"missing: {_some(missing)}")
    if strict and unexpected:
        lines.append(f"unknown here: {_some(unexpected)}")
    if lines:
        advice = "" if wrong or kinds or untied else " strict=False loads what fits."
        listed = "\n  ".join(lines)
        raise CheckpointError(f"{where}: the values do not fit the model:\n  {listed}\nBuild the same model.{advice}")
    return given, LoadReport(tuple(missing), (*unexpected, *extra, *left_out))


def _from_file(path: str | os.PathLike[str], model: torch.nn.Module, own: set[str]) -> tuple[_Given, list[str]]:
    """Return a file's values under the model's names, and the keys that loading leaves out."""
    values = open_file(path)
    names = names_in_model(model, own, values, os.fspath(path))
    keys = {name: key for key, name in names.items()}
    given = _Given({name: values[key] for name, key in keys.items()}, keys, checksums_of(Path(path)))
    return given, [key for key in values if key not in names]


def _unusable(value: torch.Tensor) -> bool:
    return isinstance(value, DTensor) or value.is_meta or value.is_quantized or value.layout != torch.strided


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex or dtype.is_floating_point:
        return "complex" if dtype.is_complex else "float"
    return "bool" if dtype is torch.bool else "int"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name(key: str, values: Mapping[str, torch.Tensor], ties: Mapping[str, str]) -> str:
    """Return the name under which ``values`` has a tensor: files of Hugging Face keep one name of a tied weight."""
    if key in values:
        return key
    return next((name for name, holder in ties.items() if holder == key and name in values), key)


def _some(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
