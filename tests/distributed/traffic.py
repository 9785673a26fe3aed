"""Record the collectives of a piece of code, and what autograd saves in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
        kind: ``gather``, ``scatter`` (reduce-scatter), ``reduce`` (all-reduce), or ``flags`` for an all-reduce of
            integers, by which ranks tell each other what they used.
        dtype: What travelled.
        numel: Elements of the larger side: what was gathered or reduced.
        ranks: Size of the group as far as the shapes tell; 0 for all-reduce.
    """

    kind: str
    dtype: torch.dtype
    numel: int
    ranks: int


class Traffic(TorchDispatchMode):
    """Notes every collective that c10d is asked for while it is on, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
            kind = "gather" if "allgather" in name else "scatter"
            sizes = (args[0].numel(), args[1].numel())
            if len(set(sizes)) > 1:  # FSDP of torch 2.7 asks groups of one rank too, where nothing travels
                self.all.append(Collective(kind, args[1].dtype, max(sizes), max(sizes) // min(sizes)))
        elif name == "c10d::allreduce_":
            for tensor in args[0]:
                kind = "reduce" if tensor.is_floating_point() else "flags"
                self.all.append(Collective(kind, tensor.dtype, tensor.numel(), 0))
        elif name.startswith("c10d::"):
            raise AssertionError(f"{name} is not counted: teach Traffic about it")
        return func(*args, **(kwargs or {}))

    def count(self) -> dict[str, int]:
        """Return how many collectives of each kind and group size there were, flags left out: ``{"gather/2": 7}``."""
        return dict(Counter(f"{c.kind}/{c.ranks}" if c.ranks else c.kind for c in self.all if c.kind != "flags"))

    def dtypes(self, kind: str) -> set[torch.dtype]:
        """Return the dtypes that travelled in collectives of ``kind``."""
        return {c.dtype for c in self.all if c.kind == kind}


@contextmanager
def saved_bytes(model: torch.nn.Module) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the bytes autograd keeps for backward, without those of ``model`` itself."""
    sizes: dict[int, int] = {}
    kept: list[torch.Tensor] = []  # so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        gathered = (param for param in model.parameters() if not isinstance(param, DTensor))
        own = {param.untyped_storage().data_ptr() for param in gathered}
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(sizes.values())
