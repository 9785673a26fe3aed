"""The private names of PyTorch this package cannot do without, each with its reason.

Nothing else in the package imports an underscore name of torch. Remove an entry as soon as a public way exists.
"""

from __future__ import annotations

from collections.abc import Callable

# Flattening call arguments: torch has no public pytree module (as of 2.14), and Hugging Face output classes
# register themselves with this one only.
# Casting inputs and outputs: fully_shard uses this walk for its own casts, so ours reaches the same tensors
# (dataclasses, named tuples, packed sequences).
import torch
from torch.distributed.utils import _apply_to_tensors as apply_to_tensors
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

__all__ = ["TreeSpec", "apply_to_tensors", "queue_callback", "tree_flatten", "tree_unflatten"]


def queue_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` once, when the backward that is under way has finished.

    FSDP and DDP use the same door; no hook of the public API opens then.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)
