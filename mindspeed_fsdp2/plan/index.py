"""The modules of one model by name: what module paths are matched against."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from ..errors import ModulePathError, PlanError
from ..module_path import ModulePath, ModuleTree, nearest


@dataclass(frozen=True)
class ModelIndex:
    """Every module of a model under every name it has.

    Attributes:
        root: The model below its wrappers; all fqns are relative to it.
        modules: First name of each module -> module, in registration order; ``""`` is the root.
        first_name: Every name, second names of shared modules included -> first name.
        tree: All names, for matching.
        classes: Class name, bare and with its import path -> first names of the modules of exactly that class.
    """

    root: nn.Module
    modules: Mapping[str, nn.Module]
    first_name: Mapping[str, str]
    tree: ModuleTree
    classes: Mapping[str, list[str]] = field(repr=False)

    def select(self, text: str) -> list[str]:
        """Return the first names of the modules that ``text`` selects, in registration order, each once.

        ``text`` is a module path, or the import path or bare name of a module class; a module path wins. An import
        path selects instances of subclasses too, as in MindSpeed's files, a bare name those of exactly that class.

        Raises:
            ModulePathError: Nothing is selected, an index names no module, or ``text`` names a parameter.
        """
        try:
            found = ModulePath.parse(text).select(self.tree)
        except ModulePathError as error:
            if found := self._of_class(text):
                return found
            raise self._explain(text, error) from None
        return list(dict.fromkeys(self.first_name[fqn] for fqn in found))

    def _of_class(self, text: str) -> list[str]:
        home, _, name = text.rpartition(".")
        # The model's classes are imported, so nothing needs to be; the path may be one that re-exports the class.
        kind = getattr(sys.modules.get(home), name, None) if home else None
        if isinstance(kind, type) and issubclass(kind, nn.Module):
            return [fqn for fqn, module in self.modules.items() if isinstance(module, kind)]
        return list(self.classes.get(text, ()))

    def _explain(self, text: str, error: ModulePathError) -> ModulePathError:
        owner, _, leaf = text.rpartition(".")
        if any(leaf in self.modules[fqn]._parameters for fqn in self._owners(owner)):
            where = f"Write its module {owner!r}." if owner else "It belongs to the root, which is always a unit."
            return ModulePathError(f"{text!r} is a parameter, not a module. {where}")
        wrapped = text.removeprefix("module.")
        if wrapped != text and wrapped in self.first_name:
            return ModulePathError(f"{text!r} selects no module: wrappers are not part of a path. Write {wrapped!r}.")
        close = nearest(text, self.classes) if text.rpartition(".")[2][:1].isupper() else []
        if close:
            return ModulePathError(f"{error} Classes with a similar name: {', '.join(close)}.")
        return error

    def _owners(self, text: str) -> list[str]:
        try:
            return self.select(text) if text else [""]
        except ModulePathError:
            return []


def build_index(model: nn.Module) -> ModelIndex:
    """Return the index of ``model`` below its wrappers, in time linear in the number of names.

    Raises:
        PlanError: A module contains itself.
    """
    root = below_wrappers(model)
    modules: dict[str, nn.Module] = {}
    first_name: dict[str, str] = {}
    first_of: dict[int, str] = {}
    of_class: dict[type[nn.Module], list[str]] = {}

    def visit(module: nn.Module, name: str) -> None:
        # What named_modules(remove_duplicate=False) yields, without its chain of generators.
        first = first_of.setdefault(id(module), name)
        first_name[name] = first
        if first == name:
            modules[name] = module
            of_class.setdefault(type(module), []).append(name)
        if module._modules:
            prefix = f"{name}." if name else ""
            for child_name, child in module._modules.items():
                if child is not None:
                    visit(child, prefix + child_name)

    try:
        visit(root, "")
    except RecursionError:
        raise PlanError("model: a module contains itself. FSDP2 needs a module tree without cycles.") from None
    classes: dict[str, list[str]] = {}
    for kind, fqns in of_class.items():
        for name in {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}:
            others = classes.get(name)
            classes[name] = _in_order([*others, *fqns], modules) if others else fqns
    return ModelIndex(root, modules, first_name, ModuleTree(first_name), classes)


def _in_order(fqns: list[str], modules: Mapping[str, nn.Module]) -> list[str]:
    position = {fqn: n for n, fqn in enumerate(modules)}
    return sorted(fqns, key=position.__getitem__)


def below_wrappers(model: nn.Module) -> nn.Module:
    """Return the first module below wrappers such as Megatron's ``Float16Module`` or DDP.

    A wrapper is a module whose only child is called ``module`` and that owns no parameter itself.
    """
    while list(model._modules) == ["module"] and not model._parameters:
        inner = model._modules["module"]
        if inner is None:
            break
        model = inner
    return model
