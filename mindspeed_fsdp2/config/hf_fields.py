"""The mappings of a Hugging Face configuration: every key is taken once, and no key is left out without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from ..errors import ConfigError
from ..module_path import nearest
from .source import Location, Origin
from .values import describe

T = TypeVar("T")

_DROPPED = "Hugging Face drops without a word"
_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")


@dataclass
class Found:
    """What became of the keys so far.

    Attributes:
        settings: Our keys and their values.
        sources: Our key -> the key or the reason it comes from.
        noted: What has another meaning or none here, with its file's number and line, for sorting.
        problems: Mistakes, like that.
    """

    settings: dict[str, object] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    noted: list[tuple[int, int, str]] = field(default_factory=list)
    problems: list[tuple[int, int, str]] = field(default_factory=list)

    def set(self, key: str, value: object, source: str) -> None:
        """Note that our ``key`` becomes ``value`` because of ``source``."""
        self.settings[key] = value
        self.sources[key] = source

    def error(self) -> ConfigError:
        """Return all problems as one error, in the order of the files."""
        return ConfigError("\n".join(_in_order(self.problems)))

    def notes(self) -> tuple[str, ...]:
        """Return one line for each note, in the order of the files."""
        return tuple(_in_order(self.noted))


def _in_order(said: list[tuple[int, int, str]]) -> list[str]:
    return list(dict.fromkeys(text for _, _, text in sorted(said, key=lambda entry: entry[:2])))


class Fields:
    """One mapping of the source, its keys with or without a prefix.

    Attributes:
        found: What became of all mappings of this source.
    """

    def __init__(
        self,
        values: Mapping[str, object],
        origin: Origin,
        found: Found,
        *,
        at: Location = (),
        prefix: str = "",
        always: bool = False,
        number: int = 0,
    ) -> None:
        """Read the keys.

        Args:
            values: The mapping.
            origin: The file it stands in.
            found: Gets notes and problems.
            at: Where in the file it stands.
            prefix: What keys may begin with; a key given with and without it is an error.
            always: Whether keys that are absent are called with the prefix.
            number: Which of several files this is.
        """
        self.found = found
        self._values, self._origin, self._at, self._number = values, origin, at, number
        self._prefix, self._absent = prefix, prefix if always else ""
        self._keys: dict[str, str] = {}  # without the prefix -> as written
        for key in values:
            name = key.removeprefix(prefix)
            if name in self._keys:
                self.error(name, f"is given again as {key}. Keep one of the two.")
            else:
                self._keys[name] = key
        self._left = dict.fromkeys(self._keys)

    def __contains__(self, name: str) -> bool:
        """Say whether the key is there and has a value."""
        return name in self._keys and self._values[self._keys[name]] is not None

    def take(self, name: str, check: Callable[[object], T]) -> T | None:
        """Return the checked value of a key; ``None`` if it is absent, empty or wrong, which becomes a problem."""
        self._left.pop(name, None)
        if name not in self:
            return None
        try:
            return check(self._values[self._keys[name]])
        except ValueError as error:
            self.error(name, str(error))
            return None

    def source(self, *names: str) -> str:
        """Return how comments in the result call keys, e.g. ``fsdp_config.fsdp_version``."""
        return ", ".join(".".join(map(str, self._location(name))) for name in names if name in self._keys)

    def note(self, name: str, text: str) -> None:
        """Say of a key what has no effect here, or another one; the key need not be there."""
        self.found.noted.append(self._said(name, text))

    def error(self, name: str, text: str) -> None:
        """Say what is wrong with a key."""
        self.found.problems.append(self._said(name, text))

    def left(self) -> list[str]:
        """Return the keys that nothing took, in the order of the source."""
        return list(self._left)

    def refuse_left(self, known: Iterable[str], elsewhere: Mapping[str, str], fate: str = _DROPPED) -> None:
        """Turn every key that nothing took into a problem.

        Args:
            known: Keys that exist.
            elsewhere: Key that exists in another place or format -> what to write instead.
            fate: What becomes of such a key there.
        """
        known = list(known)
        for name in self.left():
            near = nearest(name.strip().lower().replace("-", "_"), known, limit=1)
            begin = self._prefix if self._keys[name].startswith(self._prefix) else self._absent
            listed = f"Remove it; the keys are {', '.join(begin + key for key in known)}."
            instead = elsewhere.get(name) or (f"Write {begin}{near[0]}." if near else listed)
            self.error(name, f"unknown key, which {fate}. {instead}")

    def _location(self, name: str) -> Location:
        return (*self._at, self._keys.get(name, f"{self._absent}{name}"))

    def _said(self, name: str, text: str) -> tuple[int, int, str]:
        location = self._location(name)
        return self._number, self._origin.line(location) or 0, f"{self._origin.where(location)}: {text}"


def flag(value: object) -> bool:
    """Return a boolean from what Hugging Face reads as one: also text such as ``"false"``."""
    word = str(value).strip().lower()
    if isinstance(value, bool) or (isinstance(value, (str, int)) and word in (*_TRUE, *_FALSE)):
        return word in _TRUE
    raise ValueError(f"{describe(value)} is not a boolean. Write true or false.")


def plain_flag(value: object) -> bool:
    """Return a boolean where Hugging Face takes anything that is not empty for true, the text ``"false"`` too."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value:
        meant = "false" if value.strip().lower() in _FALSE else "true"
        raise ValueError(f"{describe(value)} counts as true there, as any text does. Without quotes, write {meant}.")
    raise ValueError(f"{describe(value)} is not a boolean. Write true or false.")


def whole_number(value: object) -> int:
    """Return a whole number of 0 or more, also from text."""
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = None
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if type(number) is int and number >= 0:
        return number
    raise ValueError(f"{describe(value)} is not a whole number of 0 or more. Write a number.")


def word_of(*words: str) -> Callable[[object], str]:
    """Return a check for one of a few words, whatever their case."""

    def check(value: object) -> str:
        spelled = str(value).strip()
        for word in words:
            if spelled.lower() == word.lower():
                return word
        near = nearest(spelled.upper(), words, limit=1)
        raise ValueError(f"{describe(value)} is not one of {', '.join(words)}. Write {near[0] if near else words[0]}.")

    return check


def anything(value: object) -> object:
    """Return any value."""
    return value
