"""Carry out a plan. The only caller of ``fully_shard`` and of the prefetch setters' recorder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ._torch_older import mend_unit
from ._torch_private import prepare_unit_class
from .backward import Backward
from .casts import apply_exact_outputs, apply_input_casts, apply_output_casts
from .device import current_device
from .errors import PlanError
from .gathering import GatherOnce, reshard_after_evaluation
from .guards import (
    complete_zero_grad,
    explain_sharded_use,
    mark_replaced,
    refuse_conversion,
    refuse_deepcopy,
    watch_optimizers,
)
from .materialize.fill import Deferred
from .mesh import replicate_group
from .misuse import guard_misuse
from .param_attrs import kept_param_attrs
from .plan import FSDP2Plan, below_wrappers
from .policies import build_offload, build_precision, to_dtype
from .prefetch import PrefetchRecorder
from .recompute import apply_recompute
from .recovery import Recovery
from .rng import RandomState
from .start_values import equalise_shards, equalise_whole, store_in
from .step_state import StepState
from .torch_compat import mend_averages, set_reshard_after_forward
from .unit_grads import UnitGradients
from .unit_order import UnitOrderCheck
from .whole_grads import WholeGradients

_HANDLE = "_mindspeed_fsdp2"


@dataclass(frozen=True)
class Sharded:
    """What stays attached to a wrapped model.

    Attributes:
        plan: The plan that was applied.
        root: The root unit.
        module: The same object as a plain module.
        mesh: The mesh it was applied on.
        group: The data-parallel group, None for all ranks.
        prefetch: The order recorder, None when no prefetch was asked for.
        resharding: Units that are resharded in full after their forward; the root is not among them.
        whole: Reducer of the whole trainable parameters' gradients, None when every parameter is sharded.
        state: What is under way.
    """

    plan: FSDP2Plan
    root: FSDPModule
    module: nn.Module
    mesh: DeviceMesh
    group: dist.ProcessGroup | None
    prefetch: PrefetchRecorder | None
    resharding: tuple[FSDPModule, ...]
    whole: WholeGradients | None
    state: StepState


def sharded(model: nn.Module) -> Sharded | None:
    """Return what :func:`apply_plan` attached to ``model`` (or to the module below its wrappers), if anything."""
    model = getattr(model, "_orig_mod", model)  # what torch.compile(model) returns
    found = vars(below_wrappers(model)).get(_HANDLE)
    return found if isinstance(found, Sharded) else None


def apply_plan(
    plan: FSDP2Plan,
    model: nn.Module,
    mesh: DeviceMesh,
    group: dist.ProcessGroup | None,
    random_states: Sequence[RandomState],
    deferred: Deferred | None = None,
    same_start: bool = False,
) -> Sharded:
    """Shard ``model`` as ``plan`` says (**in place**, **collective** over ``group``).

    Args:
        plan: Made for this model.
        model: The model, possibly below wrappers.
        mesh: Shape ``(shards,)`` or ``(replicas, shards)``.
        group: The data-parallel group the mesh covers.
        random_states: Restored around recomputation.
        deferred: What is on the meta device.
        same_start: Whether all ranks take the first rank's values of it.

    Returns:
        The handle that :func:`sharded` finds again.

    Raises:
        PlanError: ``model`` is wrapped already.
    """
    root = below_wrappers(model)
    if isinstance(root, FSDPModule) or sharded(root) is not None:
        raise PlanError("model: it is wrapped already. Call wrap_model once.")
    modules: dict[str, nn.Module] = dict(root.named_modules(remove_duplicate=False))
    config = plan.config
    apply_recompute([(fqn, modules[fqn]) for fqn in plan.recompute], config.use_reentrant, random_states)
    ignored = [modules[fqn] for fqn in plan.ignored]
    device = current_device(mesh.device_type)
    if deferred is not None:
        deferred.allocate_whole(ignored, device)
    for module in ignored:
        module.to(device)
    stays = {p for module in ignored for p in module.parameters()}
    with kept_param_attrs(root):
        mark_replaced({name: param for name, param in root.named_parameters() if param not in stays})
        _shard_units(plan, modules, mesh, stays)
        if deferred is not None:
            deferred.allocate_shards(plan.units, modules, device)
    if deferred is not None:
        deferred.complete(device, group, same_start, random_states)
    mend_averages(root, mesh, group, device)
    equalise_whole(root, ignored, device, group)
    if (replicas := replicate_group(mesh)) is not None:
        equalise_shards(root, replicas)
    _apply_casts(plan, modules, ignored)
    state = StepState()
    backward = Backward(root)
    _guard(plan, root, modules, mesh, group, device, state, backward)
    root.register_forward_pre_hook(GatherOnce(always=config.reduce_grads == "last_microbatch"), prepend=True)
    root.register_forward_hook(partial(reshard_after_evaluation, state))
    whole = [param for param in root.parameters() if param in stays and param.is_floating_point()]
    handle = Sharded(
        plan,
        _as_unit(root),
        root,
        mesh,
        group,
        _start_prefetch(plan, root, modules, group),
        tuple(_as_unit(modules[unit.fqns[0]]) for unit in plan.units if unit.fqns != ("",) and unit.reshard is True),
        WholeGradients(whole, backward, group, to_dtype(config.reduce_dtype), plan.main_grads) if whole else None,
        state,
    )
    setattr(root, _HANDLE, handle)
    return handle


def _guard(
    plan: FSDP2Plan,
    root: nn.Module,
    modules: dict[str, nn.Module],
    mesh: DeviceMesh,
    group: dist.ProcessGroup | None,
    device: torch.device,
    state: StepState,
    backward: Backward,
) -> None:
    units = {unit.name: [modules[fqn] for fqn in unit.fqns] for unit in plan.units}
    grads = UnitGradients(root, units, group, device, state, backward)
    hides_sums = replicate_group(mesh) is not None or plan.config.reduce_grads == "last_microbatch"
    recovery = Recovery(root, state, backward, grads, hides_sums, group, device)
    watch_optimizers(root, state, backward)
    refuse_deepcopy(root)
    complete_zero_grad(root, recovery)
    refuse_conversion(root)
    explain_sharded_use({fqn or "the model": modules[fqn] for unit in plan.units for fqn in unit.fqns})
    guard_misuse(plan, root, modules, group, device, state)
    gathering = {unit.name: units[unit.name] for unit in plan.units if unit.numel and unit.fqns != ("",)}
    if plan.config.check_unit_order is not False and dist.get_world_size(group) > 1:
        UnitOrderCheck(root, gathering, group, device, always=bool(plan.config.check_unit_order))


def _as_unit(module: nn.Module) -> FSDPModule:
    if not isinstance(module, FSDPModule):
        raise PlanError(f"model: {type(module).__name__} did not become an FSDP unit.")
    return module


def _shard_units(
    plan: FSDP2Plan, modules: dict[str, nn.Module], mesh: DeviceMesh, ignored_params: set[nn.Parameter]
) -> None:
    for unit in plan.units:
        members = [modules[fqn] for fqn in unit.fqns]
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": build_precision(unit.param_dtype, unit.reduce_dtype, unit.output_dtype, unit.stored_dtype),
            "offload_policy": build_offload(unit.offload, plan.config.pin_memory, mesh.device_type),
            "ignored_params": ignored_params,
        }
        if unit.stored_dtype is not None:
            store_in(unit.stored_dtype, members, ignored_params)
        if unit.fqns != ("",):  # left to torch, the root stays gathered from its forward to its backward
            options["reshard_after_forward"] = unit.reshard
        for member in members:
            prepare_unit_class(type(member))
        fully_shard(members if len(members) > 1 else members[0], **options)
        mend_unit(members[0])


def _apply_casts(plan: FSDP2Plan, modules: dict[str, nn.Module], ignored: Sequence[nn.Module]) -> None:
    config = plan.config
    silent = set(plan.parameterless)
    for unit in plan.units:
        if unit.param_dtype is not None and unit.cast_inputs and (unit.fqns != ("",) or plan.root_casts_inputs):
            members = [modules[fqn] for fqn in unit.fqns if fqn not in silent]
            apply_input_casts(members, unit.param_dtype, config.keep_input_dtype)
    if any(unit.param_dtype is not None and unit.cast_inputs for unit in plan.units):
        apply_exact_outputs(modules[fqn] for fqn in plan.parameterless)
    dtype = to_dtype(config.param_dtype)
    if dtype is None:
        return
    if not plan.root_casts_inputs:
        apply_output_casts(ignored, dtype)
    if not config.cast_forward_inputs:
        return
    apply_input_casts([modules[fqn] for fqn in plan.cast_leaves], dtype, config.keep_input_dtype)
    for module in ignored:
        # Inside a unit an ignored module gets what that unit computed, in the unit's dtype.
        own = {p.dtype for p in module.parameters() if p.is_floating_point()}
        if len(own) == 1 and own != {dtype}:
            apply_input_casts([module], own.pop(), config.keep_input_dtype)


def reshard_after_forward(handle: Sharded, value: bool) -> None:
    """Set whether units for which true was asked reshard after forward (**in place**); false needs no change."""
    for unit in handle.resharding:
        set_reshard_after_forward(unit, value)


def _start_prefetch(
    plan: FSDP2Plan, root: nn.Module, modules: dict[str, nn.Module], group: dist.ProcessGroup | None
) -> PrefetchRecorder | None:
    config = plan.config
    if not (config.num_to_forward_prefetch or config.num_to_backward_prefetch):
        return None
    units = {u.name: [modules[fqn] for fqn in u.fqns] for u in plan.units if u.numel or u.fqns == ("",)}
    recorder = PrefetchRecorder(
        root, units, config.num_to_forward_prefetch, config.num_to_backward_prefetch, plan.recomputed, group
    )
    recorder.start()
    return recorder
