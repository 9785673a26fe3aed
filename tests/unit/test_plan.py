"""What a plan decides: units and their order, owners of parameters, notices, the printed table, the digest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_fsdp2 import FSDP2Plan, build_plan, load_config
from tests.distributed.models import Decoder, Layer, build


class Wrapper(nn.Module):
    """Stands for Float16Module or DDP."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class TwoNames(nn.Module):
    """As in T5: one embedding, known to the root, the encoder and the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(9, 4)
        self.encoder = Tower(self.shared)
        self.decoder = Tower(self.shared)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decoder(tokens) + self.encoder(tokens)


class Tower(nn.Module):
    def __init__(self, embed_tokens: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.proj = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.proj(self.embed_tokens(tokens))


def plan_of(model: nn.Module, units: list[Any] | None, **rest: Any) -> FSDP2Plan:
    ranks = rest.pop("data_parallel_size", None)
    default_units = rest.pop("default_units", None)
    settings = {"sharding_size": "auto", **({} if units is None else {"sub_modules_to_wrap": units}), **rest}
    return build_plan(load_config(settings), model, data_parallel_size=ranks, default_units=default_units)


def units_of(plan: FSDP2Plan) -> list[str]:
    return [unit.name for unit in plan.units]


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ([], ["(root)"]),
        (["layers.{*}"], ["layers.2", "layers.1", "layers.0", "(root)"]),
        # the model's order, whatever the list's
        (["head", "layers.{0,2}", "embedding"], ["head", "layers.2", "layers.0", "embedding", "(root)"]),
        # nested units before the units around them
        (["layers.1", "layers.1.up", "layers.1.norm"], ["layers.1.up", "layers.1.norm", "layers.1", "(root)"]),
        (["layers.{0-1}.up", "layers.{0-1}"], ["layers.1.up", "layers.1", "layers.0.up", "layers.0", "(root)"]),
        # one unit of two modules, one of which holds a unit registered after the first
        ([["layers.0", "layers.2"], "layers.2.norm"], ["layers.2.norm", "layers.0 + layers.2", "(root)"]),
        ([["layers.{*}"]], ["layers.0 + layers.1 + layers.2", "(root)"]),
        # selected twice, one unit
        (["layers.1", "layers.{*}", ["layers.2"]], ["layers.2", "layers.1", "layers.0", "(root)"]),
        # classes, bare and by import path; a module path wins over a class
        (["Layer"], ["layers.2", "layers.1", "layers.0", "(root)"]),
        (["tests.distributed.models.Rotary"], ["rotary", "(root)"]),
    ],
)
def test_units_in_order_of_application(units: list[Any], expected: list[str]) -> None:
    assert units_of(plan_of(build(), units)) == expected


def test_units_of_several_modules_may_cross_units_around_and_inside() -> None:
    names = units_of(
        plan_of(build(), [["layers.0.up", "layers.1.up"], "layers.0", "layers.1", ["norm", "layers.2.up"]])
    )
    assert names[-1] == "(root)"
    assert set(names[:-1]) == {"layers.0.up + layers.1.up", "layers.0", "layers.1", "norm + layers.2.up"}
    assert names.index("layers.0.up + layers.1.up") < min(names.index("layers.0"), names.index("layers.1"))


def test_a_module_path_wins_over_a_class_of_the_same_name() -> None:
    model = nn.Sequential()
    model.add_module("Linear", nn.Sequential(nn.Linear(2, 2)))
    assert units_of(plan_of(model, ["Linear"])) == ["Linear", "(root)"]


def test_parameters_belong_to_the_innermost_unit() -> None:
    plan = plan_of(build(), ["embedding", "layers.0", "layers.0.norm", ["norm", "head"]])
    numel = {unit.name: unit.numel for unit in plan.units}
    layer = 2 * 16 + (32 * 16 + 32) + (16 * 32 + 16)
    assert numel == {
        "norm + head": 2 * 16 + 33 * 16,
        "layers.0.norm": 2 * 16,
        "layers.0": layer - 2 * 16,
        "embedding": 33 * 16,
        "(root)": 2 * layer,
    }
    assert sum(numel.values()) == sum(p.numel() for p in build().parameters())


def test_module_dict_children() -> None:
    model = nn.Sequential()
    model.add_module("experts", nn.ModuleDict({"b": nn.Linear(2, 2), "a": nn.Linear(2, 2)}))
    assert units_of(plan_of(model, ["experts.{*}"])) == ["experts.a", "experts.b", "(root)"]


def test_wrappers_are_not_part_of_a_path() -> None:
    plan = plan_of(Wrapper(Wrapper(build())), ["layers.{*}"])
    assert units_of(plan) == ["layers.2", "layers.1", "layers.0", "(root)"]
    assert plan.units[-1].kind == "Decoder"


def test_shared_module_is_selected_under_its_first_name() -> None:
    assert units_of(plan_of(TwoNames(), ["decoder.embed_tokens"])) == ["shared", "(root)"]


def test_shared_module_is_sharded_before_every_unit_around_it() -> None:
    plan = plan_of(TwoNames(), ["shared", "encoder", "decoder"])
    assert units_of(plan) == ["shared", "decoder", "encoder", "(root)"]
    assert {unit.name: unit.numel for unit in plan.units} == {"shared": 36, "decoder": 20, "encoder": 20, "(root)": 0}


@pytest.mark.parametrize(
    ("units", "notices"),
    [
        (["layers.{*}", ["embedding", "head"]], 0),
        (["layers.{*}", "embedding", "head"], 1),
        (["layers.{*}", "head"], 1),
    ],
)
def test_tied_parameters_end_in_one_unit(units: list[Any], notices: int) -> None:
    model = build()
    model.head.weight = model.embedding.weight
    plan = plan_of(model, units)
    assert {unit.name: unit.numel for unit in plan.units}["embedding + head"] == 33 * 16  # counted once
    text = "'embedding' and 'head' share a weight: they are sharded as one unit [embedding, head]."
    assert plan.notices == (text,) * notices


def test_trainable_ignored_parameters_are_told() -> None:
    plan = plan_of(build(), [], ignored_modules=["norm"])
    assert plan.whole_trainable == ("norm.weight", "norm.bias")
    assert plan.notices == (
        "ignored_modules: trainable parameters stay whole on every rank: norm.weight, norm.bias. "
        "Their gradients are averaged over all data-parallel ranks in each backward.",
    )


def test_modules_holding_only_a_shared_module_have_parameters() -> None:
    model = TwoNames()
    del model.encoder.proj
    assert plan_of(model, ["shared"]).parameterless == ()


def test_default_units_of_the_model() -> None:
    model = build()
    model._no_split_modules = ["Layer", "Absent"]  # type: ignore[assignment]
    assert units_of(plan_of(model, None)) == ["layers.2", "layers.1", "layers.0", "(root)"]


@pytest.mark.parametrize("hosted", [True, False])
def test_default_units_leave_ignored_modules_out(hosted: bool) -> None:
    model = build().requires_grad_(False)
    model._no_split_modules = ["Layer", "LayerNorm"]  # type: ignore[assignment]

    def host(root: nn.Module) -> list[str]:
        return [fqn for fqn, module in root.named_modules() if isinstance(module, (Layer, nn.LayerNorm))]

    plan = plan_of(model, None, ignored_modules=["layers.{1-2}"], default_units=host if hosted else None)
    assert units_of(plan) == ["norm", "layers.0.norm", "layers.0", "(root)"]
    assert plan.ignored == ("layers.1", "layers.2")


def test_selections_are_in_the_order_of_the_model() -> None:
    model = build().requires_grad_(False)
    plan = plan_of(model, [], ignored_modules=["norm", "embedding"], recompute_modules=["layers.2", "layers.{0-1}"])
    assert plan.ignored == ("embedding", "norm")
    assert plan.recompute == ("layers.0", "layers.1", "layers.2")


def test_modules_without_parameters() -> None:
    dropouts = tuple(f"layers.{i}.dropout" for i in range(3))
    assert plan_of(build(), []).parameterless == ("rotary", *dropouts)


@pytest.mark.parametrize(
    ("param_dtype", "encoder", "casts"),
    [("bf16", torch.float32, False), ("bf16", torch.bfloat16, True), (None, torch.float32, True)],
)
def test_root_casts_unless_an_ignored_module_has_another_dtype(
    param_dtype: str | None, encoder: torch.dtype, casts: bool
) -> None:
    model = build()
    model.embedding.requires_grad_(False).to(encoder)
    plan = plan_of(model, ["layers.{*}", "norm"], ignored_modules=["embedding"], param_dtype=param_dtype)
    assert plan.root_casts_inputs is casts
    assert plan.cast_leaves == (() if casts else ("head",))


@pytest.mark.parametrize(
    ("size", "shards"),
    [(1, 1), (2, 2), (8, 8), ("auto", 8)],
)
def test_shard_size(size: int | str, shards: int) -> None:
    assert plan_of(build(), [], sharding_size=size, data_parallel_size=8).shard_size == shards


@pytest.mark.parametrize("reshard", [2, 4])
def test_reshard_number_may_be_the_shard_group(reshard: int) -> None:
    plan = plan_of(build(), [], sharding_size=4, reshard_after_forward=reshard, data_parallel_size=8)
    assert plan.config.reshard_after_forward == reshard


def test_shard_group_as_reshard_number_is_true_with_other_parallelism_too() -> None:
    config = load_config({"sharding_size": 4, "reshard_after_forward": 4, "sub_modules_to_wrap": []})
    assert build_plan(config, build(), data_parallel_size=8, whole_world=False).shard_size == 4


def test_notice_of_low_precision_storage() -> None:
    text = (
        "trainable parameters are stored in bfloat16: the optimizer steps on bfloat16 values and loses small updates "
        "(at lr 1e-5 no weight moves), and gradients of micro-batches add up in bfloat16. Load the model in float32; "
        "param_dtype alone sets the compute precision."
    )
    model = build().to(torch.bfloat16)
    assert plan_of(model, [], param_dtype="bf16").notices == plan_of(model, []).notices == (text,)
    once = text.replace(", and gradients of micro-batches add up in bfloat16", "")
    assert plan_of(model, [], param_dtype="bf16", reduce_grads="last_microbatch").notices == (once,)
    assert plan_of(build(), [], param_dtype="bf16").notices == ()
    assert plan_of(model.requires_grad_(False), [], param_dtype="bf16").notices == ()


def test_notice_that_nothing_is_sharded_comes_from_the_configuration() -> None:
    (notice,) = plan_of(build(), [], sharding_size=1).notices
    assert notice.startswith("sharding_size: 1: nothing is sharded")


def test_notice_of_units_without_forward_prefetch() -> None:
    rest: dict[str, Any] = {"recompute_modules": ["layers.{0,2}"], "num_to_forward_prefetch": 1}
    plan = plan_of(build(), ["layers.{*}", "layers.{*}.norm"], **rest)
    assert plan.recomputed == ("layers.2.norm", "layers.0.norm")
    assert plan.notices == (
        "num_to_forward_prefetch: nothing is gathered ahead from layers.2.norm, layers.0.norm: they lie inside "
        "recomputed modules, and recomputation would gather ahead once more for nothing.",
    )
    assert plan_of(build(), ["layers.{*}"], **rest).recomputed == ()  # the unit's own hooks lie outside


TABLE = """\
FSDP2 plan
  ranks          8 data-parallel = 4 replicas x 2 shards
  unit               modules    units  parameters each  stored
  (root)             Decoder    1      1,632            float32
  layers.{0,2}       Layer      2      1,072            float32
  layers.{0-2}.norm  LayerNorm  3      32               float32
  precision      compute bf16, reduce fp32, output fp32
  input cast     to bf16 by units only (an ignored module has another dtype), except freqs
  after forward  keep gathered (ZeRO-2); the root stays gathered until its backward
  prefetch       forward 0, backward 2 (execution order: assumed from registration until recorded)
  accumulation   every_microbatch reduces (last_microbatch: 6 reduce-scatters fewer per further micro-batch, 15.1 KiB more per rank)
  ignored        embedding
  recompute      layers.{0-2}.norm (non-reentrant)"""

SHORT_TABLE = """\
FSDP2 plan
  ranks          sharding_size auto
  unit         modules    units  parameters each  stored
  (root)       Decoder    1      3,840            float32
  norm + head  LayerNorm  1      560              -
  precision      compute as stored, reduce as stored, output unchanged
  input cast     off
  after forward  reshard to 2 ranks; the root stays gathered until its backward
  prefetch       forward 0, backward 0 (execution order: assumed from registration until recorded)
  accumulation   every_microbatch reduces (last_microbatch: 1 reduce-scatters fewer per further micro-batch, 15.0 KiB more per rank)"""


def test_printed_plan() -> None:
    model = build()
    model.embedding.requires_grad_(False)
    plan = plan_of(
        model,
        ["layers.{0,2}", "layers.{*}.norm"],
        data_parallel_size=8,
        sharding_size=2,
        param_dtype="bfloat16",
        reduce_dtype="float32",
        output_dtype="fp32",
        keep_input_dtype=["freqs"],
        reshard_after_forward=False,
        num_to_backward_prefetch=2,
        ignored_modules=["embedding"],
        recompute_modules=["layers.{*}.norm"],
        use_reentrant=False,
    )
    assert str(plan) == TABLE


def test_printed_plan_without_ranks() -> None:
    model = build()
    model.norm.requires_grad_(False)
    model.head.requires_grad_(False)
    assert str(plan_of(model, [["norm", "head"]], reshard_after_forward=2)) == SHORT_TABLE


def _frozen(model: Decoder) -> None:
    model.norm.requires_grad_(False)


def _other_dtype(model: Decoder) -> None:
    model.norm.to(torch.float64).requires_grad_(False)


def _transposed(model: Decoder) -> None:
    model.layers[0].up, model.layers[0].down = model.layers[0].down, model.layers[0].up


def _renamed(model: Decoder) -> None:
    model.layers[0].top = model.layers[0].up
    del model.layers[0].up


def _one_more_buffer(model: Decoder) -> None:
    model.register_buffer("scale", torch.ones(2))


@pytest.mark.parametrize("change", [_frozen, _other_dtype, _transposed, _renamed, _one_more_buffer])
def test_digest_tells_models_apart(change: Callable[[Decoder], None]) -> None:
    model = build()
    before = plan_of(model, ["layers.{*}"]).digest()
    change(model)
    assert plan_of(model, ["layers.{*}"]).digest() != before


def test_assumed_order_is_the_order_of_registration() -> None:
    plan = plan_of(build(), ["head", "layers.{0-1}.up", "layers.{*}", "embedding"])
    names = ["(root)", "embedding", "layers.0", "layers.0.up", "layers.1", "layers.1.up", "layers.2", "head"]
    assert [unit.name for unit in plan.assumed_order] == names


def test_digest_is_of_what_ranks_must_share() -> None:
    plan = plan_of(build(seed=1), ["layers.{*}"], data_parallel_size=4)
    assert plan.digest() == plan_of(build(seed=2), ["layers.{*}"], data_parallel_size=4).digest()  # values may differ
    others = [
        plan_of(build(layers=2), ["layers.{*}"], data_parallel_size=4),
        plan_of(build(), ["layers.{0-1}"], data_parallel_size=4),
        plan_of(build(), ["layers.{*}"], data_parallel_size=8),
        plan_of(build(), ["layers.{*}"], data_parallel_size=4, reshard_after_forward=False),
        plan_of(build(), ["layers.{*}"], data_parallel_size=4, recompute_modules=["norm"]),
    ]
    assert len({plan.digest(), *(other.digest() for other in others)}) == 1 + len(others)


def test_planning_changes_nothing() -> None:
    model = build()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    state = dict(vars(model.layers[0]))
    plan_of(model, ["layers.{*}"], recompute_modules=["layers.{*}"], param_dtype="bf16")
    assert all(id(p) == before[name][0] and torch.equal(p, before[name][1]) for name, p in model.named_parameters())
    assert vars(model.layers[0]) == state
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
