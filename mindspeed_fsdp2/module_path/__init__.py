"""Module paths such as ``decoder.layers.{0-20,22-40}``: parsing and matching over names. Strings only."""

from __future__ import annotations

from .index_group import IndexGroup
from .path import ModulePath
from .tree import ModuleTree, nearest

__all__ = ["IndexGroup", "ModulePath", "ModuleTree", "nearest"]
