"""Module paths: how a YAML names modules of a model.

A module path is an fqn in which a whole segment may be a group: ``{*}`` (every child) or ``{0-20,22-40}`` (these
indices, both ends included). ``<...>`` means the same as ``{...}``. Strings only: no model, no torch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..errors import ModulePathError
from .index_group import IndexGroup, format_spans, index_spans, is_index
from .tree import ModuleTree, nearest

_GROUP = re.compile(r"\{([^{}<>]*)\}|<([^{}<>]*)>")
_SUGGESTIONS = 3


@dataclass(frozen=True)
class ModulePath:
    """One parsed module path. Paths that select the same compare equal, however they were written.

    Attributes:
        text: As written, for messages.
        segments: Names and groups from the model's first child downwards.
    """

    text: str = field(compare=False)
    segments: tuple[str | IndexGroup, ...]

    @classmethod
    def parse(cls, text: str) -> ModulePath:
        """Parse one path such as ``decoder.layers.{0-20,22-40}``.

        Raises:
            ModulePathError: A segment is empty, a group does not fill its segment or is not closed, an index is not a
                number, or a range runs backwards.
        """
        if not text.strip():
            raise ModulePathError(
                f"module path {text!r} is empty. Write the name of a module, e.g. decoder.layers.{{*}}."
            )
        return cls(text, tuple(_parse_segment(text, segment) for segment in text.split(".")))

    @property
    def is_plain(self) -> bool:
        """Whether the path has no group, so that it may also be the name of a class."""
        return all(isinstance(segment, str) for segment in self.segments)

    def select(self, tree: ModuleTree) -> list[str]:
        """Return the fqns this path names, in model order.

        Args:
            tree: Names of the model below every wrapper.

        Returns:
            At least one fqn, each once. ``{*}`` passes over children that lack the rest of the path (dense layers
            under ``layers.{*}.mlp.experts``); an index written out does not.

        Raises:
            ModulePathError: No module has such a name, or an index written out names none.
        """
        misses: list[_Miss] = []
        found = self._walk(tree, "", 0, misses)
        if found:
            return found
        raise ModulePathError(self._explain(tree, misses, f"module path {self.text!r} selects no module: "))

    def _walk(self, tree: ModuleTree, fqn: str, depth: int, misses: list[_Miss]) -> list[str]:
        if depth == len(self.segments):
            return [fqn]
        segment = self.segments[depth]
        children = tree.children(fqn)
        if isinstance(segment, str):
            below = [children[segment]] if segment in children else []
        else:
            self._check_indices(tree, fqn, segment, children)
            below = [child for name, child in children.items() if name in segment]
        if not below:
            misses.append(_Miss(depth, fqn))
        found: list[str] = []
        for child in below:
            deeper: list[_Miss] = []
            selected = self._walk(tree, child, depth + 1, deeper)
            if not selected and isinstance(segment, IndexGroup) and segment.spans is not None:
                raise ModulePathError(self._explain(tree, deeper, f"module path {self.text!r}: "))
            found += selected
            misses += deeper
        return found

    def _check_indices(self, tree: ModuleTree, fqn: str, group: IndexGroup, children: Mapping[str, str]) -> None:
        if group.spans is None:
            return
        present = index_spans(children)
        absent = group.absent(present)
        if not absent:
            return
        word = "index" if len(absent) == 1 and absent[0][0] == absent[0][1] else "indices"
        problem = f"module path {self.text!r}: {_label(fqn)} has no {word} {format_spans(absent)}"
        if present:
            has = format_spans(present)
            raise ModulePathError(f"{problem}, only {has}. Write indices out of {has}, or {{*}} for all of them.")
        raise ModulePathError(f"{problem}. {tree.describe_children(fqn)}")

    def _explain(self, tree: ModuleTree, misses: list[_Miss], opening: str) -> str:
        """Say where the walk ended and what would have matched. Runs on errors only, so it may look at every fqn."""
        depth = max(miss.depth for miss in misses)
        ends = [miss.fqn for miss in misses if miss.depth == depth]
        segment = self.segments[depth]
        wanted = "children" if isinstance(segment, IndexGroup) else f"child {segment!r}"
        message = f"{opening}{_label(ends[0])} has no {wanted}."
        matching = (path.text for path in self._alternatives(tree, depth, ends) if path._selects_any(tree))
        texts = list(dict.fromkeys(itertools.islice(matching, _SUGGESTIONS)))
        if texts:
            return f"{message} Write {' or '.join(map(repr, texts))}."
        return f"{message} {tree.describe_children(ends[0])}"

    def _alternatives(self, tree: ModuleTree, depth: int, ends: list[str]) -> Iterator[ModulePath]:
        """Yield paths the author may have meant, likeliest first; not every one selects something."""
        segment, head, tail = self.segments[depth], self.segments[:depth], self.segments[depth + 1 :]
        if any(isinstance(part, IndexGroup) and part.spans is not None for part in head):
            yield _build(*(IndexGroup(None) if isinstance(part, IndexGroup) else part for part in self.segments))
        if isinstance(segment, str) and not is_index(segment):
            names = dict.fromkeys(name for end in ends for name in tree.children(end))
            yield from (_build(*head, name, *tail) for name in nearest(segment, names))
        if isinstance(segment, IndexGroup) and head:
            yield _build(*head)
        for start in range(1, len(self.segments)):
            if isinstance(self.segments[start], str):
                yield _build(*self.segments[start:])
        first = self.segments[0]
        if isinstance(first, str) and depth == 0:
            parents = dict.fromkeys(_fold(fqn) for fqn in tree.fqns if fqn.endswith(f".{first}"))
            yield from (_build(*parent, *self.segments[1:]) for parent in parents)

    def _selects_any(self, tree: ModuleTree) -> bool:
        ends = [""]
        for segment in self.segments:
            if isinstance(segment, str):
                ends = [tree.children(end)[segment] for end in ends if segment in tree.children(end)]
            else:
                ends = [fqn for end in ends for name, fqn in tree.children(end).items() if name in segment]
        return bool(ends)


@dataclass(frozen=True)
class _Miss:
    """A module below which the segment at ``depth`` names nothing."""

    depth: int
    fqn: str


def _parse_segment(text: str, segment: str) -> str | IndexGroup:
    where = f"module path {text!r}"
    group = _GROUP.fullmatch(segment)
    if group is None:
        _check_name(where, segment)
        return segment
    try:
        return IndexGroup.parse(group[1] if group[1] is not None else group[2])
    except ValueError as error:
        raise ModulePathError(f"{where}: {error}") from None


def _check_name(where: str, name: str) -> None:
    if not name:
        raise ModulePathError(
            f"{where} has an empty segment. Write names joined by single dots, e.g. decoder.layers.0."
        )
    if _GROUP.search(name):
        apart = _GROUP.sub(lambda match: f".{match[0]}.", name).strip(".")
        raise ModulePathError(f"{where}: a group must fill a whole segment, not share {name!r}. Write {apart!r}.")
    bracket = next((character for character in name if character in "{}<>"), None)
    if bracket is not None:
        raise ModulePathError(f'{where}: {bracket!r} has no partner in {name!r}. Write a group as "layers.{{0-3}}".')
    if name != name.strip():
        raise ModulePathError(f"{where} has a space beside a dot or at an end. Remove it.")
    if "*" in name:
        raise ModulePathError(f"{where} has a '*' outside braces. Write {{*}} for every child.")
    if " - " in name:
        raise ModulePathError(f"{where} is two list entries run together. Indent all entries alike.")
    if "[" in name or "]" in name:
        raise ModulePathError(f"{where}: {name!r} has square brackets. Write an index as layers.0 or layers.{{0-3}}.")
    if "," in name:
        raise ModulePathError(f"{where}: {name!r} has a comma. Write every path as a list entry of its own.")


def _label(fqn: str) -> str:
    return fqn or "the model"


def _fold(fqn: str) -> tuple[str | IndexGroup, ...]:
    """Return the segments of ``fqn`` with ``{*}`` for its indices, so that forty layers give one suggestion."""
    return tuple(IndexGroup(None) if is_index(name) else name for name in fqn.split("."))


def _build(*segments: str | IndexGroup) -> ModulePath:
    return ModulePath(".".join(map(str, segments)), segments)
