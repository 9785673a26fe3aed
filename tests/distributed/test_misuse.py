"""Uses that torch would answer with an error of its own, or not at all: right, or refused alike on every rank."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mindspeed_fsdp2 import FSDP2Error, accumulate, full_parameters, wrap_model
from mindspeed_fsdp2.apply import sharded
from tests.distributed.ranks import RankPool
from tests.distributed.training import full
from tests.distributed.versions import CONTAINERS, SEES_DATACLASSES

WIDTH = 8
UNITS: dict[str, Any] = {"sharding_size": "auto", "sub_modules_to_wrap": ["layers.{*}"]}


class Block(nn.Module):
    """Two linear maps and a residual; ``pack`` puts the result into something."""

    def __init__(self, pack: Callable[[torch.Tensor], Any] = lambda hidden: hidden) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.pack = pack

    def forward(self, x: torch.Tensor) -> Any:
        return self.pack(x + self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    """An embedding, layers and a head; ``pack`` and ``unpack`` are about the layers' outputs."""

    def __init__(
        self,
        pack: Callable[[torch.Tensor], Any] = lambda hidden: hidden,
        unpack: Callable[[Any], torch.Tensor] = lambda output: output,
    ) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(pack) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)
        self.unpack = unpack

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = self.unpack(layer(x))
        return self.head(x)


def x_of(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def message(action: Callable[[], Any]) -> str:
    """Return the text of the error of ours that ``action`` raises."""
    try:
        action()
    except FSDP2Error as error:
        return str(error)
    return ""


def off_after_training(
    make: Callable[[], nn.Module],
    settings: dict[str, Any],
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.SGD(params, lr=0.1),
) -> tuple[float, float]:
    """Return the largest distance from the unsharded model after two steps, and how far that one moved."""
    model, twin, start = wrap_model(make(), settings), make(), make()
    optimizers = [optimizer(m.parameters()) for m in (model, twin)]
    ranks = dist.get_world_size()
    for step in range(2):
        loss(model, x_of(dist.get_rank(), step)).backward()
        for rank in range(ranks):
            (loss(twin, x_of(rank, step)) / ranks).backward()
        for opt in optimizers:
            opt.step()
            opt.zero_grad()
    pairs = [(full(model.get_parameter(n)), p, start.get_parameter(n)) for n, p in twin.named_parameters()]
    return max((a - b).abs().max().item() for a, b, _ in pairs), min((b - c).abs().max().item() for _, b, c in pairs)


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


# --- outputs in which FSDP's hooks see no tensor


class Slots:
    __slots__ = ("hidden",)

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


@dataclass(frozen=True)
class Frozen:
    hidden: torch.Tensor
    count: int = 1


class Named(NamedTuple):
    hidden: torch.Tensor
    count: int


@dataclass
class Nested:
    inner: Any


PACKS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "SimpleNamespace": (lambda h: SimpleNamespace(hidden=h), lambda o: o.hidden),
    "Slots": (Slots, lambda o: o.hidden),
    "set": (lambda h: {h}, lambda o: next(iter(o))),
    "Nested": (lambda h: Nested([SimpleNamespace(hidden=h)]), lambda o: o.inner[0].hidden),
    "tuple": (lambda h: (h, None), lambda o: o[0]),
    "list": (lambda h: [1, [h]], lambda o: o[1][0]),
    "dict": (lambda h: {"hidden": h, "why": SimpleNamespace(text="")}, lambda o: o["hidden"]),
    "frozen dataclass": (Frozen, lambda o: o.hidden),
    "named tuple": (lambda h: Named(h, 1), lambda o: o.hidden),
    "beside a hidden copy": (lambda h: (h, SimpleNamespace(cache=h * 2)), lambda o: o[0]),
}
HIDDEN = {"SimpleNamespace": "SimpleNamespace", "Slots": "Slots", "set": "set", "Nested": "Nested"}  # kind -> class
HIDDEN |= {} if SEES_DATACLASSES else {"frozen dataclass": "Frozen"}


def _packed(kind: str, settings: dict[str, Any]) -> tuple[str, tuple[float, float]]:
    seen: list[tuple[float, float]] = []
    text = message(lambda: seen.append(off_after_training(lambda: Net(*PACKS[kind]), {**UNITS, **settings}, square)))
    return text, seen[0] if seen else (0.0, 1.0)


@pytest.mark.parametrize("kind", PACKS)
def test_unit_that_returns_its_tensors_in_an_object(ranks2: RankPool, kind: str) -> None:
    hidden = (
        f"layers.0: this unit returns its tensors in a {HIDDEN.get(kind)}, where FSDP2 cannot see them, so that backward would meet "
        f"sharded weights. Return {CONTAINERS}."
    )
    for settings in ({}, {"reshard_after_forward": False}, {"sharding_size": 1}):
        for text, (off, moved) in ranks2.run(_packed, kind, settings):
            assert text == (hidden if kind in HIDDEN else "")
            assert off < 1e-6
            assert moved > 1e-4


def test_unit_of_several_modules_that_hides_its_outputs(ranks2: RankPool) -> None:
    settings = {"sub_modules_to_wrap": [["layers.0", "layers.1"]]}
    for text, _ in ranks2.run(_packed, "Slots", settings):
        assert text.startswith("layers.0 + layers.1: this unit returns its tensors in a Slots, where FSDP2")
    for text, (off, moved) in ranks2.run(_packed, "frozen dataclass", settings):
        if SEES_DATACLASSES:
            assert (text, off < 1e-6, moved > 1e-4) == ("", True, True)
        else:
            assert text.startswith("layers.0 + layers.1: this unit returns its tensors in a Frozen, where FSDP2")


def _packed_in_another_dtype() -> list[str]:
    override = {"modules": ["layers.{*}"], "param_dtype": "bf16", "output_dtype": "fp32"}
    return [
        message(
            lambda k=kind: square(wrap_model(Net(*PACKS[k]), {**UNITS, "overrides": [override]}), x_of(0)).backward()
        )  # type: ignore[misc]
        for kind in ("frozen dataclass", "tuple", "Slots")
    ]


def test_outputs_that_are_cast_are_seen(ranks2: RankPool) -> None:
    for first, second, third in ranks2.run(_packed_in_another_dtype):
        hidden = "" if SEES_DATACLASSES else "layers.0: this unit returns its tensors in a Frozen, where FSDP2"
        assert (first[: len(hidden) or None], second) == (hidden, "")
        assert third.startswith("layers.0: this unit returns its tensors in a Slots, where FSDP2")


def _no_gradient_comes() -> list[str]:
    """Objects whose tensors no backward reaches are nobody's business."""
    model = wrap_model(Net(*PACKS["SimpleNamespace"]), UNITS)
    with torch.no_grad():
        texts = [message(lambda: model(x_of(0)))]
    texts.append(message(lambda: model.requires_grad_(False)(x_of(0))))
    detached = Net(lambda h: SimpleNamespace(hidden=h.detach()), lambda o: o.hidden)
    model = wrap_model(detached, UNITS)
    texts.append(message(lambda: model(x_of(0)).sum().backward()))
    return [*texts, str(model.head.weight.grad is not None)]


def test_objects_without_gradients_pass(ranks2: RankPool) -> None:
    assert ranks2.run(_no_gradient_comes) == [["", "", "", "True"]] * 2


class Keeps(Net):
    """Keeps its loss instead of returning it in something that hooks see."""

    how = "attribute"

    def forward(self, x: torch.Tensor) -> Any:
        self.loss = super().forward(x).square().mean()
        return SimpleNamespace(loss=self.loss) if self.how == "object" else None


class KeepsInObject(Keeps):
    how = "object"


def _kept(make: type[Keeps], settings: dict[str, Any], frozen: bool) -> tuple[str, tuple[float, float]]:
    def build() -> Keeps:
        model = make()
        if frozen:  # no gradient reaches any unit but the root
            model.layers.requires_grad_(False)
            model.embed.requires_grad_(False)
        return model

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model(x)
        return model.loss

    seen: list[tuple[float, float]] = []
    text = message(lambda: seen.append(off_after_training(build, settings, loss)))
    return text, seen[0] if seen else (0.0, 0.0)


@pytest.mark.parametrize("make", [Keeps, KeepsInObject])
def test_loss_that_the_root_keeps(ranks2: RankPool, make: type[Keeps]) -> None:
    for text, (off, moved) in ranks2.run(_kept, make, UNITS, False):
        assert (text, off < 1e-6, moved > 1e-4) == ("", True, True)  # the units' outputs announce the backward
    never = (
        "optimizer: the gradients of {} were never averaged over the ranks, because the loss came out of the model where "
        f"FSDP2 cannot see it: in an attribute, or in an object. Return it as {CONTAINERS}."
    )
    for sharding_size in ("auto", 1):
        alone = {"sharding_size": sharding_size, "sub_modules_to_wrap": []}
        for text, _ in ranks2.run(_kept, make, alone, False):
            assert text == never.format("embed.weight, embed.bias, layers.0.up.weight and 9 more")
    for text, _ in ranks2.run(_kept, make, UNITS, True):
        assert text == never.format("head.weight, head.bias")


def _kept_over_micro_batches() -> tuple[str, float]:
    model, twin = wrap_model(KeepsInObject(), UNITS), KeepsInObject()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        for n in range(2):
            with accumulate(model, last=n == 1):
                model(x_of(dist.get_rank(), n)).loss.backward()
            for rank in range(2):
                (twin(x_of(rank, n)).loss / 2).backward()
        optimizer.step()

    text = message(step)
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    return text, max((full(model.get_parameter(n)) - p).abs().max().item() for n, p in twin.named_parameters())


def test_loss_in_an_object_over_micro_batches(ranks2: RankPool) -> None:
    for text, off in ranks2.run(_kept_over_micro_batches):
        assert text == ""
        assert off < 1e-6


# --- running statistics


class Norms(Net):
    """Batch norms in the root and in the units, one without weights; and a count of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        for layer in self.layers:
            layer.norm = nn.BatchNorm1d(WIDTH, affine=False)
            layer.pack = layer.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


def _statistics(settings: dict[str, Any], micro_batches: int) -> tuple[bool, float, float, float]:
    """Train beside DDP; return whether the outputs in evaluation agree, and their distances over ranks and from DDP."""
    ddp, model = DistributedDataParallel(Norms()), wrap_model(Norms(), {**UNITS, **settings})
    rank, buffers = dist.get_rank(), []
    for step in range(3):
        for n in range(micro_batches):
            last = n == micro_batches - 1
            with accumulate(model, last=last):
                square(model, x_of(rank, 10 * step + n)).backward()
            if last:
                square(ddp, x_of(rank, 10 * step + n)).backward()
            else:
                with ddp.no_sync():
                    square(ddp, x_of(rank, 10 * step + n)).backward()
        mine, other = dict(model.named_buffers()), dict(ddp.module.named_buffers())
        buffers.append(max((mine[name].double() - other[name].double()).abs().max().item() for name in other))
    own = model.norm.running_mean.clone()
    with torch.no_grad():
        outputs = [m.eval()(x_of(0, 99)) for m in (model, ddp)]
    every = [torch.empty_like(outputs[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(every, outputs[0])
    drift = (own - model.norm.running_mean).abs().max().item()
    return (
        all(torch.equal(every[0], other) for other in every),
        (outputs[0] - outputs[1]).abs().max().item(),
        max(buffers),
        drift,
    )


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"sharding_size": 1}])
def test_running_statistics_are_those_of_ddp(ranks2: RankPool, settings: dict[str, Any], micro_batches: int) -> None:
    for rank, (agree, output, buffers, drift) in enumerate(ranks2.run(_statistics, settings, micro_batches)):
        assert agree
        assert output < 1e-6
        assert buffers < 1e-6
        assert (drift > 1e-3) is (rank > 0)  # each rank's own batches had moved them


def _statistics_of_a_checkpoint() -> list[float]:
    """A checkpoint taken between two steps holds each rank's own statistics."""
    model = wrap_model(Norms(), UNITS)
    rank = dist.get_rank()
    model.load_state_dict({name: value + rank for name, value in Norms().state_dict().items()})
    with torch.no_grad():
        model.eval()(x_of(0))
    return [float(buffer.double().sum()) for buffer in model.buffers()]


def test_running_statistics_of_a_checkpoint(ranks2: RankPool) -> None:
    expected = [float(buffer.double().sum()) for buffer in Norms().buffers()]
    assert ranks2.run(_statistics_of_a_checkpoint) == [expected] * 2


class Codebook(Net):
    """Counts what it sees, as modules with a state of their own do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("fixed", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.data.add_(x.mean())
        return super().forward(x)


def _warned(make: Callable[[], nn.Module]) -> list[str]:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    model = wrap_model(make(), UNITS)
    logger = logging.getLogger("mindspeed_fsdp2")
    logger.addHandler(handler)
    try:
        for step in range(3):
            square(model, x_of(dist.get_rank(), step)).backward()
    finally:
        logger.removeHandler(handler)
    return seen


def test_other_buffers_that_drift_are_named(ranks2: RankPool) -> None:
    text = (
        "buffers: the forward leaves different values on the ranks in seen. Only running_mean and running_var are kept "
        "equal; each rank goes on with its own values of the others, where DDP would take rank 0's. Average them over "
        "the ranks in the module, if it does not count on that."
    )
    assert ranks2.run(_warned, Codebook) == [[text], []]
    assert ranks2.run(_warned, Norms) == [[], []]


# --- state dicts


def _inside_full_parameters() -> tuple[list[str], bool]:
    model = wrap_model(Net(), UNITS)
    before = {name: full(param) for name, param in model.named_parameters()}

    def run(action: Callable[[], Any]) -> str:
        def inside() -> None:
            with full_parameters(model):
                action()

        return message(inside)

    def nested() -> None:
        with full_parameters(model):
            pass

    texts = [
        run(lambda: model.state_dict()),  # looked up inside
        run(lambda: nn.Sequential(model).state_dict()),
        run(lambda: model.load_state_dict(Net().state_dict())),
        run(nested),
    ]
    after = model.state_dict()
    same = all(isinstance(v, DTensor) and torch.equal(full(v), before[n]) for n, v in after.items())
    return texts, same and after.keys() == before.keys()


def test_state_dicts_inside_full_parameters(ranks2: RankPool) -> None:
    saving = (
        "full_parameters: state_dict() inside would shard the model again and return shards. Take whole tensors with "
        "{name: p.detach().clone() for name, p in model.named_parameters()}, or call state_dict() outside for the shards."
    )
    loading = (
        "full_parameters: load_state_dict() inside would shard the model again. Call it outside: whole tensors are cut "
        "into shards there."
    )
    nesting = (
        "full_parameters: the model is inside full_parameters already, and leaving the inner one would shard it for the "
        "outer one too. Enter it once, around both uses."
    )
    assert ranks2.run(_inside_full_parameters) == [([saving, saving, loading, nesting], True)] * 2


class Ragged(Net):
    """Dimensions that two and four ranks do not divide, a module used twice, and a whole one."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 1)
        self.narrow = nn.Linear(WIDTH, 3)
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.again = self.layers[0]
        self.register_buffer("count", torch.tensor(3))


def _loaded(settings: dict[str, Any], forward_first: bool) -> tuple[list[str], list[float], list[str]]:
    values = Ragged()
    with torch.no_grad():
        for tensor in (*values.parameters(), *values.buffers()):
            tensor.add_(1)
    source = values.state_dict()
    model = wrap_model(Ragged(), {**UNITS, "ignored_modules": ["adapter"], **settings})
    if forward_first:
        model(x_of(0))
    keys = model.load_state_dict(source)
    off = [(full(param) - values.get_parameter(name)).abs().max().item() for name, param in model.named_parameters()]
    off.append((model.count - values.count).abs().item())
    model.layers[1].load_state_dict({name: value * 2 for name, value in values.layers[1].state_dict().items()})
    off.append((full(model.layers[1].up.weight) - 2 * values.layers[1].up.weight).abs().max().item())
    shards = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(shards)
    off += [(full(v) - full(shards[name])).abs().max().item() for name, v in model.state_dict().items()]
    texts = [message(lambda: model.load_state_dict(source, assign=True))]
    for wrong in ({**source, "other": torch.ones(1)}, {**source, "head.weight": torch.ones(2, WIDTH)}):
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(wrong)
        texts.append(str(caught.value).splitlines()[1].strip())
    return [*keys.missing_keys, *keys.unexpected_keys], off, texts


@pytest.mark.parametrize("forward_first", [False, True])
@pytest.mark.parametrize("settings", [{}, {"sharding_size": 1}, {"offload_to_cpu": True}])
def test_whole_state_dict_is_cut_into_shards(ranks2: RankPool, settings: dict[str, Any], forward_first: bool) -> None:
    check_loaded(ranks2.run(_loaded, settings, forward_first))


def test_whole_state_dict_is_cut_into_shards_of_replicas(ranks4: RankPool) -> None:
    check_loaded(ranks4.run(_loaded, {"sharding_size": 2}, False))
    check_loaded(ranks4.run(_loaded, {}, False))


def check_loaded(results: list[Any]) -> None:
    for keys, off, texts in results:
        assert keys == []
        assert len(off) > 30
        assert max(off) == 0
        assert texts[0] == (
            "load_state_dict: assign=True would replace the sharded parameters, and an optimizer would go on with the old "
            "ones. Leave assign out: values are copied into the shards."
        )
        assert texts[1] == 'Unexpected key(s) in state_dict: "other".'
        assert texts[2].startswith("size mismatch for head.weight: copying a param with shape torch.Size([2, 8])")


# --- terms made of parameters, and gradients of gradients


class ReturnsLoss(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


class OneRow(ReturnsLoss):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 1)


class TermInside(ReturnsLoss):
    """Adds its own weights' squares where they are gathered."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.1 * (self.head.weight.square().sum() + self.embed.weight.square().sum())


def _term(model: nn.Module) -> torch.Tensor:
    return 0.1 * sum(param.square().sum() for param in model.parameters())


def _terms(settings: dict[str, Any]) -> tuple[list[str], list[tuple[float, float]]]:
    def loss_and_term(make: type[nn.Module]) -> Callable[[], None]:
        model = wrap_model(make(), {**UNITS, **settings})

        def run() -> None:
            term = _term(model)
            (model(x_of(dist.get_rank())) + term).backward()

        return run

    def apart(make: type[nn.Module]) -> Callable[[], None]:
        model = wrap_model(make(), {**UNITS, **settings})

        def run() -> None:
            _term(model).backward()
            for param in model.parameters():
                torch.testing.assert_close(param.grad.to_local(), 0.2 * param.detach().to_local())

        return run

    texts = [message(loss_and_term(ReturnsLoss)), message(apart(OneRow)), message(apart(ReturnsLoss))]

    def after(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        (model(x) / (1 if sharded(model) else dist.get_world_size())).backward()
        return _term(model)

    off = [
        off_after_training(TermInside, {**UNITS, **settings}, lambda m, x: m(x)),
        off_after_training(ReturnsLoss, {**UNITS, **settings}, after),
        off_after_training(
            ReturnsLoss, {**UNITS, **settings}, lambda m, x: m(x), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.2)
        ),
    ]
    return texts, off


def check_terms(results: list[Any], one_row: bool) -> None:
    way_out = (
        "Use the optimizer's weight_decay, or compute the term in the forward of the module that holds the weights, and "
        "return it."
    )
    for texts, off in results:
        assert texts[0] == f"backward: the loss holds a term made of the model's sharded parameters. {way_out}"
        refused = (
            "backward: torch lays the gradient of a term made of the sharded parameter head.bias out in another way than "
            f"the parameter. {way_out}"
        )
        assert texts[1] in ("", refused) if one_row else texts[1] == ""  # torch 2.7 lays it out as the parameter
        assert texts[2] == ""
        for difference, moved in off:
            assert difference < 1e-6
            assert moved > 1e-4


def test_terms_made_of_parameters(ranks2: RankPool) -> None:
    check_terms(ranks2.run(_terms, {}), True)
    check_terms(ranks2.run(_terms, {"sharding_size": 1}), False)


def test_terms_made_of_parameters_of_replicas(ranks4: RankPool) -> None:
    check_terms(ranks4.run(_terms, {"sharding_size": 2}), True)


def _penalty(settings: dict[str, Any]) -> tuple[str, tuple[float, float]]:
    model = wrap_model(Net(), {**UNITS, **settings})
    x = x_of(dist.get_rank()).requires_grad_()
    text = message(lambda: torch.autograd.grad(model(x).sum(), x, create_graph=True))

    def through_inputs(of: nn.Module, data: torch.Tensor) -> torch.Tensor:
        """A first-order gradient of the input beside the loss."""
        data = data.requires_grad_()
        output = of(data)
        (grad,) = torch.autograd.grad(output.sum(), data, retain_graph=True)
        return (output * grad.mean()).square().mean()

    return text, off_after_training(Net, {**UNITS, **settings}, through_inputs) if not settings else (0.0, 1.0)


@pytest.mark.parametrize("settings", [{}, {"reshard_after_forward": False}, {"sharding_size": 1}])
def test_gradient_penalty_is_refused(ranks2: RankPool, settings: dict[str, Any]) -> None:
    for text, _ in ranks2.run(_penalty, settings):
        assert text == (
            "backward: a gradient of a gradient (create_graph=True, as for a gradient penalty) is not possible: the second "
            "backward would meet weights that are sharded again. Compute such a term on an unwrapped model."
        )


# --- weights that are sharded where they are used


def _leaves() -> list[str]:
    model = wrap_model(Net(), UNITS)
    hidden = torch.ones(2, WIDTH)
    texts = [
        message(lambda: model.head.forward(hidden)),
        message(lambda: model.head(hidden)),
        message(lambda: model.layers[1].up.forward(hidden)),
        message(lambda: model.layers[1].up(hidden)),
    ]
    with full_parameters(model):
        texts.append(message(lambda: model.head.forward(model.layers[1].up(hidden)[:, :WIDTH])))
    return texts


def test_leaf_that_runs_outside_of_its_unit(ranks2: RankPool) -> None:
    text = (
        "{0}: it ran while its weights are sharded, outside of a forward of {1}, which gathers them. Call {1}, wrap this "
        "use in full_parameters(model), or list '{0}' in sub_modules_to_wrap. (mixed torch.Tensor and DTensor)"
    )
    head, up = text.format("head", "the model"), text.format("layers.1.up", "the unit layers.1")
    assert ranks2.run(_leaves) == [[head, head, up, up, ""]] * 2


class Precise(Net):
    """A norm before each linear map."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.up = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4))


def _overridden(override: dict[str, Any]) -> str:
    units = ["layers.{*}", "layers.{*}.up.0", "head.0"]
    settings = {"sharding_size": "auto", "param_dtype": "bf16", "sub_modules_to_wrap": units, "overrides": [override]}
    model = wrap_model(Precise(), settings)
    return message(lambda: model(x_of(dist.get_rank())).float().sum().backward())


def test_override_whose_output_the_rest_does_not_take(ranks2: RankPool) -> None:
    inside = {"modules": ["layers.{*}.up.0"], "param_dtype": "fp32"}
    for text in ranks2.run(_overridden, inside):
        assert text == (
            "overrides: layers.0.up.0 (fp32) inside layers.0 (bf16): the output keeps the dtype of the override, and what "
            "follows does not take it (torch: mat1 and mat2 must have the same dtype, but got Float and BFloat16). Add "
            "output_dtype: bf16 to the override."
        )
    for text in ranks2.run(_overridden, {"modules": ["head.0"], "param_dtype": "fp32"}):
        assert text.startswith("overrides: head.0 (fp32) inside (root) (bf16): the output keeps the dtype")
    assert ranks2.run(_overridden, {**inside, "output_dtype": "bf16"}) == ["", ""]


# --- optimizers, arguments, other wrappers


def _together(kind: str, groups: bool) -> tuple[str, tuple[float, float]]:
    def build(params: Any) -> torch.optim.Optimizer:
        listed = list(params)
        if groups:
            listed = [
                {
                    "params": [p for p in listed if isinstance(p, DTensor) is sharded_ones]
                    or [nn.Parameter(torch.ones(1))]
                }
                for sharded_ones in (True, False)
            ]
        return torch.optim.AdamW(listed, lr=0.01, **({} if kind == "neither" else {kind: True}))

    seen: list[tuple[float, float]] = []
    settings = {**UNITS, "ignored_modules": ["embed"]}
    text = message(lambda: seen.append(off_after_training(Net, settings, square, build)))
    return text, seen[0] if seen else (0.0, 1.0)


@pytest.mark.parametrize("kind", ["foreach", "fused", "neither"])
def test_whole_and_sharded_parameters_in_one_group(ranks2: RankPool, kind: str) -> None:
    refused = (
        f"optimizer: {kind}=True needs sharded and whole parameters in groups of their own, and one group holds both: "
        f"embed.weight, embed.bias are whole. Give AdamW two groups, or pass {kind}=False."
    )
    for text, (off, moved) in ranks2.run(_together, kind, False):
        assert text == ("" if kind == "neither" else refused)
        assert (off < 1e-5, moved > 1e-4) == (True, True)
    for text, (off, moved) in ranks2.run(_together, kind, True):
        assert text == ""
        assert (off < 1e-5, moved > 1e-4) == (True, True)


class HoldsScript(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.jit.script(nn.Linear(WIDTH, WIDTH))


def _arguments() -> list[str]:
    whole: Any = DistributedDataParallel(Net())
    inside = Net()
    inside.layers[0] = DistributedDataParallel(inside.layers[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        scripted = [torch.jit.script(nn.Linear(2, 2)), torch.jit.trace(Net(), x_of(0)), HoldsScript()]
    cases: list[tuple[Any, dict[str, Any]]] = [
        (Net, {}),
        ([Net()], {}),
        ("model.pt", {}),
        (Net(), {"process_group": [0, 1]}),
        (Net(), {"process_group": "world"}),
        *((model, {}) for model in scripted),
        (whole, {}),
        (inside, {}),
    ]
    return [message(lambda m=model, k=options: wrap_model(m, UNITS, **k)) for model, options in cases]  # type: ignore[misc]


def test_arguments_of_other_kinds(ranks2: RankPool) -> None:
    group = "is no process group. Pass what torch.distributed.new_group returned or mesh.get_group(), or None for all ranks."
    jit = "was made by torch.jit, whose modules take neither sharded parameters nor hooks."
    averages = "expects whole parameters and averages their gradients itself."
    expected = [
        "model: Net is a class. Build the model: wrap_model(Net(...), ...).",
        "model: list is not an nn.Module. Pass the module that is trained.",
        "model: str is not an nn.Module. Pass the module that is trained.",
        f"process_group: [0, 1] {group}",
        f"process_group: 'world' {group}",
        f"model: it {jit} Wrap the original module.",
        f"model: it {jit} Wrap the original module.",
        f"model: 'extra' {jit} Put the original module in its place, or list it in ignored_modules.",
        f"model: it is wrapped in DistributedDataParallel, which {averages} Wrap the module inside: "
        "wrap_model(model.module, ...).",
        f"model: 'layers.0' is a DistributedDataParallel, which {averages} Put the module inside it in its place.",
    ]
    for texts in ranks2.run(_arguments):
        assert texts == expected


# --- training in evaluation mode, modules without parameters


def _prefetch_in_eval(evaluate_first: bool) -> tuple[bool, list[bool]]:
    model = wrap_model(Net(), {**UNITS, "num_to_forward_prefetch": 1, "num_to_backward_prefetch": 1}).eval()
    handle = sharded(model)
    assert handle is not None and handle.prefetch is not None
    known = []
    if evaluate_first:
        for _ in range(2):
            model(x_of(0))  # with gradients, but no backward comes
        known.append(handle.prefetch.order is not None)
    twin = copy.copy(Net()).eval()
    equal = True
    for step in range(3):
        square(model, x_of(dist.get_rank(), step)).backward()
        for rank in range(2):
            (square(twin, x_of(rank, step)) / 2).backward()
        known.append(handle.prefetch.order is not None)
        equal &= all(
            (full(model.get_parameter(n).grad) - p.grad).abs().max() < 1e-6 for n, p in twin.named_parameters()
        )
    return equal, known


@pytest.mark.parametrize("evaluate_first", [False, True])
def test_prefetch_lists_of_training_in_evaluation_mode(ranks2: RankPool, evaluate_first: bool) -> None:
    expected = [False, True, True] if not evaluate_first else [False, False, True, True]
    assert ranks2.run(_prefetch_in_eval, evaluate_first) == [(True, expected)] * 2


class Positions(nn.Module):
    """Adds fixed positions to what it gets; or turns them into angles for it."""

    def __init__(self, angles: bool) -> None:
        super().__init__()
        self.angles = angles
        self.register_buffer("table", torch.linspace(0, 3, 6 * WIDTH).view(6, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table[:, :2] if self.angles else x + self.table


class Positioned(Net):
    def __init__(self, angles: bool) -> None:
        super().__init__()
        self.positions = Positions(angles)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.embed(x)
        made = self.positions(hidden)
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda _, args: self.seen.extend(a.dtype for a in args))
        if not self.positions.angles:
            return self.head(self.layers[1](self.layers[0](made)))
        return self.head(self.layers[1](self.layers[0](hidden) + made.sum().to(hidden.dtype))), made


def _positions(angles: bool) -> tuple[list[torch.dtype], bool]:
    model = wrap_model(Positioned(angles), {**UNITS, "param_dtype": "bf16"})
    output = model(x_of(dist.get_rank()))
    kept = (
        bool(angles) and output[1].dtype == torch.float32 and getattr(output[1], "_mindspeed_fsdp2_keep_dtype", False)
    )
    (output[0] if angles else output).float().sum().backward()
    return model.seen, kept


def test_modules_that_pass_activations_on_are_cast(ranks2: RankPool) -> None:
    bf16 = torch.bfloat16
    assert ranks2.run(_positions, False) == [([bf16, bf16], False)] * 2
    assert ranks2.run(_positions, True) == [([bf16, bf16], True)] * 2
