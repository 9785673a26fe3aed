"""Gradients, norms and training equal one process on all ranks' data: whole, frozen and mixed parameters."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mindspeed_fsdp2 import FSDP2Error, PlanError, accumulate, clip_grad_norm_, wrap_model
from mindspeed_fsdp2.grad_sync import power_sum
from tests.distributed.ranks import RankPool
from tests.distributed.towers import (
    BASE,
    WHOLE,
    WIDTH,
    Recipe,
    Run,
    TwoTowers,
    Use,
    check_close,
    check_equal_over_ranks,
    check_moved,
    differences,
    inputs,
    reference,
    union,
    wrapped,
)
from tests.distributed.traffic import Collective, Traffic
from tests.distributed.training import full
from tests.distributed.versions import CANNOT_GO_ON, GOES_ON

TOWER = [f"tower.{name}" for name in ("temperature", "up.weight", "up.bias", "down.weight")]
LAST = {"reduce_grads": "last_microbatch"}
WITH_UNUSED = functools.partial(TwoTowers, unused=True)

# name -> ranks, settings, training, parameters that never move
ROWS: dict[str, tuple[int, dict[str, Any], Recipe, tuple[str, ...]]] = {
    "SGD": (2, {}, Recipe(), ()),
    "AdamW": (2, {}, Recipe(optimizer="adamw"), ()),
    "clipping": (2, {}, Recipe(clip=0.1), ()),
    "clipping, inf norm, AdamW": (2, {}, Recipe(clip=0.05, norm_type=math.inf, optimizer="adamw"), ()),
    "ZeRO-2, prefetch": (
        2,
        {"reshard_after_forward": False, "num_to_forward_prefetch": 2, "num_to_backward_prefetch": 2},
        Recipe(),
        (),
    ),
    "sharding_size 1": (2, {"sharding_size": 1}, Recipe(clip=0.1), ()),
    "4 ranks": (4, {}, Recipe(), ()),
    "4 ranks, sharding_size 2": (4, {"sharding_size": 2}, Recipe(clip=0.1), ()),
    "4 ranks, sharding_size 1": (4, {"sharding_size": 1}, Recipe(optimizer="adamw"), ()),
    "offload": (2, {"offload_to_cpu": True}, Recipe(clip=0.1), ()),
    "4 ranks, sharding_size 2, offload": (4, {"sharding_size": 2, "offload_to_cpu": True}, Recipe(), ()),
    "fp32 reduction by name": (2, {"reduce_dtype": "fp32"}, Recipe(), ()),
    "unused parameter": (2, {}, Recipe(make=WITH_UNUSED), ("tower.unused",)),
    "skipped by all": (2, {}, Recipe(use=Use("never")), tuple(TOWER)),
    "skipped on one rank": (2, {}, Recipe(use=Use("odd ranks")), ()),
    "skipped on two ranks": (4, {}, Recipe(use=Use("odd ranks"), clip=0.1), ()),
    "skipped on two ranks, sharding_size 2": (4, {"sharding_size": 2}, Recipe(use=Use("odd ranks")), ()),
    "skipped in turns": (2, {}, Recipe(use=Use("taking turns"), steps=4), ()),
    "skipped in turns, AdamW": (2, {}, Recipe(use=Use("taking turns"), steps=4, optimizer="adamw"), ()),
    "skipped in turns, optional_modules": (
        2,
        {"ignored_modules": [], "optional_modules": ["tower"]},
        Recipe(use=Use("taking turns"), steps=4),
        (),
    ),
    "first used in step 1": (2, {}, Recipe(use=Use("from step 1")), ()),
    "used twice": (2, {}, Recipe(use=Use(times=2)), ()),
    **{
        f"used twice, recompute{'' if reentrant else ', non-reentrant'}": (
            2,
            {"recompute_modules": ["tower", "layers.{*}"], "use_reentrant": reentrant},
            Recipe(use=Use(times=2), steps=4),
            (),
        )
        for reentrant in (True, False)
    },
    **{
        f"{ranks} ranks, sharding_size {size}, 3 micro-batches, {how}, {grads}": (
            ranks,
            {"sharding_size": size, "reduce_grads": grads},
            Recipe(use=Use(tower), micro_batches=3, marked=how == "marked"),
            (),
        )
        for ranks, size, tower, how, grads in [
            (2, "auto", "always", "marked", "every_microbatch"),
            (2, "auto", "always", "not marked", "every_microbatch"),
            (2, "auto", "taking turns", "marked", "every_microbatch"),
            (2, "auto", "taking turns", "not marked", "every_microbatch"),
            (2, "auto", "taking turns", "marked", "last_microbatch"),
            (2, "auto", "last micro-batch of odd ranks", "marked", "every_microbatch"),
            (2, 1, "first micro-batch", "marked", "every_microbatch"),
            (4, 2, "taking turns", "marked", "every_microbatch"),
            (4, 2, "first micro-batch", "marked", "last_microbatch"),
            (4, 2, "last micro-batch", "marked", "every_microbatch"),
        ]
    },
}


def pool_of(ranks: int, request: pytest.FixtureRequest) -> RankPool:
    pool: RankPool = request.getfixturevalue(f"ranks{ranks}")
    return pool


def _run(recipe: Recipe, settings: dict[str, Any]) -> Run:
    return wrapped(recipe, {**WHOLE, **settings})


@pytest.mark.parametrize("name", ROWS)
def test_trainable_ignored_parameters(name: str, request: pytest.FixtureRequest) -> None:
    ranks, settings, recipe, still = ROWS[name]
    runs = pool_of(ranks, request).run(_run, recipe, settings)
    theirs = reference(recipe, ranks)
    check_close(differences("whole", name, runs, theirs), recipe.optimizer)
    check_equal_over_ranks(runs)
    for run in runs:
        assert sorted(run.whole) == sorted(n for n in theirs.params if n.startswith("tower."))
        check_moved(recipe, run, still)
    if recipe.clip:
        assert min(theirs.norms) > recipe.clip


def _ddp() -> dict[str, torch.Tensor]:
    model = DistributedDataParallel(TwoTowers(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe = Recipe(use=Use("taking turns"))
    for step in range(20):
        recipe.loss(model, step, 0, dist.get_rank(), dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: full(param) for name, param in model.module.named_parameters()}


def test_twenty_steps_equal_ddp_bit_for_bit(ranks2: RankPool) -> None:
    ours = ranks2.run(_run, Recipe(use=Use("taking turns"), steps=20), {})
    theirs = ranks2.run(_ddp)
    for run, params in zip(ours, theirs, strict=True):
        assert {name for name in params if not torch.equal(run.params[name], params[name])} == set()
    check_equal_over_ranks(ours)


def _frozen() -> TwoTowers:
    model = TwoTowers()
    model.tower.requires_grad_(False)
    return model


UNFROZEN = Recipe(make=_frozen, steps=4)


def _unfreeze(model: nn.Module, step: int) -> None:
    tower = model.tower
    assert isinstance(tower, nn.Module)
    tower.requires_grad_(step in (1, 2))


def _frozen_at_first() -> Run:
    return wrapped(UNFROZEN, WHOLE, _unfreeze)


def test_frozen_and_unfrozen_after_wrapping(ranks2: RankPool) -> None:
    runs = ranks2.run(_frozen_at_first)
    worst = differences("whole", "unfrozen for two steps", runs, union(UNFROZEN, 2, _unfreeze))
    check_close(worst)
    check_equal_over_ranks(runs)
    check_moved(Recipe(), runs[0])


def _collectives(settings: dict[str, Any], trainable: bool, use: Use) -> tuple[list[Collective], list[Collective]]:
    """Return the collectives of the second step's forward and backward."""
    model = TwoTowers()
    model.tower.requires_grad_(trainable)
    wrap_model(model, {**WHOLE, "check_unit_order": False, **settings})
    recipe, rank = Recipe(use=use), dist.get_rank()
    recipe.loss(model, 0, 0, rank, 2).backward()
    with Traffic() as traffic:
        loss = recipe.loss(model, 1, 0, rank, 2)
        forward = len(traffic.all)
        loss.backward()
    return traffic.all[:forward], traffic.all[forward:]


def test_frozen_ignored_parameters_cost_no_collective(ranks2: RankPool) -> None:
    for forward, backward in ranks2.run(_collectives, {}, False, Use()):
        kinds = [c.kind for c in (*forward, *backward)]
        assert set(kinds) == {"gather", "scatter", "flags"}
        assert kinds.count("flags") == 1  # of the sharded parameters
    kinds = [c.kind for c in ranks2.run(_collectives, {}, True, Use())[0][1]]
    assert kinds.count("reduce") == 1  # one bucket
    assert kinds.count("flags") == 2


def test_whole_gradients_leave_before_backward_ends(ranks2: RankPool) -> None:
    numel = sum(param.numel() for param in TwoTowers().tower.parameters())
    for _, backward in ranks2.run(_collectives, {}, True, Use()):
        sent = [c.numel for c in backward]
        scatters = [n for n, c in enumerate(backward) if c.kind == "scatter"]
        # The tower lies behind the first layer: that layer and what comes before it are reduced later.
        assert sent.index(numel) < scatters[-3]
        assert backward[-1].dtype == torch.int32  # the flags, at the very end


def _held() -> list[int]:
    model = wrap_model(TwoTowers(), {**WHOLE, "check_unit_order": False})
    counts = []
    for micro in range(3):
        with Traffic() as traffic, accumulate(model, last=micro == 2):
            model(inputs(0, micro, dist.get_rank())).sum().backward()
        counts.append(traffic.count().get("reduce", 0))
    return counts


def test_whole_gradients_are_reduced_on_the_last_micro_batch_only(ranks2: RankPool) -> None:
    assert ranks2.run(_held) == [[0, 0, 1]] * 2


@pytest.mark.parametrize("reduce", ["bf16", "fp32", None])
def test_whole_gradients_travel_in_reduce_dtype(ranks2: RankPool, reduce: str | None) -> None:
    settings = {"reduce_dtype": reduce} if reduce else {}
    expected = torch.bfloat16 if reduce == "bf16" else torch.float32
    for _, backward in ranks2.run(_collectives, settings, True, Use()):
        assert {c.dtype for c in backward if c.kind == "reduce"} == {expected}
        assert {c.dtype for c in backward if c.kind == "scatter"} == {expected}


def _clip(settings: dict[str, Any], norm_type: float) -> tuple[float, float, float, set[str]]:
    model = wrap_model(TwoTowers(), {**WHOLE, **settings})
    Recipe().loss(model, 0, 0, dist.get_rank(), dist.get_world_size()).backward()
    whole = torch.cat([full(p.grad).flatten().double() for p in model.parameters() if p.grad is not None])
    kinds = {type(p.grad).__name__ for p in model.parameters() if p.grad is not None}
    exact = torch.linalg.vector_norm(whole, norm_type).item()
    norm = clip_grad_norm_(model, 0.01, norm_type).item()
    after = torch.cat([full(p.grad).flatten().double() for p in model.parameters() if p.grad is not None])
    factor = 0.01 / (exact + 1e-6)  # as in torch
    return norm, exact, (after / factor - whole).abs().max().item(), kinds


CLIPPED: dict[str, dict[str, Any]] = {
    "fp32": {},
    "sharding_size 1": {"sharding_size": 1},
    "sharding_size 2": {"sharding_size": 2},
    "offload": {"offload_to_cpu": True},
    "offload of one unit": {"overrides": [{"modules": ["layers.1"], "offload_to_cpu": True}]},
    "bf16 compute": {"param_dtype": "bf16", "reduce_dtype": "fp32"},
}


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("name", CLIPPED)
def test_norm_over_sharded_and_whole_gradients(ranks4: RankPool, name: str, norm_type: float) -> None:
    results = ranks4.run(_clip, CLIPPED[name], norm_type)
    assert len({norm for norm, *_ in results}) == 1
    for norm, exact, error, kinds in results:
        assert exact > 0.05  # clipping has something to do
        assert norm == pytest.approx(exact, rel=1e-6)
        assert error < 1e-6
        assert kinds == {"DTensor", "Tensor"}
    print(f"clipping, {name}, p={norm_type}: norm off by {abs(results[0][0] / results[0][1] - 1):.1e}")


def _clip_bf16() -> tuple[float, float]:
    model = TwoTowers().bfloat16()
    wrap_model(model, WHOLE)
    model(inputs(0, 0, dist.get_rank()).bfloat16()).square().mean().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.bfloat16}
    whole = torch.cat([full(p.grad).flatten().double() for p in model.parameters() if p.grad is not None])
    return clip_grad_norm_(model, math.inf).item(), torch.linalg.vector_norm(whole).item()


def test_norm_of_bf16_gradients_is_summed_in_fp32(ranks2: RankPool) -> None:
    for norm, exact in ranks2.run(_clip_bf16):
        assert norm == pytest.approx(exact, rel=1e-6)


def test_power_sum_of_plain_tensors() -> None:
    tensors = [torch.tensor([3.0, -4.0]), torch.ones(2, dtype=torch.bfloat16), torch.zeros(0)]
    assert power_sum(tensors, 2.0) == 27.0
    assert power_sum(tensors, math.inf) == 4.0
    assert power_sum([], 2.0) == 0.0


class LoRA(nn.Module):
    """A frozen linear map in ``dtype`` with a trainable fp32 correction of low rank."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).to(dtype).requires_grad_(False)
        self.a = nn.Linear(WIDTH, 2, bias=False)
        self.b = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.base(x.to(self.base.weight.dtype)).to(x.dtype)
        return torch.tanh(base + self.b(self.a(x)))


class Odd(nn.Module):
    """First dimensions that are smaller than the ranks or not divisible by them, one of them unused."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(WIDTH, 1)
        self.wide = nn.Linear(1, 7, bias=False)
        self.back = nn.Linear(7, WIDTH)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.back(self.wide(self.narrow(x)))) + x


class Mixed(nn.Module):
    """Layers of one class, one of which runs twice."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        kinds = {
            "bf16 base": lambda: LoRA(torch.bfloat16),
            "fp32 base": lambda: LoRA(torch.float32),
            "odd sizes": Odd,
        }
        self.layers = nn.ModuleList(kinds[kind]() for _ in range(3))
        self.register_buffer("scale", torch.full((WIDTH,), 1.0009765625))  # not a bf16 number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[1]):
            x = layer(x)
        return x * self.scale


MIXED: dict[str, tuple[str, int, dict[str, Any], Recipe]] = {
    "LoRA": ("fp32 base", 2, {}, Recipe(make=functools.partial(Mixed, "fp32 base"))),
    "LoRA on bf16": ("bf16 base", 2, {}, Recipe(make=functools.partial(Mixed, "bf16 base"))),
    "LoRA on bf16, AdamW, recompute": (
        "bf16 base",
        2,
        {"recompute_modules": ["layers.{*}"], "use_reentrant": False},
        Recipe(make=functools.partial(Mixed, "bf16 base"), optimizer="adamw"),
    ),
    "LoRA on bf16, sharding_size 2": (
        "bf16 base",
        4,
        {"sharding_size": 2},
        Recipe(make=functools.partial(Mixed, "bf16 base"), clip=0.01),
    ),
    "LoRA on bf16, ZeRO-2": (
        "bf16 base",
        2,
        {"reshard_after_forward": False},
        Recipe(make=functools.partial(Mixed, "bf16 base"), micro_batches=2),
    ),
    "odd sizes": ("odd sizes", 4, {}, Recipe(make=functools.partial(Mixed, "odd sizes"))),
    "odd sizes, AdamW": ("odd sizes", 4, {}, Recipe(make=functools.partial(Mixed, "odd sizes"), optimizer="adamw")),
    "odd sizes, sharding_size 2": (
        "odd sizes",
        4,
        {"sharding_size": 2, **LAST},
        Recipe(make=functools.partial(Mixed, "odd sizes"), micro_batches=2, clip=0.1),
    ),
}


def _mixed(recipe: Recipe, settings: dict[str, Any]) -> tuple[Run, torch.dtype, set[str]]:
    config = {"sharding_size": "auto", "sub_modules_to_wrap": ["layers.{*}"], **settings}
    run = wrapped(recipe, config)
    model = wrap_model(recipe.make(), config)
    return run, model.scale.dtype, {str(p.dtype) for p in model.parameters() if isinstance(p, DTensor)}


@pytest.mark.parametrize("name", MIXED)
def test_frozen_mixed_and_odd_parameters(name: str, request: pytest.FixtureRequest) -> None:
    kind, ranks, settings, recipe = MIXED[name]
    for run, buffer, dtypes in (results := pool_of(ranks, request).run(_mixed, recipe, settings)):
        assert buffer == torch.float32
        assert dtypes == ({"torch.bfloat16", "torch.float32"} if kind == "bf16 base" else {"torch.float32"})
        assert not any("base" in grad or "unused" in grad for grad in run.grads)
        check_moved(recipe, run, tuple(n for n in run.params if "base" in n or "unused" in n))
    worst = differences("mixed", name, [run for run, *_ in results], reference(recipe, ranks))
    if kind == "bf16 base":
        # The base rounds its inputs to bf16: where one differs by an fp32 rounding, it may fall to the other side.
        assert worst["grad"] <= 1e-6 or worst["grad"] <= 2**-8
        assert worst["param"] <= 2**-8 and worst["loss"] <= 2**-8
    else:
        check_close(worst, recipe.optimizer)


def _lora_under_bf16() -> tuple[set[str], float]:
    model = wrap_model(
        Mixed("bf16 base"),
        {**BASE, "sub_modules_to_wrap": ["layers.{*}"], "param_dtype": "bf16", "reduce_dtype": "fp32"},
    )
    seen: set[str] = set()
    for layer in model.layers:
        layer.a.register_forward_pre_hook(lambda module, args: seen.add(f"{args[0].dtype}/{module.weight.dtype}"))
    buffers: list[torch.Tensor] = []
    model.register_forward_hook(lambda module, *_: buffers.append(module.scale.clone()))
    model(inputs(0, 0, dist.get_rank())).float().square().mean().backward()
    return seen, buffers[0].max().item()


def test_adapters_compute_in_param_dtype_and_buffers_stay_exact(ranks2: RankPool) -> None:
    assert ranks2.run(_lora_under_bf16) == [({"torch.bfloat16/torch.bfloat16"}, 1.0009765625)] * 2


class Scalar(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.tensor(1.0), requires_grad=not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) * self.temperature


def _scalar(frozen: bool) -> str:
    try:
        wrap_model(nn.Sequential(Scalar(frozen)), {"sharding_size": "auto", "sub_modules_to_wrap": ["{*}"]})
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("frozen", [True, False])
def test_scalar_parameters_are_refused(ranks2: RankPool, frozen: bool) -> None:
    text = (
        "unit [0]: FSDP2 cannot shard the scalar parameter 0.temperature. Give it the shape (1,), or freeze it and list "
        "its module in ignored_modules."
    )
    assert ranks2.run(_scalar, frozen) == [text] * 2


def _several_dtypes() -> str:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).bfloat16())
    try:
        wrap_model(model, {"sharding_size": "auto", "sub_modules_to_wrap": []})
    except PlanError as error:
        return str(error)
    return ""


def test_trainable_parameters_of_several_dtypes_are_refused(ranks2: RankPool) -> None:
    text = (
        "the root unit: trainable parameters of several dtypes in one unit (bfloat16: 1.weight, 1.bias; float32: "
        "0.weight, 0.bias). Cast them to one dtype before wrapping."
    )
    assert ranks2.run(_several_dtypes) == [text] * 2


def _failed() -> list[bool] | str:
    """Return, for whole gradients, whether they are averaged after a backward that failed; or what was said."""
    model = wrap_model(TwoTowers(), WHOLE)
    rank = dist.get_rank()

    def fail(_grad: torch.Tensor) -> None:
        raise ValueError("half-way")

    handle = model.pre.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    with pytest.raises(ValueError, match="half-way"):
        model(inputs(0, 0, rank)).square().mean().backward()
    handle.remove()
    for param in model.parameters():
        param.grad = None
    try:
        with accumulate(model, last=True):
            model(inputs(1, 0, rank)).square().mean().backward()
    except FSDP2Error as error:
        return str(error)
    equal = []
    for param in model.tower.parameters():
        every = [torch.empty_like(param.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(every, param.grad)
        equal.append(all(torch.equal(grad, every[0]) for grad in every))
    return equal


def test_whole_gradients_after_a_failed_backward(ranks2: RankPool) -> None:
    assert ranks2.run(_failed) == [[True] * 4 if GOES_ON else CANNOT_GO_ON] * 2
