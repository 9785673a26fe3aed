"""dtypes: in forward, in collectives, of inputs that must stay exact, around ignored modules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_fsdp2 import wrap_model
from tests.distributed.chains import Chain, inputs
from tests.distributed.models import Rotary
from tests.distributed.ranks import RankPool
from tests.distributed.traffic import Traffic

FP32, BF16 = torch.float32, torch.bfloat16
LENGTH, WIDTH = 2048, 8


@dataclass
class Seen:
    """dtypes of one training step."""

    inputs: list[torch.dtype] = field(default_factory=list)
    weights: list[torch.dtype] = field(default_factory=list)
    outputs: list[torch.dtype] = field(default_factory=list)
    loss: torch.dtype = FP32
    gathered: set[torch.dtype] = field(default_factory=set)
    reduced: set[torch.dtype] = field(default_factory=set)
    stored: set[torch.dtype] = field(default_factory=set)
    grads: set[torch.dtype] = field(default_factory=set)


def _dtypes(settings: dict[str, Any], stored: torch.dtype = FP32) -> Seen:
    base = {"sharding_size": "auto", "sub_modules_to_wrap": ["blocks.{*}"], "check_unit_order": False}
    model = wrap_model(Chain().to(stored), {**base, **settings})
    seen = Seen()

    def note(module: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        seen.inputs.append(args[0].dtype)
        seen.weights.append(module.down.weight.dtype)
        seen.outputs.append(output.dtype)

    for block in model.blocks:
        forward = block.forward

        def noting(x: torch.Tensor, block: Any = block, forward: Any = forward) -> torch.Tensor:
            output = forward(x.to(block.down.weight.dtype))
            note(block, (x,), output)
            return output

        block.forward = noting
    with Traffic() as traffic:
        loss = model(inputs().to(stored))
        loss.backward()
    seen.loss = loss.dtype
    seen.gathered, seen.reduced = traffic.dtypes("gather"), traffic.dtypes("scatter") | traffic.dtypes("reduce")
    seen.stored = {p.dtype for p in model.parameters() if isinstance(p, DTensor)}
    seen.grads = {p.grad.dtype for p in model.parameters()}
    return seen


@pytest.mark.parametrize(
    ("settings", "compute", "reduce", "loss"),
    [
        ({}, FP32, FP32, FP32),
        ({"param_dtype": "bf16"}, BF16, BF16, BF16),
        ({"param_dtype": "bfloat16", "reduce_dtype": "float32"}, BF16, FP32, BF16),
        ({"param_dtype": "bf16", "reduce_dtype": "fp32", "output_dtype": "fp32"}, BF16, FP32, FP32),
        ({"reduce_dtype": "bf16"}, FP32, BF16, FP32),
        ({"output_dtype": "bf16"}, FP32, FP32, BF16),
        ({"param_dtype": "fp16", "reduce_dtype": "fp32"}, torch.float16, FP32, torch.float16),
    ],
)
@pytest.mark.parametrize("size", ["auto", 1])
def test_param_reduce_and_output_dtype(
    ranks2: RankPool,
    settings: dict[str, Any],
    compute: torch.dtype,
    reduce: torch.dtype,
    loss: torch.dtype,
    size: int | str,
) -> None:
    for seen in ranks2.run(_dtypes, {**settings, "sharding_size": size}):
        assert seen.inputs == seen.weights == [compute] * 4
        assert seen.outputs == [compute] * 4  # output_dtype is the root's: no unit inside widens what it returns
        assert seen.loss == loss
        assert seen.gathered == ({compute} if size == "auto" else set())
        assert seen.reduced == {reduce}
        assert seen.stored == seen.grads == {FP32}


def test_bf16_storage_is_left_as_it_is(ranks2: RankPool) -> None:
    for seen in ranks2.run(_dtypes, {"reduce_dtype": "fp32"}, BF16):
        assert (seen.stored, seen.grads, seen.reduced, seen.gathered) == ({BF16}, {BF16}, {FP32}, {BF16})


def test_cast_forward_inputs_false(ranks2: RankPool) -> None:
    settings = {"param_dtype": "bf16", "cast_forward_inputs": False}
    for seen in ranks2.run(_dtypes, settings):
        assert seen.inputs == [FP32, BF16, BF16, BF16]  # the first block gets what the caller passed
        assert seen.weights == [BF16] * 4


class Turned(nn.Module):
    """A layer that gets angles under some name and notes them, in recomputation as well."""

    def __init__(self, seen: list[torch.Tensor]) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.seen = seen

    def forward(self, hidden: torch.Tensor, angles: torch.Tensor, freqs: torch.Tensor | None = None) -> torch.Tensor:
        """Return hidden states of shape ``(1, LENGTH, WIDTH)``."""
        assert hidden.dtype == self.proj.weight.dtype == BF16
        given = angles if freqs is None else freqs
        self.seen.append(given.detach().clone())
        return hidden + torch.tanh(self.proj(hidden)) * torch.cos(given).to(hidden.dtype)


class Outer(nn.Module):
    """A layer around a unit of its own."""

    def __init__(self, seen: list[torch.Tensor]) -> None:
        super().__init__()
        self.inner = Turned(seen)

    def forward(self, hidden: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Pass everything on."""
        return self.inner(hidden, angles)


class Turning(nn.Module):
    """Passes angles to two layers in the way that ``how`` says."""

    def __init__(self, how: str, seen: list[torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.how = how
        self.embedding = nn.Linear(WIDTH, WIDTH, bias=False)
        self.rotary = Rotary(WIDTH)
        self.layers = nn.ModuleList(Outer(seen) if how == "nested" else Turned(seen) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scalar loss for ``x`` of shape ``(1, LENGTH, WIDTH)``."""
        hidden = self.embedding(x)
        if self.how == "by hand":  # not made by a module: a floating argument like any other
            made = self.rotary.forward(LENGTH)
        else:
            made = self.rotary(LENGTH)
        for layer in self.layers:
            if self.how == "keyword":
                hidden = layer(hidden, angles=made.new_zeros(1), freqs=made.clone())
            elif self.how == "name of a positional":
                hidden = layer(hidden, made.new_zeros(1), made.clone())
            else:
                hidden = layer(hidden, made)
        return hidden.float().square().mean()


def _angles(how: str, settings: dict[str, Any]) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    model = wrap_model(
        Turning(how, seen),
        {"sharding_size": "auto", "sub_modules_to_wrap": ["layers.{*}", "Turned"], "param_dtype": "bf16", **settings},
    )
    model(torch.randn(1, LENGTH, WIDTH)).backward()
    assert all(p.grad is not None for p in model.parameters())
    return seen


RECOMPUTE: dict[str, dict[str, Any]] = {
    "no recompute": {},
    "reentrant": {"recompute_modules": ["layers.{*}"], "use_reentrant": True},
    "non-reentrant": {"recompute_modules": ["layers.{*}"], "use_reentrant": False},
}


@pytest.mark.parametrize("kind", RECOMPUTE)
@pytest.mark.parametrize(
    ("how", "keep", "exact"),
    [
        ("keyword", ["freqs"], True),
        ("keyword", ["rotary_pos_emb"], False),
        ("name of a positional", ["freqs"], True),
        ("by hand", ["angles"], True),
        ("by hand", ["freqs"], False),
        ("module", [], True),  # the output of a module without parameters, passed by position
        ("nested", [], True),  # the same, through a recomputed module to a unit inside
    ],
)
def test_keep_input_dtype(ranks2: RankPool, how: str, keep: list[str], exact: bool, kind: str) -> None:
    angles = Rotary(WIDTH)(LENGTH)
    rounded = angles.to(BF16).float()
    assert (rounded - angles).abs().max() > 2.0  # radians: what rounding would do at 2048 tokens
    for seen in ranks2.run(_angles, how, {"keep_input_dtype": keep, **RECOMPUTE[kind]}):
        assert len(seen) == (2 if kind == "no recompute" else 4)
        for given in seen:
            assert given.dtype == (FP32 if exact else BF16)
            assert torch.equal(given.float(), angles if exact else rounded)


class Encoder(nn.Module):
    """A frozen tower that notes what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.seen: list[torch.Tensor] = []

    def forward(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return features of the shape of ``pixels``, ``(batch, WIDTH)``."""
        self.seen.append(pixels.detach().clone())
        return {"features": torch.tanh(self.proj(pixels))}


class TwoTowers(nn.Module):
    """A frozen encoder, a projector in the root, and the chain."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.encoder = Encoder().requires_grad_(False)
        self.projector = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.decoder = Chain()
        self.features: list[torch.Tensor] = []

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the scalar loss for ``pixels`` of shape ``(batch, WIDTH)``."""
        features = self.encoder(pixels)["features"]
        self.features.append(features.detach().clone())
        return self.decoder(torch.tanh(self.projector(features)) * self.scale)


@dataclass
class Towers:
    """What a step of the two towers did."""

    pixels: torch.Tensor
    seen: torch.Tensor
    features: torch.Tensor
    loss: float
    plain: list[str]
    grads: dict[str, torch.Tensor]
    encoder: dict[str, torch.Tensor]


def _towers(settings: dict[str, Any] | None, encoder: torch.dtype) -> Towers:
    model = TwoTowers()
    model.encoder.to(encoder)
    if settings is not None:
        base = {"sharding_size": "auto", "sub_modules_to_wrap": ["decoder.blocks.{*}"], "ignored_modules": ["encoder"]}
        wrap_model(model, {**base, **settings})
    pixels = inputs() / 3
    loss = model(pixels if encoder == FP32 or settings is not None else pixels.to(encoder))
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Towers(
        pixels,
        model.encoder.seen[0],
        model.features[0],
        loss.item(),
        [n for n, p in model.named_parameters() if not isinstance(p, DTensor) and n.startswith("encoder.")],
        {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()},
        {n: p.detach().clone() for n, p in model.encoder.named_parameters()},
    )


def test_ignored_fp32_encoder_gets_the_callers_own_values(ranks2: RankPool) -> None:
    twin = TwoTowers()
    for cast in (True, False):
        settings = {"param_dtype": "bf16", "cast_forward_inputs": cast}
        for towers in ranks2.run(_towers, settings, FP32):
            assert towers.plain == ["encoder.proj.weight", "encoder.proj.bias"]
            assert towers.seen.dtype == FP32
            assert torch.equal(towers.seen, towers.pixels)
            assert not torch.equal(towers.pixels, towers.pixels.to(BF16).float())  # rounding would have shown
            assert towers.features.dtype == BF16
            exact = twin.encoder(towers.pixels)["features"]
            assert torch.equal(towers.features, exact.to(BF16))
            assert all(torch.equal(towers.encoder[n], p) for n, p in twin.encoder.named_parameters())
            assert towers.grads.keys() == {n for n, p in twin.named_parameters() if p.requires_grad}


def test_ignored_bf16_encoder(ranks2: RankPool) -> None:
    for towers in ranks2.run(_towers, {"param_dtype": "bf16"}, BF16):
        assert (towers.seen.dtype, towers.features.dtype) == (BF16, BF16)
        assert torch.equal(towers.seen, towers.pixels.to(BF16))
        assert len(towers.grads) == 11


def test_ignored_encoder_changes_nothing_in_full_precision(ranks2: RankPool) -> None:
    plain = ranks2.run(_towers, None, FP32)
    mean = {name: (plain[0].grads[name] + plain[1].grads[name]) / 2 for name in plain[0].grads}
    for rank, towers in enumerate(ranks2.run(_towers, {}, FP32)):
        assert towers.loss == plain[rank].loss
        assert all(torch.equal(towers.grads[name], grad) for name, grad in mean.items())


class Routed(nn.Module):
    """A unit with an ignored fp32 router inside."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.router = nn.Linear(WIDTH, 2, bias=False).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.proj(x)) * self.router(x).softmax(-1)[..., :1]


def _routed(router: torch.dtype) -> tuple[set[torch.dtype], torch.dtype]:
    model = nn.Sequential(Routed(), Routed())
    seen: set[torch.dtype] = set()
    for layer in model:
        layer.router.to(router)
    settings = {"sharding_size": "auto", "sub_modules_to_wrap": ["{*}"], "ignored_modules": ["{*}.router"]}
    wrap_model(model, {**settings, "param_dtype": "bf16"})
    for layer in model:
        layer.router.register_forward_pre_hook(lambda _, args: seen.add(args[0].dtype))
    output = model(inputs())
    output.sum().backward()
    return seen, output.dtype


@pytest.mark.parametrize("router", [FP32, BF16])
def test_ignored_module_inside_a_unit_computes_in_its_own_dtype(ranks2: RankPool, router: torch.dtype) -> None:
    for seen, output in ranks2.run(_routed, router):
        assert (seen, output) == ({router}, BF16)


def _drifted() -> torch.Tensor:
    model = TwoTowers()
    with torch.no_grad():
        model.encoder.proj.weight += dist.get_rank()
    wrap_model(model, {"sharding_size": "auto", "sub_modules_to_wrap": [], "ignored_modules": ["encoder"]})
    return model.encoder.proj.weight.detach().clone()


def test_ignored_parameters_start_from_the_first_rank(ranks2: RankPool) -> None:
    for weight in ranks2.run(_drifted):
        assert torch.equal(weight, TwoTowers().encoder.proj.weight)
