"""Checkpoints: resuming equals never having stopped, and what is in one."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from mindspeed_fsdp2 import wrap_model
from mindspeed_fsdp2.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from tests.distributed.checkpoint_jobs import LAYERS, Job, Mixed, contents, full, run
from tests.distributed.models import tokens_of
from tests.distributed.ranks import RankPool

OPTIMIZERS = ["adamw", "amsgrad", "sgd", "momentum", "group step", "local"]
IGNORED = (("ignored_modules", ["adapter"]),)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_resuming_equals_never_having_stopped(ranks2: RankPool, tmp_path: Path, kind: str) -> None:
    job = Job(kind, IGNORED, dropout=0.3)
    directory = str(tmp_path / "ckpt")
    whole = ranks2.run(run, job, 0, 10)
    begun = ranks2.run(run, job, 0, 5, None, directory)
    resumed = ranks2.run(run, job, 5, 10, directory, None, 8)
    for rank in range(2):
        assert begun[rank].losses + resumed[rank].losses == whole[rank].losses
        assert resumed[rank].differences(whole[rank], ("draws",)) == []
        assert resumed[rank].draws[3] == 10  # the scheduler's counter
        loaded = resumed[rank].loaded
        assert (loaded.step, loaded.extra, loaded.rank_extra) == (5, {"seen": 60}, [rank, 5])
        assert loaded.report.lines() == [] and str(loaded.report) == "everything was loaded"
    # Neither check may be empty: the ranks differ, the steps matter, and some parameters have no state.
    assert whole[0].losses != whole[1].losses and whole[0].draws != whole[1].draws
    state = whole[0].state
    assert {"unused.weight", "frozen.weight"}.isdisjoint(state) and (kind == "sgd" or "adapter.weight" in state)
    if kind in ("adamw", "amsgrad"):
        assert state["gate.weight"]["step"].item() == 10
    if kind in ("group step", "local"):
        assert [options["step"] for options in whole[0].options] == [10, 10]


def _nothing_advances(directory: str) -> list[str]:
    model, optimizer, scheduler = Job("adamw", IGNORED).build()
    before = contents(model, optimizer)
    save_checkpoint(directory, model, optimizer, step=0, scheduler=scheduler)
    after = contents(model, optimizer)
    other, other_optimizer, other_scheduler = Job("adamw", IGNORED).build(seed=9)
    other(tokens_of(0, 0)).backward()
    other_optimizer.step()  # state that the checkpoint does not have must go
    load_checkpoint(directory, other, other_optimizer, scheduler=other_scheduler)
    loaded = contents(other, other_optimizer)
    assert loaded.state == {} and len(before.model) > 20
    return [*before.differences(after), *before.differences(loaded)]


def test_saving_before_the_first_step_changes_nothing(ranks2: RankPool, tmp_path: Path) -> None:
    assert ranks2.run(_nothing_advances, str(tmp_path)) == [[], []]


def _contents_on_disk(directory: str, tied: bool) -> dict[str, Any]:
    model, optimizer, _ = Job("adamw", tied=tied).build()
    model(tokens_of(0, 0)).backward()
    optimizer.step()
    path = save_checkpoint(directory, model, optimizer, step=1)
    twin = Mixed(tied=tied)
    return {
        "keys": list(twin.state_dict()),
        "model": {key: full(value) for key, value in model.state_dict().items()},
        "state": contents(model, optimizer).state,
        "path": str(path),
    }


@pytest.mark.parametrize("tied", [False, True])
def test_keys_are_those_of_the_unwrapped_model(ranks2: RankPool, tmp_path: Path, tied: bool) -> None:
    first, _ = ranks2.run(_contents_on_disk, str(tmp_path / "ckpt"), tied)
    out = tmp_path / "plain.pt"
    dcp_to_torch_save(first["path"], out)  # PyTorch's own converter reads it, too
    plain = torch.load(out, weights_only=True)
    assert plain["model"].keys() == set(first["keys"])
    assert all(torch.equal(plain["model"][key], value) for key, value in first["model"].items())
    state = plain["optimizer"]["state"]
    assert state.keys() == first["state"].keys() - {"unused.weight"} and "gate.bias" in state
    assert all(torch.equal(state[fqn]["exp_avg"], first["state"][fqn]["exp_avg"]) for fqn in state)
    if tied:  # one tensor under two names takes space once
        index = pickle.loads((Path(first["path"]) / ".metadata").read_bytes())
        places = {key: [] for key in ("model.embedding.weight", "model.head.weight")}
        for entry, info in index.storage_data.items():
            places.get(entry.fqn, []).append((info.relative_path, info.offset))
        assert places["model.embedding.weight"] == places["model.head.weight"] and len(places["model.head.weight"]) == 2


class Normed(nn.Module):
    """Has statistics that each rank gathers from its own batches, and state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.line = nn.Linear(4, 4)
        self.note: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(self.norm(x)).square().mean()

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def _own_buffers(directory: str, save: bool, ranks: int) -> Any:
    rank = dist.get_rank()
    model = wrap_model(Normed(), {"sharding_size": "auto", "sub_modules_to_wrap": []})
    if save:
        model(torch.randn(8, 4, generator=torch.Generator().manual_seed(rank)))
        model.note = {"scales": torch.tensor([1.0, 2.0]), "amax": (torch.tensor(3.0, dtype=torch.float64), None)}
        save_checkpoint(directory, model, step=1)
        return model.norm.running_mean.clone(), None, None
    report = load_checkpoint(directory, model).report
    return model.norm.running_mean.clone(), model.note, report.notes


def test_buffers_that_differ_between_ranks_and_extra_state(ranks2: RankPool, ranks4: RankPool, tmp_path: Path) -> None:
    directory = str(tmp_path)
    saved = ranks2.run(_own_buffers, directory, True, 2)
    assert not torch.equal(saved[0][0], saved[1][0])
    for rank, (mean, note, notes) in enumerate(ranks2.run(_own_buffers, directory, False, 2)):
        assert torch.equal(mean, saved[rank][0]) and notes == ()
        assert torch.equal(note["scales"], torch.tensor([1.0, 2.0]))
        assert note["amax"][0].dtype == torch.float64 and note["amax"][0].item() == 3.0 and note["amax"][1] is None
    for mean, _, notes in ranks4.run(_own_buffers, directory, False, 4):
        assert torch.equal(mean, saved[0][0])
        assert notes == (
            "saved by 2 data-parallel ranks and loaded by 4: random states and rank_extra are not restored",
            "rank 0's values, of several, are loaded on all ranks: norm.running_mean, norm.running_var",
        )


def _history(directory: str) -> list[Any]:
    model, optimizer, _ = Job().build()
    seen = []
    for step, keep in ((1, None), (2, None), (3, None), (2, None), (4, 2), (4, 2)):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(10 * step + len(seen))
        path = save_checkpoint(directory, model, optimizer, step=step, keep=keep)
        seen.append((path.name, [info.path.name for info in list_checkpoints(directory)]))
        loaded = load_checkpoint(directory, model)
        values = {float(full(param).min()) for param in model.parameters()}
        assert (loaded.path, values) == (path, {10.0 * step + len(seen) - 1}), seen
        dist.barrier()  # the next save of rank 0 may remove what the others are still listing
    return seen


def test_which_checkpoint_is_the_newest_and_what_is_kept(ranks2: RankPool, tmp_path: Path) -> None:
    one, two, three, again = "step-00000001", "step-00000002", "step-00000003", "step-00000002-2"
    expected = [
        (one, [one]),
        (two, [one, two]),
        (three, [one, two, three]),
        (again, [one, three, again]),  # saved last, so the newest; the older one of its step is gone
        ("step-00000004", [again, "step-00000004"]),
        ("step-00000004-2", [again, "step-00000004-2"]),
    ]
    assert ranks2.run(_history, str(tmp_path)) == [expected, expected]
    assert sorted(path.name for path in tmp_path.iterdir()) == [again, "step-00000004-2"]
    assert list_checkpoints(tmp_path / "nowhere") == []


def _values(directory: str) -> Any:
    from collections import Counter, OrderedDict

    model, _, _ = Job().build()
    extra = {
        "none": None,
        "numbers": [1, -(2**70), 0.1, float("inf"), True],
        "nested": OrderedDict(a=(1, (2.5, "x")), b=Counter({3: 2})),
        "int keys": {1: "a", (2, 3): "b"},
        "$dollar": {"$tuple": "not a tag"},
        "tensors": {
            "bf16": torch.arange(3, dtype=torch.bfloat16),
            "0": torch.tensor(2.5, dtype=torch.float16),
            "empty": torch.zeros(0, 3),
            "complex": torch.tensor(1 + 2j),
            "flag": torch.tensor(True),
        },
        "numpy float": __import__("numpy").float64(0.3),
    }
    save_checkpoint(directory, model, step=3, extra=extra)
    return extra, load_checkpoint(directory, model).extra


def test_extra_comes_back_as_it_was(ranks2: RankPool, tmp_path: Path) -> None:
    for given, back in ranks2.run(_values, str(tmp_path)):
        tensors, back_tensors = given.pop("tensors"), back.pop("tensors")
        assert back == given
        assert type(back["nested"]["a"][1]) is tuple and type(back["nested"]["b"]).__name__ == "Counter"
        for name, value in tensors.items():
            assert back_tensors[name].dtype == value.dtype and torch.equal(back_tensors[name], value), name


def _same_places(directory: str) -> Any:
    model, _, _ = Job().build()
    extra = {
        "a": {"b": torch.tensor([1.0]), "b~": torch.tensor([2.0])},
        "a.b": torch.tensor([3.0]),
        "keys": {1: torch.tensor([4.0]), "1": torch.tensor([5.0])},
        "": torch.tensor([6.0]),
    }
    save_checkpoint(directory, model, step=1, extra=extra)
    return load_checkpoint(directory, model).extra


def test_tensors_of_extra_whose_dotted_names_are_the_same(ranks2: RankPool, tmp_path: Path) -> None:
    for back in ranks2.run(_same_places, str(tmp_path)):
        assert {key: value.item() for key, value in back["a"].items()} == {"b": 1.0, "b~": 2.0}
        assert (back["a.b"].item(), back[""].item()) == (3.0, 6.0)
        assert {key: value.item() for key, value in back["keys"].items()} == {1: 4.0, "1": 5.0}


def _schedulers(directory: str) -> list[list[float]]:
    model, _, _ = Job().build()
    rates = []
    for number, make in enumerate(
        (
            lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
            lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
            lambda o: torch.optim.lr_scheduler.SequentialLR(
                o,
                [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.MultiStepLR(o, [2, 2, 4])],
                milestones=[2],
            ),
            lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        )
    ):

        def steps(count: int, optimizer: Any, scheduler: Any) -> list[float]:
            rates = []
            for _ in range(count):
                optimizer.step()
                scheduler.step()
                rates += [group["lr"] for group in optimizer.param_groups]
            return rates

        first, second = (torch.optim.SGD(model.parameters(), lr=0.2) for _ in range(2))
        one, two = make(first), make(second)
        steps(3, first, one)
        where = f"{directory}/{number}"
        save_checkpoint(where, model, first, step=3, scheduler=one)
        load_checkpoint(where, model, second, scheduler=two)
        expected = steps(5, first, one)
        assert steps(5, second, two) == expected and len(set(expected)) > 1
        rates.append(expected)
    return rates


def test_schedulers_go_on(ranks2: RankPool, tmp_path: Path) -> None:
    assert len(ranks2.run(_schedulers, str(tmp_path))[0]) == 4


def _regrouped(directory: str) -> list[list[Any]]:
    model, _, _ = Job().build()
    named = dict(model.named_parameters())
    first, rest = [named["gate.weight"]], [p for n, p in named.items() if n != "gate.weight"]
    old = torch.optim.AdamW([{"params": rest, "lr": 0.1, "role": "rest"}, {"params": first, "lr": 0.3, "role": "gate"}])
    model(tokens_of(0, 0)).backward()
    old.step()
    save_checkpoint(directory, model, old, step=1)
    half = len(rest) // 2
    new = torch.optim.AdamW([{"params": first}, {"params": rest[half:]}, {"params": rest[:half][::-1]}], foreach=False)
    load_checkpoint(directory, model, new)
    assert new.state[first[0]]["exp_avg"].to_local().equal(old.state[first[0]]["exp_avg"].to_local())
    return [[group["lr"], group["role"], group["foreach"]] for group in new.param_groups]


def test_options_follow_the_parameters_not_the_position(ranks2: RankPool, tmp_path: Path) -> None:
    expected = [[0.3, "gate", False], [0.1, "rest", False], [0.1, "rest", False]]
    assert ranks2.run(_regrouped, str(tmp_path)) == [expected, expected]


def _special_options(directory: str) -> list[Any]:
    model, _, _ = Job().build()
    kinds = {
        "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
        "tensor lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-2), foreach=False),
        "nadam": lambda params: torch.optim.NAdam(params, momentum_decay=0.01),
        "asgd": lambda params: torch.optim.ASGD(params, lr=1e-2),
    }
    found = []
    for kind, make in kinds.items():
        first, second = make(model.parameters()), make(model.parameters())
        model(tokens_of(0, 0)).backward()
        first.step()
        first.zero_grad()
        rate = second.param_groups[0]["lr"]
        if isinstance(rate, torch.Tensor):
            first.param_groups[0]["lr"].fill_(0.125)
        save_checkpoint(f"{directory}/{kind}", model, first, step=1)
        load_checkpoint(f"{directory}/{kind}", model, second)
        differences = contents(model, first).differences(contents(model, second), ())
        kept = second.param_groups[0]["lr"] is rate if kind == "tensor lr" else None  # compiled code refers to it
        found.append((kind, differences, kept, float(second.param_groups[0]["lr"])))
    unfused = torch.optim.AdamW(model.parameters(), lr=1.0, fused=False)
    load_checkpoint(f"{directory}/fused", model, unfused)
    found.append((unfused.param_groups[0]["fused"], unfused.param_groups[0]["lr"]))
    return found


def test_optimizers_with_tensors_and_counters_of_all_kinds(ranks2: RankPool, tmp_path: Path) -> None:
    expected = [
        ("fused", [], None, 1e-2),
        ("tensor lr", [], True, 0.125),
        ("nadam", [], None, 2e-3),
        ("asgd", [], None, 1e-2),
        (False, 1e-2),
    ]
    assert ranks2.run(_special_options, str(tmp_path)) == [expected, expected]


def _moments(directory: str) -> list[list[str]]:
    model, optimizer, scheduler = Job("adamw", (("reshard_after_forward", False),)).build()
    model(tokens_of(0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    model(tokens_of(1, 0)).backward()  # a gradient that waits for the step
    wanted = contents(model, optimizer)
    found = []
    for number, mode in enumerate((torch.enable_grad, torch.no_grad, torch.inference_mode)):
        with mode():
            model.train(number == 0)(tokens_of(2, 0))  # leaves units gathered, the root or all
        model.calls.fill_(2)
        model.train()
        save_checkpoint(directory, model, optimizer, step=number, scheduler=scheduler)
        found.append(contents(model, optimizer).differences(wanted))
        other, other_optimizer, _ = Job().build(seed=3)
        other(tokens_of(0, 0))
        load_checkpoint(directory, other, other_optimizer)
        found.append(contents(other, other_optimizer).differences(wanted, ()))
    optimizer.step()
    assert contents(model, optimizer).differences(wanted)
    return [difference for difference in found if difference != []]


def test_saving_and_loading_after_a_forward_without_backward(ranks2: RankPool, tmp_path: Path) -> None:
    assert ranks2.run(_moments, str(tmp_path)) == [[], []]


def _recomputed(directory: str) -> bool:
    recompute = (("recompute_modules", ["layers.{*}"]), ("use_reentrant", False))
    models = [Job(config=config).build() for config in (recompute, ())]
    for (saver, saving, _), (loader, loading, _) in (models, models[::-1]):
        saver(tokens_of(0, 0)).backward()
        saving.step()
        save_checkpoint(directory, saver, saving, step=1)
        load_checkpoint(directory, loader, loading)
        if contents(saver, saving).differences(contents(loader, loading)):
            return False
    return True


def test_recomputation_does_not_enter_names(ranks2: RankPool, tmp_path: Path) -> None:
    assert ranks2.run(_recomputed, str(tmp_path)) == [True, True]


class Renamed(Mixed):
    """Saves one key under an older name, and the head's weight under its second name only."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self._register_state_dict_hook(_to_old_names)
        self._register_load_state_dict_pre_hook(_from_old_names)


def _to_old_names(module: nn.Module, state: dict[str, Any], prefix: str, local: Any) -> None:
    state[f"{prefix}old.gate"] = state.pop(f"{prefix}gate.weight")
    del state[f"{prefix}embedding.weight"]


def _from_old_names(state: dict[str, Any], prefix: str, *_rest: Any) -> None:
    state[f"{prefix}gate.weight"] = state.pop(f"{prefix}old.gate")


def _wrapped_layers(wrapped: bool, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer, _ = Job().build(seed=seed)
    if wrapped:
        kind = type(model.layers[0])
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, kind))
    return model, optimizer


def _renamed(wrapped: bool, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = wrap_model(Renamed(), LAYERS)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _other_names(directory: str) -> list[Any]:
    found = []
    for number, (make, saved, loaded) in enumerate(
        ((_wrapped_layers, True, True), (_wrapped_layers, True, False), (_wrapped_layers, False, True), (_renamed,) * 3)
    ):
        model, optimizer = make(bool(saved), 1)
        other, other_optimizer = make(bool(loaded), 2)
        where = f"{directory}/{number}"
        for step in range(2):
            model(tokens_of(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        save_checkpoint(where, model, optimizer, step=2)
        report = str(load_checkpoint(where, other, other_optimizer).report)
        states = [
            list(each.state.get(param, {}).values())
            for each, of in ((optimizer, model), (other_optimizer, other))
            for param in of.parameters()
        ]
        half = len(states) // 2
        equal = all(
            len(one) == len(two) and all(torch.equal(full(x), full(y)) for x, y in zip(one, two))
            for one, two in zip(states[:half], states[half:])
        )
        found.append((report, equal, sum(map(bool, states[half:])) > 10))
    return found


def test_optimizer_state_of_parameters_whose_names_are_not_their_keys(ranks2: RankPool, tmp_path: Path) -> None:
    expected = [("everything was loaded", True, True)] * 4
    assert ranks2.run(_other_names, str(tmp_path)) == [expected, expected]


def test_the_manifest_lists_every_file(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(run, Job(), 0, 1, None, str(tmp_path))
    (info,) = list_checkpoints(tmp_path)
    manifest = json.loads((info.path / "checkpoint.json").read_text())
    assert {name: manifest[name] for name in ("format", "version", "step", "serial", "ranks")} == {
        "format": "mindspeed_fsdp2",
        "version": 1,
        "step": 1,
        "serial": 1,
        "ranks": 2,
    }
    present = {path.name: path.stat().st_size for path in info.path.iterdir()}
    assert present.keys() == {"checkpoint.json", "state.json", ".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert manifest["files"] == {name: size for name, size in present.items() if name != "checkpoint.json"}
    assert dataclasses.asdict(info)["step"] == 1 and info.lacks() == ""
    assert LAYERS["sharding_size"] == "auto"
