"""Seconds and peak memory of converting between checkpoints and Hugging Face weights.

    python benchmarks/hf_checkpoint.py [MEGABYTES] [PROCESSES] [DIRECTORY]

Makes Hugging Face weights of about MEGABYTES (default 2000, bf16, tensors of 34 MB, files of 500 MB) and runs each
command in processes of its own: alone, and shared by PROCESSES (2). Prints wall seconds and the most resident memory
that the command added to a process, mapped files included; then the same of PyTorch's HuggingFaceStorageWriter, which
is given the whole state dict. A plain synced copy of the bytes comes first.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import nn

from mindspeed_fsdp2 import export_hf, wrap_model
from mindspeed_fsdp2.cli import main as command
from mindspeed_fsdp2.full_files import open_file

SHAPE = (4096, 4096)
PER_FILE = 14


def make(folder: Path, megabytes: int) -> int:
    """Write the weights file by file; return their bytes."""
    count = max(1, round(megabytes * 10**6 / (2 * SHAPE[0] * SHAPE[1])))
    names = [f"layers.{number}.weight" for number in range(count)]
    groups = [names[start : start + PER_FILE] for start in range(0, count, PER_FILE)]
    places = {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file({name: torch.randn(SHAPE).bfloat16() for name in group}, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(group, file))
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {str(places).replace(chr(39), chr(34))}}}')
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def resident(kind: str) -> int:
    """Return the process's memory now (VmRSS), or the most since the last reset (VmHWM), in bytes; Linux only."""
    # Not ru_maxrss: a new process begins with that of the one that started it.
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{kind}:")[1].split()[0]) * 1024


def measured(rank: int, world: int, place: str, work: Callable[..., Any], arguments: tuple[Any, ...], out: Any) -> None:
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=world)
    import mindspeed_fsdp2.checkpoint.hf_convert
    import mindspeed_fsdp2.checkpoint.hf_import
    import mindspeed_fsdp2.checkpoint.hf_verify  # noqa: F401 - not counted

    action = work(*arguments)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, start = resident("VmRSS"), time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        action()
    seconds = time.perf_counter() - start
    out.put((seconds, resident("VmHWM") - before))
    if world > 1:
        dist.destroy_process_group()


def run(name: str, size: int, world: int, work: Callable[..., Any], *arguments: Any) -> None:
    context = mp.get_context("spawn")
    out = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as place:
        group = [
            context.Process(target=measured, args=(rank, world, f"{place}/rendezvous", work, arguments, out))
            for rank in range(world)
        ]
        for process in group:
            process.start()
        for process in group:
            process.join()
            if process.exitcode:
                raise SystemExit(f"{name}: a process ended with {process.exitcode}")
    found = [out.get() for _ in group]
    seconds, memory = max(each[0] for each in found), max(each[1] for each in found)
    share = f"{world} process{'es' * (world > 1)}"
    print(f"| {name} | {share} | {seconds:.1f} | {size / seconds / 1e9:.2f} | {memory / 1e6:,.0f} |", flush=True)


def tool(*arguments: str) -> Callable[[], None]:
    def action() -> None:
        if command(["checkpoint", *arguments]):
            raise SystemExit(f"{arguments} failed")

    return action


def copy(source: str, target: str) -> Callable[[], None]:
    def action() -> None:
        shutil.copytree(source, target)
        for path in Path(target).iterdir():
            with path.open("rb+") as stream:
                os.fsync(stream.fileno())

    return action


def wrapped(layers: int, target: str) -> Callable[[], Any]:
    parts = [nn.Linear(*SHAPE, bias=False, dtype=torch.bfloat16, device="meta") for _ in range(layers)]
    model = nn.Sequential(*parts).to_empty(device="cpu")
    wrap_model(model, {"sharding_size": "auto", "sub_modules_to_wrap": ["{*}"]})
    return lambda: export_hf(model, target, max_shard_size="500MB")


def torch_writer(source: str, target: str) -> Callable[[], None]:
    def action() -> None:
        state = {key: value.clone() for key, value in open_file(source).items()}
        files = {key: 1 + number // PER_FILE for number, key in enumerate(state)}
        writer = dcp.HuggingFaceStorageWriter(target, fqn_to_index_mapping=files)
        dcp.save(state, storage_writer=writer)

    return action


def main() -> None:
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    world = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    with tempfile.TemporaryDirectory(dir=sys.argv[3] if len(sys.argv) > 3 else None) as folder:
        hf = Path(folder, "hf")
        hf.mkdir()
        size = make(hf, megabytes)
        print(f"{size / 1e9:.2f} GB, PyTorch {torch.__version__}, load average {os.getloadavg()[0]:.0f}\n")
        print("| | by | seconds | GB/s | MB of memory |\n|---|---|---|---|---|")
        run("copy and sync", size, 1, copy, str(hf), f"{folder}/copy")
        shutil.rmtree(f"{folder}/copy")
        for count in dict.fromkeys((1, world)):
            run("import", size, count, tool, "import", str(hf), f"{folder}/ckpt{count}")
            run("export", size, count, tool, "export", f"{folder}/ckpt{count}", f"{folder}/out{count}", *SHARDS)
            run("verify, checkpoint", size, count, tool, "verify", f"{folder}/ckpt{count}")
            run("verify, weights", size, count, tool, "verify", f"{folder}/out{count}")
            shutil.rmtree(f"{folder}/ckpt{count}")
            shutil.rmtree(f"{folder}/out{count}")
        layers = round(size / (2 * SHAPE[0] * SHAPE[1]))
        run("`export_hf` of a wrapped model", size, max(2, world), wrapped, layers, f"{folder}/model")
        shutil.rmtree(f"{folder}/model")
        if hasattr(dcp, "HuggingFaceStorageWriter"):
            run("HuggingFaceStorageWriter of PyTorch", size, 1, torch_writer, str(hf), f"{folder}/torch")


SHARDS = ("--max-shard-size", "500MB")

if __name__ == "__main__":
    main()
