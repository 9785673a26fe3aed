"""When a backward of a wrapped model begins and ends, and whether one never ended."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ._torch_private import backward_waits, in_backward, queue_callback
from .hidden_outputs import tensors_in


class Backward:
    """Tells its listeners when a backward begins, and when it and all of FSDP's reductions have ended.

    A backward begins where a gradient reaches an output of the root, or where a listener sees one elsewhere first (an
    output that no hook finds, a forward of a part of the model). One that failed is noticed by the next forward.

    Attributes:
        running: Between begin and end; still true after a backward that failed.
        forward_failed: A forward ended with an exception, and its leftovers are still there.
        failed: A backward did.
    """

    def __init__(self, root: nn.Module) -> None:
        """Register the hooks (**in place**).

        Args:
            root: The root unit's module, every unit sharded.
        """
        self._root = weakref.ref(root)
        self.running = False
        self.forward_failed = False
        self.failed = False
        self._completed = False
        self._forwards: list[Callable[[], None]] = []
        self._begins: list[Callable[[], None]] = []
        self._ends: list[Callable[[], None]] = []
        root.register_forward_pre_hook(self._before_forward, prepend=True)
        root.register_forward_hook(self._after_forward)
        root.register_forward_hook(self._left_forward, always_call=True)

    def on_forward(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` before each forward of the root that is no recomputation."""
        self._forwards.append(listener)

    def on_begin(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` at the beginning of each backward."""
        self._begins.append(listener)

    def on_end(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` at the end of each backward that did not fail, after FSDP's reductions."""
        self._ends.append(listener)

    def begin(self) -> None:
        """Note that a backward is under way; a second call changes nothing."""
        if self.running:
            return
        self.running = True
        # A callback queued by a callback runs after all that were queued meanwhile, FSDP's last reductions among them.
        queue_callback(lambda: queue_callback(self._end))
        for listener in self._begins:
            listener()

    def stopped(self) -> bool:
        """Return whether the last forward or backward ended with an exception."""
        return self.failed or self.forward_failed or (self._under_way() and not in_backward())

    def _under_way(self) -> bool:
        root = self._root()  # FSDP may know of a backward that nobody announced: the loss came out elsewhere
        return self.running or (root is not None and backward_waits(root))

    def recovered(self) -> None:
        """Note that nothing is left of the exception."""
        self.running = self.failed = self.forward_failed = False

    def _end(self) -> None:
        self.running = False
        for listener in self._ends:
            listener()

    def _before_forward(self, _module: nn.Module, _args: Any) -> None:
        if in_backward():
            return
        if self._under_way():
            self.running, self.failed = False, True
        for listener in self._forwards:
            listener()

    def _after_forward(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._completed = True
        if torch.is_grad_enabled():
            for tensor in tensors_in(output, opaque=True):
                if tensor.requires_grad:
                    tensor.register_hook(self._reached)  # type: ignore[no-untyped-call]

    def _left_forward(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self.forward_failed |= not self._completed
        self._completed = False

    def _reached(self, _grad: torch.Tensor) -> None:
        self.begin()
