"""The preloaded process: reads one job per line of JSON, forks its ranks, and answers with one line when they ended."""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import importlib.util
import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
import traceback
import types
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

GRACE_S = 3.0  # after one rank failed, how long the others get to fail as well
DUMP_S = 1.0  # for writing the stack of a rank that hangs
RENDEZVOUS_S = 60.0
POLL_S = 0.005
PRELOADED = (
    "megatron.training",
    "megatron.training.training",
    "megatron.training.checkpointing",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.dist_checkpointing",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "mindspeed_fsdp2.wrap",
    "mindspeed_fsdp2.config",
    "mindspeed_fsdp2.megatron.cpu",
    "tests.megatron.jobs_probes",
)


def main() -> None:
    # What the imports print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    for module in PRELOADED:
        importlib.import_module(module)
    _remember_docstrings()
    _share_results_by_fork()
    gc.collect()
    gc.freeze()
    _answer(answers, {"ready": True})
    for line in sys.stdin.buffer:
        _answer(answers, _run(json.loads(line)))


def _answer(answers: BinaryIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message).encode() + b"\n")


def _remember_docstrings() -> None:
    """Parse Megatron's sources once: its argument parser reads the docstrings of dataclasses anew in every job."""
    from megatron.training import arguments

    if importlib.util.find_spec("megatron.training.argument_utils"):  # Megatrons older than 0.17 have none
        factory = importlib.import_module("megatron.training.argument_utils").ArgumentGroupFactory
        factory._get_field_docstrings = functools.cache(factory._get_field_docstrings)
        argv, sys.argv = sys.argv, sys.argv[:1]
        arguments.parse_args(ignore_unknown_args=True)
        sys.argv = argv


def _share_results_by_fork() -> None:
    """Let a checkpoint writer's queue server be forked: spawned, it would import the script and with it Megatron."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    fork = multiprocessing.get_context("fork")
    filesystem_async.get_write_results_queue = functools.cache(lambda mp_mode="spawn": fork.Manager().Queue())


def _run(job: dict[str, Any]) -> dict[str, Any]:
    start = time.monotonic()
    pids = [_fork(job, rank) for rank in range(job["world_size"])]
    codes: dict[int, int] = {}
    deadline, timed_out = start + job["timeout"], False
    while len(codes) < len(pids):
        for rank, pid in enumerate(pids):
            if rank not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    if codes[rank]:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        if len(codes) < len(pids) and time.monotonic() > deadline:
            timed_out = not any(codes.values())
            _end([pid for rank, pid in enumerate(pids) if rank not in codes])
            deadline = float("inf")
        time.sleep(POLL_S)
    for pid in pids:
        _signal_group(pid, signal.SIGKILL)  # data loader workers
    return {
        "exitcodes": [codes[rank] for rank in range(len(pids))],
        "timed_out": timed_out,
        "seconds": time.monotonic() - start,
    }


def _end(pids: list[int]) -> None:
    """Let each rank write the stacks of its threads, then kill it."""
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(DUMP_S)
    for pid in pids:
        _signal_group(pid, signal.SIGKILL)


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass


def _fork(job: dict[str, Any], rank: int) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        code = _rank(job, rank)
    except BaseException:  # noqa: BLE001 - this is the end of the forked process; it must not raise into the zygote
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # never back into the zygote's loop, no exit handlers of the zygote


def _rank(job: dict[str, Any], rank: int) -> int:
    folder = Path(job["folder"])
    for fd, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / f"rank{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["world_size"], "LOCAL_WORLD_SIZE": job["world_size"]}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", **job["env"]})
    os.chdir(folder)
    record: dict[str, Any] = {"extra": {}}
    try:
        return _script(job, record)
    finally:
        # Not pickle: Megatron replaces how tensors are unpickled by a function of its own.
        torch.save(record, folder / f"rank{rank}.pt")


def _script(job: dict[str, Any], record: dict[str, Any]) -> int:
    """Run the script as ``python -m mindspeed_fsdp2.run`` (or ``python``, without the plugin) does."""
    from tests.megatron.jobs_probes import install_probes

    _meet_without_port(Path(job["folder"]))
    sys.argv = [job["script"], *job["argv"]]
    sys.path[0] = str(Path(job["script"]).parent)
    try:
        if job["plugin"]:
            importlib.import_module("mindspeed_fsdp2.megatron_adaptor")
        else:
            from mindspeed_fsdp2.megatron.cpu import enable_cpu

            sys.modules["mindspeed_fsdp2.megatron_adaptor"] = types.ModuleType("mindspeed_fsdp2.megatron_adaptor")
            enable_cpu()
        install_probes(record)
        if job["hook"]:
            module, _, function = job["hook"].partition(":")
            getattr(importlib.import_module(module), function)(record["extra"])
        runpy.run_path(job["script"], run_name="__main__")
        if dist.is_initialized():
            dist.barrier()  # rank 0 holds the store
    except SystemExit as end:
        if isinstance(end.code, int) or end.code is None:
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:  # noqa: BLE001 - reported as Python itself would, by the hook the adaptor may have set
        kind, error, trace = sys.exc_info()
        assert kind is not None and error is not None
        sys.excepthook(kind, error, trace)
        return 1
    return 0


def _meet_without_port(folder: Path) -> None:
    """Let ``init_process_group`` meet over a port that the system picks and rank 0 writes down in ``folder``."""
    original = dist.init_process_group
    note = folder / "port"

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if kwargs.get("store") is None and kwargs.get("init_method") is None:
            rank = int(os.environ["RANK"])
            if rank == 0:
                store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                unfinished = note.with_suffix(".unfinished")
                unfinished.write_text(str(store.port))
                unfinished.rename(note)
            else:
                deadline = time.monotonic() + RENDEZVOUS_S
                while not note.exists():
                    if time.monotonic() > deadline:
                        raise TimeoutError("rank 0 opened no store")
                    time.sleep(POLL_S)
                store = dist.TCPStore("127.0.0.1", int(note.read_text()), is_master=False)
            kwargs.update(store=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
        original(*args, **kwargs)

    dist.init_process_group = init_process_group


if __name__ == "__main__":
    main()
