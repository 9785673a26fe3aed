"""Be called when a module has been imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


class Arrival(importlib.abc.MetaPathFinder):
    """Calls ``then`` once, right after ``module`` has run; asks the other finders where it lies.

    Whoever imports the module gets it only afterwards. An error of ``then`` is an error of that import.

    Args:
        module: Full name; must not be imported yet.
        then: What to call.
    """

    def __init__(self, module: str, then: Callable[[], None]) -> None:
        self._module = module
        self._then = then
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return what the other finders say of the module waited for, and nothing of any other."""
        if fullname != self._module:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _ThenCall(spec, spec.loader, self)
            if spec is not None:
                found: importlib.machinery.ModuleSpec = spec
                return found
        return None

    def stop(self) -> None:
        """Wait no longer (**in place**); a second call does nothing."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def arrived(self) -> None:
        """Stop waiting and call."""
        if self in sys.meta_path:  # otherwise it was stopped between being found and being run
            self.stop()
            self._then()


class _ThenCall(importlib.abc.Loader):
    def __init__(self, spec: importlib.machinery.ModuleSpec, loader: importlib.abc.Loader, arrival: Arrival) -> None:
        self._spec = spec
        self._loader = loader
        self._arrival = arrival

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Readers of sources and resources look for the real loader in both places.
        self._spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._arrival.arrived()

    def __getattr__(self, name: str) -> object:  # find_spec() alone, as in runpy, must show what the loader can do
        return getattr(self._loader, name)
