"""The patch table: resolve and check everything first, rebind, restore identity."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from mindspeed_fsdp2.errors import PatchError
from mindspeed_fsdp2.megatron.patcher import ABSENT, Installation, Patch, accepts, install, resolves

HOST = """
def train(step, *, async_op=False):
    return f"train {step}"

class Base:
    def inherited(self):
        return "base"

class Model(Base):
    def forward(self, x):
        return x

    @staticmethod
    def static(x):
        return x + 1

    @classmethod
    def made(cls):
        return cls

    class Inner:
        def deep(self):
            return "deep"

NUMBER = 7
"""

Register = Callable[..., Any]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    """Put a module with the given source and names into sys.modules for the time of the test."""

    def make(name: str, source: str = "", **names: Any) -> ModuleType:
        module = ModuleType(name)
        exec(source, module.__dict__)
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


@pytest.fixture
def host(register: Register) -> Any:
    return register("host", HOST)


def loud(original: Any) -> Any:
    """A wrapper that is recognisable and calls the original."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return f"[{original(*args, **kwargs)}]"

    return wrapper


def row(name: str, *targets: str, make: Callable[[Any], Any] = loud, **settings: Any) -> Patch:
    return Patch(name, targets, make, why="the test", remove_when="never", **settings)


def test_function_is_wrapped_and_restored(host: Any) -> None:
    original = host.train
    done = install([row("train", "host:train")])
    assert host.train("1") == "[train 1]"
    assert done.applied == {"train": ("host.train",)}
    done.uninstall()
    assert host.train is original
    done.uninstall()  # nothing left to do
    assert host.train is original


def test_methods_keep_their_kind_and_identity(host: Any) -> None:
    kept = dict(vars(host.Model)), dict(vars(host.Model.Inner))

    def static(original: Any) -> Any:
        assert isinstance(original, staticmethod)
        return staticmethod(lambda x: original.__func__(x) * 10)

    def class_method(original: Any) -> Any:
        assert isinstance(original, classmethod)
        return classmethod(lambda cls: (cls, "ours"))

    done = install(
        [
            row("forward", "host:Model.forward"),
            row("static", "host:Model.static", make=static),
            row("made", "host:Model.made", make=class_method),
            row("deep", "host:Model.Inner.deep"),
        ]
    )
    assert host.Model().forward("x") == "[x]"
    assert (host.Model.static(1), host.Model.made()) == (20, (host.Model, "ours"))
    assert host.Model.Inner().deep() == "[deep]"
    assert done.applied["deep"] == ("host.Model.Inner.deep",)
    done.uninstall()
    for now, before in zip((vars(host.Model), vars(host.Model.Inner)), kept, strict=True):
        assert now.keys() == before.keys() and all(now[name] is before[name] for name in before)


def test_inherited_method_is_overridden_and_deleted_again(host: Any) -> None:
    done = install([row("inherited", "host:Model.inherited")])
    assert (host.Model().inherited(), host.Base().inherited()) == ("[base]", "base")
    done.uninstall()
    assert "inherited" not in vars(host.Model) and host.Model().inherited() == "base"


def test_new_name_is_added_and_removed(host: Any) -> None:
    seen: list[Any] = []

    def make(original: Any) -> Any:
        seen.append(original)
        return lambda *_: "new"

    done = install([row("new", "host:Model.scale", "host:helper", make=make, creates=True)])
    assert (host.Model().scale(), host.helper(), seen) == ("new", "new", [ABSENT])
    done.uninstall()
    assert not hasattr(host.Model, "scale") and not hasattr(host, "helper")


def test_aliases_share_one_replacement(host: Any, register: Register) -> None:
    other = register("host_training", model_class=host.Model)
    original = host.Model
    made: list[Any] = []

    def subclass(held: type) -> type:
        made.append(held)
        return type("Ours", (held,), {})

    done = install([row("class", "host:Model", "host_training:model_class", "host_gone:Model", make=subclass)])
    assert host.Model is other.model_class and made == [original]
    assert issubclass(host.Model, original)
    assert done.applied == {"class": ("host.Model", "host_training.model_class")}
    done.uninstall()
    assert host.Model is original and other.model_class is original


def test_name_replaced_by_somebody_else_gets_its_own_wrapper(host: Any, register: Register) -> None:
    other = register("host_training", train=host.train)

    def theirs(step: str, **_: Any) -> str:
        return f"theirs {step}"

    mine, host.train = host.train, theirs
    done = install([row("train", "host:train", "host_training:train")])
    assert (host.train("1"), other.train("1")) == ("[theirs 1]", "[train 1]")
    done.uninstall()
    assert host.train is theirs and other.train is mine


def test_aliases_are_found_by_value_and_name(host: Any, register: Register) -> None:
    script = register("user_script", train=host.train)
    renamed = register("user_renamed", my_train=host.train)
    namesake = register("user_namesake", train=lambda step: "own")
    own, original = namesake.train, host.train
    done = install([row("train", "host:train", also_aliases=True)])
    assert script.train is host.train is not original
    assert renamed.my_train is original and namesake.train is own
    assert set(done.applied["train"]) == {"host.train", "user_script.train"}
    late = register("user_late", train=host.train)
    done.uninstall()
    assert host.train is original and script.train is original and late.train is original
    assert namesake.train is own


def test_module_that_defines_the_replacement_keeps_it(host: Any, register: Register) -> None:
    patches = register("our_patches", "def train(step):\n    return 'ours'\n")
    ours, original = patches.train, host.train
    done = install([row("train", "host:train", make=lambda _: ours, also_aliases=True)])
    done.uninstall()
    assert patches.train is ours and host.train is original


def test_nothing_is_restored_if_somebody_rebound_one_name(host: Any) -> None:
    done = install([row("train", "host:train"), row("forward", "host:Model.forward")])
    ours, forward = host.train, vars(host.Model)["forward"]
    host.train = theirs = lambda step: "later"
    del host.Model.forward
    with pytest.raises(PatchError) as caught:
        done.uninstall()
    what = "cannot be restored, it was rebound after mindspeed_fsdp2 had patched it. Undo that patch first."
    assert str(caught.value) == f"host.train: {what}\nhost.Model.forward: {what}"
    assert host.train is theirs
    host.train, host.Model.forward = ours, forward  # that patch is undone: now it works
    done.uninstall()
    assert host.train("1") == "train 1"


def test_all_problems_are_listed_and_nothing_is_touched(host: Any, register: Register) -> None:
    original, made = host.train, []
    table = [
        row("good", "host:train", make=lambda held: made.append(held)),
        row("gone", "host:vanished", "host.sub:train", "host:Vanished.forward"),
        row("again", "host:train"),
        row("malformed", "host.train"),
        row("not_a_class", "host:NUMBER.real"),
        row("method_aliases", "host:Model.forward", also_aliases=True),
    ]
    with pytest.raises(PatchError) as caught:
        install(table)
    assert str(caught.value).splitlines() == [
        "gone: none of its targets exists: host:vanished, host.sub:train, host:Vanished.forward. Name the new place.",
        "again: host.train is patched by the row good already. Merge the two rows.",
        "malformed: the target 'host.train' is malformed. Write module:attr or module:Class.attr.",
        "not_a_class: the target 'host:NUMBER.real' goes through NUMBER, which is not a class.",
        "method_aliases: also_aliases does not follow host:Model.forward. Use it with module:attr targets only.",
    ]
    assert host.train is original and made == []


def test_rows_that_do_not_apply_are_skipped(host: Any) -> None:
    table = [
        row("optional", "host_gone:train", required=False),
        row("unneeded", "host:train", applies=lambda: accepts("host:train", "force")),
        row("needed", "host:train", applies=lambda: accepts("host:train", "async_op")),
    ]
    done = install(table)
    assert done.skipped == {"optional": "none of its targets exists", "unneeded": "not needed here"}
    assert list(done.applied) == ["needed"]
    done.uninstall()


def test_make_must_change_something(host: Any) -> None:
    with pytest.raises(PatchError) as caught:
        install([row("same", "host:train", make=lambda held: held)])
    assert str(caught.value) == "same: make returned what host.train holds already. Use applies to skip a row."


def test_a_name_that_cannot_be_set_undoes_the_ones_before(host: Any) -> None:
    original = host.train
    table = [row("train", "host:train"), row("builtin", "builtins:int.bit_length")]
    with pytest.raises(PatchError, match=r"^builtin: builtins\.int\.bit_length cannot be set: .*Nothing is patched\.$"):
        install(table)
    assert host.train is original


def test_a_broken_module_is_not_taken_for_an_absent_one(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "host_broken.py").write_text("import host_dependency_that_is_missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PatchError) as caught:
        install([row("broken", "host_broken:train", required=False)])
    assert str(caught.value) == (
        "broken: host_broken fails to import: No module named 'host_dependency_that_is_missing'. "
        "Repair the installation."
    )


def test_lazy_module_attribute(register: Register) -> None:
    module = register(
        "host_lazy",
        "def __getattr__(name):\n    if name == 'train':\n        return print\n    raise AttributeError(name)\n",
    )
    done = install([row("lazy", "host_lazy:train", make=lambda held: (held, "ours"))])
    assert module.train == (print, "ours")
    done.uninstall()
    assert "train" not in vars(module) and module.train is print


@pytest.mark.parametrize(
    ("target", "exists"),
    [
        ("host:train", True),
        ("host:Model.inherited", True),
        ("host:vanished", False),
        ("host:Vanished.forward", False),
        ("host.sub:train", False),
        ("host_gone:train", False),
    ],
)
def test_resolves(host: Any, target: str, exists: bool) -> None:
    assert resolves(target) is exists


@pytest.mark.parametrize(
    ("target", "parameter", "expected"),
    [
        ("host:train", "async_op", True),
        ("host:train", "other", False),
        ("host:Model.static", "x", True),
        ("host:Model.made", "cls", True),
        ("host:vanished", "x", False),
    ],
)
def test_accepts(host: Any, target: str, parameter: str, expected: bool) -> None:
    assert accepts(target, parameter) is expected


def test_an_empty_table_is_an_empty_installation() -> None:
    assert install([]) == Installation()
