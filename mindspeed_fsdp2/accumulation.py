"""Gradient accumulation: which micro-batch reduces gradients and frees parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .apply import Sharded, reshard_after_forward, sharded
from .errors import PlanError


@contextmanager
def accumulate(model: nn.Module, last: bool) -> Iterator[None]:
    """Run one micro-batch's forward and backward inside (**in place** on the state of the units).

    With ``reduce_grads: every_microbatch`` each micro-batch reduce-scatters its gradients; between replicas they are
    averaged on the last one only. With ``last_microbatch`` gradients stay whole (and parameters gathered) until the
    last micro-batch: one reduce-scatter per unit and step, at the price of a whole model's gradients per rank.

    Args:
        model: A wrapped model.
        last: Whether this is the step's last micro-batch. Every rank passes the same value. Every step needs a last
            one: an optimizer's step before it is refused. ``model.zero_grad()`` or ``optimizer.zero_grad()`` gives a
            step up.

    Raises:
        PlanError: ``model`` is not wrapped.
    """
    handle = sharded(model)
    if handle is None:
        raise PlanError("accumulate: the model is not wrapped. Call wrap_model first.")
    if not last:
        _hold(handle)
    try:
        yield
    finally:
        if not last:
            _release(handle)


def _hold(handle: Sharded) -> None:
    root = handle.root
    handle.state.holding = handle.state.unfinished = True
    root.set_is_last_backward(False)
    if handle.plan.config.reduce_grads == "last_microbatch":
        root.set_requires_gradient_sync(False)
        root.set_reshard_after_backward(False)
        # Gathered once and kept: gathering again would cost what this setting is there to save.
        reshard_after_forward(handle, False)
    else:
        root.set_requires_all_reduce(False)
    if handle.whole is not None:
        handle.whole.enabled = False


def _release(handle: Sharded) -> None:
    root = handle.root
    handle.state.holding = False
    root.set_is_last_backward(True)
    root.set_requires_gradient_sync(True)
    root.set_requires_all_reduce(True)
    root.set_reshard_after_backward(True)
    if handle.plan.config.reduce_grads == "last_microbatch":
        reshard_after_forward(handle, True)
    if handle.whole is not None:
        handle.whole.enabled = True
