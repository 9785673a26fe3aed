"""What does not fit is refused with one message on every rank, before anything is changed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from mindspeed_fsdp2 import CheckpointError, wrap_model
from mindspeed_fsdp2.checkpoint import load_checkpoint, save_checkpoint
from tests.distributed.checkpoint_jobs import LAYERS, GroupStepAdam, Job, contents, run
from tests.distributed.models import Decoder, tokens_of
from tests.distributed.ranks import RankPool

ROOT = {"sharding_size": "auto", "sub_modules_to_wrap": []}


def message(act: Callable[[], Any]) -> str:
    try:
        act()
    except CheckpointError as error:
        return str(error)
    return "no error"


@pytest.fixture
def saved(ranks2: RankPool, tmp_path: Path) -> Path:
    """A directory with a checkpoint of step 2."""
    ranks2.run(run, Job(), 0, 2, None, str(tmp_path / "ckpt"))
    return tmp_path / "ckpt"


def same(answers: list[Any]) -> Any:
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]


class Changed(Decoder):
    """Another vocabulary, a new head, other layers than the saved model."""

    def __init__(self) -> None:
        super().__init__(layers=2, dim=16, vocab=40)
        self.gate = nn.Linear(16, 1)
        self.new_head = nn.Linear(16, 2)
        self.norm = self.norm.to(torch.bfloat16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, freqs=self.rotary(tokens.shape[1]))
        return self.gate(hidden).sum() + self.new_head(hidden).sum() + self.head(hidden).sum()


def _changed(directory: str) -> tuple[list[str], bool, list[str], dict[str, Any]]:
    model = wrap_model(Changed(), {**LAYERS, "ignored_modules": ["norm"]})
    optimizer = torch.optim.AdamW(p for n, p in model.named_parameters() if not n.startswith("layers.0"))
    model(tokens_of(0, 0)).backward()
    optimizer.step()
    before = contents(model, optimizer)
    errors = [
        message(lambda: load_checkpoint(directory, model, optimizer)),
        message(lambda: load_checkpoint(directory, model, partial=True)),
    ]
    unchanged = before.differences(contents(model, optimizer)) == []
    loaded = load_checkpoint(directory, model, optimizer, partial=True, cast=True)
    after = contents(model, optimizer)
    kept = {name for name in after.model if torch.equal(after.model[name], before.model[name])}
    kept_state = {
        name for name in after.state if torch.equal(after.state[name]["exp_avg"], before.state[name]["exp_avg"])
    }
    facts = {"kept": sorted(kept), "state kept": sorted(kept_state), "dtype": str(after.model["norm.weight"].dtype)}
    facts["steps"] = sorted({state["step"].item() for state in after.state.values()})
    return errors, unchanged, loaded.report.lines(), facts


def test_every_difference_is_listed_before_anything_is_changed(ranks2: RankPool, saved: Path) -> None:
    errors, unchanged, report, facts = same(ranks2.run(_changed, str(saved)))
    assert unchanged
    place = saved / "step-00000002"
    of = [f"optimizer state of layers.0.{n}" for n in ("down.bias", "down.weight", "norm.bias", "norm.weight")]
    of += [f"optimizer state of layers.0.{n}" for n in ("up.bias", "up.weight")]
    differences = [
        "missing in the checkpoint: new_head.weight, new_head.bias",
        "only in the checkpoint: adapter.bias, adapter.weight, calls, frozen.bias, frozen.weight, scale, unused.bias, "
        f"unused.weight, {', '.join(of)}",
        "other shape: embedding.weight is (40, 16) here and (33, 16) in the checkpoint, head.weight is (40, 16) here and "
        "(33, 16) in the checkpoint",
        "other dtype: norm.weight is bfloat16 here and float32 in the checkpoint, norm.bias is bfloat16 here and float32 "
        "in the checkpoint",
        "param group 0 joins parameters that had different options when they were saved",
    ]
    assert errors[0].splitlines() == [
        f"{place}: the checkpoint does not fit:",
        *(f"  {line}" for line in differences),
        "Build the model and the optimizer as they were saved, or pass partial=True to load what fits; pass cast=True to "
        "convert to the model's dtypes.",
    ]
    assert errors[1].splitlines() == [
        f"{place}: the checkpoint does not fit:",
        f"  {differences[3]}",
        "Pass cast=True to convert to the model's dtypes.",
    ]
    note = "the checkpoint has the state of a scheduler, which is not loaded: none was passed"
    assert report == [*differences, "the optimizer state is not loaded", note]
    assert facts["kept"] == ["embedding.weight", "head.weight", "new_head.bias", "new_head.weight"]
    assert facts["dtype"] == "torch.bfloat16" and facts["steps"] == [1.0]
    assert "layers.1.up.weight" in facts["state kept"]


def _new_head(directory: str) -> Any:
    model, optimizer, _ = Job().build()
    model(tokens_of(0, 0)).backward()
    optimizer.step()
    save_checkpoint(directory, model, optimizer, step=1)
    old = contents(model, optimizer)
    torch.manual_seed(5)
    bigger = Decoder(layers=2, dim=16, vocab=33)
    bigger.new_head = nn.Linear(16, 2)
    bigger = wrap_model(bigger, LAYERS)
    fresh = torch.optim.AdamW(
        [
            {"params": [p for p in bigger.parameters() if p.dim() > 1]},
            {"params": [p for p in bigger.parameters() if p.dim() < 2]},
        ]
    )
    report = load_checkpoint(directory, bigger, fresh, partial=True).report
    new = contents(bigger, fresh)
    same_state = [n for n in new.state if torch.equal(new.state[n]["exp_avg"], old.state[n]["exp_avg"])]
    return report.missing, sorted(new.state) == sorted(same_state), len(same_state), fresh.param_groups[0]["lr"]


def test_a_partial_load_takes_the_optimizer_state_that_fits(ranks2: RankPool, tmp_path: Path) -> None:
    missing, equal, count, rate = same(ranks2.run(_new_head, str(tmp_path)))
    wanted = ("new_head.weight", "new_head.bias")
    assert missing == wanted
    assert equal and count == 6 * 2 + 4 and rate == 2e-2


def _other_parts(directory: str) -> list[str]:
    model, optimizer, scheduler = Job().build()
    save_checkpoint(f"{directory}-bare", model, step=1)

    def load(*args: Any, **options: Any) -> str:
        return message(lambda: load_checkpoint(directory, model, *args, **options))

    def bare(*args: Any, **options: Any) -> str:
        return message(lambda: load_checkpoint(f"{directory}-bare", model, *args, **options))

    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return [
        load(torch.optim.SGD(model.parameters())),
        load(optimizer, scheduler=cosine),
        bare(optimizer, scheduler=scheduler),
        load(optimizer, step=7, scheduler=scheduler),
        message(lambda: load_checkpoint(directory, nn.Linear(2, 2))),
        message(lambda: load_checkpoint(directory, wrap_model(nn.Linear(2, 2), ROOT))),
    ]


def test_other_optimizers_schedulers_and_models(ranks2: RankPool, saved: Path) -> None:
    answers = same(ranks2.run(_other_parts, str(saved)))
    way = "Build the model and the optimizer as they were saved, or pass partial=True to load what fits."
    place = saved / "step-00000002"
    assert answers[0].splitlines()[1:] == [
        "  the optimizer is SGD, the checkpoint has the state of AdamW",
        "  param group 0 joins parameters that had different options when they were saved",
        way,
    ]
    assert answers[1].splitlines() == [
        f"{place}: the checkpoint does not fit:",
        "  the scheduler is CosineAnnealingLR, the checkpoint has the state of MultiStepLR",
        way,
    ]
    assert answers[2].splitlines()[1:] == [
        "  the checkpoint has no optimizer state: it was saved without optimizer",
        "  the checkpoint has no scheduler state: it was saved without scheduler",
        way,
    ]
    assert answers[3] == f"{saved}: there is no checkpoint of step 7, only of 2. Pass one of these as step."
    assert answers[4] == "load_checkpoint: the model is not wrapped. Call wrap_model first."
    assert answers[5].startswith(
        f"{place}: no tensor of it fits the model: the model has weight, bias, the checkpoint "
    )


def _ties(directory: str) -> str:
    model, _, _ = Job(tied=True).build()
    return message(lambda: load_checkpoint(directory, model))


def test_a_tied_model_and_an_untied_checkpoint(ranks2: RankPool, saved: Path) -> None:
    line = same(ranks2.run(_ties, str(saved))).splitlines()[1]
    assert line == "  head.weight and embedding.weight are one tensor in the model and two in the checkpoint"


def _load(directory: str) -> str:
    model, _, _ = Job().build()
    return message(lambda: load_checkpoint(directory, model))


OTHERS = {
    "iter_0000010": "it holds a Megatron checkpoint (iter_0000010). load_checkpoint reads what save_checkpoint wrote; load "
    "this one with Megatron's --load.",
    "model-00001-of-00002.safetensors": "it holds Hugging Face weights (model-00001-of-00002.safetensors). Load them with "
    "from_pretrained() before wrap_model, or with load_full_state_dict() after it.",
    ".metadata": "it holds a checkpoint of torch.distributed.checkpoint (.metadata) that save_checkpoint did not write. "
    "Read it with torch.distributed.checkpoint.load before or after wrap_model, then save it with save_checkpoint.",
    "model.pt": "it holds a file of torch.save (model.pt). Load it with torch.load(..., weights_only=True) and "
    "load_state_dict before wrap_model.",
    "notes.txt": "it holds no checkpoint (notes.txt). Pass the directory given to save_checkpoint.",
    "": "it is empty, so there is no checkpoint to load. Pass the directory given to save_checkpoint, or start without "
    "load_checkpoint where list_checkpoints(directory) is empty.",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_and_empty_directories(ranks2: RankPool, tmp_path: Path, name: str) -> None:
    if name:
        (tmp_path / name).touch()
    assert same(ranks2.run(_load, str(tmp_path))) == f"{tmp_path}: {OTHERS[name]}"


def test_absent_directories(ranks2: RankPool, tmp_path: Path) -> None:
    place = tmp_path / "nowhere"
    assert same(ranks2.run(_load, str(place))).startswith(f"{place}: it does not exist, so there is no checkpoint to ")


def test_damaged_checkpoints_are_passed_over(ranks2: RankPool, saved: Path) -> None:
    newer = saved / "step-00000003"
    shutil.copytree(saved / "step-00000002", newer)
    manifest = json.loads((newer / "checkpoint.json").read_text())
    (newer / "checkpoint.json").write_text(json.dumps({**manifest, "step": 3, "serial": 9}))
    assert same(ranks2.run(_load, str(saved))) == "no error"
    (newer / "__1_0.distcp").write_bytes(b"short")
    (saved / "step-00000004").mkdir()
    assert same(ranks2.run(_load, str(saved))) == "no error"  # the older one
    assert same(ranks2.run(_load, str(newer))).startswith(
        f"{newer}: there is no complete checkpoint: step-00000003 lacks "
    )
    shutil.rmtree(saved / "step-00000002")
    assert same(ranks2.run(_load, str(saved))) == (
        f"{saved}: there is no complete checkpoint: step-00000004 has no checkpoint.json; step-00000003 lacks "
        "__1_0.distcp or has it in another size. Start without load_checkpoint, or copy a complete one here."
    )


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def _rewrite(folder: Path, change: Callable[[Any], None], data: bytes | None = None) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    change(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    if data is not None:
        (folder / "__0_0.distcp").write_bytes(data)
    manifest = json.loads((folder / "checkpoint.json").read_text())
    manifest["files"] = {name: (folder / name).stat().st_size for name in manifest["files"]}
    (folder / "checkpoint.json").write_text(json.dumps(manifest))


def test_nothing_in_a_checkpoint_is_executed(ranks2: RankPool, saved: Path, tmp_path: Path) -> None:
    folder, mark = saved / "step-00000002", tmp_path / "mark"

    def evil_index(index: Any) -> None:
        index.planner_data = Evil(str(mark))

    def evil_data(index: Any) -> None:
        index.planner_data = None
        for info in index.storage_data.values():
            if info.relative_path == "__0_0.distcp":
                info.offset, info.length = 0, len(payload)

    def pickled_object(index: Any) -> None:
        index.state_dict_metadata["model.scale"] = BytesStorageMetadata()

    def elsewhere(index: Any) -> None:
        next(iter(index.storage_data.values())).relative_path = "../step-00000001/__0_0.distcp"

    torch.save({"x": Evil(str(mark))}, tmp_path / "payload")
    payload = (tmp_path / "payload").read_bytes()
    _rewrite(folder, evil_index)
    assert same(ranks2.run(_load, str(saved))) == (
        f"{folder}/.metadata: the index cannot be read: it refers to posix.system. Load another checkpoint, or save this "
        "one again."
    )
    _rewrite(folder, evil_data, payload)
    assert mark.exists()  # the plain reader, which rewrites it here, did run it
    mark.unlink()
    assert same(ranks2.run(_load, str(saved))) == (
        f"{folder}: a file holds a pickled object, which is never loaded. Load another. The model holds part of it now: do "
        "not train on."
    )
    _rewrite(folder, pickled_object)
    assert same(ranks2.run(_load, str(saved))) == (
        f"{folder}/.metadata: 'model.scale' is not a tensor but a pickled object, which is never loaded."
    )
    _rewrite(folder, lambda index: index.state_dict_metadata.pop("model.scale"))
    _rewrite(folder, elsewhere)
    assert same(ranks2.run(_load, str(saved))) == (
        f"{folder}/.metadata: it points to '../step-00000001/__0_0.distcp', which is no file of this checkpoint."
    )
    assert not mark.exists()


class BadState(torch.optim.SGD):
    """Keeps state that cannot be saved."""

    def __init__(self, params: Any, values: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(params)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {"bad": values(param)}


def _bad_saves(directory: str) -> list[str]:
    rank = dist.get_rank()
    raw = Decoder(layers=1)
    early = torch.optim.SGD(raw.parameters(), lr=0.1)
    model = wrap_model(raw, LAYERS)
    good = torch.optim.SGD(model.parameters(), lr=0.1)

    def save(optimizer: Any = None, **options: Any) -> str:
        return message(lambda: save_checkpoint(directory, model, optimizer, **{"step": 1, **options}))

    return [
        save(early),
        save(torch.optim.SGD([nn.Parameter(torch.zeros(2))])),
        save(BadState(model.parameters(), lambda p: torch.zeros(p.shape))),
        save(BadState(model.parameters(), lambda p: {1, 2})),
        save(good, extra={"path": [object()]}),
        save(good, extra={"rank": rank}),
        save(good, extra={"values": torch.tensor([float(rank), 1.0])}),
        save(good, rank_extra=torch.zeros(2)),
        save(good, extra=model.head.weight),
        save(good, step=1.5),
        save(good, step=-1),
        save(good, keep=0),
        save(good, step=rank),
        save(good, scheduler=3),
        save("adam"),
        message(lambda: save_checkpoint(directory, nn.Linear(2, 2), step=1)),
    ]


def test_what_cannot_be_saved(ranks2: RankPool, tmp_path: Path) -> None:
    early, foreign, plain, kind, *rest = same(ranks2.run(_bad_saves, str(tmp_path)))
    assert early == (
        "optimizer: embedding.weight, layers.0.norm.weight, layers.0.norm.bias and 7 more is not a parameter of the model. "
        "Build the optimizer after wrap_model, from the parameters of this model."
    )
    assert foreign.startswith("optimizer: (2,) is not a parameter of the model. Build the optimizer after")
    assert (
        "BadState keeps 'bad' of 'embedding.weight' as a plain tensor of shape (33, 16), which is not this rank's "
        in plain
    )
    assert kind == (
        "optimizer.state.embedding.weight.bad: a set cannot be saved without pickle. Turn it into numbers, strings, lists, "
        "dicts or tensors."
    )
    differs = "differs from rank 0. Pass the same on every rank; what is each rank's own belongs in rank_extra."
    assert rest == [
        "extra.path.0: a object cannot be saved without pickle. Turn it into numbers, strings, lists, dicts or tensors.",
        f"save_checkpoint: extra on rank 1 {differs}",
        f"save_checkpoint: extra.values on rank 1 {differs}",
        "rank_extra: it holds tensors with more than one value. Use extra for tensors, or tolist() for small ones.",
        "extra: a sharded tensor is saved with the model or the optimizer only. Save its full_tensor().",
        "step: 1.5 is not a number of finished steps. Pass an int from 0.",
        "step: -1 is not a number of finished steps. Pass an int from 0.",
        "keep: 0 is not a number of checkpoints. Pass an int from 1, or None.",
        f"save_checkpoint: step on rank 1 {differs}",
        "scheduler: int has no state_dict(). Pass a scheduler of torch.",
        "optimizer: str is not a torch.optim.Optimizer. Pass the optimizer itself.",
        "save_checkpoint: the model is not wrapped. Call wrap_model first.",
    ]
    assert list(tmp_path.iterdir()) == []


def _clash(directory: str) -> list[str]:
    model = nn.Module()
    model.register_parameter("a", nn.Parameter(torch.zeros(4)))
    model.b = nn.Module()
    model.b.register_parameter("c", nn.Parameter(torch.zeros(4)))
    model.a_ = nn.Module()
    model = wrap_model(model, {**ROOT, "ignored_modules": ["b"]})
    optimizer = torch.optim.SGD(model.parameters())
    for param in model.parameters():
        optimizer.state[param] = {"x": torch.zeros_like(param)}
    optimizer.state[model.b.c]["x"] = torch.zeros_like(model.b.c)
    answers = [message(lambda: save_checkpoint(directory, model, optimizer, step=1))]
    with torch.no_grad():
        model.b.c.fill_(dist.get_rank())
    answers.append(message(lambda: save_checkpoint(directory, model, optimizer, step=1)))
    optimizer = GroupStepAdam(model.parameters(), lr=0.1)
    model.b.c.data.zero_()
    optimizer.state[model.a] = {"x": torch.zeros_like(model.a), "y.z": torch.zeros_like(model.a)}
    optimizer.state[model.a]["y"] = {"z": torch.zeros(4)}
    answers.append(message(lambda: save_checkpoint(directory, model, optimizer, step=1)))
    return answers


def test_one_name_for_two_tensors(ranks2: RankPool, tmp_path: Path) -> None:
    fine, drifted, twice = same(ranks2.run(_clash, str(tmp_path)))
    assert fine == "no error"
    assert drifted == (
        "save_checkpoint: b.c has other values on each rank although it is not sharded. Change parameters equally on every "
        "rank."
    )
    assert twice == (
        "checkpoint: two tensors would be saved under one name: optimizer.state.a.y.z. Rename a module or an optimizer "
        "state."
    )


def _drop_gate(module: nn.Module, state: dict[str, Any], prefix: str, local: Any) -> None:
    del state[f"{prefix}weight"]


def _without_key(directory: str) -> list[str]:
    model, optimizer, _ = Job().build()
    save_checkpoint(directory, model, optimizer, step=1)
    model.gate._register_state_dict_hook(_drop_gate)
    others = torch.optim.SGD(p for n, p in model.named_parameters() if n != "gate.weight")
    return [
        message(lambda: save_checkpoint(directory, model, optimizer, step=2)),
        message(lambda: load_checkpoint(directory, model, optimizer, partial=True)),
        message(lambda: save_checkpoint(f"{directory}/others", model, others, step=2)),
    ]


def test_trained_parameters_without_a_key(ranks2: RankPool, tmp_path: Path) -> None:
    save, load, untrained = same(ranks2.run(_without_key, str(tmp_path)))
    assert (
        save
        == load
        == (
            "optimizer: gate.weight has no key in the model's state_dict(), so neither its values nor its optimizer state can "
            "be saved or loaded. Remove the hook that drops it, or do not train it."
        )
    )
    assert untrained == "no error"


def _frozen_drift(directory: str) -> str:
    model, _, _ = Job(config=(("ignored_modules", ["frozen"]),)).build()
    with torch.no_grad():
        model.frozen.bias.fill_(dist.get_rank())
    return message(lambda: save_checkpoint(directory, model, step=1))


def test_frozen_whole_parameters_that_differ_between_ranks(ranks2: RankPool, tmp_path: Path) -> None:
    assert same(ranks2.run(_frozen_drift, str(tmp_path))) == (
        "save_checkpoint: frozen.bias has other values on each rank although it is not sharded. Change parameters equally "
        "on every rank."
    )


def _two_models(directory: str) -> list[str]:
    job, wider = Job().build()[0], wrap_model(Decoder(layers=2, dim=16, vocab=34), LAYERS)
    return [
        message(lambda: save_checkpoint(directory, job, step=1)),
        message(lambda: save_checkpoint(directory, wider, step=1)),
        message(lambda: save_checkpoint(directory, job, step=1)),
        message(lambda: save_checkpoint(directory, wider, step=2)),
        message(lambda: load_checkpoint(directory, job, step=1)),
    ]


def test_another_models_checkpoint_is_not_replaced(ranks2: RankPool, tmp_path: Path) -> None:
    first, second, *rest = same(ranks2.run(_two_models, str(tmp_path)))
    assert second == (
        f"{tmp_path}/step-00000001: it holds another model, and this save of step 1 would replace it: adapter.bias is "
        "absent here and (16,) there. Use another directory for each model, or remove this checkpoint first."
    )
    assert [first, *rest] == ["no error"] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001-2", "step-00000002"]


def _moved_groups(directory: str) -> list[Any]:
    model, _, _ = Job().build()
    weights = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]

    def build(*groups: list[nn.Parameter]) -> tuple[Any, Any]:
        optimizer = torch.optim.AdamW([{"params": group, "lr": 0.1 / len(group)} for group in groups])
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    first, scheduler = build(weights, rest)
    save_checkpoint(directory, model, first, step=1, scheduler=scheduler)
    answers: list[Any] = []
    for groups in ((rest, weights), (weights, rest[:3], rest[3:]), (weights[::-1], rest)):
        optimizer, scheduler = build(*groups)
        answers.append(message(lambda: load_checkpoint(directory, model, optimizer, scheduler=scheduler)))  # noqa: B023
    optimizer, scheduler = build(rest, weights)
    rates = list(scheduler.base_lrs)
    report = load_checkpoint(directory, model, optimizer, scheduler=scheduler, partial=True).report
    return [
        *answers,
        message(lambda: load_checkpoint(directory, model, optimizer)),
        str(report),
        rates == scheduler.base_lrs,
    ]


def test_a_scheduler_and_groups_in_another_order(ranks2: RankPool, tmp_path: Path) -> None:
    swapped, split, alike, without, report, kept = same(ranks2.run(_moved_groups, str(tmp_path)))
    line = "the scheduler's rates follow the positions of param groups, but {}: the scheduler is not loaded"
    of_swapped = line.format("param group 0 holds other parameters than in the checkpoint")
    assert swapped.splitlines()[1:-1] == [f"  {of_swapped}"]
    assert split.splitlines()[1:-1] == [f"  {line.format('the optimizer has 3 param groups, the checkpoint 2')}"]
    assert (alike, without, report, kept) == ("no error", "no error", of_swapped, True)


def test_a_changed_digit_beside_the_tensors(ranks2: RankPool, saved: Path) -> None:
    state = saved / "step-00000002" / "state.json"
    before = state.read_text()
    state.write_text(before.replace('"seen": 24', '"seen": 25'))
    assert state.read_text() != before
    answer = same(ranks2.run(_load, str(saved)))
    assert answer.startswith(f"{state}: its checksum is ")
    assert answer.endswith(": it was changed after the save. Load another checkpoint.")
    state.write_text(before)
    assert same(ranks2.run(_load, str(saved))) == "no error"
