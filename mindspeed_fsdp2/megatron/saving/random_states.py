"""Every rank's random states: each gets its own back, and other numbers of ranks what all of them had alike."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .plain_state import pack, unpack

_NUMPY = "np_rng_state"


def own_state(gathered: Sequence[Mapping[str, Any]], rank: int) -> dict[str, Any]:
    """Return this rank's part of what Megatron's ``get_rng_state`` returns.

    Args:
        gathered: One entry, this rank's, or one for each data-parallel rank.
        rank: This rank among the data-parallel ranks.
    """
    return dict(gathered[rank if len(gathered) > 1 else 0])


def digests(state: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> digest of each random state."""
    return {name: hashlib.sha256(_content(value)).hexdigest()[:16] for name, value in state.items()}


def to_tensor(state: Mapping[str, Any]) -> torch.Tensor:
    """Return the states as bytes, shape ``(bytes,)``, uint8."""
    kind, keys, *rest = state[_NUMPY]
    plain = {**state, _NUMPY: (kind, np.asarray(keys).tolist(), *rest)}
    return torch.frombuffer(bytearray(pack(plain)), dtype=torch.uint8)


def from_tensor(content: torch.Tensor, where: str) -> dict[str, Any]:
    """Return the states inside the bytes of :func:`to_tensor`.

    Raises:
        CheckpointError: They are damaged.
    """
    state: dict[str, Any] = unpack(bytes(content.numpy()), where)
    kind, keys, *rest = state[_NUMPY]
    return {**state, _NUMPY: (kind, np.array(keys, dtype=np.uint32), *rest)}


def _content(value: object) -> bytes:
    if isinstance(value, torch.Tensor):
        return bytes(value.cpu().numpy())
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, Mapping):
        return b"".join(repr(key).encode() + _content(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return b"".join(_content(item) for item in value)
    return repr(value).encode()
