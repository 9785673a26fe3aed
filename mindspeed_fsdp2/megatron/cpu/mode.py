"""CPU mode: unmodified Megatron training on a host without an accelerator, with the gloo backend.

Megatron spells its device ``cuda`` everywhere. CPU mode redirects those names to the host for as long as it is on; the
table is :func:`redirections`. Nothing needs to happen before Megatron is imported: :func:`enable_cpu` may be called
any time before ``initialize_megatron``. Not covered: Transformer Engine, CUDA graphs, and random numbers that a
dataset draws from torch's default generator in the main process (use ``numpy`` or ``random``, or worker processes).
"""

from __future__ import annotations

import importlib.util
import logging
from contextlib import ExitStack
from itertools import chain

import torch

from ...device import cuda_means_npu
from ...errors import ConflictError, PatchError
from ..patcher import Installation, Patch, install, resolves
from . import stand_ins
from .device import ACCELERATOR, DEVICE, MEMORY, RANDOM, STREAMS
from .host import BUILD_STEPS, HOST_DRAWS, TRACKER_LOGGER, SharedGeneratorFilter
from .placement import fill_device_cache, placement
from .redirection import REMOVE_WHEN, Redirection

_NCCL = "torch.distributed:ProcessGroupNCCL"


class CpuMode:
    """CPU mode while it is on; returned by :func:`enable_cpu`. Leaving a ``with`` block restores as well.

    Attributes:
        installation: The redirected names and what they held.
    """

    def __init__(self, installation: Installation, others: ExitStack) -> None:
        self.installation = installation
        self._others = others

    def __enter__(self) -> CpuMode:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Give every name back what it held (**in place**); a second call does nothing.

        Tensors, models and process groups made in the meantime stay usable.

        Raises:
            PatchError: Somebody rebound one of the names since; nothing is restored then.
        """
        self.installation.uninstall()
        self._others.close()


def cpu_mode_wanted(distributed_backend: str) -> bool:
    """Return whether a run with this ``--distributed-backend`` is to train on CPU.

    Args:
        distributed_backend: The flag's value. Only plain ``gloo`` means CPU.

    Raises:
        ConflictError: ``gloo`` although an accelerator, or the module for one, is there.
    """
    if distributed_backend != "gloo":
        return False
    if torch.cuda.is_available is stand_ins.is_available:
        return True  # CPU mode is on: what torch.cuda says now is our own answer
    if torch.cuda.is_available() and not cuda_means_npu():
        raise ConflictError(
            "--distributed-backend gloo: means training on CPU, but this machine has a CUDA device. Write "
            "--distributed-backend nccl (or cuda:nccl,cpu:gloo), or hide the device with CUDA_VISIBLE_DEVICES=''."
        )
    if hasattr(torch, "npu") or importlib.util.find_spec("torch_npu") is not None:
        raise ConflictError(
            "--distributed-backend gloo: means training on CPU, but torch_npu is installed here. Write "
            "--distributed-backend npu:hccl,cpu:gloo, or use an environment without torch_npu."
        )
    return True


def enable_cpu() -> CpuMode:
    """Redirect every CUDA name that Megatron uses to the host, **in place**.

    Returns:
        What :meth:`CpuMode.restore` undoes.

    Raises:
        PatchError: CPU mode is on already, or a name cannot be redirected; nothing has changed then.
    """
    if torch.cuda.is_available is stand_ins.is_available:
        raise PatchError("CPU mode is on already. Call restore() on the CpuMode that enable_cpu() returned before.")
    fill_device_cache()
    with ExitStack() as started:  # undone if what follows fails
        # Functions decorated with torch.compile when Megatron was imported; building kernels for them takes minutes.
        started.push(torch.compiler.set_stance("force_eager"))
        tracker, shared = logging.getLogger(TRACKER_LOGGER), SharedGeneratorFilter()
        tracker.addFilter(shared)
        started.callback(tracker.removeFilter, shared)
        installation = install([*chain.from_iterable(group.patches() for group in redirections()), _nccl_options()])
        others = started.pop_all()
    return CpuMode(installation, others)


def redirections() -> tuple[Redirection, ...]:
    """Return the table, grouped by purpose."""
    return (DEVICE, STREAMS, MEMORY, RANDOM, ACCELERATOR, *placement(), HOST_DRAWS, BUILD_STEPS)


def _nccl_options() -> Patch:
    return Patch(
        name="cpu: NCCL options",
        targets=(_NCCL,),
        make=lambda absent: stand_ins.ProcessGroupNCCL,
        why="From 0.13 on Megatron asks for NCCL stream options with FSDP2, on CPU builds of torch too; gloo ignores "
        "them.",
        remove_when=REMOVE_WHEN,
        applies=lambda: not resolves(_NCCL),
        creates=True,
    )
