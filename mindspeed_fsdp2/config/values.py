"""What each kind of value may be. A check returns the value in its final form or says what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..module_path import nearest

_DTYPES = {
    "bf16": "bf16",
    "fp16": "fp16",
    "fp32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
}
_OTHER_DTYPES = {  # what else people call them; the widest there is stands for what is wider
    "half": "fp16",
    "f16": "fp16",
    "float": "fp32",
    "single": "fp32",
    "f32": "fp32",
    "tf32": "fp32",
    "double": "fp32",
    "fp64": "fp32",
    "f64": "fp32",
    "float64": "fp32",
}
_BOOLEANS = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}
_LONGEST = 80
T = TypeVar("T")


def describe(value: object) -> str:
    """Return how to call ``value`` in a message, with the value itself, on one line."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, (int, float)):
        return f"the number {value}"
    text = repr(value)
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 1]}…"
    for kind, noun in ((str, "text"), ((list, tuple), "list"), (dict, "mapping")):
        if isinstance(value, kind):
            return f"the {noun} {text}"
    return text


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
    meant = _DTYPES.get(name) or _OTHER_DTYPES.get(name) or next(iter(nearest(name, _DTYPES)), None)
    allowed = (
        f"Write {meant}." if meant else "Write bf16, fp16 or fp32, or remove the key to leave the dtype unchanged."
    )
    raise ValueError(f"{describe(value)} is not one of the dtypes bf16, fp16, fp32. {allowed}")


def one_of(*choices: str) -> Callable[[object], str]:
    """Return a check for one of a few words."""

    def check(value: object) -> str:
        if isinstance(value, str) and value in choices:
            return value
        near = nearest(str(value), choices, limit=1)
        raise ValueError(
            f"{describe(value)} is not one of {', '.join(choices)}. Write {near[0] if near else choices[0]}."
        )

    return check


def or_none(check: Callable[[object], T]) -> Callable[[object], T | None]:
    """Return ``check`` for a key that may be left unset."""
    return lambda value: None if value is None else check(value)


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
