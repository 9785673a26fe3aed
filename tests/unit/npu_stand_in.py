"""A stand-in for torch_npu on a machine without an NPU. It says what this package calls, not how an NPU computes.

It offers no name that is not in data/torch_npu_names.json, which scripts/npu_names.py reads from the real wheel. A name
that the wheel has and the stand-in does not implement raises NotImplementedError; any other one AttributeError. Every
call is counted.

What is real: torch's ``npu`` device type (``rename_privateuse1_backend``), with it devices, meshes and process groups
``npu:hccl,cpu:gloo``. Tensors need tests/device/npu_device.cpp, which gives the device memory and hccl its rules; without
it there is no memory, and hccl is gloo. Installing the stand-in cannot be undone: do so in a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NAMES: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "torch_npu_names.json").read_text("utf-8"))
DEVICES = 8


class Offered(types.ModuleType):
    """A module of torch_npu: names of the wheel only."""

    def __init__(self, name: str, members: dict[str, Any]) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        unknown = members.keys() - set(NAMES["modules"][name])
        assert not unknown, f"torch_npu {NAMES['version']} has no {sorted(unknown)} in {name}"
        self.__dict__.update(members)

    def __getattr__(self, attribute: str) -> Any:
        name = self.__name__
        if attribute in NAMES["modules"][name]:
            raise NotImplementedError(f"the stand-in does not implement {name}.{attribute}")
        raise AttributeError(f"torch_npu {NAMES['version']} has no {name}.{attribute}")


class Npu:
    """The state of the stand-in, and what its modules are made of.

    Attributes:
        calls: How often each function was called.
        bf16: What ``is_bf16_supported`` says.
        available: What ``is_available`` says.
        extension: The compiled tests/device/npu_device.cpp, or None.
    """

    def __init__(self, extension: Any = None) -> None:
        self.calls: Counter[str] = Counter()
        self.extension = extension
        self.bf16 = True
        self.available = True
        self.current = 0
        self.generators = tuple(torch.Generator().manual_seed(n) for n in range(DEVICES))

    def counted(self, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return answer(*args, **kwargs)

        return call

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the functions of ``torch_npu.npu``, each counting its calls."""
        answers: dict[str, Callable[..., Any]] = {
            "is_available": lambda: self.available,
            "is_initialized": lambda: True,
            "device_count": lambda: DEVICES,
            "current_device": lambda: self.current if self.extension is None else self.extension.current_device(),
            "set_device": self.set_device,
            "synchronize": lambda device=None: None,
            "get_device_name": lambda device=None: "Stand-in",
            "mem_get_info": lambda device=None: (2**30, 2**31),
            "is_bf16_supported": lambda including_emulation=False: self.bf16,
            "get_rng_state": lambda device="npu": self.generators[self.current].get_state(),
            "set_rng_state": lambda state, device="npu": self.generators[self.current].set_state(state),
            "manual_seed_all": lambda seed: [generator.manual_seed(seed) for generator in self.generators],
            "manual_seed": lambda seed: self.generators[self.current].manual_seed(seed),
            "_is_in_bad_fork": lambda: False,
            "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16, torch.float32],
            "current_stream": lambda device=None: Stream(),
            "default_stream": lambda device=None: Stream(),
            "stream": lambda stream: contextlib.nullcontext(),
            "Stream": Stream,
            "Event": Event,
        }
        return {name: self.counted(name, answer) for name, answer in answers.items()}

    def set_device(self, device: Any) -> None:
        self.current = device if isinstance(device, int) else torch.device(device).index or 0
        if self.extension is not None:
            self.extension.set_device(self.current)


class Stream(torch.Stream):
    """Work on it is done at once. As in torch_npu, a subclass of torch's own, which is passed to torch's C++."""

    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        return super().__new__(cls, device="npu")

    def wait_event(self, event: Any) -> None:
        assert isinstance(event, Event), event
        super().wait_event(event)

    def wait_stream(self, stream: Any) -> None:
        assert isinstance(stream, Stream), stream
        super().wait_stream(stream)

    def record_event(self, event: Any = None) -> Any:
        found = Event() if event is None else event
        found.record(self)
        return found


class Event(torch.Event):
    """Over as soon as it is recorded."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False) -> Event:
        return super().__new__(cls, device="npu")


def modules(npu: Npu) -> dict[str, types.ModuleType]:
    """Return the modules of torch_npu by name."""
    for kind in (Stream, Event):
        offered = set(NAMES["classes"][kind.__name__])
        unknown = {name for name in vars(kind) if not name.startswith("__")} - offered
        assert not unknown, f"torch_npu's {kind.__name__} has no {sorted(unknown)}"
    functions = npu.functions()
    utils = Offered("torch_npu.npu.utils", {"get_cann_version": npu.counted("get_cann_version", lambda: "stand-in")})
    device = Offered(
        "torch_npu.npu", {**functions, "utils": utils, "default_generators": npu.generators, "_initialized": True}
    )
    return {"torch_npu.npu.utils": utils, "torch_npu.npu": device, "torch_npu": Offered("torch_npu", {"npu": device})}


def install(npu: Npu) -> Npu:
    """Make ``import torch_npu`` find the stand-in and do what the real import does to torch (**in place**)."""
    made = modules(npu)
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", made["torch_npu.npu"])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

    def group(store: Any, rank: int, size: int, timeout: Any) -> Any:
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        return gloo if npu.extension is None else npu.extension.Hccl(gloo)

    dist.Backend.register_backend("hccl", group, devices=["npu"])
    sys.modules.update(made)
    return npu


def transfer(npu: Npu) -> None:
    """Do what ``import torch_npu.contrib.transfer_to_npu`` does, as far as it concerns this package (**in place**)."""
    functions = npu.functions()
    for name in NAMES["exported"]["torch_npu.npu"]:
        if name in functions:
            setattr(torch.cuda, name, getattr(sys.modules["torch_npu.npu"], name))
    torch.cuda.default_generators = npu.generators

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            def turn(value: Any) -> Any:
                return value.replace("nccl", "hccl").replace("cuda", "npu") if isinstance(value, str) else value

            return original(*map(turn, args), **{key: turn(value) for key, value in kwargs.items()})

        return call

    assert "torch.distributed.init_process_group" in NAMES["transfer_to_npu assigns"]
    assert "torch.distributed.device_mesh.DeviceMesh.__init__" in NAMES["transfer_to_npu assigns"]
    dist.init_process_group = wrapped(dist.init_process_group)
    mesh: Any = dist.device_mesh.DeviceMesh
    mesh.__init__ = wrapped(mesh.__init__)
