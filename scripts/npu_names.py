"""List the names that torch_npu offers, read from its wheel without importing it.

torch_npu can only be imported where CANN is installed. The tests use a stand-in instead, which offers no name that is
not in this list. Regenerate it for another version with:

    pip download --no-deps --python-version 3.11 --platform manylinux_2_28_x86_64 --only-binary :all: torch_npu==2.14.0
    python scripts/npu_names.py torch_npu-*.whl tests/unit/data/torch_npu_names.json

What the list cannot hold: members that a class inherits from the C extension, and operators that torch_npu takes over
from ``torch.ops.npu`` while it is imported.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

MODULES = ("torch_npu", "torch_npu.npu", "torch_npu.npu.utils", "torch_npu.npu.random", "torch_npu.npu.streams")
CLASSES = {"torch_npu.npu.streams": ("Stream", "Event")}
TRANSFER = "torch_npu/contrib/transfer_to_npu.py"
TRANSFER_LISTS = (
    "torch_fn_white_list",
    "torch_tensor_fn_white_list",
    "torch_module_fn_white_list",
    "torch_cuda_fn_white_list",
    "device_kwargs_list",
)


class Wheel:
    """The Python sources inside a wheel."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        self._files = set(self._zip.namelist())
        info = next(name for name in self._files if name.endswith(".dist-info/METADATA"))
        lines = self._zip.read(info).decode().splitlines()
        self.version = next(line.split(": ")[1] for line in lines if line.startswith("Version: "))
        self.needs = [line.split(": ")[1] for line in lines if line.startswith("Requires-Dist: torch=")]

    def tree(self, file: str) -> ast.Module:
        """Return the syntax tree of ``file``."""
        return ast.parse(self._zip.read(file).decode())

    def file_of(self, module: str) -> str | None:
        """Return the file of ``module``, None where the wheel holds none."""
        base = module.replace(".", "/")
        return next((name for name in (f"{base}/__init__.py", f"{base}.py") if name in self._files), None)

    def names(self, module: str) -> set[str]:
        """Return the names that ``module`` binds at its top level, star imports followed, submodules included."""
        file = self.file_of(module)
        if file is None:
            return set()
        tree = self.tree(file)
        package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
        found = set(_bound(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
                found |= self.exported(_absolute(package, node))
        if file.endswith("__init__.py"):
            folder = file.rpartition("/")[0]
            inside = {name.removeprefix(f"{folder}/") for name in self._files if name.startswith(f"{folder}/")}
            found |= {name.split("/")[0].removesuffix(".py") for name in inside if _is_module(name)}
        return {name for name in found if not name.startswith("__")}

    def exported(self, module: str) -> set[str]:
        """Return what ``from module import *`` gives."""
        file = self.file_of(module)
        if file is None:
            return set()
        listed = _literal(self.tree(file), "__all__")
        return set(listed) if listed is not None else {name for name in self.names(module) if name[0] != "_"}

    def members(self, module: str, name: str) -> list[str]:
        """Return what the class ``name`` of ``module`` itself defines."""
        file = self.file_of(module)
        if file is None:
            return []
        classes = (node for node in self.tree(file).body if isinstance(node, ast.ClassDef) and node.name == name)
        return sorted({bound for node in classes for bound in _bound(node)})


def collect(path: Path) -> dict[str, object]:
    """Return everything that the list of the wheel ``path`` holds."""
    wheel = Wheel(path)
    transfer = wheel.tree(TRANSFER)
    return {
        "wheel": path.name,
        "version": wheel.version,
        "needs": wheel.needs,
        "modules": {module: sorted(wheel.names(module)) for module in MODULES},
        "exported": {"torch_npu.npu": sorted(wheel.exported("torch_npu.npu"))},
        "classes": {name: wheel.members(module, name) for module, classes in CLASSES.items() for name in classes},
        "transfer_to_npu": {name: sorted(_literal(transfer, name) or ()) for name in TRANSFER_LISTS},
        "transfer_to_npu assigns": sorted(_assigned(transfer)),
    }


def _absolute(package: str, node: ast.ImportFrom) -> str:
    parts = package.split(".")
    base = parts[: len(parts) - node.level + 1] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


def _is_module(name: str) -> bool:
    return name.endswith(".py") if "/" not in name else name.endswith("/__init__.py") and name.count("/") == 1


def _bound(scope: ast.Module | ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(scope) if isinstance(scope, ast.Module) else scope.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node in scope.body:
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)) and node in scope.body:
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names if alias.name != "*")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node in scope.body:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def _literal(tree: ast.Module, name: str) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            value: list[str] = ast.literal_eval(node.value)
            return value
    return None


def _assigned(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names below ``torch`` that the file rebinds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from (text for target in node.targets if (text := ast.unparse(target)).startswith("torch."))


def main(arguments: Sequence[str]) -> int:
    """Write the list of the wheel ``arguments[0]`` to ``arguments[1]``, or to stdout; return the exit status."""
    if len(arguments) not in (1, 2):
        print("usage: python scripts/npu_names.py WHEEL [OUTPUT]", file=sys.stderr)
        return 2
    text = json.dumps(collect(Path(arguments[0])), indent=1) + "\n"
    if len(arguments) == 1:
        print(text, end="")
    else:
        Path(arguments[1]).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
