"""From pydantic's findings, and from what YAML lets pass, to sentences for the author of a file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from ..module_path import nearest
from .foreign import own_key
from .source import Location, Problem
from .values import describe

_LISTS = (
    "sub_modules_to_wrap",
    "ignored_modules",
    "recompute_modules",
    "keep_input_dtype",
    "moe_modules",
    "overrides",
    "optional_modules",
)


def problems_of(error: ValidationError, keys: Sequence[str], override_keys: Sequence[str]) -> list[Problem]:
    """Return one problem per finding.

    Args:
        error: Raised by the settings' model.
        keys: Valid top-level keys.
        override_keys: Valid keys of one override.
    """
    problems = []
    for detail in error.errors():
        location: Location = detail["loc"]
        context = detail.get("ctx", {})
        if detail["type"] == "extra_forbidden":
            text = _unknown_key(str(location[-1]), keys if len(location) == 1 else override_keys)
        elif detail["type"] == "missing":
            text = "is missing. Write the module paths that this override is for."
        elif detail["type"] == "model_type":
            text = f"{describe(detail['input'])} is not a mapping. Write '- modules: [...]' with keys to change."
        else:
            text = str(context.get("text") or context.get("error") or f"{detail['msg']}. Write another value.")
        problems.append(Problem(location, text))
    return problems


def problems_of_keys(source: Mapping[Any, object]) -> list[Problem]:
    """Return one problem per key of ``source`` that is not text."""
    keys = (key for key in source if not isinstance(key, str))
    return [Problem((), f"the key {key!r} is not text. Write the name of a setting.") for key in keys]


def take_out_empty(data: dict[str, object], keys: Collection[str], override_keys: Collection[str]) -> list[Problem]:
    """Remove keys that were written without a value, which YAML reads as null, and say so (**in place**).

    Args:
        data: The settings of a file.
        keys: Valid top-level keys; others are left for the check of unknown keys.
        override_keys: Valid keys of one override.
    """
    overrides = data.get("overrides")
    places: list[tuple[Location, dict[str, object], Collection[str]]] = [((), data, keys)]
    for index, entry in enumerate(overrides if isinstance(overrides, list) else []):
        if isinstance(entry, dict):
            places.append((("overrides", index), entry, override_keys))
    problems = []
    for location, settings, valid in places:
        for key in [key for key, value in settings.items() if value is None and key in valid]:
            del settings[key]
            value = "[] for none" if key in _LISTS else "a value"
            problems.append(Problem((*location, key), f"has no value. Write {value}, or remove the key."))
    return problems


def _unknown_key(name: str, valid: Sequence[str]) -> str:
    spelled = name.strip().lower().replace("-", "_")
    meant = own_key(spelled)
    close = [meant] if meant in valid else nearest(spelled, valid, limit=1)
    choice = close[0] if close else f"one of {', '.join(valid)}"
    return f"unknown key. Write {choice}."
