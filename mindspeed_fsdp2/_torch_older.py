"""The private names of PyTorch that only its older versions need, each with its reason; they go away with those.

Nothing here changes what a newer torch does, which has a public way or no such limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Naming process groups: up to torch 2.13 ranks that belong to different numbers of groups name a new one differently.
# Dividing gradients: torch 2.7 has no setting by which a unit sums them instead of averaging (see torch_compat.py).
import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from ._torch_private import param_groups, state_of

# Where FSDP looks up how to divide gradients, as a module and a name in it.
DIVIDE_FACTORS = (collectives, "_get_gradient_divide_factors")

# Whether FSDP itself ends the forward of a unit of which not all modules ran.
COMPLETES_FORWARDS = hasattr(FSDPState, "_force_complete_incomplete_states")


def mend_unit(unit: nn.Module) -> None:
    """Lift two limits of FSDP of torch 2.7 from ``unit`` (**in place**, right after ``fully_shard``).

    It counts frozen parameters in where it asks for one dtype at the first forward, though only gradients need that.
    And on the CPU it refuses to go on after an all-reduce over replicas, because streams of the CPU record no events.
    """
    for group in param_groups(unit):
        group._init_mp_dtypes = _of_trainable(group, group._init_mp_dtypes)
        if group.device.type == "cpu":
            group.post_backward = _with_events(group, group.post_backward)


def _with_events(group: Any, original: Callable[..., None]) -> Callable[..., None]:
    def post_backward(*unused: Any) -> None:
        stream = group.comm_ctx.all_reduce_stream  # made in the first forward
        if isinstance(stream, torch.cpu.Stream) and not isinstance(stream, _RecordingStream):
            group.comm_ctx.all_reduce_stream = _RecordingStream()
        original(*unused)

    return post_backward


class _RecordingStream(torch.cpu.Stream):
    """Has an event to show, on which nobody needs to wait."""

    def record_event(self) -> Any:
        return torch.cpu.Event()


def _of_trainable(group: Any, original: Callable[[], None]) -> Callable[[], None]:
    def init_mp_dtypes() -> None:
        try:
            original()
        except AssertionError:
            every = group.fsdp_params  # the first call has set the dtypes of each, before it compared them
            group.fsdp_params = [param for param in every if param.sharded_param.requires_grad] or every[:1]
            try:
                original()
            finally:
                group.fsdp_params = every

    return init_mp_dtypes


def complete_partial_forward(unit: nn.Module) -> None:
    """Let FSDP know that a forward of ``unit`` is over although some of its modules did not run (**in place**).

    Torch 2.7 goes on waiting for them, and does not gather in the next forward.
    """
    state: Any = state_of(unit)
    waits: set[nn.Module] = state._modules_to_run_forward
    if not waits:
        return
    waits.clear()
    if state._state_ctx.iter_forward_root is state:  # recomputation began outside of the root's forward
        state._state_ctx.iter_forward_root = None
    for part in (state, *param_groups(unit)):
        part._training_state = type(part._training_state).IDLE


def set_reshard_after_forward(unit: nn.Module, value: bool) -> None:
    """Set whether ``unit`` is resharded, in full, after its forward (**in place**).

    ``FSDPModule.set_reshard_after_forward`` is public from torch 2.8 on, and does this.
    """
    for group in param_groups(unit):
        group.post_forward_mesh_info = group.mesh_info if value else None


def group_name(ranks: Sequence[int]) -> str:
    """Return how torch would call a new process group that only its own ``ranks`` create."""
    name: Callable[[Sequence[int]], str] | None = getattr(distributed_c10d, "_hash_ranks_to_str", None)
    return "" if name is None else name(ranks)


@contextmanager
def groups_named(name: str) -> Iterator[None]:
    """Let torch call a process group that is created inside ``name``."""
    original = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = original
