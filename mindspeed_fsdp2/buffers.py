"""Buffers that training changes: running statistics are rank 0's on every rank, as under DDP."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import nn

from ._torch_private import in_backward
from .step_state import StepState

logger = logging.getLogger("mindspeed_fsdp2")

_STATISTICS = {"running_mean", "running_var"}  # batch norms of every kind, and instance norms that keep statistics
_NAMED_AT_MOST = 4


class RunningStatistics:
    """Gives every rank the first rank's running statistics, at the times at which DDP does (**collective** in forward).

    Each rank updates them from its own data, so they would drift apart, and every rank but the first would evaluate
    another model. They are sent before the first forward, and before each that follows a forward with gradients of a
    step's last micro-batch, all in one broadcast; a model without such buffers sends nothing.

    What other buffers hold is the model's own business (MoE layers count each rank's tokens in one). The ranks compare
    those once, after the first training forward, and the first rank names the ones that differ.
    """

    def __init__(
        self, root: nn.Module, group: dist.ProcessGroup | None, device: torch.device, state: StepState
    ) -> None:
        """Register the hooks (**in place**).

        Args:
            root: The root unit's module, whose buffers are on ``device`` and equal on every rank.
            group: All data-parallel ranks.
            device: Where their collectives run.
            state: Tells whether a micro-batch is held.
        """
        self._group = group
        self._device = device
        self._state = state
        self._root = root
        self._keepers = [module for module in root.modules() if _STATISTICS <= module._buffers.keys()]
        self._changed = True  # a checkpoint that is loaded before the first forward holds each rank's own
        self._trained = False
        self._compared = False
        self._hook = root.register_forward_pre_hook(self._before_forward, prepend=True)

    def _before_forward(self, _module: nn.Module, _args: object) -> None:
        if in_backward():
            return
        if self._changed:
            self._send(self._statistics())
            if self._trained and not self._compared:
                self._compared = True
                self._compare()
        self._changed = torch.is_grad_enabled() and not self._state.holding
        self._trained |= self._changed
        if self._compared and not self._keepers:
            self._hook.remove()

    def _statistics(self) -> list[torch.Tensor]:
        """Return all buffers of the modules that keep running statistics, each once."""
        found = [buffer for module in self._keepers for buffer in module._buffers.values() if buffer is not None]
        return list({id(buffer): buffer for buffer in found}.values())

    def _send(self, buffers: list[torch.Tensor]) -> None:
        if not buffers:
            return
        # As bytes, because they are of several dtypes: batch norms count batches beside their statistics.
        pieces = [buffer.detach().to(self._device).contiguous().flatten().view(torch.uint8) for buffer in buffers]
        flat = torch.cat(pieces)
        dist.broadcast(flat, group=self._group, group_src=0)
        for buffer, piece in zip(buffers, torch.split(flat, [piece.numel() for piece in pieces])):
            # A copy, because views of wider dtypes must start at a multiple of their size; and through .data, as in
            # the norm's own update: a forward whose backward is still to come may have saved the buffer.
            buffer.data.copy_(piece.clone().view(buffer.dtype).view(buffer.shape))

    def _compare(self) -> None:
        sent = {id(buffer) for buffer in self._statistics()}
        mine = {
            name: float(buffer.sum(dtype=torch.float64))
            for name, buffer in self._root.named_buffers()
            if buffer.is_floating_point() and id(buffer) not in sent
        }
        if not mine:
            return
        every: list[dict[str, float]] = [mine] * dist.get_world_size(self._group)
        dist.all_gather_object(every, mine, group=self._group)
        if differ := [name for name in mine if len({repr(sums.get(name)) for sums in every}) > 1]:
            more = f" and {len(differ) - _NAMED_AT_MOST} more" if len(differ) > _NAMED_AT_MOST else ""
            if dist.get_rank(self._group) == 0:
                logger.warning(
                    "buffers: the forward leaves different values on the ranks in %s%s. Only running_mean and "
                    "running_var are kept equal; each rank goes on with its own values of the others, where DDP would "
                    "take rank 0's. Average them over the ranks in the module, if it does not count on that.",
                    ", ".join(differ[:_NAMED_AT_MOST]),
                    more,
                )
