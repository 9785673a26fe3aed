"""What every data-parallel rank keeps for itself: its random states and its own extra."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import numpy as np
import torch

from ..device import device_module
from ..errors import CheckpointError
from .values import Json, Packer, on_host, unpack

SECTION = "ranks"


def rank_path(rank: int) -> tuple[str, str]:
    """Return the path of the tensor that holds the state of data-parallel rank ``rank``."""
    return (SECTION, f"{rank:05d}")


def collect_rank_state(device_type: str, rank_extra: object) -> torch.Tensor:
    """Return this rank's random states and ``rank_extra`` as bytes, shape ``(bytes,)``, uint8.

    Args:
        device_type: Device of the mesh; its generator is saved beside those of the CPU, Python and numpy.
        rank_extra: JSON-like value, None for nothing.

    Raises:
        CheckpointError: ``rank_extra`` is not JSON-like.
    """
    packer = Packer("rank_extra")
    extra = packer.pack(rank_extra)
    if packer.tensors:
        raise CheckpointError(
            "rank_extra: it holds tensors with more than one value. Use extra for tensors, or tolist() for small ones."
        )
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    content: dict[str, Json] = {
        "extra": extra,
        "cpu": _text(torch.get_rng_state()),
        "python": list(random.getstate()),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
    }
    if device_type != "cpu":
        content["device"] = [device_type, _text(device_module(device_type).get_rng_state())]
    return torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8).cpu()


def rank_extra_of(state: torch.Tensor) -> Any:
    """Return the ``rank_extra`` inside the bytes of :func:`collect_rank_state`."""
    return unpack(_content(state)["extra"], {}, on_host)


def restore_random_states(state: torch.Tensor, device_type: str) -> None:
    """Put this rank's generators back to where they were (**in place**, in the whole process).

    Args:
        state: The bytes of :func:`collect_rank_state`.
        device_type: Device of the mesh; another one than that of the save keeps its own state.
    """
    content = _content(state)
    torch.set_rng_state(_tensor(content["cpu"]))
    version, internal, gauss = content["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, numpy_gauss = content["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, numpy_gauss))
    saved_type, device_state = content.get("device", (None, ""))
    if saved_type == device_type:
        device_module(device_type).set_rng_state(_tensor(device_state))


def _content(state: torch.Tensor) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(bytes(state.numpy()))
    except ValueError as error:
        raise CheckpointError(f"checkpoint: the state of a rank cannot be read: {error}. Load another one.") from error
    return content


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.cpu().numpy())).decode()


def _tensor(text: str) -> torch.Tensor:
    # On the host, also where torch.set_default_device names another device.
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8).cpu()
