"""Megatron's gradient statistics over two-dimensional meshes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from ..mesh import shard_group


def wrap_data_parallel_group(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``get_data_parallel_group_if_dtensor`` that takes the shard axis of a (replicate, shard) mesh.

    The original asks a 2-D mesh for its one group and raises. Replicas hold equal gradients: only shards are summed.
    """

    @functools.wraps(original)
    def get_data_parallel_group_if_dtensor(tensor: Any, data_parallel_group: Any = None) -> Any:
        if isinstance(tensor, DTensor) and tensor.device_mesh.ndim == 2:
            return shard_group(tensor.device_mesh)
        return original(tensor, data_parallel_group)

    return get_data_parallel_group_if_dtensor
