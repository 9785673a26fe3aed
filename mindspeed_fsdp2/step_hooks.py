"""Hooks before optimizer steps that end with their model."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

# Hooks whose model is gone. The garbage collector may find that out while torch iterates over the hooks, in the middle
# of a step, where none may be removed.
_ended: deque[RemovableHandle] = deque()


def before_each_step(root: nn.Module, hook: Callable[[torch.optim.Optimizer, Any, Any], None]) -> None:
    """Call ``hook`` before each step of any optimizer, for as long as ``root`` lives.

    Args:
        root: The root unit's module, which ``hook`` must not hold.
        hook: Called with the optimizer, and the positional and keyword arguments of its ``step``.
    """
    while _ended:
        _ended.popleft().remove()
    weakref.finalize(root, _ended.append, register_optimizer_step_pre_hook(hook))
