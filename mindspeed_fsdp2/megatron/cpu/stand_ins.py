"""What ``torch.cuda`` hands out, for a host without an accelerator.

The device is number 0 of 1. It executes in program order, so streams and events have nothing to order, and it holds no
memory of its own.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from dataclasses import dataclass

import torch


def is_available() -> bool:
    """Stand in for ``torch.cuda.is_available``; also how CPU mode recognises itself."""
    return True


def nothing(*_args: object, **_kwargs: object) -> None:
    """Stand in for calls that only select, order, flush or trace."""


def no(*_args: object, **_kwargs: object) -> bool:
    """Answer False."""
    return False


def yes(*_args: object, **_kwargs: object) -> bool:
    """Answer True."""
    return True


def zero(*_args: object, **_kwargs: object) -> int:
    """Answer 0: the device's index, or the bytes it holds."""
    return 0


def one(*_args: object, **_kwargs: object) -> int:
    """Answer 1: the number of devices."""
    return 1


@dataclass(frozen=True)
class DeviceProperties:
    """What Megatron asks about a device.

    Attributes:
        name: Device name.
        major: Compute capability, first number: 8 has bfloat16 but no fp8, like a CPU.
        minor: Compute capability, second number.
        total_memory: Bytes of host memory.
        multi_processor_count: Host cores.
    """

    name: str = "cpu"
    major: int = 8
    minor: int = 0
    total_memory: int = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    multi_processor_count: int = os.cpu_count() or 1


def properties(_device: object = None) -> DeviceProperties:
    """Stand in for ``torch.cuda.get_device_properties``."""
    return DeviceProperties()


def capability(_device: object = None) -> tuple[int, int]:
    """Stand in for ``torch.cuda.get_device_capability``."""
    return DeviceProperties.major, DeviceProperties.minor


def device_name(_device: object = None) -> str:
    """Stand in for ``torch.cuda.get_device_name``."""
    return DeviceProperties.name


def memory_info(_device: object = None) -> tuple[int, int]:
    """Stand in for ``torch.cuda.mem_get_info``: free and total bytes."""
    return DeviceProperties.total_memory, DeviceProperties.total_memory


def memory_stats(_device: object = None) -> Counter[str]:
    """Stand in for ``torch.cuda.memory_stats``: 0 for every key."""
    return Counter()


def memory_snapshot(*_args: object, **_kwargs: object) -> list[object]:
    """Stand in for ``torch.cuda.memory_snapshot``: no segments."""
    return []


class Event:
    """Stand in for ``torch.cuda.Event``: when it is recorded, everything before it is done."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        self._recorded_at = time.perf_counter()

    def record(self, _stream: object = None) -> None:
        """Note the time."""
        self._recorded_at = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event to ``end_event``."""
        return (end_event._recorded_at - self._recorded_at) * 1e3

    wait = synchronize = nothing
    query = yes


class Stream:
    """Stand in for ``torch.cuda.Stream``: the host's program order."""

    cuda_stream = device_index = priority = stream_id = 0
    device = torch.device("cpu")

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event``, a new one if None, and return it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest and the highest priority of a stream."""
        return 0, 0

    wait_stream = wait_event = synchronize = nothing
    query = yes


STREAM = Stream()  # one object, so that comparing streams answers "the same"


def stream(_device: object = None) -> Stream:
    """Stand in for ``torch.cuda.current_stream`` and ``torch.cuda.default_stream``."""
    return STREAM


class OnlyDevice(contextlib.AbstractContextManager[None]):
    """Stand in for ``torch.cuda.device``, ``torch.cuda.stream`` and other contexts that select or trace."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass

    def __exit__(self, *_exc_info: object) -> None:
        pass


class ProcessGroupNCCL:
    """Stand in for ``torch.distributed.ProcessGroupNCCL`` on builds of torch without NCCL."""

    class Options:
        """Options that gloo ignores; ``config`` takes whatever is set on it."""

        def __init__(self, is_high_priority_stream: bool = False, **_named: object) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = _Anything()


class _Anything:
    """An object that takes attributes."""
