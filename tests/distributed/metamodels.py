"""Models for the tests of initialisation on the meta device, and what is measured there."""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

WIDTH = 24
VOCAB = 37


class Rotary(nn.Module):
    """Angles computed in the constructor: a buffer that no checkpoint holds, and a plain attribute as in Megatron."""

    def __init__(self) -> None:
        super().__init__()
        freq = 1.0 / 10000 ** (torch.arange(0, 8, 2, dtype=torch.float32) / 8)
        self.register_buffer("inv_freq", freq, persistent=False)
        self.original = self.inv_freq  # as Hugging Face's
        self.scale = freq * 2
        self.tables = {"cos": [freq.cos()]}
        self.helper = Helper((freq.sin(), 1))


class Helper:
    """No module, as Megatron's token dispatchers."""

    def __init__(self, pair: tuple[torch.Tensor, int]) -> None:
        self.pair = pair


class Block(nn.Module):
    """Linear layers, norms and a buffer, with parameters of every kind of initialisation in ``torch.nn.init``."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.batch = nn.BatchNorm1d(width)
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)).bool())
        self.scale = nn.Parameter(torch.full((width,), 0.1))
        nn.init.xavier_normal_(self.down.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states of the same shape ``(batch, WIDTH)``."""
        return self.batch(hidden) + self.scale * self.down(torch.relu(self.up(self.norm(hidden))))


class Net(nn.Module):
    """Embedding, blocks and head.

    Args:
        blocks: How many.
        width: Their width.
        tied: Whether the head uses the embedding's weight.
        second_pass: Initialise once more after construction, as Hugging Face's ``post_init`` does.
        drop: Dropout after the embedding.
    """

    def __init__(
        self, blocks: int = 2, tied: bool = False, second_pass: bool = False, drop: float = 0.0, width: int = WIDTH
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width, padding_idx=3)
        self.rotary = Rotary()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, blocks)]
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.dropout = nn.Dropout(drop)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if second_pass:
            self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.padding_idx is not None:
                module.weight.data[module.padding_idx].zero_()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits for ``tokens`` of shape ``(batch,)``."""
        hidden = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Odd(nn.Module):
    """Initialisation that a list of simple calls does not cover."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.truncated = nn.Parameter(torch.empty(33, 20))
        nn.init.trunc_normal_(self.truncated, std=0.02)  # asks after each round whether to draw again
        self.tail = nn.Parameter(torch.empty(33, 20))
        nn.init.trunc_normal_(self.tail, std=1, a=2, b=4)
        self.orthogonal = nn.Parameter(torch.empty(20, 30))
        nn.init.orthogonal_(self.orthogonal)
        self.sparse = nn.Parameter(torch.empty(20, 30))
        nn.init.sparse_(self.sparse, 0.3)
        self.eye = nn.Parameter(torch.empty(6, 6))
        nn.init.eye_(self.eye)
        self.drawn = nn.Parameter(torch.randn(7, 5) * 0.1)
        self.from_data = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.low = nn.Parameter(torch.randn(9, 2, dtype=torch.bfloat16), requires_grad=False)
        state = torch.get_rng_state()
        self.second = nn.Linear(3, 3)
        torch.set_rng_state(state)
        self.again = nn.Linear(3, 3)  # as second
        torch.manual_seed(11)
        self.seeded = nn.Linear(4, 4)
        torch.manual_seed(11)
        self.seeded_again = nn.Linear(4, 4)  # as seeded
        generator = torch.Generator().manual_seed(3)
        self.own = nn.Parameter(torch.randn(6, generator=generator))
        self.own_too = nn.Parameter(torch.rand(6, generator=generator))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.attention = nn.MultiheadAttention(8, 2)
        self.memory = nn.LSTM(3, 4)
        self.copied = copy.deepcopy(self.first)
        self.follows = nn.Linear(5, 3)
        with torch.no_grad():
            self.follows.weight.copy_(self.first.weight * 2)
            self.first.weight.add_(torch.randn_like(self.first.weight) * 0.01)
            torch._foreach_mul_([self.second.weight, self.second.bias], 0.5)
            torch.add(self.again.bias, 1, out=self.again.bias)
        for param in self.parameters():
            if param.dim() == 2 and param.requires_grad:
                param.data.mul_(1.25)


class Pair(NamedTuple):
    """Holds a tensor."""

    table: torch.Tensor
    size: int


class Held(nn.Module):
    """Tensors in containers of other classes than list, tuple and dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.ordered = OrderedDict(a=torch.arange(3.0))
        self.default = defaultdict(list, a=torch.arange(4.0))
        self.queue = deque([torch.ones(2)])
        self.space = SimpleNamespace(a=torch.arange(2.0))
        self.pair = Pair(torch.arange(5.0), 5)
        self.same = self.pair
        self.top = torch.topk(self.first.bias.detach(), 2)

    def held(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""
        assert type(self.pair) is Pair and self.pair.size == 5
        assert isinstance(self.top, torch.return_types.topk)
        return {
            "ordered": self.ordered["a"],
            "default": self.default["a"],
            "queue": self.queue[0],
            "space": self.space.a,
            "pair": self.pair.table,
            "same": self.same.table,
            "top": self.top.values,
            "places": self.top.indices,
        }


class ByName(nn.Module):
    """Puts modules on the meta device by name, where nothing is drawn, and gives them values later."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.skip_init(nn.Linear, 4, 4)
        nn.init.ones_(self.first.weight)
        nn.init.normal_(self.first.bias)
        self.second = nn.Linear(4, 3, device="meta")
        self.second.weight.data.normal_()
        self.second.to_empty(device="cpu")
        self.second.reset_parameters()
        with torch.device("meta"):
            self.third = nn.Embedding(5, 4)
            assert (self.third.weight.is_meta, str(torch.rand(2).device)) == (True, "meta")
        self.third.load_state_dict({"weight": torch.ones(5, 4)}, assign=True)
        self.last = nn.Linear(4, 4)
        with torch.no_grad():
            self.last.weight[self.last.weight > 0] = 0.5  # torch puts the number on the tensor's device itself


OTHERS: dict[str, type[nn.Module]] = {"odd": Odd, "held": Held, "by_name": ByName}


def build(kind: str, **options: Any) -> nn.Module:
    """Return ``Net``, one of ``OTHERS`` or, with ``kind`` ``"bf16"``, a ``Net`` that is converted."""
    if kind in OTHERS:
        return OTHERS[kind]()
    model = Net(**options)
    return model.bfloat16() if kind == "bf16" else model


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every tensor of ``model`` by name, whole (**collective** where it is sharded)."""
    found = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    for fqn, module in model.named_modules():
        if isinstance(module, Rotary):
            found |= {f"{fqn}.scale": module.scale, f"{fqn}.tables": module.tables["cos"][0]}
            found[f"{fqn}.helper"] = module.helper.pair[0]
    if isinstance(model, Held):
        found |= model.held()
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in found.items()}
    return {name: tensor.detach() for name, tensor in whole.items()}


def different(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that are not equal bit for bit."""
    assert one.keys() == two.keys()
    return [
        name
        for name, tensor in one.items()
        if tensor.dtype != two[name].dtype or two[name].is_meta or not torch.equal(tensor, two[name])
    ]


def peak_bytes(body: Callable[[], Any]) -> tuple[int, int, Any]:
    """Return the most bytes of tensors alive during ``body``, those left after it, and what it returned."""
    gc.collect()  # what earlier tests left would be given back during the body
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = body()
    events = profiled.profiler.kineto_results.events()
    live = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, live, result
