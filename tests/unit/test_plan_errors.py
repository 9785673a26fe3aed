"""What a plan refuses, with the exact message."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_fsdp2 import ConfigError, PlanError, build_plan, load_config
from tests.distributed.models import build
from tests.unit.test_plan import TwoNames, Wrapper, plan_of

UNITS = "sub_modules_to_wrap[0]: "


def message(error: type[Exception], model: nn.Module, units: list[Any] | None, **rest: Any) -> str:
    with pytest.raises(error) as caught:
        plan_of(model, units, **rest)
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("norm.weight", "'norm.weight' is a parameter, not a module. Write its module 'norm'."),
        ("layers.{*}.up.bias", "'layers.{*}.up.bias' is a parameter, not a module. Write its module 'layers.{*}.up'."),
        (
            "layers",
            "'layers' selects 'layers', a ModuleList, which has no forward of its own. "
            "Write 'layers.{*}' for its members.",
        ),
        ("Decoder", "'Decoder' selects the model itself. Remove it: the root is always a unit."),
        (
            "layers.{0-7}",
            "module path 'layers.{0-7}': layers has no indices 3-7, only 0-2. "
            "Write indices out of 0-2, or {*} for all of them.",
        ),
        (
            "layers.7",
            "module path 'layers.7' selects no module: layers has no child '7'. Its indices are 0-2.",
        ),
        (
            "module.norm",
            "'module.norm' selects no module: wrappers are not part of a path. Write 'norm'.",
        ),
        (
            "pkg.models.DecoderLayer",
            "module path 'pkg.models.DecoderLayer' selects no module: the model has no child 'pkg'. "
            "Its children are embedding, rotary, layers, norm, head.",
        ),
        (
            "tests.distributed.models.Layers",
            "module path 'tests.distributed.models.Layers' selects no module: the model has no child 'tests'. "
            "Its children are embedding, rotary, layers, norm, head. Classes with a similar name: "
            "tests.distributed.models.Layer, tests.distributed.models.Rotary, tests.distributed.models.Decoder.",
        ),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_paths(path: str, text: str, wrapped: bool) -> None:
    model = Wrapper(build()) if wrapped else build()
    assert message(ConfigError, model, [path]) == UNITS + text


def test_parameter_of_the_root() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    text = "'scale' is a parameter, not a module. It belongs to the root, which is always a unit."
    assert message(ConfigError, model, ["scale"]) == UNITS + text


def test_plain_module_without_forward_is_a_container_too() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

    holder = Holder()
    model = nn.Sequential(holder)
    text = "'0' selects '0', a Holder, which has no forward of its own. Write '0.{*}' for its members."
    assert message(ConfigError, model, [], recompute_modules=["0"]) == f"recompute_modules[0]: {text}"
    assert message(ConfigError, model, ["0"]) == UNITS + text
    holder.forward = holder.inner.forward  # type: ignore[method-assign]
    assert [unit.name for unit in plan_of(model, ["0"]).units] == ["0", "(root)"]


def test_containers_may_be_ignored() -> None:
    plan = plan_of(build().requires_grad_(False), [], ignored_modules=["layers"])
    assert plan.ignored == ("layers",)


def test_the_model_itself_cannot_be_ignored() -> None:
    text = "ignored_modules: the model itself is selected, so nothing would be left to shard. List parts of it."
    assert message(ConfigError, build().requires_grad_(False), [], ignored_modules=["Decoder"]) == text


def test_absent_units() -> None:
    assert message(ConfigError, build(), None) == (
        "sub_modules_to_wrap: absent, and Decoder does not say which modules to shard (no _no_split_modules). "
        "List the units, e.g. 'layers.{*}', or [] for the root alone."
    )
    assert message(ConfigError, nn.Sequential(nn.Linear(2, 2)), None) == (
        "sub_modules_to_wrap: absent, and Sequential does not say which modules to shard (no _no_split_modules). "
        "List the units, e.g. the repeated layers, or [] for the root alone."
    )


def test_module_in_two_units() -> None:
    assert message(ConfigError, build(), ["layers.{*}", ["norm", "layers.1"]]) == (
        "sub_modules_to_wrap[1]: 'layers.1' belongs to two units, [layers.1] and [norm, layers.1]. "
        "List it in one of them."
    )


def test_units_that_enclose_each_other() -> None:
    text = message(PlanError, build(), [["layers.0", "layers.1.norm"], ["layers.1", "layers.0.norm"]])
    assert text == (
        "sub_modules_to_wrap: the units [layers.0, layers.1.norm] and [layers.1, layers.0.norm] enclose each other. "
        "Split one of them."
    )


def test_member_inside_another_member() -> None:
    text = "sub_modules_to_wrap: 'layers.0.norm' lies inside 'layers.0' of the same unit. List the outer one only."
    assert message(PlanError, build(), [["layers.0", "layers.0.norm"]]) == text


def test_units_inside_ignored_modules() -> None:
    text = message(PlanError, build(), ["layers.{0-1}", "norm"], ignored_modules=["layers.0", "norm"])
    assert text.splitlines() == [
        "sub_modules_to_wrap: 'layers.0' lies inside the ignored module 'layers.0'. Remove it from one of the two lists.",
        "sub_modules_to_wrap: 'norm' lies inside the ignored module 'norm'. Remove it from one of the two lists.",
    ]


def test_units_inside_optional_modules() -> None:
    text = message(PlanError, build(), ["layers.{0-1}"], ignored_modules=["layers.0"], optional_modules=["layers"])
    assert text.splitlines() == [
        "sub_modules_to_wrap: 'layers.0' lies inside the ignored module 'layers.0'. Remove it from one of the two lists.",
        "sub_modules_to_wrap: 'layers.1' lies inside the optional module 'layers'. Remove it from one of the two lists.",
    ]


class Lists(nn.Module):
    """Holds parameters in containers, in the model itself and in a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(2))])
        self.part = Part()


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.ones(2))})

    def forward(self) -> None:
        """Be a module that is called."""


def test_containers_of_parameters() -> None:
    assert message(ConfigError, Lists(), ["scales", "part.named"]).splitlines() == [
        f"{UNITS}'scales' selects 'scales', a ParameterList, which is never called: its parameters are used by the root, "
        "which is always a unit. Remove the entry.",
        "sub_modules_to_wrap[1]: 'part.named' selects 'part.named', a ParameterDict, which is never called: its "
        "parameters are used by 'part'. Write 'part'.",
    ]


def test_parameters_that_cannot_be_sharded() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16), nn.Linear(2, 2, device="meta"))
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    model.register_parameter("turned", nn.Parameter(torch.ones(4, 3).t()))
    model.register_parameter("none", nn.Parameter(torch.ones(0, 4)))
    model.register_parameter("frozen", nn.Parameter(torch.ones(0, 4), requires_grad=False))
    assert message(PlanError, model, []).splitlines() == [
        "the root unit: FSDP2 cannot shard the scalar parameter scale. Give it the shape (1,), or freeze it and list "
        "its module in ignored_modules.",
        "the root unit: FSDP2 cannot shard the non-contiguous parameter turned. Make it contiguous().",
        "the root unit: FSDP2 cannot reduce the gradient of the empty parameter none. Freeze or remove it.",
        "the root unit: trainable parameters of several dtypes in one unit (bfloat16: 1.weight, 1.bias; float32: "
        "scale, turned, none, 0.weight, 0.bias, 2.weight, 2.bias). Cast them to one dtype before wrapping.",
    ]


def test_frozen_parameters_may_have_another_dtype() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16).requires_grad_(False))
    assert plan_of(model, []).units[0].stored_dtype == torch.float32


def test_tied_parameter_with_one_end_ignored() -> None:
    model = build().requires_grad_(False)
    model.head.weight = model.embedding.weight
    text = "parameter 'head.weight' is shared by an ignored module and the root unit. Ignore both modules or none."
    assert message(PlanError, model, [], ignored_modules=["embedding"]) == text
    text = (
        "parameter 'head.weight' is shared by an optional module and the root unit. List both modules in optional_modules "
        "or none."
    )
    assert message(PlanError, model, [], optional_modules=["embedding"]) == text


def test_module_that_two_units_reach() -> None:
    assert message(PlanError, TwoNames(), ["encoder", "decoder"]).splitlines() == [
        "module 'shared' is also 'encoder.embed_tokens' and so belongs to the root unit and to unit [encoder]. "
        "Add 'shared' to sub_modules_to_wrap.",
        "module 'shared' is also 'decoder.embed_tokens' and so belongs to the root unit and to unit [decoder]. "
        "Add 'shared' to sub_modules_to_wrap.",
    ]
    text = (
        "module 'shared' is also 'encoder.embed_tokens' and so belongs to the root unit and to an ignored module. "
        "Add 'shared' to ignored_modules."
    )
    assert message(PlanError, TwoNames().requires_grad_(False), [], ignored_modules=["encoder"]) == text
    text = text.replace("ignored", "optional")
    assert message(PlanError, TwoNames().requires_grad_(False), [], optional_modules=["encoder"]) == text


def test_module_that_contains_itself() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].up = model
    text = "model: a module contains itself. FSDP2 needs a module tree without cycles."
    assert message(PlanError, model, []) == text


@pytest.mark.parametrize("size", [3, 8])
def test_sharding_size_that_does_not_divide(size: int) -> None:
    text = f"sharding_size: {size} does not divide the 4 data-parallel ranks. Use one of 1, 2, 4, or auto."
    assert message(ConfigError, build(), [], sharding_size=size, data_parallel_size=4) == text


@pytest.mark.parametrize(
    ("size", "reshard", "fits"),
    [(8, 3, "true, 2, 4 or false"), (4, 8, "true, 2 or false"), (2, 4, "true or false"), (1, 2, "true or false")],
)
def test_reshard_number_that_does_not_divide(size: int, reshard: int, fits: str) -> None:
    text = f"reshard_after_forward: {reshard} does not divide the {size} ranks of a shard group. Use {fits}."
    rest: dict[str, Any] = {"sharding_size": size, "reshard_after_forward": reshard, "data_parallel_size": 8}
    assert message(ConfigError, build(), [], **rest) == text


def test_reshard_number_where_the_group_is_not_the_world() -> None:
    config = load_config({"sharding_size": 4, "reshard_after_forward": 2, "sub_modules_to_wrap": []})
    with pytest.raises(ConfigError) as caught:
        build_plan(config, build(), data_parallel_size=4, whole_world=False)
    assert str(caught.value) == (
        "reshard_after_forward: the number 2 needs a data-parallel group that holds all ranks; with tensor or "
        "pipeline parallelism PyTorch would hang building one mesh per group. Use true or false."
    )


FIVE_MISTAKES = """\
recompute_modules: ["layers"]
expert_parallel_size: 2
sub_modules_to_wrap:
  - "layers.{0-7}"
  - norm.weight
sharding_size: 3
"""


def test_all_mistakes_in_the_order_of_the_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "cfg.yaml"
    file.write_text(FIVE_MISTAKES)
    with pytest.raises(ConfigError) as caught:
        build_plan(load_config(file), build(), data_parallel_size=4)
    assert str(caught.value).replace(str(file), "cfg.yaml").splitlines() == [
        "cfg.yaml:1: recompute_modules[0]: 'layers' selects 'layers', a ModuleList, which has no forward of its own. "
        "Write 'layers.{*}' for its members.",
        "cfg.yaml:2: expert_parallel_size: 2 is not supported yet. Write 1 or remove the key.",
        "cfg.yaml:4: sub_modules_to_wrap[0]: module path 'layers.{0-7}': layers has no indices 3-7, only 0-2. "
        "Write indices out of 0-2, or {*} for all of them.",
        "cfg.yaml:5: sub_modules_to_wrap[1]: 'norm.weight' is a parameter, not a module. Write its module 'norm'.",
        "cfg.yaml:6: sharding_size: 3 does not divide the 4 data-parallel ranks. Use one of 1, 2, 4, or auto.",
    ]


def test_plan_errors_are_value_errors() -> None:
    assert issubclass(PlanError, ValueError)
    assert issubclass(ConfigError, ValueError)
