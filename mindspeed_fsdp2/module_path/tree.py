"""The module names of one model as a tree, and the search for the nearest name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from .index_group import format_spans, index_spans, is_index

_SHOWN = 8


def nearest(text: str, candidates: Iterable[str], limit: int = 3) -> list[str]:
    """Return the members of ``candidates`` that look most like ``text``, best first.

    Args:
        text: What somebody wrote.
        candidates: What would have been right.
        limit: How many to return at most.
    """
    return difflib.get_close_matches(text, list(candidates), n=limit, cutoff=0.6)


_NO_CHILDREN: Mapping[str, str] = MappingProxyType({})


class ModuleTree:
    """The module names of one model. Built once; every module path then walks down from the root.

    Attributes:
        fqns: Every fqn in model order, the root ``""`` left out.
    """

    def __init__(self, fqns: Iterable[str]) -> None:
        """Build the tree.

        Args:
            fqns: Names in the order of ``named_modules(remove_duplicate=False)``: a parent before its children. The
                root ``""`` may be among them.

        Raises:
            ValueError: A name comes before its parent, so no path could ever reach it.
        """
        self._children: dict[str, dict[str, str]] = {}  # leaves, most of all modules, have no entry
        self._names: dict[str, None] = {"": None}
        for fqn in fqns:
            if not fqn:
                continue
            parent, _, name = fqn.rpartition(".")
            siblings = self._children.get(parent)
            if siblings is None:
                if parent not in self._names:
                    raise ValueError(
                        f"module {fqn!r} comes before {parent!r}. Pass names in the order of named_modules()."
                    )
                siblings = self._children[parent] = {}
            siblings[name] = fqn
            self._names[fqn] = None
        self.fqns: tuple[str, ...] = tuple(fqn for fqn in self._names if fqn)

    def __contains__(self, fqn: str) -> bool:
        return fqn in self._names

    def children(self, fqn: str) -> Mapping[str, str]:
        """Return the direct children of ``fqn`` as name -> fqn, in model order; empty for a leaf.

        Raises:
            KeyError: The model has no module ``fqn``.
        """
        if fqn not in self._names:
            raise KeyError(fqn)
        return self._children.get(fqn, _NO_CHILDREN)

    def describe_children(self, fqn: str) -> str:
        """Return one sentence for an error message that says what lies below ``fqn``."""
        children = self.children(fqn)
        if not children:
            return f"Write {fqn!r} for the module itself." if fqn else "The model has no child modules."
        if all(map(is_index, children)):
            return f"Its indices are {format_spans(index_spans(children))}."
        more = f" and {len(children) - _SHOWN} more" if len(children) > _SHOWN else ""
        return f"Its children are {', '.join(list(children)[:_SHOWN])}{more}."
