"""Settings of single units, and shards in host memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from mindspeed_fsdp2 import ConfigError, build_plan, load_config, wrap_model
from mindspeed_fsdp2.backends import check_offload_backend
from mindspeed_fsdp2.policies import build_offload
from tests.distributed.ranks import RankPool
from tests.distributed.towers import (
    BASE,
    SHARDABLE,
    WIDTH,
    Recipe,
    Run,
    check_close,
    check_moved,
    differences,
    inputs,
    reference,
    wrapped,
)
from tests.distributed.traffic import Traffic
from tests.distributed.training import full

FP32, BF16 = torch.float32, torch.bfloat16
OFFLOAD = {"offload_to_cpu": True}
RECOMPUTE = {"recompute_modules": ["layers.{*}"]}
AHEAD = {"num_to_forward_prefetch": 2, "num_to_backward_prefetch": 2}
MIXED = {"param_dtype": "bf16", "reduce_dtype": "fp32"}

# ranks, settings of both runs, what the offloaded run adds, training
OFFLOADED: dict[str, tuple[int, dict[str, Any], dict[str, Any], Recipe]] = {
    "ZeRO-3": (2, {}, OFFLOAD, Recipe(make=SHARDABLE)),
    "AdamW, clipping": (2, {}, OFFLOAD, Recipe(make=SHARDABLE, optimizer="adamw", clip=0.1)),
    "pin_memory false": (2, {}, {**OFFLOAD, "pin_memory": False}, Recipe(make=SHARDABLE)),
    "ZeRO-2": (2, {"reshard_after_forward": False}, OFFLOAD, Recipe(make=SHARDABLE)),
    "recompute, prefetch": (2, {**RECOMPUTE, **AHEAD}, OFFLOAD, Recipe(make=SHARDABLE)),
    "micro-batches": (2, {}, OFFLOAD, Recipe(make=SHARDABLE, micro_batches=3)),
    "last_microbatch": (2, {"reduce_grads": "last_microbatch"}, OFFLOAD, Recipe(make=SHARDABLE, micro_batches=3)),
    "bf16 compute": (2, MIXED, OFFLOAD, Recipe(make=SHARDABLE, optimizer="adamw")),
    "sharding_size 1": (2, {"sharding_size": 1}, OFFLOAD, Recipe(make=SHARDABLE, clip=0.1)),
    "one unit": (
        2,
        {},
        {"overrides": [{"modules": ["layers.1"], "offload_to_cpu": True}]},
        Recipe(make=SHARDABLE, optimizer="adamw", clip=0.1),
    ),
    "all units but one": (
        2,
        {},
        {**OFFLOAD, "overrides": [{"modules": ["layers.1"], "offload_to_cpu": False}]},
        Recipe(make=SHARDABLE, optimizer="adamw", clip=0.1),
    ),
    "4 ranks, sharding_size 2, clipping, recompute": (
        4,
        {"sharding_size": 2, **RECOMPUTE},
        OFFLOAD,
        Recipe(make=SHARDABLE, micro_batches=2, optimizer="adamw", clip=0.1),
    ),
    "4 ranks, reshard to 2": (4, {"reshard_after_forward": 2}, OFFLOAD, Recipe(make=SHARDABLE)),
}


def offloaded_units(model: nn.Module) -> list[str]:
    """Return the fqns of the units whose shards FSDP keeps in host memory."""
    found = []
    for fqn, module in model.named_modules():
        state = fully_shard.state(module) if fqn in ("", "pre") or fqn.startswith("layers.") else None
        group = state._fsdp_param_group if state is not None else None
        if group is not None and all(param.offload_to_cpu for param in group.fsdp_params):
            found.append(fqn or "(root)")
    return found


def _offload(recipe: Recipe, settings: dict[str, Any]) -> tuple[Run, list[str]]:
    config = {**BASE, **settings}
    return wrapped(recipe, config), offloaded_units(wrap_model(recipe.make(), config))


@pytest.mark.parametrize("name", OFFLOADED)
def test_offload_changes_no_number(name: str, request: pytest.FixtureRequest) -> None:
    ranks, settings, offload, recipe = OFFLOADED[name]
    pool: RankPool = request.getfixturevalue(f"ranks{ranks}")
    plain = pool.run(_offload, recipe, settings)
    moved = pool.run(_offload, recipe, {**settings, **offload})
    names = ["(root)", "layers.0", "layers.1", "layers.2", "pre"]
    expected = {"one unit": ["layers.1"], "all units but one": [n for n in names if n != "layers.1"]}.get(name, names)
    for (ours, units), (theirs, none) in zip(moved, plain, strict=True):
        assert (sorted(units), none) == (expected, [])
        assert ours.where == theirs.where == {"cpu"}
        assert (ours.losses, ours.norms) == (theirs.losses, theirs.norms)
        assert ours.grads.keys() == theirs.grads.keys() and ours.params.keys() == theirs.params.keys()
        assert all(torch.equal(ours.grads[n], grad) for n, grad in theirs.grads.items())
        assert all(torch.equal(ours.params[n], param) for n, param in theirs.params.items())
        check_moved(recipe, ours)
    if "bf16" not in name:
        worst = differences("offload", name, [run for run, _ in moved], reference(recipe, ranks))
        check_close(worst, recipe.optimizer)


def test_memory_is_pinned_only_where_an_accelerator_is() -> None:
    for device, asked, pinned in (
        ("cpu", True, False),
        ("cuda", True, True),
        ("npu", True, True),
        ("npu", False, False),
    ):
        policy = build_offload(True, asked, device)
        assert isinstance(policy, CPUOffloadPolicy)
        assert policy.pin_memory is pinned
    assert type(build_offload(False, True, "npu")) is OffloadPolicy


UNIT_ONLY = {"overrides": [{"modules": ["layers.1"], "offload_to_cpu": True}]}
DUAL = "offload_to_cpu: true needs a backend for CPU tensors beside {!r}. Initialise torch.distributed with {!r}."


@pytest.mark.parametrize(
    ("settings", "device", "backend", "text"),
    [
        (OFFLOAD, "cuda", "cuda:nccl", DUAL.format("cuda:nccl", "cuda:nccl,cpu:gloo")),
        (OFFLOAD, "npu", "npu:hccl", DUAL.format("npu:hccl", "npu:hccl,cpu:gloo")),
        (UNIT_ONLY, "npu", "npu:hccl", DUAL.format("npu:hccl", "npu:hccl,cpu:gloo")),
        (OFFLOAD, "cuda", "cpu:gloo,cuda:nccl", ""),
        (OFFLOAD, "npu", "npu:hccl,cpu:gloo", ""),
        (OFFLOAD, "cpu", "cuda:nccl", ""),
        ({}, "npu", "npu:hccl", ""),
        ({"overrides": [{"modules": ["layers.1"], "offload_to_cpu": False}]}, "npu", "npu:hccl", ""),
    ],
)
def test_offload_needs_a_backend_for_host_tensors(
    settings: dict[str, Any], device: str, backend: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = build_plan(load_config({**BASE, **settings}), SHARDABLE(), data_parallel_size=2)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backend)  # stands in for a group of this machine
    if not text:
        check_offload_backend(plan, None, device)
        return
    with pytest.raises(ConfigError) as caught:
        check_offload_backend(plan, None, device)
    assert str(caught.value) == text


class Routed(nn.Module):
    """A layer with a router whose decisions are made in the router's own precision."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        weights = self.router(hidden).softmax(-1)
        mixed = torch.einsum("bw,ewv->bev", hidden, self.experts)
        return x + (mixed * weights.to(mixed.dtype).unsqueeze(-1)).sum(1)


class Experts(nn.Module):
    """Three routed layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.layers = nn.ModuleList(Routed() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


ROUTED: dict[str, Any] = {
    "sharding_size": "auto",
    "sub_modules_to_wrap": ["layers.{*}", "layers.{*}.router"],
    "param_dtype": "bf16",
    "check_unit_order": False,
}
FP32_ROUTER = {"modules": ["layers.{*}.router"], "param_dtype": "fp32"}


@dataclass
class Seen:
    """What happened in one step."""

    given: list[torch.Tensor] = field(default_factory=list)  # inputs of routers
    weights: list[torch.Tensor] = field(default_factory=list)
    made: list[torch.Tensor] = field(default_factory=list)
    layer_dtypes: set[torch.dtype] = field(default_factory=set)
    gathered: list[tuple[int, torch.dtype]] = field(default_factory=list)
    reduced: list[tuple[int, torch.dtype]] = field(default_factory=list)
    backward_gathers: list[int] = field(default_factory=list)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    output: torch.dtype = FP32


def _routed(settings: dict[str, Any]) -> Seen:
    model = wrap_model(Experts(), {**ROUTED, **settings})
    seen = Seen()

    def note(module: nn.Module, args: tuple[torch.Tensor], _output: torch.Tensor) -> None:
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        seen.given.append(args[0].detach().clone())
        seen.weights.append(weight.detach().clone())

    for layer in model.layers:
        layer.router.register_forward_hook(note, prepend=True)  # before the weight is resharded
        layer.router.register_forward_hook(lambda module, args, output: seen.made.append(output.detach().clone()))
        layer.register_forward_hook(lambda module, args, output: seen.layer_dtypes.add(output.dtype))
    with Traffic() as traffic:
        output = model(inputs(0, 0, dist.get_rank()))
        forward = len(traffic.all)
        output.float().square().mean().backward()
    seen.output = output.dtype
    seen.gathered = [(c.numel, c.dtype) for c in traffic.all if c.kind == "gather"]
    seen.reduced = [(c.numel, c.dtype) for c in traffic.all if c.kind == "scatter"]
    seen.backward_gathers = [c.numel for c in traffic.all[forward:] if c.kind == "gather"]
    seen.grads = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return seen


ROUTER = WIDTH * 4  # elements of a router
LAYER = WIDTH * 2 + 4 * WIDTH * WIDTH  # of a layer without its router
ROOT = WIDTH * 5 + 6  # padded


def test_an_fp32_router_in_a_bf16_layer(ranks2: RankPool) -> None:
    twin = Experts()
    for seen in ranks2.run(_routed, {"overrides": [FP32_ROUTER]}):
        for n, (given, weight, made) in enumerate(zip(seen.given, seen.weights, seen.made, strict=True)):
            assert (given.dtype, weight.dtype, made.dtype) == (FP32, FP32, FP32)
            router = twin.layers[n].router
            assert isinstance(router, nn.Linear)
            assert torch.equal(weight, router.weight)  # as stored: it was never rounded
            assert torch.equal(made, given @ router.weight.T)
        assert seen.layer_dtypes == {BF16}
        assert {dtype for numel, dtype in seen.gathered if numel == ROUTER} == {FP32}
        assert {dtype for numel, dtype in seen.reduced if numel == ROUTER} == {FP32}
        assert {dtype for numel, dtype in (*seen.gathered, *seen.reduced) if numel != ROUTER} == {BF16}
        assert len(seen.reduced) == 7
    for seen in ranks2.run(_routed, {}):
        assert {tensor.dtype for tensor in (*seen.given, *seen.weights, *seen.made)} == {BF16}


def test_reduce_dtype_of_single_units(ranks2: RankPool) -> None:
    reduced = [{"modules": ["layers.{*}.router"], "reduce_dtype": "fp32"}]
    for seen in ranks2.run(_routed, {"overrides": reduced}):
        assert {tensor.dtype for tensor in seen.weights} == {BF16}
        assert {dtype for numel, dtype in seen.reduced if numel == ROUTER} == {FP32}
        assert {dtype for numel, dtype in seen.reduced if numel != ROUTER} == {BF16}
    # A unit that computes in fp32 reduces in fp32, whatever the rest does; unless it is told otherwise itself.
    for own, expected in (({}, FP32), ({"reduce_dtype": "bf16"}, BF16)):
        settings = {"reduce_dtype": "bf16", "overrides": [{**FP32_ROUTER, **own}]}
        for seen in ranks2.run(_routed, settings):
            assert {dtype for numel, dtype in seen.reduced if numel == ROUTER} == {expected}


def test_reshard_of_single_units(ranks2: RankPool) -> None:
    kept = [{"modules": ["layers.1"], "reshard_after_forward": False}]
    every = ranks2.run(_routed, {})[0].backward_gathers
    assert (every.count(LAYER), every.count(ROUTER)) == (3, 3)
    assert ranks2.run(_routed, {"overrides": kept})[0].backward_gathers.count(LAYER) == 2
    freed = [{"modules": ["layers.{0-1}"], "reshard_after_forward": True}]
    seen = ranks2.run(_routed, {"reshard_after_forward": False, "overrides": freed})[0]
    assert (seen.backward_gathers.count(LAYER), seen.backward_gathers.count(ROUTER)) == (2, 0)


def test_reshard_of_single_units_to_fewer_ranks(ranks4: RankPool) -> None:
    settings = {"overrides": [{"modules": ["layers.1"], "reshard_after_forward": 2}]}
    grads = ranks4.run(_routed, settings)[0].grads
    for name, grad in ranks4.run(_routed, {})[0].grads.items():
        assert torch.equal(grads[name], grad)


def test_input_cast_of_single_units(ranks2: RankPool) -> None:
    exact = [{**FP32_ROUTER, "cast_forward_inputs": False}]
    base = {"sub_modules_to_wrap": ["layers.{*}.router"], "param_dtype": None}
    for seen in ranks2.run(_routed, {**base, "overrides": exact}):
        assert {given.dtype for given in seen.given} == {FP32}
    cast = [{"modules": ["layers.{*}.router"], "param_dtype": "bf16"}]
    for seen in ranks2.run(_routed, {**base, "overrides": cast}):
        assert {given.dtype for given in (*seen.given, *seen.weights)} == {BF16}
        assert seen.layer_dtypes == {FP32}


def test_output_dtype_of_single_units(ranks2: RankPool) -> None:
    wide = [{"modules": ["layers.{*}.router"], "output_dtype": "fp32"}]
    for seen in ranks2.run(_routed, {"overrides": wide}):
        assert {weight.dtype for weight in seen.weights} == {BF16}
        assert {made.dtype for made in seen.made} == {FP32}
        assert (seen.layer_dtypes, seen.output) == ({BF16}, BF16)


SAME = Recipe(make=Experts, optimizer="adamw", clip=0.1, micro_batches=2)


def _train(settings: dict[str, Any]) -> Run:
    return wrapped(SAME, {**ROUTED, "param_dtype": None, **settings})


@pytest.mark.parametrize(
    "overrides",
    [
        [{"modules": ["layers.{*}.router"], "param_dtype": "fp32", "reduce_dtype": "fp32"}],
        [{"modules": ["layers.{0-1}"], "reshard_after_forward": False}],
        [{"modules": ["Routed"], "offload_to_cpu": True}, {"modules": ["layers.2.router"], "output_dtype": "fp32"}],
    ],
)
@pytest.mark.parametrize(("ranks", "size"), [(2, "auto"), (4, 2)])
def test_training_with_overrides(
    overrides: list[Any], ranks: int, size: int | str, request: pytest.FixtureRequest
) -> None:
    pool: RankPool = request.getfixturevalue(f"ranks{ranks}")
    runs = pool.run(_train, {"sharding_size": size, "overrides": overrides})
    check_close(differences("overrides", _shown(overrides), runs, reference(SAME, ranks)), "adamw")


def _shown(overrides: list[dict[str, Any]]) -> str:
    texts = (
        ", ".join(o["modules"]) + ": " + ", ".join(f"{k} {v}" for k, v in o.items() if k != "modules")
        for o in overrides
    )
    return "; ".join(texts)


def _far_from_fp32(settings: dict[str, Any]) -> float:
    """Return how far the logits are from fp32 for routers with large weights, relative to the largest logit."""
    model, twin = Experts(), Experts()
    with torch.no_grad():
        for layer in (*model.layers, *twin.layers):
            layer.router.weight.mul_(12)
    wrap_model(model, {**ROUTED, **settings})
    x = inputs(0, 0, dist.get_rank(), 64)
    with torch.no_grad():
        exact = twin(x)
        return ((model(x).float() - exact).abs().max() / exact.abs().max()).item()


def test_an_fp32_router_brings_logits_nearer_to_fp32(ranks2: RankPool) -> None:
    plain, routed = (ranks2.run(_far_from_fp32, {"overrides": o}) for o in ([], [FP32_ROUTER]))
    print(f"routers x12, logits off by {max(plain):.2e} in bf16, {max(routed):.2e} with fp32 routers")
    assert max(routed) <= max(plain)
    assert max(routed) < 0.05


def _refused(settings: dict[str, Any]) -> str:
    try:
        wrap_model(Experts(), {**ROUTED, **settings})
    except ConfigError as error:
        return str(error)
    return ""


def test_refused_overrides(ranks2: RankPool) -> None:
    settings = {
        "sub_modules_to_wrap": ["layers.{*}"],
        "overrides": [
            {"modules": ["layers.{*}.router", "layers.0"], "param_dtype": "fp32"},
            {"modules": ["layers.{0-1}"], "reshard_after_forward": False},
            {"modules": ["head"], "offload_to_cpu": True},
        ],
    }
    units = "is not a unit, and precision, resharding and offload belong to whole units. List it in sub_modules_to_wrap too."
    lines = [
        *(f"overrides[0].modules[0]: 'layers.{n}.router' {units}" for n in range(3)),
        "overrides[1].modules[0]: 'layers.0' is overridden twice. Merge the two entries.",
        f"overrides[2].modules[0]: 'head' {units}",
    ]
    for text in ranks2.run(_refused, settings):
        assert text.splitlines() == lines
    for text in ranks2.run(_refused, {"overrides": [{"modules": ["layers.7"], "offload_to_cpu": True}]}):
        assert text == (
            "overrides[0].modules[0]: module path 'layers.7' selects no module: layers has no child '7'. Its indices are "
            "0-2."
        )
    for text in ranks2.run(_refused, {"overrides": [{"modules": ["layers.1"], "reshard_after_forward": 3}]}):
        assert text == (
            "overrides[0].reshard_after_forward: 3 does not divide the 2 ranks of a shard group. Use true or false."
        )
