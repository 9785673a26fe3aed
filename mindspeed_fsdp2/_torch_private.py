"""The private names of PyTorch this package cannot do without, each with its reason.

Nothing else in the package imports an underscore name of torch, but for ``_torch_older.py``. Remove an entry as soon
as a public way exists.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

# Flattening call arguments: torch has no public pytree module (as of 2.14), and Hugging Face output classes
# register themselves with this one only.
# Casting inputs and outputs: fully_shard uses this walk for its own casts, so ours reaches the same tensors
# (dataclasses, named tuples, packed sequences).
# Before a unit's reduction: FSDP leaves out parameters without a gradient, and no public hook opens before that.
# Recording initialisation on the meta device: the only hook that sees every operator, whoever calls it.
# Classes of units: fully_shard keeps the class it makes for each module class here, and has no hook for another one.
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_state as fsdp_state
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state as state_of
from torch.distributed.fsdp._fully_shard._fully_shard import cls_to_fsdp_cls
from torch.distributed.utils import _apply_to_tensors as apply_to_tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

__all__ = [
    "SEES_DATACLASSES",
    "TorchDispatchMode",
    "TreeSpec",
    "apply_to_tensors",
    "backward_waits",
    "before_reduction",
    "drop_pending",
    "gradient_hooks",
    "has_gradient_hooks",
    "in_backward",
    "keep_in_reduce_dtype",
    "param_groups",
    "prepare_unit_class",
    "queue_callback",
    "reduction_hooks",
    "schema_of",
    "set_reduction_hooks",
    "state_of",
    "tree_flatten",
    "tree_unflatten",
    "unsaved_buffers",
]

# Whether FSDP's hooks look into dataclasses; without, they see what torch's pytrees see.
SEES_DATACLASSES = hasattr(fsdp_state, "_apply_to_tensors")


def queue_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` once, when the backward that is under way has finished.

    FSDP and DDP use the same door; no hook of the public API opens then.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Return whether autograd runs on this thread right now; no public name tells."""
    return torch._C._current_graph_task_id() != -1


def backward_waits(root: nn.Module) -> bool:
    """Return whether FSDP waits for the end of a backward of ``root``; outside of backward: of one that failed."""
    state: Any = state_of(root)
    return bool(state._state_ctx.post_backward_final_callback_queued)


def before_reduction(unit: nn.Module, listener: Callable[[bool, bool], None]) -> None:
    """Call ``listener(reached, reduces)`` each time FSDP is about to reduce the gradients of ``unit`` (**in place**).

    Args:
        unit: A module given to ``fully_shard``.
        listener: Told whether a gradient has reached the unit's outputs since the last time, and whether FSDP will
            reduce now; it keeps the gradients whole otherwise.
    """
    for group in param_groups(unit):
        group.post_backward = _after_listener(group, listener)


def _after_listener(group: Any, listener: Callable[[bool, bool], None]) -> Callable[..., None]:
    original: Callable[..., None] = group.post_backward

    def post_backward(*unused: Any) -> None:
        listener(group._training_state.name == "PRE_BACKWARD", group.reduce_grads)
        original(*unused)

    return post_backward


def keep_in_reduce_dtype(unit: nn.Module) -> None:
    """Keep the gradients of ``unit`` as FSDP keeps those of earlier micro-batches, in the reduce dtype (**in place**).

    FSDP reduces kept and new gradients of one unit together only if they have one dtype.
    """
    for group in param_groups(unit):
        for param in group.fsdp_params:
            # From torch 2.15 on kept gradients stay where autograd puts them, and their dtypes may differ.
            convert = getattr(param, "to_accumulated_grad_if_needed", None)
            if convert is not None and param.unsharded_accumulated_grad is None and hasattr(param, "_unsharded_param"):
                convert()


def gradient_hooks(param: nn.Parameter) -> Any:
    """Return the hooks of ``register_hook`` on ``param``; tensors have no public list of them."""
    return param._backward_hooks


def reduction_hooks(param: nn.Parameter) -> Any:
    """Return the hooks that FSDP calls when the gradient of the shard ``param`` has been reduced; None without any."""
    return param._post_accumulate_grad_hooks


def set_reduction_hooks(param: nn.Parameter, hooks: Any) -> None:
    """Put back what :func:`reduction_hooks` returned, or None to take the hooks away for a while (**in place**)."""
    param._post_accumulate_grad_hooks = hooks


def drop_pending(unit: nn.Module) -> None:
    """Let go of the gradients that FSDP keeps of ``unit`` until a step's last micro-batch (**in place**).

    ``FSDPModule.reset_iter_state`` keeps those that were not reduced (torch 2.14).
    """
    for group in param_groups(unit):
        group._partial_reduce_output = None
        for param in group.fsdp_params:
            if not isinstance(getattr(type(param), "unsharded_accumulated_grad", None), property):  # from torch 2.15 on
                param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):  # exists from the first gathering on
                param._unsharded_param.grad = None


def param_groups(unit: nn.Module) -> list[Any]:
    """Return what FSDP gathers and reduces together of ``unit``: at most one group before torch 2.12 or so."""
    state: Any = state_of(unit)
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)  # one group only in older versions
    return [state._fsdp_param_group] if groups is None and state._fsdp_param_group is not None else groups or []


def has_gradient_hooks(param: nn.Parameter) -> bool:
    """Return whether someone waits for the gradient of ``param``; tensors have no public list of their hooks."""
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)


def schema_of(operator: Any) -> Any:
    """Return what the signature of an operator says of its arguments and results: which of them it writes into."""
    return operator._schema


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Return the names of the buffers of ``module`` that are left out of state dicts; no public name tells."""
    return module._non_persistent_buffers_set


def prepare_unit_class(kind: type[nn.Module]) -> None:
    """Let ``fully_shard`` turn modules of class ``kind`` into units where Python would refuse the class it makes.

    It derives ``FSDPModule`` and ``kind``, in this order, and assigns the result to the module's ``__class__``. Python
    compares where the two classes first get a ``__dict__``: ``nn.Module`` in most, but a class of its own where the
    first base has none (Megatron's routers derive ``ABC`` before ``nn.Module``). A new class at that place mends it.
    """
    first: Any = kind
    while first.__base__.__dictoffset__:
        first = first.__base__
    if first.__base__ is object or kind in cls_to_fsdp_cls:
        return
    start = types.new_class(first.__name__, (first.__base__,))
    # As in torch's own class: no copies, and an object made from it (a slice, say) is one of the original class.
    own = {"__deepcopy__": _refuse_deepcopy, "__new__": lambda _cls, *args, **kwargs: kind(*args, **kwargs)}
    cls_to_fsdp_cls[kind] = type(f"FSDP{kind.__name__}", (start, FSDPModule, kind), own)


def _refuse_deepcopy(self: nn.Module, _memo: Any) -> Any:
    raise TypeError(f"{type(self).__name__}: a sharded module cannot be copied.")
