"""Ranks whose ``npu`` devices have memory: the stand-in for torch_npu with its compiled part."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.ranks import RankPool
from tests.unit.npu_stand_in import Npu, install

HERE = Path(__file__).parent
BUILT = HERE.parents[1] / "build" / f"npu_device-{torch.__version__}"
COMPILER = shutil.which(os.environ.get("CXX", "c++")) is not None and shutil.which("ninja") is not None

_installed: list[Npu] = []  # one per process, as there is one torch_npu


def build() -> Path:
    """Compile npu_device.cpp, unless that was done before, and return the library (a minute on two cores)."""
    from torch.utils import cpp_extension

    BUILT.mkdir(parents=True, exist_ok=True)
    cpp_extension.load("npu_device", [str(HERE / "npu_device.cpp")], ["-O0", "-w"], build_directory=str(BUILT))
    return BUILT / "npu_device.so"


def enter(library: Path) -> Npu:
    """Install the stand-in in this process, once."""
    if not _installed:
        spec = importlib.util.spec_from_file_location("npu_device", library)
        assert spec is not None and spec.loader is not None
        extension: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(extension)
        _installed.append(install(Npu(extension)))
    return _installed[0]


def join(library: Path, rendezvous: str, backend: str = "npu:hccl,cpu:gloo") -> str:
    """Make this rank one of an NPU job; return the backends it got."""
    enter(library)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.npu.set_device(rank)  # type: ignore[attr-defined]
    dist.destroy_process_group()
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    return str(dist.get_backend_config())


class NpuPool(RankPool):
    """Ranks with an NPU each, also those that start anew after a failure."""

    def __init__(self, library: Path, world_size: int = 2) -> None:
        super().__init__(world_size)
        self._library = library

    def _start(self) -> None:
        super()._start()
        backends = self.run(join, self._library, new_rendezvous())
        assert backends == ["npu:hccl,cpu:gloo"] * self.world_size


def new_rendezvous() -> str:
    return os.path.join(tempfile.mkdtemp(), "rendezvous")
