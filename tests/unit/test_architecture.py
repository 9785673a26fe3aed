"""Imports go one way; these tables are the architecture (design sections 2 and 8)."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2] / "mindspeed_fsdp2"

# Layers, lowest first: a file imports only from its own layer or lower ones. A folder counts as one part.
LAYERS = [
    {"errors", "_torch_private", "_torch_older"},
    {"module_path", "device", "mesh", "agreement", "param_attrs", "casts"},
    {"config", "rng", "policies"},
    {"step_state", "step_hooks"},
    {
        "recompute",
        "recompute_args",
        "prefetch",
        "torch_compat",
        "grad_sync",
        "whole_grads",
        "guards",
        "gathering",
        "backward",
        "recovery",
        "unit_grads",
        "start_values",
        "hidden_outputs",
        "input_grads",
        "full_files",
        "buffers",
        "unit_order",
    },
    {"plan", "misuse"},
    {"materialize"},
    {"apply", "backends"},
    {"accelerator"},
    {"wrap", "accumulation", "full_params", "full_state", "clipping", "checkpoint"},
    {"doctor"},
    {
        "megatron/names",
        "megatron/patcher",
        "megatron/arguments",
        "megatron/conflicts",
        "megatron/cpu",
        "megatron/norms",
        "megatron/model_facts",
        "megatron/meta_build",
        "megatron/mindspeed/arrival",
        "megatron/mindspeed/records",
        "megatron/mindspeed/beside",
        "megatron/mindspeed/collectives",
        "megatron/mindspeed/own_sharding",
    },
    {"megatron/startup"},
    {"megatron/saving"},
    {"megatron/data_parallel"},
    {"megatron/patches"},
    {"megatron/installation"},
    {"megatron/entry", "megatron/mindspeed/feature"},
    {"megatron_adaptor", "cli", "run"},
]
# third-party package -> the only files (or folders, with a slash at the end) that may name it
ONLY_IN = {
    "yaml": ("config/",),
    "pydantic": ("config/",),
    "megatron": ("megatron/",),
    "mindspeed": ("megatron/mindspeed/feature",),
    "torch_npu": ("device",),
}


def level(name: str) -> int:
    for number, layer in enumerate(LAYERS):
        if any(name == entry or name.startswith(entry + "/") for entry in layer):
            return number
    raise AssertionError(f"{name} is in no layer: add it to LAYERS")


def imports(path: pathlib.Path) -> Iterator[tuple[str | None, str | None]]:
    """Yield (inner module, None) or (None, third-party package) of every import, type-checking ones included."""
    here = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((None, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = [*here[: len(here) - (node.level - 1)], *(node.module or "").split(".")]
            target = "/".join(part for part in base if part)
            if (ROOT / f"{target}.py").exists():
                yield target, None
            else:  # from . import name
                yield from (("/".join([target, alias.name]).strip("/"), None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield None, (node.module or "").split(".")[0]


FILES = sorted(path for path in ROOT.rglob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path: pathlib.Path) -> None:
    name = path.relative_to(ROOT).with_suffix("").as_posix()
    for inner, outer in imports(path):
        if inner is not None:
            assert level(inner) <= level(name), f"{name} may not import {inner}"
        elif outer in ONLY_IN:
            allowed = ONLY_IN[outer]
            assert any(name.startswith(entry) for entry in allowed), f"{name} may not import {outer}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_readable(path: pathlib.Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 250, "a file over 250 lines is a room too large to know"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno < 75, f"{node.name} is too long"
        assert not isinstance(node, ast.Assert), f"line {getattr(node, 'lineno', '?')}: raise one of our own errors"


def test_only_apply_shards() -> None:
    callers = {
        path.relative_to(ROOT).as_posix()
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "fully_shard"
    }
    assert callers == {"apply.py"}


def test_get_args_only_under_megatron() -> None:
    for path in FILES:
        if "get_args()" in path.read_text(encoding="utf-8"):
            assert path.relative_to(ROOT).as_posix().startswith("megatron/"), path
