"""What each kind of value may be. A check returns the value in its final form or says what to write instead."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping, Sequence

from pydantic import ValidationError, ValidationInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from .config_source import Location
from .errors import ModulePathError
from .module_path import ModulePath, nearest

_DTYPES = {
    "bf16": "bf16",
    "fp16": "fp16",
    "fp32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
}
_BOOLEANS = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}
_COMMA = re.compile(r",(?![^{<]*[}>])")
_LONGEST = 80


def describe(value: object) -> str:
    """Return how to call ``value`` in a message, with the value itself, on one line."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, (int, float)):
        return f"the number {value}"
    kind = {str: "the text ", list: "the list ", tuple: "the list ", dict: "the mapping "}.get(type(value), "")
    text = repr(value)
    return kind + (text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…")


def check_bool(value: object) -> bool:
    """Return a boolean."""
    if isinstance(value, bool):
        return value
    meant = _BOOLEANS.get(value.strip().lower()) if isinstance(value, str) else None
    if meant:
        raise ValueError(f"{describe(value)} is not a boolean. Drop the quotes: write {meant}.")
    raise ValueError(f"{describe(value)} is not a boolean. Write true or false.")


def at_least(least: int) -> Callable[[object], int]:
    """Return a check for whole numbers from ``least`` up."""

    def check(value: object) -> int:
        return _whole_number(value, least, f"{least} or more")

    return check


def check_sharding_size(value: object) -> int | str:
    """Return a number of ranks or ``"auto"``."""
    if value == "auto":
        return "auto"
    if isinstance(value, str) and value.strip().lower() == "auto":
        raise ValueError(f"{describe(value)} is neither a number of ranks nor auto. Write auto.")
    return _whole_number(value, 1, "a number of ranks, 1 or more, or auto")


def check_reshard(value: object) -> bool | int:
    """Return a boolean or a number of ranks above 1."""
    if type(value) is int or isinstance(value, float):
        if value in (0, 1):
            raise ValueError(
                f"{describe(value)} is neither a boolean nor a number of ranks above 1. "
                f"Write {'true' if value else 'false'}."
            )
        return _whole_number(value, 2, "true, false or a number of ranks of 2 or more")
    if isinstance(value, str) and value.strip().isdecimal():
        return _whole_number(value, 2, "true, false or a number of ranks of 2 or more")
    if isinstance(value, (bool, str)):
        return check_bool(value)
    raise ValueError(f"{describe(value)} is not a boolean. Write true, false or a number of ranks of 2 or more.")


def check_dtype(value: object) -> str | None:
    """Return the short name of a dtype; ``None`` stays ``None`` (unchanged)."""
    if value is None:
        return None
    if isinstance(value, str) and value in _DTYPES:
        return _DTYPES[value]
    name = str(value).strip().lower().removeprefix("torch.")
    meant = _DTYPES.get(name) or next(iter(nearest(name, _DTYPES)), None)
    allowed = f"Write {meant}." if meant else "Write bf16, fp16 or fp32, or remove the key to leave the dtype unchanged."
    raise ValueError(f"{describe(value)} is not one of the dtypes bf16, fp16, fp32. {allowed}")


def check_paths(value: object, info: ValidationInfo) -> tuple[str, ...]:
    """Return a list of module paths, each once."""
    errors = _Errors()
    for index, entry in _entries(value, info.field_name, errors):
        errors.check_path((index,), entry)
    errors.raise_if_any()
    return tuple(value)  # type: ignore[arg-type]  # _entries() accepted it


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
        if not isinstance(entry, (list, tuple)):
            errors.check_path((index,), entry)
            units.append(entry)
            continue
        if not entry:
            errors.add((index,), "the unit is an empty list. List its modules, or write [] for the whole key: root only.")
        for inner, member in _uncut(entry, (index,), errors):
            if isinstance(member, (list, tuple)):
                errors.add((index, inner), "a unit inside a unit. Write module paths at most two lists deep.")
            else:
                errors.check_path((index, inner), member)
        units.append(tuple(entry))
    errors.raise_if_any()
    return tuple(units)


def check_argument_names(value: object, info: ValidationInfo) -> tuple[str, ...]:
    """Return a list of names that arguments of a forward can have, each once."""
    errors = _Errors()
    seen: set[str] = set()
    for index, name in _entries(value, info.field_name, errors, what="argument names"):
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            errors.add((index,), f"{describe(name)} is not the name of an argument. Write a name such as rotary_pos_emb.")
        elif name in seen:
            errors.add((index,), f"{name!r} is listed twice. Remove one.")
        else:
            seen.add(name)
    errors.raise_if_any()
    return tuple(value)  # type: ignore[arg-type]  # _entries() accepted it


def check_overrides(value: object) -> tuple[object, ...]:
    """Return a list whose entries are mappings or finished overrides; their keys are checked later."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{describe(value)} is not a list. Write a list of 'modules: [...]' with the keys to change.")
    errors = _Errors()
    for index, entry in enumerate(value):
        if isinstance(entry, (str, int, float, list, tuple)) or entry is None:
            errors.add((index,), f"{describe(entry)} is not a mapping. Write 'modules: [...]' with the keys to change.")
    errors.raise_if_any()
    return tuple(dict(entry) if isinstance(entry, Mapping) else entry for entry in value)


class _Errors:
    """The mistakes of one list, all reported at once; knows which module paths were already listed."""

    def __init__(self) -> None:
        self._details: list[InitErrorDetails] = []
        self._seen: dict[ModulePath, Location] = {}

    def add(self, location: Location, text: str) -> None:
        error = PydanticCustomError("setting", "{text}", {"text": text})
        self._details.append(InitErrorDetails(type=error, loc=location, input=None))

    def check_path(self, location: Location, entry: object) -> None:
        if not isinstance(entry, str):
            self.add(location, f"{describe(entry)} is not a module path. {_as_text(entry)}")
            return
        try:
            path = ModulePath.parse(entry)
        except ModulePathError as error:
            self.add(location, str(error))
            return
        if path in self._seen:
            first = "".join(f"[{part}]" for part in self._seen[path])
            self.add(location, f"{entry!r} is already listed as entry {first}. Remove one.")
        self._seen.setdefault(path, location)

    def raise_if_any(self) -> None:
        if self._details:
            raise ValidationError.from_exception_data("settings", self._details)


def _as_text(entry: object) -> str:
    if isinstance(entry, Mapping):
        key = str(next(iter(entry), ""))
        return f"Quote it: \"{{{key}}}\"." if key and key[0] in "0123456789*" else f"Write \"{key}\", without a colon."
    if isinstance(entry, (bool, int, float)):
        return f"Quote it if a module has that name: \"{str(entry).lower()}\"."
    return "Write the name of a module, e.g. decoder.layers.{*}, or remove the entry."


def _entries(
    value: object, key: str | None, errors: _Errors, what: str = "module paths"
) -> list[tuple[int, object]]:
    """Return the entries to check with their indices."""
    if isinstance(value, str):
        parts = ", ".join(f'"{part.strip()}"' for part in _COMMA.split(value))
        raise ValueError(f"{describe(value)} is not a list. Write {key}: [{parts}].")
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
            f"{pieces} are one module path, cut at its comma. Quote module paths: \"{','.join(parts)}\".",
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


def _whole_number(value: object, least: int, wanted: str) -> int:
    if type(value) is int:
        if value >= least:
            return value
        raise ValueError(f"{describe(value)} is too small. Write {wanted}.")
    if isinstance(value, str) and value.strip().isdecimal():
        raise ValueError(f"{describe(value)} is not a number. Drop the quotes: write {int(value)}.")
    if isinstance(value, float) and value.is_integer() and value >= least:
        raise ValueError(f"{describe(value)} is not a whole number. Write {int(value)}.")
    raise ValueError(f"{describe(value)} is not a whole number. Write {wanted}.")
