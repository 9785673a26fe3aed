"""What the conversion asks of a model. Nothing here needs torch: a model is only asked for its modules."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

from .values import describe

_PLAIN = re.compile(r"\w+(\.\w+)*")  # a regular expression that can only be meant as a module path


class _Model(Protocol):
    def named_modules(self) -> Iterable[tuple[str, object]]: ...


class HFModel:
    """A model as the conversion sees it."""

    def __init__(self, model: _Model) -> None:
        """Note the modules and their classes."""
        self._modules = dict(model.named_modules())

    def no_split_classes(self) -> list[str]:
        """Return the names in ``_no_split_modules`` of the model and its parts that some module has, sorted."""
        names: set[str] = set()
        for module in self._modules.values():
            names.update(getattr(module, "_no_split_modules", None) or ())
        present = {type(module).__name__ for name, module in self._modules.items() if name}
        return sorted(names & present)

    @staticmethod
    def modules_matching(model: HFModel | None, pattern: object) -> list[str]:
        """Return the modules whose whole name ``pattern`` matches, those inside another one left out.

        Args:
            model: The model; without it only names, and alternatives of names, can be told.
            pattern: A regular expression.

        Raises:
            ValueError: It is none, matches nothing, or needs the model.
        """
        if not isinstance(pattern, str) or not pattern.strip():
            raise ValueError(f"{describe(pattern)} is not a regular expression. Write text, e.g. model.vision_tower.")
        try:
            expression = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{describe(pattern)} is not a regular expression ({error}). Correct it.") from None
        if model is None:
            names = pattern.split("|")
            if all(_PLAIN.fullmatch(name) for name in names):
                return list(dict.fromkeys(names))
            raise ValueError(
                f"{describe(pattern)} is a regular expression over the names of modules, and the model was not given. "
                "Convert with --model, or write names joined by '|'."
            )
        found: list[str] = []
        for name in model._modules:
            if name and expression.fullmatch(name) and not any(name.startswith(f"{outer}.") for outer in found):
                found.append(name)
        if not found:
            raise ValueError(f"{describe(pattern)} matches the whole name of no module. Write e.g. {model._example()}.")
        return found

    def _example(self) -> str:
        return next((name for name in self._modules if name), "the name of a module")
