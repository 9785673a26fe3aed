"""The rows of CPU mode about what runs on the host anyway: data loading, compilation, Megatron's build steps."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch

from . import stand_ins
from .redirection import Redirection, StandIn, apart

TRACKER_LOGGER = "megatron.core.tensor_parallel.random"


def _own_generator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``original`` with a generator of its own where the caller gives none.

    It is seeded like the default generator, so runs stay reproducible; a state that a checkpoint restores carries its
    seed along, so a resumed run draws the same again.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def draw_apart(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        given = call.arguments.get("generator")
        if given is None or given is torch.default_generator:
            call.arguments["generator"] = torch.Generator().manual_seed(torch.initial_seed())
        if "pin_memory" in signature.parameters:
            call.arguments["pin_memory"] = False  # page-locking needs a driver; torch would warn
        return original(*call.args, **call.kwargs)

    return draw_apart


def skip_if_compiled(original: Callable[[], None]) -> Callable[[], None]:
    """Return ``compile_helpers`` that does nothing where the compiled helper can be imported.

    Wheels of megatron-core ship the helper but no Makefile: the original runs ``make`` all the same and ends the run.
    """

    @functools.wraps(original)
    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            original()

    return compile_helpers


class SharedGeneratorFilter(logging.Filter):
    """Drops the RNG tracker's warning that the CPU state changed inside a device context.

    Here both are the same generator, so it would appear at every dropout.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to keep ``record``."""
        return "CPU RNG state changed" not in record.getMessage()


HOST_DRAWS = Redirection(
    "host draws leave the default generator alone",
    "It stands for the device's. A DataLoader draws its workers' seed from it when it is iterated, samplers their "
    "order; after a resume those draws come at another moment and every later dropout mask would differ.",
    (
        StandIn("torch.utils.data:DataLoader", "__init__", _own_generator),
        StandIn("torch.utils.data:RandomSampler", "__init__", _own_generator),
        StandIn("torch.utils.data:SubsetRandomSampler", "__init__", _own_generator),
        StandIn("torch.utils.data:WeightedRandomSampler", "__init__", _own_generator),
        StandIn("torch.utils.data torch.utils.data.dataset", "random_split", _own_generator, copied=True),
    ),
)

BUILD_STEPS = Redirection(
    "nothing is compiled at start",
    "compile_helpers ends the run where a wheel is installed; the fused kernels of older Megatrons need nvcc.",
    (
        StandIn("megatron.core.datasets.utils", "compile_helpers", skip_if_compiled, required=False),
        StandIn("megatron.legacy.fused_kernels", "load", apart(stand_ins.nothing), required=False),
    ),
)
