"""The rows of CPU mode that put what asks for CUDA into host memory, and let host tensors pass for CUDA tensors."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .redirection import Redirection, StandIn, fixed

# Every function of torch with a ``device`` argument that Megatron or a model may call. Written out, because torch has
# no public list; names that a version lacks are skipped.
_CREATORS = (
    "arange as_tensor asarray bartlett_window blackman_window empty empty_permuted empty_strided eye full "
    "hamming_window hann_window kaiser_window linspace logspace normal ones rand randint randn randperm range "
    "scalar_tensor sparse_coo_tensor tensor tril_indices triu_indices zeros "
    "empty_like full_like ones_like rand_like randint_like randn_like zeros_like"
)
_NEW_TENSOR = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros"
_HOST_TYPE = re.compile(r"torch\.(\w+)\Z")
_CUDA_TYPE = re.compile(r"torch\.cuda\.(\w+)\Z")


def host_device(device: Any) -> Any:
    """Return where a tensor meant for ``device`` goes: ``cpu`` for CUDA and for a device number, else unchanged."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int):
        return torch.device("cpu")  # torch reads a number as an index of the current accelerator
    if isinstance(device, str) and re.fullmatch(r"cuda(:\d+)?", device):
        return torch.device("cpu")
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return device


def _creator(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = host_device(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # page-locking needs a driver
        return original(*args, **kwargs)

    return create


def _tensor_to(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = host_device(kwargs["device"])
        # A device comes first if it comes at all; a dtype or a tensor there is left alone.
        return original(self, *(host_device(arg) for arg in args[:1]), *args[1:], **kwargs)

    return to


def _tensor_cuda(
    self: torch.Tensor,
    device: object = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    """Stand in for ``Tensor.cuda``: the tensor is where it should be."""
    return self if memory_format is torch.preserve_format else self.contiguous(memory_format=memory_format)


def _tensor_pin_memory(self: torch.Tensor, device: object = None) -> torch.Tensor:
    """Stand in for ``Tensor.pin_memory``: nothing copies from host to device."""
    return self


def _tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return _HOST_TYPE.sub(r"torch.cuda.\1", original(self))
        if isinstance(dtype, str):
            dtype = _CUDA_TYPE.sub(r"torch.\1", dtype)
        return original(self, dtype, *args, **kwargs)

    return type_


def _restore_on_host(storage: Any, location: str) -> Any:
    """Stand in for where ``torch.load`` puts a storage by default: where it was saved."""
    elsewhere: Callable[[Any, str], Any] = torch.serialization.default_restore_location
    return storage if location.startswith("cuda") else elsewhere(storage, location)


def _load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is None:
            map_location = _restore_on_host
        elif isinstance(map_location, Mapping):
            map_location = {stored: str(host_device(place)) for stored, place in map_location.items()}
        elif not callable(map_location):
            map_location = host_device(map_location)
        return original(f, map_location, *args, **kwargs)

    return load


def _device_mesh_init(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, host_device(device_type).type if device_type == "cuda" else device_type, *args, **kwargs)

    return init


def fill_device_cache() -> None:
    """Let torch collect its own creators before they are replaced; **call it before that**.

    On first use ``with torch.device(…)`` caches which functions it applies to. Were that to happen with the
    replacements in place, the context would silently do nothing (``--init-model-with-meta-device``).
    """
    with torch.device("meta"):
        torch.empty(())


def placement() -> tuple[Redirection, ...]:
    """Return the rows about where tensors live and what they say about it."""
    types = [name for name in vars(torch.cuda) if name.endswith("Tensor") and hasattr(torch, name)]
    return (
        Redirection(
            "CUDA means host memory",
            "Megatron spells the device: device='cuda', torch.cuda.current_device(), tensor.cuda(), pinned buffers, "
            "and DeviceMesh.from_group(…, 'cuda').",
            (
                StandIn("torch", _CREATORS, _creator),
                StandIn("torch:Tensor", _NEW_TENSOR, _creator),
                StandIn("torch:Tensor", "to", _tensor_to),
                StandIn("torch:Tensor", "cuda", fixed(_tensor_cuda)),
                StandIn("torch:Tensor", "pin_memory", fixed(_tensor_pin_memory)),
                StandIn("torch torch.serialization", "load", _load),
                StandIn("torch.distributed.device_mesh:DeviceMesh", "__init__", _device_mesh_init),
            ),
        ),
        Redirection(
            "type names of CUDA tensors",
            "Megatron compares Tensor.type() with 'torch.cuda.FloatTensor' when it clips gradients and sorts "
            "parameters for the optimizer.",
            (
                StandIn("torch:Tensor", "type", _tensor_type),
                *(StandIn("torch.cuda", name, fixed(getattr(torch, name))) for name in types),
            ),
        ),
    )
