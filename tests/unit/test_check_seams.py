"""scripts/check_seams.py: which wrapped functions of Megatron changed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGET = "megatron.training.arguments:validate_args"
BODY = '''
def validate_args(args, defaults={}):
    """Says something."""
    # a comment
    if args.x == "#é":
        return f"{args.y:>{3}} {{}}"
    return args
'''


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_seams", ROOT / "scripts" / "check_seams.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_seams"] = module
    spec.loader.exec_module(module)
    return module


seams = load()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one wrapped function, and a table written from it."""
    folder = tmp_path / "core_v9"
    (folder / "megatron" / "training").mkdir(parents=True)
    set_body(folder, BODY)
    monkeypatch.setattr(seams, "ROOT", tmp_path)
    monkeypatch.setattr(seams, "TABLE", tmp_path / "seams.tsv")
    monkeypatch.setattr(seams, "targets", lambda: [TARGET, "megatron.core:absent"])
    assert seams.main(["--write", str(folder)]) == 0
    return folder


def set_body(folder: Path, text: str) -> None:
    (folder / "megatron" / "training" / "arguments.py").write_text(text, encoding="utf-8")


SAME = {
    "comment": BODY.replace("# a comment", "# another"),
    "docstring": BODY.replace("Says something.", "Says\n    something else."),
    "white space": BODY.replace("\n    return args", "\n\n    return   args").replace("defaults={}", "defaults = {}"),
    "other functions": "import os\n\n\ndef other():\n    pass\n" + BODY,
    "below if": "if True:\n" + "".join(f"    {line}\n" if line else "\n" for line in BODY.splitlines()),
}


@pytest.mark.parametrize("name", SAME)
def test_what_changes_nothing(checkout: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    set_body(checkout, SAME[name])
    assert seams.main([str(checkout)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 names as in the table: core_v9"


CHANGED = {
    "a string": (BODY.replace("#é", "#e"), "has another body"),
    "a default": (BODY.replace("{})", "None)"), "has another body"),
    "an f-string": (BODY.replace(">{3}", ">{4}"), "has another body"),
    "a decorator": (BODY.replace("def validate", "@cached\ndef validate"), "has another body"),
    "an alias": ("from .checks import validate_args\n", "has another body"),
    "renamed": (BODY.replace("validate_args", "check_args"), "is gone"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_is_reported(checkout: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, change = CHANGED[name]
    set_body(checkout, text)
    assert seams.main([str(checkout)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"core_v9: {TARGET} {change}"


def test_new_name_and_versions_out_of_reach(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "megatron" / "core").mkdir()
    (checkout / "megatron" / "core" / "__init__.py").write_text("absent = 1\n")
    other = checkout.rename(checkout.with_name("core_v10"))
    assert seams.main([str(other)]) == 1
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "core_v10: megatron.core:absent is not in the table",
        f"core_v10: {TARGET} is not in the table",
        "not reached: core_v9",
    ]
    back = other.rename(checkout)
    assert seams.main([str(back)]) == 1
    assert capsys.readouterr().out.splitlines() == ["core_v9: megatron.core:absent is new"]


def test_versions_come_from_the_environment(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGATRON_LM_TAGS", str(checkout.parent))
    monkeypatch.setattr(seams.importlib.util, "find_spec", lambda _name: None)
    assert seams.main([]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 names as in the table: core_v9"


def test_wrong_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert seams.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"no megatron/ in {tmp_path}. Give checkouts of Megatron-LM.\n"


def test_table_names_the_seams_of_this_tree() -> None:
    assert sorted(seams.read(ROOT / "scripts" / "seams.tsv")) == seams.targets()
