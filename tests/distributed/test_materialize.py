"""Models built on the meta device start from the very values, and leave the generators at the very states, of others."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_fsdp2 import PlanError, load_checkpoint, save_checkpoint, wrap_model
from mindspeed_fsdp2.materialize import meta_init
from tests.distributed.metamodels import VOCAB, Block, Net, Rotary, build, different, peak_bytes, tensors
from tests.distributed.ranks import RankPool

UNITS = ["embedding", "blocks.{*}", "head"]
CONFIG: dict[str, Any] = {"sharding_size": "auto", "sub_modules_to_wrap": UNITS}


def start(kind: str, options: dict[str, Any], config: dict[str, Any]) -> tuple[list[str], list[str], bool]:
    """Return what differs from ordinary initialisation, what is not as it should be, and whether draws go on alike."""
    torch.manual_seed(5)
    ordinary = build(kind, **options)
    for param in ordinary.parameters():
        param.mark = "kept"  # type: ignore[attr-defined]
    wrap_model(ordinary, config)
    expected, drawn = tensors(ordinary), torch.rand(9)
    torch.manual_seed(5)
    with meta_init():
        model = build(kind, **options)
    for param in model.parameters():
        param.mark = "kept"  # type: ignore[attr-defined]
    before = [name for name, param in model.named_parameters() if not param.is_meta and "from_data" not in name]
    wrap_model(model, config)
    wrong = [f"{name} had memory" for name in before]
    pairs = list(zip(ordinary.named_parameters(), model.named_parameters()))
    for (name, one), (_, two) in pairs:
        kinds = (type(one), one.shape, one.dtype, one.requires_grad, one.device)
        if kinds != (type(two), two.shape, two.dtype, two.requires_grad, two.device):
            wrong.append(f"{name} is of another kind")
        if getattr(two, "mark", None) != "kept":
            wrong.append(f"{name} lost an attribute")
    for one, two in zip(ordinary.modules(), model.modules()):
        if isinstance(one, Rotary) and isinstance(two, Rotary):
            if (one.original is one.inv_freq) != (two.original is two.inv_freq):
                wrong.append("an attribute is another tensor")
    if len(list(ordinary.parameters())) != len(list(model.parameters())):
        wrong.append("other ties")
    return different(expected, tensors(model)), wrong, torch.equal(drawn, torch.rand(9))


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("net", {}, {}),
    "root_only": ("net", {}, {"sub_modules_to_wrap": []}),
    "tied": ("net", {"tied": True}, {}),
    "second_pass": ("net", {"second_pass": True}, {}),
    "second_pass_tied": ("net", {"second_pass": True, "tied": True}, {"sub_modules_to_wrap": ["blocks.{*}"]}),
    "ignored": ("net", {}, {"ignored_modules": ["blocks.0", "norm"], "sub_modules_to_wrap": ["blocks.1"]}),
    "optional": ("net", {}, {"optional_modules": ["blocks.0"], "sub_modules_to_wrap": ["blocks.1"]}),
    "offload": ("net", {}, {"offload_to_cpu": True, "pin_memory": False}),
    "bf16": ("bf16", {}, {"param_dtype": "bf16"}),
    "odd": ("odd", {}, {"sub_modules_to_wrap": ["first", "attention"]}),
    "held": ("held", {}, {"sub_modules_to_wrap": ["first"]}),
    "by_name": ("by_name", {}, {"sub_modules_to_wrap": ["first"]}),
    "unsharded": ("net", {}, {"sharding_size": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_ordinary_initialisation(ranks2: RankPool, case: str) -> None:
    kind, options, config = CASES[case]
    for answer in ranks2.run(start, kind, options, CONFIG | config):
        assert answer == ([], [], True)


@pytest.mark.parametrize("case", ["second_pass_tied", "odd", "hsdp"])
def test_values_do_not_depend_on_the_number_of_ranks(ranks4: RankPool, case: str) -> None:
    kind, options, config = CASES.get(case) or ("net", {}, {"sharding_size": 2})
    for answer in ranks4.run(start, kind, options, CONFIG | config):
        assert answer == ([], [], True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_values_on_other_numbers_of_ranks(ranks: int) -> None:
    pool = RankPool(ranks)
    for case in ("second_pass_tied", "odd"):
        kind, options, config = CASES[case]
        for answer in pool.run(start, kind, options, CONFIG | config):
            assert answer == ([], [], True)
    pool.close()


def train(meta: bool) -> list[float]:
    torch.manual_seed(3)
    if meta:
        with meta_init():
            model: nn.Module = Net(drop=0.3)
    else:
        model = Net(drop=0.3)
    wrap_model(model, CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        tokens = (torch.arange(8) * (step + 2) + dist.get_rank()) % VOCAB
        loss = nn.functional.cross_entropy(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_with_dropout_goes_the_same_way(ranks2: RankPool) -> None:
    assert ranks2.run(train, True) == ranks2.run(train, False)


def peak(deferred: bool) -> tuple[int, int, int, int]:
    """Return the peak, what is left, and the bytes of the largest unit and of this rank's shards."""

    def body() -> nn.Module:
        if not deferred:
            return wrap_model(Net(blocks=10, second_pass=True, width=160), CONFIG)
        with meta_init():
            model = Net(blocks=10, second_pass=True, width=160)
        return wrap_model(model, CONFIG)

    most, left, model = peak_bytes(body)
    sizes = [sum(p.numel() * p.itemsize for p in unit.parameters()) for unit in (*model.blocks, model.embedding)]
    held = [*model.parameters(), *model.buffers()]
    shards = sum(t.to_local().untyped_storage().nbytes() if isinstance(t, DTensor) else t.nbytes for t in held)
    return most, left, max(sizes), shards


def test_memory_stays_at_the_shards_and_one_unit(ranks2: RankPool) -> None:
    (most, left, unit, shards), _ = ranks2.run(peak, True)
    (ordinary, _, _, _), _ = ranks2.run(peak, False)
    assert most <= 1.1 * (unit + shards), (most, unit, shards)
    assert left >= shards  # the measurement sees them
    assert ordinary > 1.5 * most  # and it sees a whole model


class Own(nn.Module):
    """Built by ``with torch.device("meta")``; its modules know how to initialise themselves."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.body = nn.ModuleList([nn.Linear(6, 6), nn.BatchNorm1d(6), nn.LayerNorm(6)])
        self.rotary: nn.Module = Cached() if kind == "cached" else Rotary() if kind == "lost" else nn.Identity()
        if kind in ("bare", "whole"):
            self.bare = nn.Parameter(torch.empty(3, 2))
            self.whole = nn.Parameter(torch.empty(5), requires_grad=False)
        if kind == "whole":
            self.init_weights = self._init_all

    def _init_all(self) -> None:
        for param in self.parameters():
            nn.init.trunc_normal_(param)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` through all layers."""
        for layer in self.body:
            x = layer(x)
        return x + self.bare.sum() + self.whole.sum() if hasattr(self, "bare") else x


class Cached(nn.Module):
    """Computes its buffer again when asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(4.0), persistent=False)

    def reset_parameters(self) -> None:
        """Compute the buffer."""
        self.angles.copy_(torch.arange(4.0) * 2)


def own_methods(kind: str) -> Any:
    torch.manual_seed(2)
    with torch.device("meta"):
        model = Own(kind)
    try:
        wrap_model(model, {"sharding_size": "auto", "sub_modules_to_wrap": ["body.0"]})
    except PlanError as error:
        return str(error)
    found = tensors(model)
    torch.manual_seed(2)
    expected = Own(kind)
    torch.manual_seed(2)
    if kind == "whole":
        expected._init_all()
        assert isinstance(expected.body[1], nn.BatchNorm1d)
        expected.body[1].reset_running_stats()
    else:
        for module in expected.modules():
            if module is not expected and hasattr(module, "reset_parameters"):
                module.reset_parameters()
    bad = different(tensors(expected), found)
    try:
        model(torch.ones(4, 6))
    except PlanError as error:
        return bad, str(error)
    return bad, ""


NOTHING = (
    "model: nothing initialised or loaded bare, whole, so it cannot run yet. Load a checkpoint that holds them, build "
    "the model in meta_init(), or let reset_parameters() or init_weights() give them values."
)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("plain", ([], "")),
        ("whole", ([], "")),
        ("cached", ([], "")),
        ("bare", (["bare", "whole"], NOTHING)),
        (
            "lost",
            "model: nothing computes rotary.inv_freq, rotary.original, rotary.scale, rotary.tables['cos'][0], rotary.helper.pair[0], and no checkpoint holds it. "
            "Build the model in meta_init(), or let reset_parameters() or init_weights() of its module compute it.",
        ),
    ],
)
def test_models_that_initialise_themselves(ranks2: RankPool, kind: str, expected: Any) -> None:
    assert ranks2.run(own_methods, kind) == [expected] * 2


class Scaled(nn.Module):
    """Initialised by the method of the model around, which looks into it from above, as GPT-2's in Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.table = nn.Embedding(9, 4)
        self.norm = nn.LayerNorm(4)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(std=0.02)
        if isinstance(module, nn.Linear):
            module.bias.data.zero_()
        for name, param in module.named_parameters():
            if name == "1.weight":
                param.data.normal_(std=0.5)


def from_above() -> list[str]:
    torch.manual_seed(2)
    with torch.device("meta"):
        model = Scaled()
    wrap_model(model, {"sharding_size": "auto", "sub_modules_to_wrap": ["inner.{*}"]})
    expected = Scaled()
    torch.manual_seed(2)
    expected.apply(expected._init_weights)
    return different(tensors(expected), tensors(model))


def test_an_outer_method_initialises_inner_parameters(ranks2: RankPool) -> None:
    assert ranks2.run(from_above) == [[], []]


def loaded_later(complete: bool) -> str:
    torch.manual_seed(2)
    values = Own("bare").state_dict()
    with torch.device("meta"):
        model = Own("bare")
    wrap_model(model, {"sharding_size": "auto", "sub_modules_to_wrap": ["body.0"]})
    with torch.no_grad():
        for name, param in model.named_parameters():
            if complete or name != "bare":
                values[name].fill_(0.5)
                local = values[name].chunk(2)[dist.get_rank()]
                param.to_local().copy_(local)
    try:
        model(torch.ones(4, 6)).sum().backward()
    except PlanError as error:
        return str(error)
    return "ran"


def test_what_is_loaded_later_counts(ranks2: RankPool) -> None:
    assert ranks2.run(loaded_later, True) == ["ran"] * 2
    assert ranks2.run(loaded_later, False) == [NOTHING.replace("bare, whole", "bare")] * 2


def loaded_checkpoint(folder: str) -> list[str]:
    config = {"sharding_size": "auto", "sub_modules_to_wrap": ["body.0"]}
    torch.manual_seed(6)
    saved = Own("bare")
    saved._init_all()
    wrap_model(saved, config)
    save_checkpoint(folder, saved, step=1)
    with torch.device("meta"):
        model = Own("bare")
    wrap_model(model, config)
    load_checkpoint(folder, model)
    bad = different(tensors(saved), tensors(model))
    model(torch.ones(4, 6)).sum().backward()
    return bad


def test_a_checkpoint_gives_the_values(ranks2: RankPool, tmp_path: Path) -> None:
    assert ranks2.run(loaded_checkpoint, os.fspath(tmp_path)) == [[], []]


def refused(case: str) -> str:
    torch.manual_seed(4)
    try:
        with meta_init():
            model = REFUSED[case][0]()
        if case == "converted":
            model.bfloat16()
        if case == "drawn":
            torch.rand(1)
        if case == "two":
            with meta_init():
                model = Block()
        if case == "ranks" and dist.get_rank():
            model = Block()
        wrap_model(model, {"sharding_size": "auto", "sub_modules_to_wrap": []})
    except PlanError as error:
        return str(error).replace(str(model.__class__), "") if "model" in dir() else str(error)
    return "nothing"


class FromData(nn.Module):
    """Draws where the recording cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.0] * 4).normal_())


class Reads(nn.Module):
    """Writes values to come into a tensor made from data."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.tensor([0.0] * 4)
        table[0] = torch.ones(1)[0]
        self.weight = nn.Parameter(table)


def orthogonal() -> nn.Module:
    """Asks torch to swallow a NotImplementedError."""
    return nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))


def indexed() -> nn.Module:
    """Takes a NotImplementedError for an answer."""
    layer = nn.Linear(4, 4)
    with contextlib.suppress(NotImplementedError):
        layer.weight.data.mul_(len(torch.nonzero(layer.weight > 0)))
    return layer


def copied_out() -> nn.Module:
    return nn.Linear(2, 2, device="meta").to("cpu")


def loads() -> nn.Module:
    layer, file = nn.Linear(2, 2), io.BytesIO(FILE)
    layer.load_state_dict(torch.load(file))
    return layer


def saved_file() -> bytes:
    file = io.BytesIO()
    torch.save(nn.Linear(2, 2).state_dict(), file)
    return file.getvalue()


FILE = saved_file()
NO_KERNEL = (
    "meta_init: {} cannot be recorded: torch has no meta kernel for it, or the shape of its result depends on values. "
    "Build this part before meta_init, or the model without meta_init."
)
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "converted": (
        lambda: nn.Linear(2, 2),
        "model: weight, bias came to the meta device outside of meta_init, or was changed since. Build the whole model in "
        "meta_init(), and convert it there: model.bfloat16().",
    ),
    "drawn": (
        lambda: nn.Linear(2, 2),
        "meta_init: random numbers were drawn between building the model on the meta device and sharding it. The model's "
        "own draws come first and are made when it is sharded: draw after wrap_model.",
    ),
    "two": (
        lambda: nn.Linear(2, 2),
        "meta_init: a model that was built before, in another meta_init, has not been wrapped yet, and its draws come "
        "first. Wrap it before, or build both in one meta_init.",
    ),
    "data": (
        FromData,
        "meta_init: normal_ draws random numbers into a tensor made from data, which would come out of order. Make it "
        "with torch.empty, torch.zeros or the like.",
    ),
    "orthogonal": (orthogonal, NO_KERNEL.format("geqrf")),
    "indexed": (indexed, NO_KERNEL.format("nonzero")),
    "copied_out": (
        copied_out,
        "meta_init: _to_copy copies a tensor from the meta device, where it has no value. Call to_empty() and initialise "
        "it then.",
    ),
    "loads": (
        loads,
        "meta_init: set_ gives a tensor other memory, which cannot be recorded. torch.load does: load after wrap_model, "
        "with load_full_state_dict.",
    ),
    "writes": (Reads, "meta_init: copy_ writes values that are not there yet into a tensor made from data."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_recorded_is_refused(ranks2: RankPool, case: str) -> None:
    assert ranks2.run(refused, case) == [REFUSED[case][1]] * 2


def test_arrays_cannot_be_written_through() -> None:
    with meta_init():
        weight = nn.Parameter(torch.zeros(3))
        for array in (weight.detach().numpy(), np.asarray(weight.data)):
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 4.0
        for copy in (np.asarray(weight.data, dtype="float64"), weight.data.numpy().copy()):
            copy[:] = 4.0  # a copy in ordinary construction too


def test_a_framework_around_may_say_meta() -> None:
    torch.manual_seed(1)
    expected = nn.Linear(3, 3).weight
    torch.manual_seed(1)
    with torch.device("meta"), meta_init():
        layer = nn.Linear(3, 3)
        assert layer.weight.tolist() == expected.tolist()


class Fails(nn.Module):
    """Draws and gives up."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        raise KeyError("gives up")


def failed() -> list[float]:
    drawn = []
    for meta in (False, True):
        torch.manual_seed(9)
        with pytest.raises(KeyError, match="gives up"):
            if meta:
                with meta_init():
                    Fails()
            else:
                Fails()
        drawn.append(torch.rand(1).item())
    return drawn


def test_generators_go_on_after_a_constructor_that_fails(ranks2: RankPool) -> None:
    for ordinary, meta in ranks2.run(failed):
        assert ordinary == meta


def several() -> list[bool]:
    torch.manual_seed(8)
    ordinary = (Net(), Block())
    drawn = torch.rand(3)
    torch.manual_seed(8)
    with meta_init():
        first, second = Net(), Block()
    wrap_model(second, {"sharding_size": "auto", "sub_modules_to_wrap": ["up"]})  # not in the order of construction
    same = torch.equal(drawn, torch.rand(3))
    wrap_model(first, CONFIG)
    return [same, *(not different(tensors(o), tensors(m)) for o, m in zip(ordinary, (first, second)))]


def test_two_models_of_one_recording(ranks2: RankPool) -> None:
    assert ranks2.run(several) == [[True, True, True]] * 2


def uneven_meta() -> str:
    model: nn.Module = nn.Linear(2, 2)
    if dist.get_rank():
        with meta_init():
            model = nn.Linear(2, 2)
    try:
        wrap_model(model, {"sharding_size": "auto", "sub_modules_to_wrap": []})
    except PlanError as error:
        return str(error)
    return "nothing"


def one_draws() -> str:
    with meta_init():
        model = nn.Linear(2, 2)
    if dist.get_rank():
        torch.rand(1)
    try:
        wrap_model(model, {"sharding_size": "auto", "sub_modules_to_wrap": []})
    except PlanError as error:
        return str(error)
    return "nothing"


def test_a_draw_on_one_rank_ends_all(ranks2: RankPool) -> None:
    assert ranks2.run(one_draws) == ["on rank 1 of 2: " + REFUSED["drawn"][1]] * 2


def test_ranks_must_agree_on_what_is_on_meta(ranks2: RankPool) -> None:
    answers = ranks2.run(uneven_meta)
    assert answers[0] == answers[1]
    assert answers[0].startswith("FSDP2 plan: the ranks do not agree (")
