"""A chain of blocks of different sizes, so that a collective's size tells which unit it serves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 8


class Block(nn.Module):
    """Two linear maps around tanh; ``2 * WIDTH * inner`` parameters."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Sequential(nn.Linear(WIDTH, inner, bias=False), nn.Tanh())
        self.down = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of ``x``, ``(batch, WIDTH)``."""
        return torch.tanh(self.down(self.up(x)))


class Chain(nn.Module):
    """Runs its blocks in ``order``, then the head; the loss is the mean square."""

    def __init__(self, order: Sequence[int] = (0, 1, 2, 3), frozen: Sequence[int] = ()) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.order = order
        # Twice a multiple of 4, so that nothing is padded on 2 or 4 ranks.
        self.blocks = nn.ModuleList(Block(8 * (2 + n)) for n in range(4))
        self.head = nn.Linear(WIDTH, 4, bias=False)
        for n in frozen:
            self.blocks[n].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scalar loss for ``x`` of shape ``(batch, WIDTH)``."""
        for n in self.order:
            x = self.blocks[n](x)
        return self.head(x).square().mean()


def inputs(step: int = 0) -> torch.Tensor:
    """Return this rank's input of ``step``, shape ``(3, WIDTH)``."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(3, WIDTH, generator=generator)


def sizes() -> dict[int, str]:
    """Return elements -> name of the unit with so many, for ``blocks.{*}`` and the root."""
    units = {sum(p.numel() for p in block.parameters()): f"blocks.{n}" for n, block in enumerate(Chain().blocks)}
    return {**units, WIDTH * 4: "(root)"}
