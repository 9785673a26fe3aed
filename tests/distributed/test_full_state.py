"""Whole weights that one rank reads reach the shards of all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mindspeed_fsdp2 import CheckpointError, wrap_model
from mindspeed_fsdp2.full_state import load_full_state_dict
from mindspeed_fsdp2.materialize import meta_init
from tests.distributed.metamodels import Net, different, peak_bytes, tensors
from tests.distributed.ranks import RankPool

CONFIG: dict[str, Any] = {"sharding_size": "auto", "sub_modules_to_wrap": ["embedding", "blocks.{*}"]}


def source(**options: Any) -> nn.Module:
    torch.manual_seed(21)
    return Net(**options)


def write_safetensors(path: Path, values: dict[str, torch.Tensor], odd: bool = False) -> None:
    """Write the format by its description: length of the header, header, data."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.bool: "BOOL", torch.int64: "I64"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for key, value in values.items():
        raw = bytes(value.contiguous().flatten().view(torch.uint8).numpy()) if value.numel() else b""
        offsets = [len(data), len(data) + len(raw)]
        header[key] = {"dtype": names[value.dtype], "shape": list(value.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * ((len(text) + odd) % 2)  # then nothing lies at a multiple of its size
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def load(kind: str, folder: str, config: dict[str, Any], meta: bool) -> tuple[list[str], Any]:
    expected = source(tied=True)
    values = expected.state_dict()
    path = Path(folder, "weights.safetensors" if "safetensors" in kind else "weights.pt")
    given: Any = values
    if kind == "half":
        given = {key: value.bfloat16() if value.is_floating_point() else value for key, value in values.items()}
        for tensor in (*expected.parameters(), *expected.buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.bfloat16().float()
        expected.rotary.inv_freq = source(tied=True).rotary.inv_freq  # type: ignore[union-attr]
    elif kind == "one name":
        given = {key: value for key, value in values.items() if key != "embedding.weight"}
    elif kind != "mapping":
        given = path
    if dist.get_rank():
        given = None
    elif kind == "torch":
        torch.save(values, path)
    elif kind == "index.safetensors":
        keys = list(values)
        files = {"a.safetensors": keys[:5], "b.safetensors": keys[5:]}
        for name, names in files.items():
            write_safetensors(Path(folder, name), {key: values[key] for key in names}, odd=name[0] == "a")
        given = Path(folder, "model.safetensors.index.json")
        given.write_text(json.dumps({"weight_map": {key: name for name, names in files.items() for key in names}}))
    elif kind == "safetensors":
        write_safetensors(path, values)
    torch.manual_seed(1)
    if meta:
        with meta_init():
            model: nn.Module = Net(tied=True)
    else:
        model = Net(tied=True)
    wrap_model(model, config)
    report = load_full_state_dict(model, given)
    found = tensors(model)
    return different(tensors(expected), found), tuple(report)


@pytest.mark.parametrize("kind", ["mapping", "half", "one name", "torch", "safetensors", "index.safetensors"])
def test_every_rank_gets_its_part(ranks2: RankPool, kind: str, tmp_path: Path) -> None:
    assert ranks2.run(load, kind, os.fspath(tmp_path), CONFIG, kind == "mapping") == [([], ((), ()))] * 2


@pytest.mark.parametrize("change", [{"sharding_size": 2}, {"ignored_modules": ["blocks.0"], "sub_modules_to_wrap": []}])
def test_replicas_and_whole_parameters(ranks4: RankPool, change: dict[str, Any], tmp_path: Path) -> None:
    assert ranks4.run(load, "mapping", os.fspath(tmp_path), CONFIG | change, True) == [([], ((), ()))] * 4


def fault(kind: str, folder: str) -> str:
    values: Any = source().state_dict()
    if kind == "keys":
        values["new.weight"] = values.pop("head.weight")
        values["norm.bias"] = values["norm.bias"][:3]
    elif kind == "partial":
        del values["head.weight"]
    elif kind == "nested":
        values = {"model": values}
    elif kind == "kinds":
        values |= {"norm.bias": values["norm.bias"].to(torch.int8), "head.weight": values["head.weight"].cfloat()}
    elif kind in LAYOUTS:
        values |= {"norm.bias": LAYOUTS[kind](values["norm.bias"])}
    elif kind == "nothing":
        values = None
    elif kind in ("cut", "pickle", "absent"):
        values = Path(folder, "w.safetensors" if kind == "cut" else "w.pt")
        if kind == "cut" and not dist.get_rank():
            write_safetensors(values, {"a": torch.ones(4)})
            values.write_bytes(values.read_bytes()[:-4])
        if kind == "pickle" and not dist.get_rank():
            torch.save({"a": nn.Linear(1, 1)}, values)
    model = wrap_model(Net(), CONFIG)
    before = tensors(model)
    try:
        load_full_state_dict(model, values if not dist.get_rank() else None)
    except CheckpointError as error:
        assert different(before, tensors(model)) == []
        return str(error).replace(folder, "DIR")
    return "nothing"


LAYOUTS = {
    "sparse": lambda value: value.to_sparse(),
    "meta": lambda value: value.to("meta"),
}
WHOLE = (
    "load_full_state_dict: norm.bias are no whole dense tensors (sharded, sparse, quantized or on the meta device). Pass "
    "whole values, as the state_dict() of an unwrapped model has them."
)
ON = "on rank 0 of 2: "
FAULTS = {
    "keys": (
        "load_full_state_dict: the values do not fit the model:\n  other shape: norm.bias is (24,) here and (3,) there\n"
        "  missing: head.weight\n  unknown here: new.weight\nBuild the same model."
    ),
    "partial": (
        "load_full_state_dict: the values do not fit the model:\n  missing: head.weight\nBuild the same model. "
        "strict=False loads what fits."
    ),
    "kinds": (
        "load_full_state_dict: the values do not fit the model:\n  other dtype: norm.bias is float32 here and int8 there, "
        "head.weight is float32 here and complex64 there\nBuild the same model."
    ),
    "sparse": WHOLE,
    "meta": WHOLE,
    "nested": ("load_full_state_dict: model hold no tensors. Pass the state dict itself, not what it is part of."),
    "nothing": ("load_full_state_dict: no source on the first data-parallel rank. Pass a mapping or a path there."),
    "cut": "DIR/w.safetensors: it cannot be read: ValueError: 'a' lies beyond the end of the file",
    "absent": "DIR/w.pt: it cannot be read: FileNotFoundError: [Errno 2] No such file or directory: 'DIR/w.pt'",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_every_rank_raises_alike_and_nothing_is_loaded(ranks2: RankPool, kind: str, tmp_path: Path) -> None:
    assert ranks2.run(fault, kind, os.fspath(tmp_path)) == [ON + FAULTS[kind]] * 2


def test_no_code_of_a_file_is_run(ranks2: RankPool, tmp_path: Path) -> None:
    answers = ranks2.run(fault, "pickle", os.fspath(tmp_path))
    assert answers[0] == answers[1]
    assert answers[0].startswith(
        "on rank 0 of 2: DIR/w.pt: it cannot be read: UnpicklingError: Weights only load failed"
    )


def partial() -> tuple[Any, list[str]]:
    values = source().state_dict()
    values["new.weight"] = values.pop("head.weight")
    model = wrap_model(Net(), CONFIG)
    before = tensors(model)
    report = load_full_state_dict(model, values if not dist.get_rank() else None, strict=False)
    changed = different(before, tensors(model))
    return tuple(report), [name for name in before if name.startswith("head")] + [str("head.weight" in changed)]


def test_partial_loads_report(ranks2: RankPool) -> None:
    assert ranks2.run(partial) == [((("head.weight",), ("new.weight",)), ["head.weight", "False"])] * 2


def peak(rank: int) -> tuple[int, int, int]:
    values = source(blocks=10, width=160).state_dict() if dist.get_rank() == rank else None
    with meta_init():
        model = Net(blocks=10, width=160)
    wrap_model(model, CONFIG)
    shards = sum(p.to_local().nbytes for p in model.parameters())  # type: ignore[attr-defined]
    largest = max(p.numel() * p.itemsize for p in model.parameters())
    most, _, _ = peak_bytes(lambda: load_full_state_dict(model, values))
    return most, largest, shards


def test_one_whole_tensor_at_a_time(ranks2: RankPool) -> None:
    for most, largest, shards in ranks2.run(peak, 0):
        assert largest <= most <= 1.1 * largest < 0.3 * shards, (most, largest, shards)


class Lazy(dict[str, torch.Tensor]):
    """A mapping whose reading fails at one key, as a file on a lost disk."""

    def __getitem__(self, key: str) -> torch.Tensor:
        if key == "norm.bias":
            raise OSError("the disk is gone")
        return super().__getitem__(key)


def lazy_fault() -> str:
    model = wrap_model(Net(), CONFIG)
    try:
        load_full_state_dict(model, Lazy(source().state_dict()) if not dist.get_rank() else None)
    except CheckpointError as error:
        return str(error)
    return "nothing"


def test_a_source_that_fails_late_ends_every_rank(ranks2: RankPool) -> None:
    first, second = ranks2.run(lazy_fault)
    text = "load_full_state_dict: norm.bias could not be read on the first data-parallel rank"
    rest = ". What comes before it is loaded already: load again from a good source before training."
    assert first == f"{text} (OSError: the disk is gone){rest}"
    assert second == text + rest


class TiedPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4, bias=False)])
        self.embedding = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embedding.weight


def untied() -> tuple[str, float]:
    model = wrap_model(TiedPair(), CONFIG)
    values = {
        "blocks.0.weight": torch.ones(4, 4),
        "embedding.weight": torch.ones(4, 4),
        "head.weight": torch.ones(4, 4),
    }
    load_full_state_dict(model, values)
    total = sum(full.sum().item() for full in (p.full_tensor() for p in model.parameters()))
    try:
        load_full_state_dict(model, {**values, "head.weight": torch.zeros(4, 4)})
    except CheckpointError as error:
        return str(error), total
    return "nothing", total


def test_two_values_for_one_tied_tensor(ranks2: RankPool) -> None:
    text = (
        "load_full_state_dict: the values do not fit the model:\n  one tensor here, two there: head.weight and "
        "embedding.weight\nBuild the same model."
    )
    assert ranks2.run(untied) == [(ON + text, 32.0)] * 2


def from_index(folder: str) -> float:
    model = wrap_model(nn.Sequential(nn.Linear(2, 2, bias=False)), {"sharding_size": "auto", "sub_modules_to_wrap": []})
    load_full_state_dict(model, Path(folder, "m.safetensors.index.json"))
    return next(model.parameters()).full_tensor().sum().item()


def test_the_index_says_which_file_holds_a_key(ranks2: RankPool, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"0.weight": torch.ones(2, 2)})
    write_safetensors(tmp_path / "b.safetensors", {"0.weight": torch.full((2, 2), 9.0), "other": torch.ones(1)})
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": {"0.weight": "a.safetensors"}}))
    assert ranks2.run(from_index, os.fspath(tmp_path)) == [4.0] * 2
