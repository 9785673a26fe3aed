"""The rows of CPU mode that make ``torch.cuda``, ``torch.accelerator`` and c10d answer for the host."""

from __future__ import annotations

import torch

from . import stand_ins
from .redirection import Redirection, StandIn, apart, fixed

_CUDA = "torch.cuda"
# The functions of torch.cuda.random hold these by value; with them redirected they work unchanged.
_CUDA_AND_RANDOM = "torch.cuda torch.cuda.random"
_MEMORY = "torch.cuda torch.cuda.memory"  # re-exported by value

DEVICE = Redirection(
    "one device is there",
    "Megatron refuses to start without CUDA, asks for the current device everywhere and synchronises for timing. "
    "is_initialized makes torch's own lazy calls, which set random states, run at once instead of being queued.",
    (
        StandIn(_CUDA, "is_available", fixed(stand_ins.is_available)),
        StandIn(_CUDA_AND_RANDOM, "is_initialized", apart(stand_ins.yes)),
        StandIn(_CUDA_AND_RANDOM, "device_count", apart(stand_ins.one)),
        StandIn(_CUDA_AND_RANDOM, "current_device", apart(stand_ins.zero)),
        StandIn(_CUDA, "set_device synchronize ipc_collect check_error", apart(stand_ins.nothing)),
        StandIn(_CUDA, "is_bf16_supported", apart(stand_ins.yes)),
        StandIn(_CUDA, "get_device_name", fixed(stand_ins.device_name)),
        StandIn(_CUDA, "get_device_properties", fixed(stand_ins.properties)),
        StandIn(_CUDA, "get_device_capability", fixed(stand_ins.capability)),
        StandIn(_CUDA, "device", fixed(stand_ins.OnlyDevice)),
        StandIn("torch.cuda.nvtx", "range_push range_pop mark", apart(stand_ins.nothing)),
        StandIn("torch.cuda.nvtx", "range", fixed(stand_ins.OnlyDevice)),
    ),
)

STREAMS = Redirection(
    "streams and events",
    "DDP, FSDP, pipelining and checkpoint writers create and join streams; without a driver that raises.",
    (
        StandIn("torch.cuda torch.cuda.streams", "Stream ExternalStream", fixed(stand_ins.Stream)),
        StandIn("torch.cuda torch.cuda.streams", "Event", fixed(stand_ins.Event)),
        StandIn(_CUDA, "current_stream default_stream", fixed(stand_ins.stream)),
        StandIn(_CUDA, "stream", fixed(stand_ins.OnlyDevice)),
        StandIn(_CUDA, "set_stream", apart(stand_ins.nothing)),
        StandIn("torch.cuda torch.cuda.graphs", "is_current_stream_capturing", apart(stand_ins.no)),
        StandIn("torch:Tensor", "record_stream", apart(stand_ins.nothing)),
    ),
)

MEMORY = Redirection(
    "no device memory",
    "Logging, checkpointing and --empty-unused-memory-level read and reset the caching allocator.",
    (
        StandIn(
            _MEMORY,
            "memory_allocated max_memory_allocated memory_reserved max_memory_reserved device_memory_used",
            apart(stand_ins.zero),
        ),
        StandIn(_MEMORY, "memory_stats", fixed(stand_ins.memory_stats)),
        StandIn(_MEMORY, "mem_get_info", fixed(stand_ins.memory_info)),
        StandIn(_MEMORY, "memory_snapshot", fixed(stand_ins.memory_snapshot)),
        StandIn(
            _MEMORY,
            "empty_cache reset_peak_memory_stats reset_max_memory_allocated reset_accumulated_memory_stats",
            apart(stand_ins.nothing),
        ),
    ),
)

RANDOM = Redirection(
    "the default generator is the device's",
    "Dropout on CPU tensors can draw from no other generator. torch.cuda's RNG calls and Megatron's RNG tracker must "
    "read and write that one, or a resumed run with dropout differs from one that never stopped.",
    (StandIn(_CUDA, "default_generators", fixed((torch.default_generator,))),),
)

ACCELERATOR = Redirection(
    "torch.accelerator is off",
    "A CUDA build of torch names its accelerator by how it was built, and asks the redirected torch.cuda whether it "
    "is there; pinning and c10d would believe it.",
    (
        StandIn("torch.accelerator", "is_available", apart(stand_ins.no)),
        StandIn("torch.accelerator", "device_count", apart(stand_ins.zero)),
        StandIn("torch.accelerator", "current_accelerator synchronize empty_cache", apart(stand_ins.nothing)),
    ),
)
