"""CPU mode without a training run: what it redirects, what it leaves alone, and that it gives everything back."""

from __future__ import annotations

import importlib
import importlib.util
import io
import logging
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, random_split

with warnings.catch_warnings():  # Megatron's imports warn about what is not installed
    warnings.simplefilter("ignore")
    import megatron.training  # noqa: F401
    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

from mindspeed_fsdp2.errors import ConflictError, PatchError
from mindspeed_fsdp2.megatron.cpu import CpuMode, cpu_mode_wanted, enable_cpu, mode
from mindspeed_fsdp2.megatron.patcher import resolves

ABSENT = object()
# Names that only some versions of torch or Megatron have.
VERSION_DEPENDENT = {
    "megatron.legacy.fused_kernels:load",
    "torch.cuda.streams:ExternalStream",
    "torch.cuda:reset_accumulated_memory_stats",
    "torch.cuda.memory:device_memory_used",
    "torch.cuda:device_memory_used",
    "torch:empty_permuted",
}


@pytest.fixture
def cpu() -> Iterator[CpuMode]:
    with enable_cpu() as entered:
        yield entered


def owners() -> list[Any]:
    """Every module and class that CPU mode may change."""
    found = {}
    for group in mode.redirections():
        for row in group.patches():
            for target in row.targets:
                module, _, path = target.partition(":")
                if "legacy" in module:  # older Megatrons only
                    continue
                owner: Any = importlib.import_module(module)
                for parent in path.split(".")[:-1]:
                    owner = getattr(owner, parent)
                found[id(owner)] = owner
    return [*found.values(), torch.distributed]


def contents() -> list[dict[str, Any]]:
    return [dict(vars(owner)) for owner in owners()]


# --- on and off -------------------------------------------------------------------------------------------------------


def test_restore_gives_every_name_back() -> None:
    before = contents()
    entered = enable_cpu()
    changed = sum(then[name] is not now.get(name) for then, now in zip(before, contents()) for name in then)
    entered.restore()
    after = contents()
    assert changed > 100
    assert [then.keys() for then in before] == [now.keys() for now in after]
    assert [name for then, now in zip(before, after) for name in then if then[name] is not now[name]] == []
    assert logging.getLogger("megatron.core.tensor_parallel.random").filters == []
    assert torch.Tensor.to is torch._C.TensorBase.to  # inherited again, not a copy in torch.Tensor
    entered.restore()  # a second call does nothing


def test_every_name_of_the_table_exists() -> None:
    targets = [target for group in mode.redirections() for row in group.patches() for target in row.targets]
    assert len(targets) == len(set(targets))
    assert {target for target in targets if not resolves(target)} <= VERSION_DEPENDENT


def test_second_enable_is_refused(cpu: CpuMode) -> None:
    expected = "CPU mode is on already. Call restore() on the CpuMode that enable_cpu() returned before."
    with pytest.raises(PatchError) as caught:
        enable_cpu()
    assert str(caught.value) == expected


def test_no_two_names_of_torch_share_a_function(cpu: CpuMode) -> None:
    # torch.compile looks rules up by function, and up to 2.13 raises where one bears names with different rules.
    silent = [torch.cuda.synchronize, torch.cuda.set_device, torch.cuda.empty_cache, torch.cuda.nvtx.range_push]
    zeros = [torch.cuda.current_device, torch.cuda.memory_allocated, torch.cuda.max_memory_allocated]
    assert len({id(function) for function in (*silent, *zeros)}) == 7
    assert [function() for function in silent] == [None] * 4
    assert [function() for function in zeros] == [0] * 3
    assert torch.cuda.memory_allocated is torch.cuda.memory.memory_allocated


def test_restore_refuses_when_a_name_was_rebound_since() -> None:
    entered = enable_cpu()
    ours = torch.cuda.synchronize
    torch.cuda.synchronize = lambda: None
    with pytest.raises(PatchError, match=r"^torch\.cuda\.synchronize: cannot be restored"):
        entered.restore()
    assert torch.cuda.is_available()  # still on
    torch.cuda.synchronize = ours
    entered.restore()
    assert not torch.cuda.is_available()


def test_failure_to_enable_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(rows: object) -> None:
        raise PatchError("no")

    before = contents()
    monkeypatch.setattr(mode, "install", fail)
    with pytest.raises(PatchError, match="^no$"):
        enable_cpu()
    assert all(then[name] is now[name] for then, now in zip(before, contents()) for name in then)
    assert logging.getLogger("megatron.core.tensor_parallel.random").filters == []
    assert compiles()


# --- when -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["nccl", "hccl", "cuda:nccl,cpu:gloo", "npu:hccl,cpu:gloo", "cpu:gloo"])
def test_other_backends_do_not_mean_cpu(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu_mode_wanted(backend) is False


def test_gloo_means_cpu() -> None:
    assert cpu_mode_wanted("gloo") is True
    with enable_cpu():  # torch.cuda now claims to be there
        assert cpu_mode_wanted("gloo") is True


def test_gloo_beside_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConflictError) as caught:
        cpu_mode_wanted("gloo")
    assert str(caught.value) == (
        "--distributed-backend gloo: means training on CPU, but this machine has a CUDA device. Write "
        "--distributed-backend nccl (or cuda:nccl,cpu:gloo), or hide the device with CUDA_VISIBLE_DEVICES=''."
    )


@pytest.mark.parametrize("sign", ["importable", "imported"])
def test_gloo_beside_npu_is_refused(sign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if sign == "importable":
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: object() if name == "torch_npu" else find_spec(name)
        )
    else:
        monkeypatch.setattr(torch, "npu", ModuleType("torch.npu"), raising=False)
    with pytest.raises(ConflictError) as caught:
        cpu_mode_wanted("gloo")
    assert str(caught.value) == (
        "--distributed-backend gloo: means training on CPU, but torch_npu is installed here. Write "
        "--distributed-backend npu:hccl,cpu:gloo, or use an environment without torch_npu."
    )


# --- where tensors live -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7", 0, torch.device("cuda"), torch.device("cuda", 1)])
def test_cuda_means_host_memory(cpu: CpuMode, device: Any, tmp_path: Path) -> None:
    made = [
        torch.empty(2, device=device),
        torch.tensor([1.0], device=device, pin_memory=True),
        torch.arange(2, device=device),
        torch.zeros_like(torch.ones(2), device=device),
        torch.ones(2).new_zeros(2, device=device),
        torch.ones(2).to(device),
        torch.ones(2).to(device, torch.float64, copy=True),
        torch.ones(2).to(device=device, non_blocking=True),
        torch.ones(2).cuda(device, non_blocking=True),
        torch.nn.Linear(2, 2, device=device).weight,
        torch.nn.Linear(2, 2).to(device).weight,
        torch.nn.Linear(2, 2).cuda(device).weight,
        torch.nn.Linear(2, 2, device="meta").to_empty(device=device).weight,
    ]
    assert {tensor.device for tensor in made} == {torch.device("cpu")}
    assert made[6].dtype == torch.float64
    torch.save(torch.ones(2), tmp_path / "saved")
    if not isinstance(device, int):  # torch.load takes no numbers
        assert torch.load(tmp_path / "saved", map_location=device).device == torch.device("cpu")
        assert torch.load(tmp_path / "saved", map_location={"cpu": str(device)}).device == torch.device("cpu")


def test_tensors_saved_on_cuda_are_loaded(cpu: CpuMode) -> None:
    file = io.BytesIO()
    torch.save(torch.ones(2), file, _use_new_zipfile_serialization=False)  # the form that can be edited as text
    there = file.getvalue().replace(b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:0")
    assert there != file.getvalue()
    assert torch.load(io.BytesIO(there)).device == torch.device("cpu")
    assert torch.load(io.BytesIO(file.getvalue())).device == torch.device("cpu")
    assert torch.load(io.BytesIO(there), lambda storage, place: storage).device == torch.device("cpu")


def test_other_devices_and_dtypes_are_left_alone(cpu: CpuMode) -> None:
    assert torch.empty(2, device="meta").device.type == "meta"
    assert torch.ones(2).to("meta").device.type == "meta"
    assert torch.ones(2).to(torch.int8).dtype == torch.int8
    assert torch.ones(2).to(torch.ones(2, dtype=torch.int8)).dtype == torch.int8
    assert torch.empty(2, device=None).device.type == "cpu"
    assert torch.ones(2, 3).t().cuda(memory_format=torch.contiguous_format).is_contiguous()
    tensor = torch.ones(2)
    assert tensor.cuda() is tensor
    assert tensor.pin_memory() is tensor


def test_meta_context_works() -> None:
    # As in a fresh process: torch collects the functions that a device context changes on the first use of one.
    from torch.utils._device import _device_constructors

    _device_constructors.cache_clear()
    with enable_cpu(), torch.device("meta"):
        assert torch.empty(2).device.type == "meta"
        assert torch.nn.Linear(2, 2).weight.device.type == "meta"
        assert torch.empty(2, device="cuda").device.type == "cpu"  # what is spelled out wins, as on a GPU


def test_type_names_are_those_of_cuda(cpu: CpuMode) -> None:
    assert torch.ones(2).type() == "torch.cuda.FloatTensor"
    assert torch.ones(2, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(2).type("torch.cuda.HalfTensor").dtype == torch.half
    assert torch.ones(2).type(torch.cuda.LongTensor).dtype == torch.long
    assert torch.ones(2).type(torch.float64).dtype == torch.float64
    assert torch.cuda.LongTensor([3, 4]).tolist() == [3, 4]


def test_mesh_of_cuda_devices_is_one_of_hosts(cpu: CpuMode) -> None:
    mesh = DeviceMesh("cuda", torch.arange(1), _init_backend=False, _rank=0)
    assert mesh.device_type == "cpu"


def test_builds_without_nccl_get_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.distributed, "ProcessGroupNCCL", raising=False)
    with enable_cpu():
        options = torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config.max_ctas = 4
        assert (options.is_high_priority_stream, options.config.max_ctas) == (True, 4)
    assert not hasattr(torch.distributed, "ProcessGroupNCCL")


def test_device_answers(cpu: CpuMode) -> None:
    assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
    assert torch.cuda.get_device_properties(torch.device("cuda:0")).major == 8
    assert torch.cuda.memory_stats()["reserved_bytes.all.current"] == 0
    assert torch.accelerator.current_accelerator() is None
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().record_event(start)
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        end.record()
    assert 0 <= start.elapsed_time(end) < 1e4
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    with torch.cuda.device(0):
        torch.ones(2).record_stream(torch.cuda.current_stream())


# --- random numbers ---------------------------------------------------------------------------------------------------


def test_device_generator_is_the_default_one(cpu: CpuMode) -> None:
    torch.cuda.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)
    state = torch.cuda.get_rng_state()
    assert torch.equal(state, torch.get_rng_state())
    drawn = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)
    torch.manual_seed(6)
    assert torch.cuda.initial_seed() == 6


def test_tracker_forks_the_default_generator(cpu: CpuMode, caplog: pytest.LogCaptureFixture) -> None:
    tracker = CudaRNGStatesTracker()
    torch.cuda.manual_seed(1)
    outside = torch.cuda.get_rng_state()
    tracker.add("tensor", 2)
    assert torch.equal(torch.cuda.get_rng_state(), outside)
    with tracker.fork("tensor"):
        first = torch.rand(4)
    assert torch.equal(torch.cuda.get_rng_state(), outside)
    with tracker.fork("tensor"):
        second = torch.rand(4)
    assert torch.equal(torch.cat([first, second]), torch.rand(8, generator=torch.Generator().manual_seed(2)))
    assert caplog.messages == []  # no warning about the CPU state, which is the same one


def test_host_draws_leave_the_default_generator_alone(cpu: CpuMode) -> None:
    dataset = TensorDataset(torch.arange(8))

    def orders() -> list[Any]:
        loader = DataLoader(dataset, batch_size=4, shuffle=True)
        return [
            [batch[0].tolist() for batch in loader],
            [batch[0].tolist() for batch in loader],
            list(RandomSampler(dataset)),
            [part.indices for part in random_split(dataset, [4, 4])],
        ]

    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = orders()
    assert torch.equal(torch.get_rng_state(), before)
    assert first[0] != first[1]  # another order in every epoch
    assert orders() == first  # reproducible
    torch.manual_seed(4)
    assert orders() != first  # by the seed


def test_given_generators_are_used(cpu: CpuMode) -> None:
    given = torch.Generator().manual_seed(9)
    assert DataLoader([1, 2], generator=given).generator is given
    assert DataLoader([1, 2], 1, False, None, None, 0, None, True, False, 0, None, None, given).generator is given
    assert RandomSampler([1, 2], generator=given).generator is given


def test_pinning_is_off(cpu: CpuMode) -> None:
    assert DataLoader([1, 2], pin_memory=True).pin_memory is False


# --- compilation ------------------------------------------------------------------------------------------------------


def compiles() -> bool:
    """Whether calling a function decorated with ``torch.compile`` compiles it."""
    graphs = []

    def backend(graph: Any, _inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    return bool(graphs)


def test_nothing_is_compiled() -> None:
    with enable_cpu():
        assert not compiles()
    assert compiles()


@pytest.mark.parametrize("compiled", [True, False])
def test_helpers_are_built_only_where_missing(cpu: CpuMode, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda command: commands.append(command[0]) or SimpleNamespace(returncode=0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if compiled else None)
    dataset_utils.compile_helpers()
    assert commands == ([] if compiled else ["make"])
