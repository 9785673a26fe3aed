"""A checkpoint is complete or absent: saves that are killed, meet a full disk, fail on one rank; saves in the background."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import resource
import shutil
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mindspeed_fsdp2 import CheckpointError
from mindspeed_fsdp2.checkpoint import (
    list_checkpoints,
    load_checkpoint,
    publish,
    save_checkpoint,
    save_checkpoint_async,
)
from tests.distributed.checkpoint_crashes import attempts, build, counted, fill, told
from tests.distributed.checkpoint_jobs import Job, contents
from tests.distributed.models import tokens_of
from tests.distributed.ranks import RankPool

pytestmark = pytest.mark.slow

LEFT_OVER = (".saving-", ".removing-")


def hidden(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(LEFT_OVER)]


def clear(directory: Path) -> None:
    """Remove what a killed save left, so that the next one goes through the same events."""
    for name in hidden(directory):
        shutil.rmtree(directory / name)


def test_killed_at_every_step_of_a_save(tmp_path: Path) -> None:
    directory, folder = tmp_path / "ckpt", tmp_path / "meeting"
    folder.mkdir()
    assert attempts(1, folder, directory, (), -1) == {0: ("saved", 0, mock.ANY)}
    newest, left = 1, []
    for at in range(100):
        # Each process loads what the killed ones before it have left, and checks every value of it.
        text, step, names = attempts(1, folder, directory, (0,), at)[0]
        assert step == newest, text
        if text == "saved":
            break
        assert text == "killed" and len(names) == at + 1
        left.append(bool(hidden(directory)))
        newest = list_checkpoints(directory)[-1].step
        clear(directory)
    # All of them left a folder that was not taken for a checkpoint, until the very last event: it was published.
    assert left == [False] + [True] * (at - 2) + [False] and newest == 2
    assert text == "saved" and at == len(names) > 20
    assert set(names) == {"mkdir", "open", "save", "fsync", "rename", "unlink"}
    assert hidden(directory) == [] and list_checkpoints(directory)[-1].step == newest + 1


def test_killed_while_cleaning(tmp_path: Path) -> None:
    directory, folder = tmp_path / "ckpt", tmp_path / "meeting"
    folder.mkdir()
    attempts(1, folder, directory, (), -1)
    attempts(1, folder, directory, (0,), 12)
    for at in (0, 1, 2):
        text, step, names = attempts(1, folder, directory, (0,), at)[0]
        assert (text, step, names) == ("killed", 1, ["rmtree", "unlink", "unlink"][: at + 1])
        assert len(hidden(directory)) == 1
    assert attempts(1, folder, directory, (), -1)[0][:2] == ("saved", 1)
    assert hidden(directory) == [] and [info.step for info in list_checkpoints(directory)] == [1, 2]


@pytest.mark.parametrize(
    ("world", "kill", "moments", "later"),
    [
        (2, (0,), (0, 2, 6, 10, 13, 16, 20, 22, 23), False),
        (2, (1,), (0, 2, 5), False),
        (2, (0, 1), (3, 5), False),
        (4, (3,), (2,), False),
        (4, (0,), (5,), False),
        (2, (1,), (2,), True),
        (2, (0,), (4, 21), True),
    ],
)
def test_one_rank_is_killed(
    tmp_path: Path, world: int, kill: tuple[int, ...], moments: tuple[int, ...], later: bool
) -> None:
    directory, folder = tmp_path / "ckpt", tmp_path / "meeting"
    folder.mkdir()
    attempts(world, folder, directory, (), -1)
    newest = 1
    for at in moments:
        answers = attempts(world, folder, directory, kill, at, later)
        assert answers.keys() == set(range(world)), f"some ranks did not end: {answers}"
        assert {answers[rank][0] for rank in kill} == {"killed"}, answers
        assert {step for _, step, _ in answers.values()} == {newest}, answers
        for rank in set(answers) - set(kill):
            assert answers[rank][0] == (
                f"save of step {newest + 1}: another rank died or left it. The checkpoints before it are untouched, and "
                "load_checkpoint finds the newest complete one: restart the job."
            )
        complete = [info.step for info in list_checkpoints(directory)]
        assert complete[-1] in (newest, newest + 1)
        newest = complete[-1]
        if at != moments[-1]:
            clear(directory)
    assert {text for text, _, _ in attempts(world, folder, directory, (), -1).values()} == {"saved"}
    assert hidden(directory) == [] and list_checkpoints(directory)[-1].step == newest + 1


def _failing(directory: str, kind: str) -> tuple[str, set[float], int, list[str]]:
    model, optimizer = build()
    fill(model, optimizer, 1)
    save_checkpoint(directory, model, optimizer, step=1)
    fill(model, optimizer, 2)
    rank, text = dist.get_rank(), "no error"
    target = directory if kind != "a file" else str(Path(directory) / "step-00000001" / "state.json")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def happens(_number: int, name: str, first: Any) -> None:
        if (
            kind == "denied"
            and name == "mkdir"
            or kind == "last moment"
            and name == "rename"
            and "saving" in str(first)
        ):
            raise PermissionError(errno.EACCES, "Permission denied", str(first))
        if kind == "one rank" and rank == 1 and name == "save":
            raise OSError(errno.EIO, "Input/output error")

    try:
        if kind == "full" and rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        with counted(happens):
            save_checkpoint(target, model, optimizer, step=2)
    except CheckpointError as error:
        text = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    left = hidden(Path(directory))
    step = load_checkpoint(directory, model, optimizer).step
    values = told(model, optimizer)
    save_checkpoint(directory, model, optimizer, step=3)
    return text, values, step, left


REASONS = {
    "full": "on rank 1 of 2: {place}: it cannot be written: ",
    "one rank": "on rank 1 of 2: {place}: it cannot be written: Input/output error. Nothing is published and earlier "
    "checkpoints are untouched. Make room or allow writing there, or pass another directory.",
    "denied": "{place}: it cannot be written: Permission denied. Nothing is published",
    "last moment": "{place}: it cannot be written: Permission denied. Nothing is published",
    "a file": "{place}: it cannot be written: ",
}


@pytest.mark.parametrize("kind", REASONS)
def test_a_save_that_cannot_be_written(ranks2: RankPool, tmp_path: Path, kind: str) -> None:
    (text, values, step, left), other = ranks2.run(_failing, str(tmp_path), kind)
    assert (text, values, step, left) == other
    start, _, rest = REASONS[kind].partition("{place}")
    assert text.startswith(start) and rest in text, text
    assert (values, step, left) == ({1.0}, 1, [])
    assert [info.step for info in list_checkpoints(tmp_path)] == [1, 3]


def _reports(directory: str) -> list[list[str]]:
    lines: list[str] = []
    live: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage().replace(directory, "DIR"))

    model, optimizer = build()
    logger, handler = logging.getLogger("mindspeed_fsdp2"), Keep(logging.WARNING)
    logger.addHandler(handler)
    try:
        save_checkpoint(directory, model, optimizer, step=1)
        if dist.get_rank() == 0:
            folder = publish.begin(Path(directory), 2)  # as if this process were still writing it
            (folder / "x").touch()
            for name in (".saving-step-00000003-dead", ".removing-step-00000000-dead", ".saving-step-00000003-reborn"):
                (Path(directory) / name).mkdir()
            # Another process that had this one's number, as after the restart of a container.
            writer = {**json.loads((folder / "writer.json").read_text()), "started": "1"}
            (Path(directory) / name / "writer.json").write_text(json.dumps(writer))
            live.append(folder.name)
        load_checkpoint(directory, model, optimizer)
        loading, lines[:] = list(lines), []
        dist.barrier()
        save_checkpoint(directory, model, optimizer, step=4)
    finally:
        logger.removeHandler(handler)
    return [[text.replace(live[0], "LIVE") if live else text for text in texts] for texts in (loading, lines)]


def test_unfinished_saves_are_reported_and_cleaned(ranks2: RankPool, tmp_path: Path) -> None:
    (loading, saving), quiet = ranks2.run(_reports, str(tmp_path))
    assert quiet == [[], []]
    assert loading == [
        "DIR: LIVE is an unfinished save; it is not loaded.",
        "DIR: .saving-step-00000003-dead is an unfinished save; it is not loaded.",
        "DIR: .saving-step-00000003-reborn is an unfinished save; it is not loaded.",
    ]
    assert saving == [
        "DIR/.removing-step-00000000-dead: removed, an interrupted removal left it.",
        "DIR/LIVE: a process of this machine is still writing it; it is left alone.",
        "DIR/.saving-step-00000003-dead: removed, an interrupted save left it.",
        "DIR/.saving-step-00000003-reborn: removed, an interrupted save left it.",
    ]
    assert len(hidden(tmp_path)) == 1


def _background(directory: str) -> dict[str, Any]:
    rank = dist.get_rank()
    model, optimizer, scheduler = Job("adamw", (("ignored_modules", ["adapter"]),)).build()
    gate, seen = threading.Event(), threading.Event()
    original = torch.save

    def held(*args: Any, **kwargs: Any) -> Any:
        seen.set()
        if not gate.wait(60):
            raise TimeoutError("nobody opened the gate")
        return original(*args, **kwargs)

    def step(number: int) -> None:
        model(tokens_of(number, rank)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    step(0)
    before = contents(model, optimizer)
    with mock.patch.object(torch, "save", held):
        first = save_checkpoint_async(directory, model, optimizer, step=1, scheduler=scheduler, extra={"n": 1})
        seen.wait(60)
        for number in range(1, 4):  # training, with its collectives, goes on while the save is held up
            step(number)
        facts: dict[str, Any] = {"running": not first.done(), "published": len(list_checkpoints(directory))}
        gate.set()
        second = save_checkpoint_async(directory, model, optimizer, step=4, scheduler=scheduler)
        facts["waited"] = first.done() and list_checkpoints(directory)[0].step == 1
        facts["paths"] = [first.wait().name, second.wait().name]
    facts["order"] = 0 < first.blocking_seconds < first.total_seconds and second.total_seconds > 0
    after = contents(model, optimizer)
    facts["moved"] = after.differences(before) != []
    for wanted, number in ((before, 1), (after, 4)):
        other, other_optimizer, _ = Job("adamw", (("ignored_modules", ["adapter"]),)).build(seed=3)
        load_checkpoint(directory, other, other_optimizer, step=number)
        facts[f"equal {number}"] = contents(other, other_optimizer).differences(wanted)
    return facts


def test_a_save_in_the_background(ranks2: RankPool, tmp_path: Path) -> None:
    for facts in ranks2.run(_background, str(tmp_path)):
        assert facts == {
            "running": True,
            "published": 0,
            "waited": True,
            "paths": ["step-00000001", "step-00000004"],
            "order": True,
            "moved": True,
            "equal 1": [],
            "equal 4": [],
        }


def _background_errors(directory: str) -> list[str]:
    model, optimizer = build()
    errors: list[str] = []

    def note(act: Any) -> None:
        try:
            act()
            errors.append("no error")
        except CheckpointError as error:
            errors.append(str(error).replace(directory, "DIR"))

    def broken(number: int, name: str, _first: Any) -> None:
        if dist.get_rank() == 1 and name == "save":
            raise OSError(errno.ENOSPC, "No space left on device")

    def fail() -> Any:
        with counted(broken):
            pending = save_checkpoint_async(directory, model, optimizer, step=1)
            with contextlib.suppress(CheckpointError):  # the patch must outlive the thread
                pending._future.result()
            return pending

    pending = fail()
    note(pending.wait)
    note(pending.wait)
    note(lambda: save_checkpoint(directory, model, optimizer, step=2))  # it was told: this one is not disturbed
    pending = fail()
    if dist.get_rank() == 0:  # told to one rank only
        note(pending.wait)
    else:
        errors.append("not asked")
    note(lambda: save_checkpoint(directory, model, optimizer, step=3))
    note(lambda: save_checkpoint(directory, model, optimizer, step=4))
    note(lambda: save_checkpoint_async(directory, model, optimizer, step=5, extra=object()))
    return errors


def test_errors_of_saves_in_the_background(ranks2: RankPool, tmp_path: Path) -> None:
    zero, one = ranks2.run(_background_errors, str(tmp_path))
    text = zero[0]
    assert text.startswith("on rank 1 of 2: DIR/.saving-step-00000001-")
    assert ": it cannot be written: No space left on device. Nothing is published" in text
    assert zero[:3] == one[:3] == [text, text, "no error"]
    assert "No space left" in zero[3] and one[3] == "not asked"
    assert "No space left" in zero[4] and zero[4] == one[4]
    refused = "extra: a object cannot be saved without pickle. Turn it into numbers, strings, lists, dicts or tensors."
    assert zero[5:] == one[5:] == ["no error", refused]
    assert [info.step for info in list_checkpoints(tmp_path)] == [2, 4]
