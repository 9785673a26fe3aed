"""Public entry for any trainer: configuration + model -> the same model, sharded."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .accelerator import check_unprepared, guard_accelerate
from .agreement import agree
from .apply import Sharded, apply_plan
from .backends import check_backends
from .config import FSDP2Config, load_config
from .device import current_device, resolve_device_type
from .errors import PlanError
from .materialize.fill import Deferred
from .materialize.find import deferred_values
from .mesh import build_mesh
from .plan import DefaultUnits, FSDP2Plan, Tie, build_plan
from .rng import RandomState, random_states
from .start_values import broadcast_whole

logger = logging.getLogger("mindspeed_fsdp2")

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | FSDP2Config


def wrap_model(
    model: nn.Module,
    config: ConfigSource,
    *,
    process_group: dist.ProcessGroup | None = None,
    device_type: str | None = None,
) -> nn.Module:
    """Shard ``model`` with FSDP2 as ``config`` says and return it (**in place**, **collective**).

    Build the optimizer afterwards: parameters are replaced by DTensors, mesh ``(dp_shard,)`` or
    ``(dp_replicate, dp_shard)``, sharded on dimension 0. The state stored and optimized keeps the loaded dtype.

    Args:
        model: The whole model with its weights loaded, on any device, or built in ``meta_init``. Attributes of
            parameters survive.
        config: Path of a YAML file, a mapping with the same keys, or an ``FSDP2Config``.
        process_group: Data-parallel ranks; None means all. Every rank of the job must call this function.
        device_type: ``"npu"``, ``"cuda"`` or ``"cpu"``; None takes the accelerator found.

    Returns:
        ``model`` itself.

    Raises:
        ConfigError: The configuration is wrong or does not fit the number of ranks; lists every problem.
        PlanError: The model cannot be sharded as asked, or the ranks do not agree. Every rank raises, or none.
    """
    if not dist.is_initialized():
        raise PlanError(
            "process_group: torch.distributed is not initialised. Start with torchrun and call "
            "torch.distributed.init_process_group() before wrap_model."
        )
    handle = shard_model(model, lambda: load_config(config), process_group, device_type, Host())
    guard_accelerate(handle)
    for notice in handle.plan.notices:
        _log_once(logging.WARNING, notice)
    _log_once(logging.INFO, str(handle.plan))
    return model


@dataclass(frozen=True)
class Host:
    """What a training framework adds to the configuration.

    Attributes:
        default_units: Called with the model below its wrappers; returns the framework's units when the configuration
            lists none.
        ties: Called like that; returns pairs of modules that use one weight although only one of them holds it.
        random_states: Its own random states, kept around recomputation.
        stored_dtype: dtype that shards are stored and optimized in, None for the dtype of the loaded model.
        same_start: Whether every rank starts from the first data-parallel rank's parameters.
    """

    default_units: DefaultUnits | None = None
    ties: Callable[[nn.Module], Sequence[Tie]] | None = None
    random_states: Sequence[RandomState] = ()
    stored_dtype: torch.dtype | None = None
    same_start: bool = False


def shard_model(
    model: nn.Module,
    load: Callable[[], FSDP2Config],
    process_group: dist.ProcessGroup | None,
    device_type: str | None,
    host: Host,
) -> Sharded:
    """Plan, agree and apply; what :func:`wrap_model` and the Megatron adapter share (**in place**, **collective**).

    Args:
        model: See :func:`wrap_model`.
        load: Returns the configuration; an error it raises on one rank ends all ranks.
        process_group: See :func:`wrap_model`.
        device_type: See :func:`wrap_model`.
        host: The framework's additions.

    Raises:
        FSDP2Error: See :func:`wrap_model`.
    """

    def build() -> tuple[FSDP2Plan, str, Deferred | None]:
        _check_arguments(model, process_group)
        if dist.get_rank(process_group) < 0:
            raise PlanError("process_group: this rank is not in it. Pass each rank its own data-parallel group.")
        device = resolve_device_type(device_type)
        plan = build_plan(
            load(),
            model,
            default_units=host.default_units,
            data_parallel_size=dist.get_world_size(process_group),
            whole_world=dist.get_world_size(process_group) == dist.get_world_size(),
            stored_dtype=host.stored_dtype,
            host_ties=host.ties,
        )
        check_backends(plan, process_group, device)
        return plan, device, deferred_values(model, current_device(device))

    plan, device, deferred = agree(build, _digest, None, "FSDP2 plan")
    if plan.shard_size is None:  # only a plan made without a number of ranks lacks it
        raise PlanError("plan: it was made without the number of data-parallel ranks.")
    mesh = build_mesh(plan.shard_size, process_group, device)
    if host.same_start:
        broadcast_whole((param for param in model.parameters() if not param.is_meta), device, process_group)
    states = (*random_states(device), *host.random_states)
    return apply_plan(plan, model, mesh, process_group, states, deferred, host.same_start)


def _digest(built: tuple[FSDP2Plan, str, Deferred | None]) -> str:
    plan, device, deferred = built
    return f"{plan.digest()}/{device}" + (f"/{deferred.digest}" if deferred is not None else "")


def _check_arguments(model: object, process_group: object) -> None:
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise PlanError(f"model: {model.__name__} is a class. Build the model: wrap_model({model.__name__}(...), ...).")
    if not isinstance(model, nn.Module):
        raise PlanError(f"model: {type(model).__name__} is not an nn.Module. Pass the module that is trained.")
    check_unprepared(model)
    outside = process_group == dist.GroupMember.NON_GROUP_MEMBER  # what new_group returns to ranks that are not in it
    if process_group is not None and not outside and not isinstance(process_group, dist.ProcessGroup):
        raise PlanError(
            f"process_group: {process_group!r} is no process group. Pass what torch.distributed.new_group returned or "
            "mesh.get_group(), or None for all ranks."
        )


def _log_once(level: int, text: str) -> None:
    if dist.get_rank() == 0:
        logger.log(level, "%s", text)
