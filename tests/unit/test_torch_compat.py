"""A function of torch is replaced once and given back, unless somebody else has replaced ours."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from mindspeed_fsdp2.torch_compat import REBOUND, Rebound


def original() -> str:
    return "torch"


def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda: f"ours around {function()}"


def row() -> Rebound:
    module = types.ModuleType("host")
    module.name = original  # type: ignore[attr-defined]
    return Rebound(module, "name", wrap, why="why", remove_when="when")


def test_install_and_uninstall() -> None:
    rebound = row()
    rebound.uninstall()
    assert rebound.held is original
    rebound.install()
    ours = rebound.held
    assert ours() == "ours around torch"
    rebound.install()
    assert rebound.held is ours
    rebound.uninstall()
    assert rebound.held is original


def test_somebody_else_s_replacement_stays() -> None:
    rebound = row()
    rebound.install()
    theirs = functools.wraps(rebound.held)(wrap(rebound.held))
    rebound.module.name = theirs  # type: ignore[attr-defined]
    rebound.uninstall()
    assert rebound.held is theirs
    rebound.install()  # ours is inside theirs
    assert rebound.held is theirs


def test_absent_name() -> None:
    rebound = Rebound(types.ModuleType("host"), "name", wrap, why="why", remove_when="when")
    assert rebound.held is None
    rebound.install()
    assert rebound.held is None


def test_the_table_names_what_torch_has() -> None:
    assert [entry.name for entry in REBOUND if entry.held is None] == []
