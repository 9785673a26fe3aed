"""What a list may hold: module paths, units, argument names, overrides. All mistakes of one list are found at once."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence

from pydantic import ValidationError, ValidationInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from ..errors import ModulePathError
from ..module_path import ModulePath
from .source import Location
from .values import describe

_BETWEEN_PATHS = re.compile(r"[,\n](?![^{<]*[}>])")


def check_paths(value: object, info: ValidationInfo) -> tuple[str, ...]:
    """Return a list of module paths, each once."""
    errors = _Errors()
    paths = [errors.checked_path((index,), entry) for index, entry in _entries(value, info.field_name, errors)]
    errors.raise_if_any()
    return tuple(paths)


def check_some_paths(value: object, info: ValidationInfo) -> tuple[str, ...]:
    """Return a list of module paths that is not empty."""
    paths = check_paths(value, info)
    if not paths:
        raise ValueError("the list is empty. Write the modules that this override is for.")
    return paths


def check_units(value: object, info: ValidationInfo) -> tuple[str | tuple[str, ...], ...] | None:
    """Return a list of units; a nested list is one unit of several modules; ``None`` stays ``None`` (absent)."""
    if value is None:
        return None
    errors = _Errors()
    units: list[str | tuple[str, ...]] = []
    for index, entry in _entries(value, info.field_name, errors):
        if isinstance(entry, (list, tuple)):
            units.append(_checked_unit(entry, index, errors))
        else:
            units.append(errors.checked_path((index,), entry))
    errors.raise_if_any()
    return tuple(units)


def check_argument_names(value: object, info: ValidationInfo) -> tuple[str, ...]:
    """Return a list of names that arguments of a forward can have, each once."""
    errors = _Errors()
    names: list[str] = []
    for index, name in _entries(value, info.field_name, errors, what="argument names"):
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            errors.add((index,), f"{describe(name)} is not the name of an argument. Write a name like rotary_pos_emb.")
        elif name in names:
            errors.add((index,), f"{name!r} is already listed as entry [{names.index(name)}]. Remove one.")
        else:
            names.append(name)
    errors.raise_if_any()
    return tuple(names)


def check_overrides(value: object) -> tuple[object, ...]:
    """Return a list; its entries are checked one by one afterwards."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{describe(value)} is not a list. Write entries like '- modules: [...]' with keys to change.")
    return tuple(dict(entry) if isinstance(entry, Mapping) else entry for entry in value)


def _checked_unit(entry: Sequence[object], index: int, errors: _Errors) -> tuple[str, ...]:
    if not entry:
        errors.add((index,), "the unit is an empty list. List its modules; [] for the whole key means root only.")
    paths = []
    for inner, member in _uncut(entry, (index,), errors):
        if isinstance(member, (list, tuple)):
            errors.add((index, inner), f"{describe(member)} is a unit inside a unit. Write lists at most two deep.")
        else:
            paths.append(errors.checked_path((index, inner), member))
    return tuple(paths)


class _Errors:
    """The mistakes of one list, all reported at once; knows which module paths were already listed."""

    def __init__(self) -> None:
        self._details: list[InitErrorDetails] = []
        self._seen: dict[ModulePath, Location] = {}

    def add(self, location: Location, text: str) -> None:
        error = PydanticCustomError("setting", "{text}", {"text": text})
        self._details.append(InitErrorDetails(type=error, loc=location, input=None))

    def checked_path(self, location: Location, entry: object) -> str:
        if not isinstance(entry, str):
            self.add(location, f"{describe(entry)} is not a module path. {_hint(entry)}")
            return ""
        try:
            path = ModulePath.parse(entry)
        except ModulePathError as error:
            self.add(location, str(error))
            return entry
        if path in self._seen:
            first = "".join(f"[{part}]" for part in self._seen[path])
            self.add(location, f"{entry!r} is already listed as entry {first}. Remove one.")
        self._seen.setdefault(path, location)
        return entry

    def raise_if_any(self) -> None:
        if self._details:
            raise ValidationError.from_exception_data("settings", self._details)


def _hint(entry: object) -> str:
    if isinstance(entry, Mapping):
        key = str(next(iter(entry), ""))
        return f'Quote it: "{{{key}}}".' if key and key[0] in "0123456789*" else f'Write "{key}", without a colon.'
    if isinstance(entry, (bool, int, float)):
        return f'Quote it if a module has that name: "{str(entry).lower()}".'
    return "Write the name of a module, e.g. decoder.layers.{*}, or remove the entry."


def _entries(value: object, key: str | None, errors: _Errors, what: str = "module paths") -> list[tuple[int, object]]:
    """Return the entries to check with their indices."""
    if isinstance(value, str):
        parts = (" ".join(part.split()) for part in _BETWEEN_PATHS.split(value))
        listed = ", ".join(f'"{part}"' for part in parts if part)
        raise ValueError(f"{describe(value)} is not a list. Write {key}: [{listed}].")
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{describe(value)} is not a list of {what}. Write one a line, each after '- '.")
    return _uncut(value, (), errors)


def _uncut(entries: Sequence[object], location: Location, errors: _Errors) -> list[tuple[int, object]]:
    """Return the entries with their indices, without those that YAML cut out of one path at a comma."""
    kept: list[tuple[int, object]] = []
    index = 0
    while index < len(entries):
        end = _end_of_cut(entries, index)
        if end is None:
            kept.append((index, entries[index]))
            index += 1
            continue
        parts = [str(part) for part in entries[index : end + 1]]
        pieces = f"{', '.join(map(repr, parts[:-1]))} and {parts[-1]!r}"
        errors.add(
            (*location, index),
            f'{pieces} are one module path, cut at its comma. Quote module paths: "{",".join(parts)}".',
        )
        index = end + 1
    return kept


def _end_of_cut(entries: Sequence[object], start: int) -> int | None:
    """Return the index of the entry that closes the group which entry ``start`` leaves open, if both exist."""
    opened = entries[start]
    if not isinstance(opened, str) or (closing := _unclosed(opened)) is None:
        return None
    for index in range(start + 1, len(entries)):
        if not isinstance(entries[index], (str, int)) or _unclosed(str(entries[index])):
            return None
        if closing in str(entries[index]):
            return index
    return None


def _unclosed(text: str) -> str | None:
    for opening, closing in ("{}", "<>"):
        if text.rfind(opening) > text.rfind(closing):
            return closing
    return None
