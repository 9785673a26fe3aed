"""Small models for the rank tests. Every rank builds them from the same seed."""

from __future__ import annotations

import torch
from torch import nn


class Rotary(nn.Module):
    """Makes angles from positions; has no parameters, as in Megatron."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, length: int) -> torch.Tensor:
        """Return float32 angles of shape ``(length, dim)``."""
        frequency = 1.0 / 10000 ** (torch.arange(0, self.dim, 2).float() / self.dim)
        return torch.outer(torch.arange(length).float(), torch.cat([frequency, frequency]))


class Layer(nn.Module):
    """Residual MLP whose input is modulated by the angles."""

    def __init__(self, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor, *, freqs: torch.Tensor) -> torch.Tensor:
        """Return hidden states of the same shape ``(batch, length, dim)``."""
        turned = self.norm(hidden) * torch.cos(freqs).to(hidden.dtype)
        return hidden + self.down(self.dropout(torch.nn.functional.gelu(self.up(turned))))


class Decoder(nn.Module):
    """Embedding, layers, norm, head; returns the mean cross entropy of predicting the input itself."""

    def __init__(self, layers: int = 3, dim: int = 16, vocab: int = 33, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.rotary = Rotary(dim)
        self.layers = nn.ModuleList(Layer(dim, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scalar loss for ``tokens`` of shape ``(batch, length)``."""
        hidden = self.embedding(tokens)
        freqs = self.rotary(tokens.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, freqs=freqs)
        logits = self.head(self.norm(hidden)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def build(seed: int = 7, **options: float) -> Decoder:
    """Return a :class:`Decoder` whose values depend on ``seed`` only."""
    torch.manual_seed(seed)
    return Decoder(**options)  # type: ignore[arg-type]


def tokens_of(step: int, rank: int, batch: int = 2, length: int = 6, vocab: int = 33) -> torch.Tensor:
    """Return the tokens of ``rank`` at ``step``, shape ``(batch, length)``."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, vocab, (batch, length), generator=generator)
