"""Training on the stand-in's NPUs: its tensors are none of the host's, and hccl refuses what HCCL refuses."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_fsdp2 import ConfigError, clip_grad_norm_, load_checkpoint, save_checkpoint, wrap_model
from mindspeed_fsdp2.cli import main
from mindspeed_fsdp2.device import cuda_means_npu, find_device_type, resolve_device_type
from tests.device.npu import COMPILER, NpuPool, build, enter, join, new_rendezvous
from tests.distributed.ranks import RankPool
from tests.distributed.test_doctor import lines_of
from tests.unit.npu_stand_in import transfer

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler and ninja")]

WIDTH = 12
NOT_PINNED = (
    "pin_memory: true cannot be had on this machine (pin_memory() returns memory that is not pinned). Set pin_memory: "
    "false."
)
UNITS = {"sub_modules_to_wrap": ["layers.{*}"]}
STEPS = 3


@pytest.fixture(scope="module")
def library() -> Path:
    return build()


@pytest.fixture(scope="module")
def npus(library: Path) -> Iterator[RankPool]:
    """Two ranks with an NPU each."""
    pool = NpuPool(library)
    yield pool
    pool.close()


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), DeviceNoise(dropout)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        loss: torch.Tensor = self.head(x).square().mean()
        return loss


class DeviceNoise(nn.Module):
    """Draws from the NPU's own generator."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.rate:
            return x
        npu: Any = torch.npu  # type: ignore[attr-defined]
        generator = npu.default_generators[npu.current_device()]
        return x * (torch.rand(x.shape, generator=generator) > self.rate).to(x.device)


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def build_net(**options: float) -> Net:
    torch.manual_seed(3)
    return Net(**options)


def train(config: dict[str, Any] | None, device_type: str | None = None, **options: float) -> dict[str, Any]:
    """Train; ``config`` None is plain data parallel. Return losses, norms, where things lie, and what was called."""
    npu = enter(Path())
    npu.calls.clear()
    npu.functions()["manual_seed"](5)
    device = torch.device("npu", dist.get_rank())
    model: nn.Module = build_net(**options)
    model = model.to(device) if config is None else wrap_model(model, config, device_type=device_type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses, norms = [], []
    for step in range(STEPS):
        loss = model(batch(step).to(device))
        loss.backward()
        if config is None:
            for param in model.parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
        norms.append(clip_grad_norm_(model, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    params = list(model.parameters())
    shards = [param.to_local() if isinstance(param, DTensor) else param for param in params]
    return {
        "losses": losses,
        "norms": norms,
        "values": [(p.full_tensor() if isinstance(p, DTensor) else p).detach().cpu() for p in params],
        "meshes": {param.device_mesh.device_type for param in params if isinstance(param, DTensor)},
        "devices": {str(shard.device) for shard in shards},
        "pinned": {shard.is_pinned() for shard in shards},
        "calls": dict(npu.calls),
    }


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({"sharding_size": "auto"}, {}),
        ({"sharding_size": "auto", "reshard_after_forward": False, "reduce_dtype": "fp32"}, {}),
        ({"sharding_size": 1}, {}),
        ({"sharding_size": "auto", "num_to_forward_prefetch": 1, "num_to_backward_prefetch": 1}, {}),
        ({"sharding_size": "auto", "recompute_modules": ["layers.{*}"], "use_reentrant": False}, {"dropout": 0.3}),
        ({"sharding_size": "auto", "recompute_modules": ["layers.{1-2}"]}, {"dropout": 0.3}),
        # One parameter group of sharded and whole parameters: foreach, torch's default here, cannot update it.
        ({"sharding_size": "auto", "ignored_modules": ["head"]}, {}),
        ({"sharding_size": "auto", "offload_to_cpu": True}, {}),
        ({"sharding_size": "auto", "offload_to_cpu": True, "pin_memory": False}, {}),
    ],
    ids=["zero3", "zero2", "replicas", "prefetch", "recompute", "reentrant", "ignored", "pinned", "not-pinned"],
)
def test_training_equals_data_parallel(npus: RankPool, config: dict[str, Any], options: dict[str, float]) -> None:
    plain = _train_all(npus, None, options)
    wrapped = _train_all(npus, {**UNITS, **config}, options)
    offload = config.get("offload_to_cpu", False)
    for rank, (want, got) in enumerate(zip(plain, wrapped)):
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-6)
        assert got["norms"] == pytest.approx(want["norms"], rel=1e-6)
        for mine, other in zip(got["values"], want["values"]):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
        assert got["meshes"] == {"npu"}
        assert got["devices"] == {"cpu" if offload else f"npu:{rank}"}
        assert got["pinned"] == {offload and config.get("pin_memory", True)}
        needed = {"is_available", "current_device", "current_stream", "stream", "Stream", "Event"}
        assert needed <= got["calls"].keys(), "a run that never asked the NPU for its streams"
        if options:
            assert got["calls"]["get_rng_state"] and got["calls"]["set_rng_state"]
    assert plain[0]["losses"] != plain[1]["losses"]


def _train_all(npus: RankPool, config: dict[str, Any] | None, options: dict[str, float]) -> list[dict[str, Any]]:
    return npus.run(_train_with, config, options)


def _train_with(config: dict[str, Any] | None, options: dict[str, float]) -> dict[str, Any]:
    return train(config, **options)


def _refused(config: dict[str, Any], dtype: str, bf16: bool) -> str:
    npu = enter(Path())
    npu.bf16 = bf16
    try:
        wrap_model(build_net().to(getattr(torch, dtype)), {**UNITS, **config})
    except ConfigError as error:
        return str(error)
    finally:
        npu.bf16 = True
    return "accepted"


@pytest.mark.parametrize(
    ("config", "dtype", "bf16", "text"),
    [
        ({}, "float32", False, "accepted"),
        ({"param_dtype": "bf16", "reduce_dtype": "fp32"}, "float32", True, "accepted"),
        (
            {},
            "float64",
            True,
            "model: HCCL cannot reduce float64 gradients or their norms (of unit layers.2 and 3 more). Load the model in "
            "fp32.",
        ),
        (
            {"param_dtype": "bf16", "reduce_dtype": "fp32"},
            "float32",
            False,
            "param_dtype: this NPU does not support bf16 (used by unit layers.2 and 3 more). Use fp16 or fp32 for "
            "param_dtype and reduce_dtype, and load the model in one of them.",
        ),
    ],
)
def test_dtypes_that_hccl_cannot_reduce(
    npus: RankPool, config: dict[str, Any], dtype: str, bf16: bool, text: str
) -> None:
    assert npus.run(_refused, {"sharding_size": "auto", **config}, dtype, bf16) == [text, text]


def _hccl_rules() -> list[str]:
    said = []
    for dtype, op in (
        (torch.float64, dist.ReduceOp.SUM),
        (torch.uint8, dist.ReduceOp.MAX),
        (torch.float32, dist._make_nccl_premul_sum(0.5)),
    ):
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(2, dtype=dtype, device="npu"), op=op)
        said.append(str(caught.value).split("\n")[0])
    with pytest.raises(RuntimeError, match="npu"):
        torch.ones(2, device="npu") + torch.ones(2)
    return said


def test_the_stand_in_refuses_what_hccl_refuses(npus: RankPool) -> None:
    assert npus.run(_hccl_rules)[0] == [
        "HCCL allreduce: Unsupported data type Double",
        "HCCL allreduce: Unsupported data type Byte",
        "Unhandled ReduceOp",
    ]


def _checkpoint(folder: str, default_device: str | None) -> bool:
    torch.set_default_device(default_device)
    try:
        return _round_trip(folder)
    finally:
        torch.set_default_device(None)


def _round_trip(folder: str) -> bool:
    config = {"sharding_size": "auto", **UNITS}
    model = wrap_model(build_net(), config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(batch(0).to("npu")).backward()
    optimizer.step()
    npu: Any = torch.npu  # type: ignore[attr-defined]
    state = npu.get_rng_state()
    save_checkpoint(folder, model, optimizer, step=1)
    npu.manual_seed(99)
    torch.manual_seed(4)
    other = wrap_model(Net(), config)
    load_checkpoint(folder, other, torch.optim.AdamW(other.parameters(), lr=0.05))
    same = all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in zip(model.parameters(), other.parameters()))  # type: ignore[attr-defined]
    return same and torch.equal(npu.get_rng_state(), state)


@pytest.mark.parametrize("default_device", [None, "npu"])
def test_a_checkpoint_keeps_the_npus_random_state(npus: RankPool, tmp_path: Path, default_device: str | None) -> None:
    assert npus.run(_checkpoint, str(tmp_path), default_device) == [True, True]


def _wrong_backend() -> str:
    config = {"sharding_size": "auto", **UNITS}
    gloo = dist.new_group(backend="gloo")
    try:
        wrap_model(build_net(), config, process_group=gloo)
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_a_group_without_hccl_is_refused(npus: RankPool) -> None:
    text = (
        "process_group: its backends 'cpu:gloo,cuda:gloo' carry no tensors of npu devices. Initialise "
        "torch.distributed with 'npu:hccl,cpu:gloo'."
    )
    assert npus.run(_wrong_backend) == [text, text]


def _transferred(library: Path, rendezvous: str) -> dict[str, Any]:
    npu = enter(library)
    transfer(npu)
    backends = join(library, rendezvous, "cuda:nccl,cpu:gloo")
    found = train({**UNITS, "sharding_size": "auto"}, device_type="cuda")
    return {**found, "backends": backends, "means": cuda_means_npu(), "found": find_device_type()}


def test_transfer_to_npu_in_force(library: Path, npus: RankPool) -> None:
    want = npus.run(train, None)
    pool = RankPool(2)  # its ranks stay transferred
    try:
        for rank, got in enumerate(pool.run(_transferred, library, new_rendezvous())):
            assert (got["means"], got["found"], got["backends"]) == (True, "npu", "npu:hccl,cpu:gloo")
            assert got["meshes"] == {"npu"} and got["devices"] == {f"npu:{rank}"}
            assert got["losses"] == pytest.approx(want[rank]["losses"], rel=1e-6)
    finally:
        pool.close()


def _not_transferred() -> tuple[bool, str, str]:
    return cuda_means_npu(), find_device_type(), resolve_device_type("cuda")


def test_transfer_to_npu_not_in_force(npus: RankPool) -> None:
    assert npus.run(_not_transferred) == [(False, "npu", "cuda")] * 2


def _doctor(library: Path, pins: bool, rank: int, ranks: int, folder: str) -> None:
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)})
    torch.set_num_threads(1)
    enter(library).extension.set_pins(pins)
    with open(f"{folder}/out{rank}", "w", encoding="utf-8") as out, contextlib.redirect_stdout(out):
        status = main(["doctor", "--store", f"{folder}/store"])
    sys.exit(status)


@pytest.mark.parametrize(("pins", "ranks"), [(True, 4), (False, 2)], ids=["sound", "broken-pinning"])
def test_doctor_on_npus(library: Path, tmp_path: Path, pins: bool, ranks: int) -> None:
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=_doctor, args=(library, pins, rank, ranks, str(tmp_path)), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    text = (tmp_path / "out0").read_text("utf-8")
    lines = lines_of(text)
    assert [process.exitcode for process in processes] == [0 if pins else 1] * ranks, text
    wrong = {name: detail for name, (verdict, detail) in lines.items() if verdict in ("FAIL", "HANGS")}
    if not pins:
        assert wrong.pop("pinned memory") == "pin_memory() returned memory that is not pinned. Set pin_memory: false"
        refused = wrong.pop("training with shards in pinned host memory equals DDP")
        assert refused == f"ConfigError: {NOT_PINNED}"
    assert wrong == {}
    assert lines["training with replicas and shards (HSDP) equals DDP"][0] == ("ok" if ranks == 4 else "skipped")
    absent = {name for name, (verdict, _) in lines.items() if verdict == "absent"}
    assert absent == {"all_reduce SUM float64", "all_reduce MAX float64", "reduce_scatter SUM float64"}
    assert lines["training with shards in pinned host memory equals DDP"][0] == ("ok" if pins else "FAIL")
    for fact in (
        "device type   npu",
        "backends      npu:hccl,cpu:gloo",
        "name          Stand-in",
        "CANN             stand-in",
    ):
        assert f"  {fact}\n" in text
