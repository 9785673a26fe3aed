"""What Megatron keeps beside tensors, as a file that is read without running what a pickle can run."""

from __future__ import annotations

import io
import logging
import pickle
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from ...errors import CheckpointError

logger = logging.getLogger("mindspeed_fsdp2")

FILE: Final = "megatron.pt"
_ARGS = "args"


def pack(value: object) -> bytes:
    """Return ``value`` as bytes in PyTorch's format."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def unpack(content: bytes, where: str) -> Any:
    """Return what was packed.

    Raises:
        CheckpointError: The bytes are damaged or hold objects that PyTorch does not load.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(f"{where}: it cannot be read: {str(error).splitlines()[0]}. Load another one.") from error


def pack_state(state: Mapping[str, Any]) -> bytes:
    """Return Megatron's state beside tensors as bytes; what could not be read again is left out, with a warning.

    Args:
        state: Scheduler state, counters, and ``args``, whose attributes are saved one by one.
    """
    content = dict(state)
    if isinstance(content.get(_ARGS), Namespace):
        content[_ARGS] = dict(vars(content[_ARGS]))
    if not _readable(content):
        dropped = []
        content, inner = dict(content), content.get(_ARGS)
        if isinstance(inner, dict):
            dropped += [f"args.{name}" for name, value in inner.items() if not _readable(value)]
            content[_ARGS] = {name: value for name, value in inner.items() if f"args.{name}" not in dropped}
        dropped += [name for name, value in content.items() if not _readable(value)]
        content = {name: value for name, value in content.items() if name not in dropped}
        logger.warning("the checkpoint leaves out what cannot be read back safely: %s", ", ".join(dropped))
    return pack(content)


def read_state(folder: Path) -> dict[str, Any]:
    """Return Megatron's state beside tensors; ``args`` is a Namespace again.

    Raises:
        CheckpointError: It cannot be read.
    """
    path = folder / FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: it cannot be read: {error.strerror}. Load another checkpoint.") from error
    state: dict[str, Any] = unpack(content, str(path))
    if isinstance(state.get(_ARGS), dict):
        state[_ARGS] = Namespace(**state[_ARGS])
    return state


def _readable(value: object) -> bool:
    try:
        torch.load(io.BytesIO(pack(value)), weights_only=True)
    except (pickle.PickleError, RuntimeError, AttributeError, TypeError, ValueError, NotImplementedError):
        return False
    return True
