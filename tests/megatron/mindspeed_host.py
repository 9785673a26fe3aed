"""Makes ``import mindspeed`` work on a host without an NPU: its real sources if a path is given, else a stand-in.

Its sources import ``torch_npu``, ``torchair`` and libraries for features that are not used here. Those that are not
installed are replaced by modules of which every attribute exists and does nothing, except the few operators that a
training run calls.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.utils._device

SOURCES = os.environ.get("MINDSPEED_PATH")
MM_SOURCES = os.environ.get("MINDSPEED_MM_PATH")
STAND_IN = str(Path(__file__).with_name("mindspeed_stand_in"))
HOLLOW = ("torch_npu", "torchair", "scipy", "einops", "accelerate", "peft", "datasets")


class Nothing:
    """Can be called, read and iterated; a decorator leaves what it decorates."""

    def __init__(self, *_args: Any, **_named: Any) -> None: ...

    def __call__(self, *args: Any, **named: Any) -> Any:
        decorated = len(args) == 1 and not named and isinstance(args[0], types.FunctionType | type)
        return args[0] if decorated else Nothing()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __contains__(self, _item: object) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter(())


class HollowModule(types.ModuleType):
    """A module, and a package, whose attributes are :class:`Nothing`."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


class HollowFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the hollow packages after every other finder."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] in HOLLOW:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = HollowModule(spec.name)
        module.__file__ = f"/nowhere/{spec.name}.py"
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, None]:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon), None


def swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    gate, up = x.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


def add_mindspeed() -> None:
    """Put MindSpeed, and MindSpeed-MM where its path is given, on ``sys.path`` (**in place**)."""
    if SOURCES is None:
        sys.path.insert(0, STAND_IN)
        return
    sys.path[:0] = [SOURCES, *([MM_SOURCES] if MM_SOURCES else [])]
    sys.meta_path.append(HollowFinder())
    import torch_npu

    torch.npu = HollowModule("torch.npu")
    torch_npu.npu_rms_norm, torch_npu.npu_swiglu = rms_norm, swiglu
    torch.utils._device._device_constructors()  # remembers the constructors it finds
    original = torch.ones

    @functools.wraps(original)
    def ones(*size: Any, device: Any = None, **named: Any) -> torch.Tensor:  # MindSpeed's attention mask names "npu"
        return original(*size, device="cpu" if device == "npu" else device, **named)

    torch.ones = ones
    from mindspeed_fsdp2.megatron import startup

    # torch_npu is there now, and gloo is meant all the same.
    startup.cpu_mode_wanted = lambda backend: backend == "gloo"
