"""The parts of saving that need no ranks: folders, the tracker file, what lies beside tensors, random states."""

from __future__ import annotations

import logging
import os
import pickle
import random
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.training", reason="needs a megatron-core wheel >= 0.17 or a Megatron-LM checkout")

from mindspeed_fsdp2.errors import CheckpointError  # noqa: E402
from mindspeed_fsdp2.megatron.saving import folders, model_values, plain_state, random_states, tracker  # noqa: E402


def make(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    return folder


def published(directory: Path, name: str = "iter_0000004") -> Path:
    folder = folders.begin_iteration(directory / name)
    (folder / "shard").write_text("values")
    return folders.publish_iteration(folder, directory / name, folders.TORCH_DCP)


@pytest.mark.parametrize(
    ("names", "kind", "fault"),
    [
        ((), "", "it is empty: a save was interrupted"),
        (("__0_0.distcp",), "", "a save of it was never finished"),
        (("__0_0.distcp", "metadata.json"), "torch_dist", "a save of it was never finished"),
        (("__0_0.distcp", "metadata.json", "common.pt", ".metadata"), "torch_dist", ""),
        (("mp_rank_00/other",), "torch", "a save of it was never finished"),
        (("mp_rank_00/model_optim_rng.pt",), "torch", ""),
        (("__0_0.distcp", ".metadata"), "torch_dcp without mindspeed_fsdp2", ""),
        (
            ("__0_0.distcp", ".metadata", "checkpoint.json"),
            "torch_dcp without mindspeed_fsdp2",
            "its checkpoint.json cannot be read",
        ),
    ],
)
def test_folders_of_others(tmp_path: Path, names: tuple[str, ...], kind: str, fault: str) -> None:
    folder = make(tmp_path / "iter_0000004", *names)
    assert (folders.kind_of(folder), folders.fault_of(folder)) == (kind, fault)


def test_published_folder(tmp_path: Path) -> None:
    folder = published(tmp_path)
    assert (folders.kind_of(folder), folders.fault_of(folder)) == ("torch_dcp", "")
    assert os.listdir(tmp_path) == ["iter_0000004"]
    (folder / "shard").write_text("value")
    assert folders.fault_of(folder) == "its shard has another size than was written"
    (folder / "shard").unlink()
    assert folders.fault_of(folder) == "its shard is missing"
    assert folders.fault_of(tmp_path / "iter_0000008") == "it does not exist"


def test_replacing_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path / "iter_0000004", "half")
    published(tmp_path)
    assert caplog.messages == [f"{tmp_path}/iter_0000004: replaced, a save of it was never finished."]
    published(tmp_path)
    assert os.listdir(tmp_path) == ["iter_0000004"]
    assert not folders.fault_of(tmp_path / "iter_0000004")


@pytest.mark.parametrize("again", [folders.recover, lambda target: folders.prepare(target.parent)])
def test_a_sealed_folder_gets_its_name(tmp_path: Path, again: Callable[[Path], object]) -> None:
    target = published(tmp_path)
    hidden = target.rename(tmp_path / ".saving-iter_0000004-0000")
    unfinished = make(tmp_path / ".saving-iter_0000006-0000", "shard")
    again(target)
    assert not folders.fault_of(target) and not hidden.exists()
    assert unfinished.exists() is (again is folders.recover)
    assert folders.unfinished_in(tmp_path) == (
        [".saving-iter_0000006-0000 is an unfinished save"] if again is folders.recover else []
    )


def test_preparing_a_directory(tmp_path: Path) -> None:
    make(tmp_path / "iter_0000002")
    make(tmp_path / "iter_0000004", "half")
    make(tmp_path / "wandb")
    folders.prepare(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["iter_0000004", "wandb"]
    with pytest.raises(OSError):
        folders.prepare(tmp_path / "iter_0000004" / "half" / "deeper")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(tracker, "get_args", lambda: Namespace(use_torch_fsdp2=True))
    return tracker.wrap_open(open)


def test_the_tracker_is_replaced_in_one_step(tmp_path: Path, opened: Callable[..., Any]) -> None:
    path = tmp_path / tracker.TRACKER
    path.write_text("4")
    before = path.stat().st_ino
    with opened(path, "w") as file:
        file.write("8")
        assert path.read_text() == "4"
    assert path.read_text() == "8" and path.stat().st_ino != before
    with pytest.raises(KeyError), opened(str(path), "w") as file:
        file.write("12")
        raise KeyError
    with opened(path, "r") as file:
        assert file.read() == "8"
    assert os.listdir(tmp_path) == [tracker.TRACKER]


def test_a_staged_tracker_needs_no_room(
    tmp_path: Path, opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker.stage(tmp_path, "8")
    monkeypatch.setattr(tracker, "stage", None)  # would fail
    with opened(tmp_path / tracker.TRACKER, "w") as file:
        file.write("8")
    assert (tmp_path / tracker.TRACKER).read_text() == "8"


def test_other_files_and_other_runs_are_left_to_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Storage:
        os = os

        def open(self, file: Any, mode: str = "r") -> str:
            calls.append((file, mode))
            return "Megatron's"

    storage = tracker.wrap_storage(Storage())
    monkeypatch.setattr(tracker, "get_args", lambda: Namespace(use_torch_fsdp2=False))
    assert storage.open(str(tmp_path / tracker.TRACKER), "w") == "Megatron's"
    monkeypatch.setattr(tracker, "get_args", lambda: Namespace(use_torch_fsdp2=True))
    assert storage.open("progress.txt", "w") == storage.open(tracker.TRACKER) == "Megatron's"
    assert storage.os is os and len(calls) == 3


class Strange:
    pass


def test_state_beside_tensors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = Namespace(lr=1e-3, dtype=torch.bfloat16, sizes=[1, None], strange=Strange(), call=print)
    content = plain_state.pack_state(
        {"args": args, "iteration": 4, "opt_param_scheduler": {"num_steps": 8}, "odd": Strange()}
    )
    (tmp_path / plain_state.FILE).write_bytes(content)
    assert caplog.messages == [
        "the checkpoint leaves out what cannot be read back safely: args.strange, args.call, odd"
    ]
    assert plain_state.read_state(tmp_path) == {
        "args": Namespace(lr=1e-3, dtype=torch.bfloat16, sizes=[1, None]),
        "iteration": 4,
        "opt_param_scheduler": {"num_steps": 8},
    }


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["EVIL"],)


@pytest.mark.parametrize("pack", [plain_state.pack, lambda value: pickle.dumps(value, protocol=2)])
def test_nothing_in_it_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[[object], bytes]) -> None:
    monkeypatch.setenv("EVIL", str(tmp_path / "done"))
    (tmp_path / plain_state.FILE).write_bytes(pack({"iteration": Evil()}))
    with pytest.raises(CheckpointError, match="megatron.pt: it cannot be read: "):
        plain_state.read_state(tmp_path)
    assert not (tmp_path / "done").exists()


def states() -> dict[str, Any]:
    tracker_states = {"default": torch.get_rng_state()}
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": tracker_states,
    }


def test_random_states_come_back() -> None:
    saved = states()
    restored = random_states.from_tensor(random_states.to_tensor(saved), "here")
    drawn = random.random(), np.random.rand(), torch.rand(3).tolist()
    random.setstate(restored["random_rng_state"])
    np.random.set_state(restored["np_rng_state"])
    torch.set_rng_state(restored["rng_tracker_states"]["default"])
    assert (random.random(), np.random.rand(), torch.rand(3).tolist()) == drawn
    assert random_states.digests(restored) == random_states.digests(saved)
    later = random_states.digests(states())
    assert [name for name, digest in random_states.digests(saved).items() if later[name] == digest] == []


def test_own_part_of_gathered_states() -> None:
    assert random_states.own_state([{"a": 0}], 3) == {"a": 0}
    assert random_states.own_state([{"a": 0}, {"a": 1}], 1) == {"a": 1}


def test_values_of_a_plain_module(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    module = torch.nn.Linear(2, 3)
    values = {"weight": torch.ones(3, 2), "bias": torch.zeros(3)}
    model_values.load_values(module, values, True, True)
    assert torch.equal(module.weight, torch.ones(3, 2)) and caplog.messages == []
    with pytest.raises(CheckpointError) as caught:
        model_values.load_values(module, {"weight": torch.zeros(2, 2), "more": torch.zeros(1)}, True, True)
    assert str(caught.value).splitlines() == [
        "load_state_dict: the values do not fit the model:",
        "  other shape: weight is (3, 2) here and (2, 2) in the checkpoint",
        "  missing in the checkpoint: bias",
        "  only in the checkpoint: more",
        "Build the model with the flags that they were saved with.",
    ]
    assert torch.equal(module.weight, torch.ones(3, 2))
    model_values.load_values(module, {"weight": torch.full((3, 2), 2.0), "more": torch.zeros(1)}, False, True)
    assert torch.equal(module.weight, torch.full((3, 2), 2.0))
    assert caplog.messages == ["load_state_dict: kept as they were: bias; not used: more"]


def test_rounding_to_bf16() -> None:
    module = torch.nn.Linear(2, 3)
    expected = module.weight.detach().bfloat16().float()
    assert model_values.round_to_bf16(module) == 2
    assert torch.equal(module.weight, expected)
