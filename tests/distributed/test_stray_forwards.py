"""Forwards and losses off the usual path: each must train as the unsharded model does."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mindspeed_fsdp2 import FSDP2Error, accumulate, clip_grad_norm_, wrap_model
from tests.distributed.models import Decoder, build, tokens_of
from tests.distributed.ranks import RankPool
from tests.distributed.training import full

UNITS = ["layers.{*}", ["norm", "head"]]


class Hidden(Decoder):
    """Returns its loss inside an object that no hook looks into."""

    def forward(self, tokens: torch.Tensor) -> Any:
        return SimpleNamespace(loss=super().forward(tokens))

    def encode(self, hidden: torch.Tensor) -> torch.Tensor:
        freqs = self.rotary(hidden.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, freqs=freqs)
        return hidden


def train(case: str, wrapped: bool, steps: int = 3) -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    torch.manual_seed(7)
    model: nn.Module = Hidden() if case != "clip" else build()
    settings: dict[str, Any] = {"sharding_size": "auto", "sub_modules_to_wrap": UNITS}
    if case in ("hidden output", "part alone"):
        settings["ignored_modules"] = ["embedding"]
    if case == "part between backward and step":
        settings["reshard_after_forward"] = False
    if wrapped:
        wrap_model(model, settings)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        tokens = tokens_of(step, rank)
        if case == "part alone":
            model.embedding(tokens).pow(2).mean().backward()
        else:
            model(tokens).loss.backward()
        if case == "part between backward and step":
            with torch.no_grad():
                model.encode(torch.ones(2, 6, 16))
        if case == "forward between backward and step":
            model(tokens_of(step + 50, rank))
        if case == "zero_grad after a forward":
            model(tokens_of(step + 50, rank))
            model.zero_grad()
            model(tokens).loss.backward()
        if not wrapped:
            for param in model.parameters():
                if param.grad is not None:
                    dist.all_reduce(param.grad)
                    param.grad /= dist.get_world_size()
        optim.step()
        optim.zero_grad()
    return {name: full(param) for name, param in model.named_parameters()}


@pytest.mark.parametrize(
    "case",
    [
        "hidden output",
        "part alone",
        "part between backward and step",
        "forward between backward and step",
        "zero_grad after a forward",
    ],
)
def test_equals_the_unsharded_model(case: str, ranks2: RankPool) -> None:
    expected, start = ranks2.run(train, case, False), ranks2.run(train, case, False, 0)
    for rank, params in enumerate(ranks2.run(train, case, True)):
        worst = max((params[name] - value).abs().max().item() for name, value in expected[rank].items())
        print(f"{case}: rank {rank}: largest difference {worst:.1e}")
        assert worst < 1e-6
        assert any(not torch.equal(params[name], value) for name, value in start[rank].items())


def norms_around_a_forward() -> tuple[float, float]:
    model = wrap_model(build(), {"sharding_size": "auto", "sub_modules_to_wrap": UNITS})
    model(tokens_of(0, dist.get_rank())).backward()
    first = clip_grad_norm_(model, math.inf).item()
    model(tokens_of(1, dist.get_rank()))
    return first, clip_grad_norm_(model, math.inf).item()


def test_clipping_after_a_forward_measures_the_same_gradients(ranks2: RankPool) -> None:
    for first, second in ranks2.run(norms_around_a_forward):
        assert first == second > 0


def refused_clippings() -> list[str]:
    model = wrap_model(build(), {"sharding_size": "auto", "sub_modules_to_wrap": UNITS})
    said = []
    with accumulate(model, last=False):
        model(tokens_of(0, dist.get_rank())).backward()
    for norm_type in (2.0, 0, -1, "inf"):
        try:
            clip_grad_norm_(model, 1.0, norm_type)  # type: ignore[arg-type]
        except FSDP2Error as error:
            said.append(str(error))
    for max_norm in (-1.0, float("nan"), "1"):
        try:
            clip_grad_norm_(model, max_norm)  # type: ignore[arg-type]
        except FSDP2Error as error:
            said.append(str(error))
    return said


def test_clipping_that_cannot_be_right_is_refused_on_every_rank(ranks2: RankPool) -> None:
    wrong = "clip_grad_norm_: norm_type {} is no norm. Write a number above 0 or math.inf."
    early = (
        "clip_grad_norm_: it came after a micro-batch that is not its step's last, so gradients are not reduced yet. "
        "Run the last micro-batch of every step in accumulate(model, last=True)."
    )
    for said in ranks2.run(refused_clippings):
        bound = "clip_grad_norm_: max_norm {} is no bound. Write a number from 0 on or math.inf."
        bounds = [bound.format(-1.0), bound.format("nan"), bound.format("'1'")]
        assert said == [early, wrong.format(0), wrong.format(-1), wrong.format("'inf'"), *bounds]
