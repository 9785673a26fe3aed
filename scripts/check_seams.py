"""Compare the Megatron functions that this project wraps with those it was written against.

    python scripts/check_seams.py                     the installed megatron-core, and each folder in MEGATRON_LM_TAGS
    python scripts/check_seams.py FOLDER...           Megatron-LM checkouts; the folder's name is the version
    python scripts/check_seams.py --write [FOLDER...] take what is there now into scripts/seams.tsv

Every name in the table PATCHES is looked up in the source text, without importing it. Its normal form (no comments, no
docstrings, no white space: the same on every Python) is hashed and compared with scripts/seams.tsv. A difference means:
read the new body, see whether the patch still fits, then write the table anew. Versions of the table that could not be
reached are named. Exit status: 0 no difference, 1 differences, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import importlib.util
import io
import os
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
TABLE: Final = ROOT / "scripts" / "seams.tsv"
ABSENT: Final = "-"
_TARGET: Final = re.compile(r"(megatron[\w.]*):([A-Za-z_][\w.]*)\Z")

Seams = dict[str, dict[str, str]]  # target -> version -> hash


def targets() -> list[str]:
    """Return every ``module:name`` of Megatron that a patch table mentions, sorted."""
    found = set()
    for path in (ROOT / "mindspeed_fsdp2" / "megatron").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _TARGET.match(node.value):
                found.add(node.value)
    return sorted(found)


def hash_of(target: str, source: Path) -> str:
    """Return the hash of the normal form of what ``target`` names below ``source``, or ``-``."""
    module, _, name = target.partition(":")
    base = source.joinpath(*module.split("."))
    path = next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)
    if path is None:
        return ABSENT
    text = path.read_text(encoding="utf-8")
    node: ast.AST | None = ast.parse(text)
    for part in name.split("."):
        node = next((child for child in _defined(node) if _names(child, part)), None)
        if node is None:
            return ABSENT
    return hashlib.sha256(normal_form(text, node).encode()).hexdigest()[:12]


def _defined(node: ast.AST | None) -> Iterator[ast.stmt]:
    """Yield the statements of a module's or a class's body, those under ``if`` and ``try`` included."""
    for child in ast.iter_child_nodes(node) if node is not None else ():
        if isinstance(child, (ast.If, ast.Try, ast.ExceptHandler, ast.With)):
            yield from _defined(child)
        elif isinstance(child, ast.stmt):
            yield child


def _names(node: ast.stmt, name: str) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name == name
    if isinstance(node, (ast.Import, ast.ImportFrom)):  # a by-value alias: the statement tells where it comes from
        return any((alias.asname or alias.name) == name for alias in node.names)
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    return False


def normal_form(text: str, node: ast.AST) -> str:
    """Return the source of ``node`` without comments, docstrings and white space."""
    lines = text.splitlines(keepends=True)
    dropped = [
        (token.start, token.end)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    ]
    for inner in ast.walk(node):
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(inner):
            dropped.append(_span(lines, inner.body[0]))
    decorators = getattr(node, "decorator_list", [])
    begin, end = _span(lines, node)
    begin = min([begin, *(_span(lines, decorator)[0] for decorator in decorators)])
    kept = []
    for start, stop in sorted(span for span in dropped if begin <= span[0] < end):
        kept.append(_between(lines, begin, start))
        begin = max(begin, stop)
    return re.sub(r"\s+", "", "".join([*kept, _between(lines, begin, end)]))


def _span(lines: Sequence[str], node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return begin and end of a node as (line, column in characters); ast counts columns in bytes."""

    def place(line: int, column: int) -> tuple[int, int]:
        return line, len(lines[line - 1].encode()[:column].decode())

    return place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]


def _between(lines: Sequence[str], begin: tuple[int, int], end: tuple[int, int]) -> str:
    if begin >= end:
        return ""
    if begin[0] == end[0]:
        return lines[begin[0] - 1][begin[1] : end[1]]
    return "".join([lines[begin[0] - 1][begin[1] :], *lines[begin[0] : end[0] - 1], lines[end[0] - 1][: end[1]]])


def sources(folders: Sequence[Path]) -> dict[str, Path]:
    """Return version -> folder that holds ``megatron/``."""
    if folders:
        return {folder.name: folder for folder in folders}
    found = {}
    if (spec := importlib.util.find_spec("megatron")) and (places := list(spec.submodule_search_locations or ())):
        found[f"wheel-{importlib.metadata.version('megatron-core')}"] = Path(places[0]).parent
    if tags := os.environ.get("MEGATRON_LM_TAGS"):
        found.update({path.name: path for path in sorted(Path(tags).iterdir()) if (path / "megatron").is_dir()})
    return found


def read(path: Path) -> Seams:
    """Return the table in ``path``; empty if there is none."""
    seams: Seams = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        target, version, value = line.split("\t")
        seams.setdefault(target, {})[version] = value
    return seams


def write(path: Path, seams: Mapping[str, Mapping[str, str]]) -> None:
    """Write the table, sorted."""
    rows = sorted((target, version, value) for target, of in seams.items() for version, value in of.items())
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")


def differences(known: Seams, now: Seams, version: str) -> list[str]:
    """Return a line for each target that differs from the table."""
    lines = []
    for target in sorted(now):
        before, after = known.get(target, {}).get(version), now[target][version]
        if before is None:
            lines.append(f"{version}: {target} is not in the table")
        elif before != after:
            change = "is gone" if after == ABSENT else "is new" if before == ABSENT else "has another body"
            lines.append(f"{version}: {target} {change}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Compare or write; return the exit status."""
    parser = argparse.ArgumentParser(description="Compare the Megatron functions that this project wraps.")
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="checkouts that hold megatron/")
    parser.add_argument("--write", action="store_true", help="write scripts/seams.tsv instead of comparing")
    options = parser.parse_args(argv)
    if without := [folder for folder in options.folders if not (folder / "megatron").is_dir()]:
        print(f"no megatron/ in {', '.join(map(str, without))}. Give checkouts of Megatron-LM.", file=sys.stderr)
        return 2
    found = sources([folder.resolve() for folder in options.folders])
    if not found:
        print("no Megatron found. Install megatron-core, set MEGATRON_LM_TAGS or name folders.", file=sys.stderr)
        return 2
    known, names = read(TABLE), targets()
    lines = []
    kept = {target: dict(known.get(target, {})) for target in names}
    for version, source in found.items():
        now = {target: {version: hash_of(target, source)} for target in names}
        lines += differences(known, now, version)
        for target in names:
            kept[target].update(now[target])
    if options.write:
        write(TABLE, kept)
        print(f"{TABLE.relative_to(ROOT)}: {len(names)} names, written for {', '.join(found)}")
        return 0
    print("\n".join(lines) if lines else f"{len(names)} names as in the table: {', '.join(found)}")
    unreached = sorted({version for of in known.values() for version in of} - found.keys())
    if unreached:
        print(f"not reached: {', '.join(unreached)}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
