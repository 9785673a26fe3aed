"""Beside MindSpeed, without Megatron: waiting for an import, and what is taken out of MindSpeed's records."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mindspeed_fsdp2.errors import PatchError
from mindspeed_fsdp2.megatron.mindspeed.arrival import Arrival
from mindspeed_fsdp2.megatron.mindspeed.records import Withdrawn, is_own
from mindspeed_fsdp2.megatron.patcher import Patch, install

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "tests" / "megatron" / "mindspeed_stand_in"
FSDP2 = "mindspeed.core.distributed.torch_fully_sharded_data_parallel.training"
NAME = "arriving_package"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "__init__.py").write_text("VALUE = 1\n")
    (tmp_path / NAME / "inner.py").write_text(f"from {NAME} import VALUE\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield NAME
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


# Waiting for an import


def test_called_once_before_anybody_else_sees_the_module(package: str) -> None:
    calls: list[int] = []

    def then() -> None:
        module = sys.modules[NAME]
        calls.append(module.VALUE)
        module.VALUE = 2

    finders = list(sys.meta_path)
    Arrival(package, then)
    inner = importlib.import_module(f"{NAME}.inner")
    assert (calls, inner.VALUE) == ([1], 2)
    assert sys.meta_path == finders
    module = importlib.import_module(NAME)
    assert module.__spec__.loader is module.__loader__ and "SourceFileLoader" in type(module.__loader__).__name__


def test_stopped_it_does_nothing(package: str) -> None:
    arrival = Arrival(package, lambda: pytest.fail("called"))
    arrival.stop()
    arrival.stop()
    assert importlib.import_module(package).VALUE == 1


def test_a_module_that_is_not_there_stays_so() -> None:
    arrival = Arrival("arriving_nowhere", lambda: pytest.fail("called"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("arriving_nowhere")
    arrival.stop()


def test_its_error_is_the_error_of_the_import(package: str) -> None:
    def then() -> None:
        raise RuntimeError("no")

    Arrival(package, then)
    with pytest.raises(RuntimeError, match="^no$"):
        importlib.import_module(package)
    assert NAME not in sys.modules


# When Megatron is patched


PROGRAM = """\
import sys, types
calls = []
stub = types.ModuleType("mindspeed_fsdp2.megatron.installation")
stub.install = lambda: calls.append("megatron.training" in sys.modules)
stub.installed = lambda: bool(calls)
stub.uninstall = calls.clear
sys.modules[stub.__name__] = stub
import mindspeed_fsdp2.megatron_adaptor as plugin
plugin.install()
print(plugin.installed(), calls)
{end}
"""


@pytest.mark.parametrize(
    ("mindspeed", "end", "said"),
    [
        (True, "import megatron.training; print(plugin.installed(), calls)", ["False []", "True [True]"]),
        (True, "plugin.uninstall(); import megatron.training; print(plugin.installed(), calls)", ["False []"] * 2),
        (False, "", ["True [False, False]"]),
    ],
    ids=["with MindSpeed when Megatron comes", "not any more", "without it at once"],
)
def test_when_megatron_is_patched(tmp_path: Path, mindspeed: bool, end: str, said: list[str]) -> None:
    folder = tmp_path / "megatron" / "training"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    paths = [str(ROOT), str(tmp_path), *([str(STAND_IN)] if mindspeed else [])]
    program = f"import sys; sys.path[:0] = {paths!r}\n" + PROGRAM.format(end=end)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr, done.stdout.splitlines()) == (0, "", said)


# Records


class Record:
    """The attributes of ``mindspeed.patch_utils.Patch`` that are read."""

    def __init__(self, owner: Any, attr: str, patch: Any = None, wrappers: tuple[Any, ...] = ()) -> None:
        self.orig_module, self.orig_func_name, self.patch_func, self.wrappers = owner, attr, patch, list(wrappers)
        self.orig_func = getattr(owner, attr)
        final = patch or self.orig_func
        for wrapper in wrappers:
            final = wrapper(final)
        self.final_patch_func, self.is_applied = final, True
        setattr(owner, attr, final)


def function(says: str, home: str = "elsewhere") -> Callable[[], list[str]]:
    def made() -> list[str]:
        return [says]

    made.__module__ = home
    return made


def around(says: str, home: str = "elsewhere") -> Callable[[Any], Any]:
    def wrapper(inner: Any) -> Any:
        return lambda: [says, *inner()]

    wrapper.__module__ = home
    return wrapper


@pytest.fixture
def host() -> types.ModuleType:
    module = types.ModuleType("some_host")
    module.name = function("original")
    return module


def test_whose_a_function_is() -> None:
    assert is_own(function("", FSDP2)) and is_own(function("", "mindspeed_mm.patchs.torch_dcp_patch"))
    assert not is_own(function("", "mindspeed.core.distributed.torch_fully_sharded_data_parallelism"))
    assert not is_own(None) and not is_own(object())


def test_other_wrappers_of_a_record_stay(host: types.ModuleType) -> None:
    record = Record(host, "name", function("fsdp2", FSDP2), (around("ema"), around("own", FSDP2)))
    held, before = host.name, {**vars(record), "wrappers": list(record.wrappers)}
    assert host.name() == ["own", "ema", "fsdp2"]
    withdrawn = Withdrawn()
    assert withdrawn.take([record]) and withdrawn
    assert host.name() == ["ema", "original"]
    assert not withdrawn.take([record])  # once
    withdrawn.give_back()
    assert host.name is held and vars(record) == before and not withdrawn


@pytest.mark.parametrize("own_first", [True, False])
def test_two_records_over_each_other(host: types.ModuleType, own_first: bool) -> None:
    own, other = (around("fsdp2", FSDP2),), (around("buckets"),)
    records = [Record(host, "name", wrappers=w) for w in ((own, other) if own_first else (other, own))]
    held, before = host.name, [{**vars(record), "wrappers": list(record.wrappers)} for record in records]
    assert sorted(host.name()) == ["buckets", "fsdp2", "original"]
    withdrawn = Withdrawn()
    withdrawn.take(records)
    assert host.name() == ["buckets", "original"]
    withdrawn.give_back()
    assert host.name is held and [vars(record) for record in records] == before


def test_aliases_follow_and_the_definition_stays(host: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = function("fsdp2", FSDP2)
    home, user = types.ModuleType(FSDP2), types.ModuleType("a_user_of_it")
    record = Record(host, "name", mine)
    home.name = user.name = mine  # type: ignore[attr-defined]
    for module in (home, user):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    withdrawn = Withdrawn()
    withdrawn.take([record])
    assert user.name() == ["original"] and home.name is mine
    withdrawn.give_back()
    assert user.name is mine and home.name is mine


def test_a_name_rebound_since_is_left_alone(host: types.ModuleType) -> None:
    record = Record(host, "name", function("fsdp2", FSDP2))
    withdrawn = Withdrawn()
    withdrawn.take([record])
    theirs = host.name = function("theirs")
    withdrawn.give_back()
    assert host.name is theirs and record.patch_func() == ["fsdp2"]


def test_emptied_records_are_not_filled_again(host: types.ModuleType) -> None:
    record = Record(host, "name", function("fsdp2", FSDP2))
    withdrawn = Withdrawn()
    withdrawn.take([record])
    withdrawn.forget()
    withdrawn.give_back()
    assert host.name() == ["original"] and record.patch_func is None


def test_the_stand_in_is_small() -> None:
    lines = [line for path in STAND_IN.rglob("*.py") for line in path.read_text().splitlines() if line.strip()]
    assert len(lines) <= 100


# Set aside and patched anew


def test_a_name_that_somebody_rebound_keeps_theirs_with_ours_below(host: types.ModuleType, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "some_host", host)
    host.other = other = function("other")  # type: ignore[attr-defined]
    rows = [
        Patch(f"row {name}", (f"some_host:{name}",), around("ours"), why="", remove_when="")
        for name in ("name", "other")
    ]
    first = install(rows)
    theirs = host.name = around("theirs")(host.name)
    first.set_aside()
    assert host.name is theirs and host.other is other
    second = install(rows, first)
    assert host.name is theirs and host.name() == ["theirs", "ours", "original"]
    assert host.other() == ["ours", "other"]
    with pytest.raises(PatchError, match=r"^some_host\.name: cannot be restored, it was rebound"):
        second.uninstall()
    host.name = theirs.__closure__[0].cell_contents  # they take their own away
    second.uninstall()
    assert host.name() == ["original"] and host.other is other
