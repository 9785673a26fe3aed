"""The form of a row in the tables of conflicts: which flags it looks at, when it fires, what it says."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ...config import FSDP2Config

Language = Literal["en", "zh"]


class Text(NamedTuple):
    """One sentence or more in both languages of the documentation; errors are English."""

    en: str
    zh: str

    def in_(self, language: Language) -> str:
        """Return the sentence in that language."""
        return self.zh if language == "zh" else self.en


class Situation(NamedTuple):
    """What a row looks at.

    Attributes:
        args: Megatron's arguments as parsed, before its ``validate_args`` changes them.
        config: The loaded YAML; None where there is none, or where it could not be loaded.
        environ: The environment variables.
    """

    args: Namespace
    config: FSDP2Config | None
    environ: Mapping[str, str]

    def value(self, dest: str, default: object = None) -> object:
        """Return an argument, or ``default`` in versions of Megatron that lack it."""
        return getattr(self.args, dest, default)

    def size(self, dest: str) -> int:
        """Return a parallel size; 1 where it is absent or not set."""
        value = self.value(dest, 1)
        return value if isinstance(value, int) and value > 0 else 1

    def data_parallel_size(self) -> int:
        """Return the ranks of the data-parallel group, context parallel included, as Megatron will compute it."""
        world = self.value("world_size")
        if not isinstance(world, int):
            world = int(self.environ.get("WORLD_SIZE", "1"))
        return max(1, world // (self.size("tensor_model_parallel_size") * self.size("pipeline_model_parallel_size")))


@dataclass(frozen=True)
class Flag:
    """A command-line flag and the parsed values that count as typed.

    Attributes:
        text: The flag as typed, ``--save``.
        dest: Its attribute on the arguments; empty: from ``text``.
        off: Values that change nothing, the defaults of all Megatron versions among them.
        only: If given, the only values that count.
        shown: What the documentation adds to the flag, ``> 1`` for instance.
        bare: Print the flag without its value.
    """

    text: str
    dest: str = ""
    off: tuple[object, ...] = (None, False)
    only: tuple[object, ...] | None = None
    shown: str = ""
    bare: bool = False

    def read(self, situation: Situation) -> object:
        """Return the parsed value; None in versions of Megatron that lack the flag."""
        return situation.value(self.dest or self.text.removeprefix("--").replace("-", "_"))

    def typed(self, situation: Situation) -> str | None:
        """Return the flag with its value if it counts as typed."""
        value = self.read(situation)
        if value is None or value == [] or value in self.off or (self.only is not None and value not in self.only):
            return None
        if self.bare or isinstance(value, bool):
            return self.text
        return f"{self.text} {' '.join(map(str, value)) if isinstance(value, list | tuple) else value}"

    def documented(self) -> str:
        """Return the flag as the table in the documentation shows it."""
        return f"`{self.text}`{' ' + self.shown if self.shown else ''}"


@dataclass(frozen=True)
class Conflict:
    """One row. It fires when one of ``flags`` is typed and the other conditions hold.

    Attributes:
        name: Stable identifier.
        flags: All that are typed are named in one message, for they share reason and remedy.
        why: What goes wrong.
        write: What to write instead.
        together: Flags of which each must be typed too.
        unless: Flags of which each one alone settles the matter.
        when: A further condition.
        missing: Fire when the (only) flag is *not* typed and this version of Megatron has it.
        found: Replaces all of the above where flags alone do not tell: returns what was found, or None.
        shown: What the documentation shows where flags alone do not tell.
        until: The feature whose arrival removes the row; empty for a lasting one.
        without_fsdp2: The row is for runs without ``--use-torch-fsdp2``, all others for runs with it.
    """

    name: str
    flags: tuple[Flag, ...]
    why: Text
    write: Text
    together: tuple[Flag, ...] = ()
    unless: tuple[Flag, ...] = ()
    when: Callable[[Situation], bool] | None = None
    missing: bool = False
    found: Callable[[Situation], str | None] | None = None
    shown: Text | None = None
    until: str = ""
    without_fsdp2: bool = False

    def message(self, situation: Situation) -> str | None:
        """Return the line for the user, or None where the row does not fire."""
        if self.without_fsdp2 == bool(situation.value("use_torch_fsdp2", False)):
            return None
        what = self.found(situation) if self.found is not None else self._found(situation)
        return None if what is None else f"{what}: {self.why.en} {self.write.en}"

    def _found(self, situation: Situation) -> str | None:
        if self.when is not None and not self.when(situation):
            return None
        if any(flag.typed(situation) for flag in self.unless):
            return None
        typed = [text for flag in self.flags if (text := flag.typed(situation))]
        if self.missing:
            absent = self.flags[0].read(situation) is None
            return None if typed or absent else f"{self.flags[0].text} is missing"
        others = [flag.typed(situation) for flag in self.together]
        if not typed or None in others:
            return None
        what = ", ".join(typed) + "".join(f" with {text}" for text in others)
        return what + (f" without {' or '.join(flag.text for flag in self.unless)}" if self.unless else "")

    def documented(self, language: Language) -> str:
        """Return what the row is about, for the table in the documentation."""
        if self.shown is not None:
            return self.shown.in_(language)
        comma, with_, without, or_, missing = {
            "en": (", ", " with ", ", without ", " or ", "missing "),
            "zh": ("、", " 与 ", "，且没有 ", " 或 ", "缺少 "),
        }[language]
        text = (missing if self.missing else "") + comma.join(flag.documented() for flag in self.flags)
        text += "".join(with_ + flag.documented() for flag in self.together)
        return text + (without + or_.join(flag.documented() for flag in self.unless) if self.unless else "")
