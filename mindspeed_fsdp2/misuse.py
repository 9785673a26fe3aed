"""Guards against uses of a wrapped model that torch would answer with an error of its own, or not at all."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from ._torch_private import gradient_hooks
from .buffers import RunningStatistics
from .errors import FSDP2Error
from .hidden_outputs import refuse_hidden_outputs, refuse_unreduced, tensors_in
from .input_grads import let_inputs_require_grad
from .plan import FSDP2Plan, Unit
from .step_state import StepState

_MIXED = "mixed torch.Tensor and DTensor"
_OF_DTYPES = re.compile(r"dtype|scalar type|should be the same")
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_TERM = (
    "Use the optimizer's weight_decay, or compute the term in the forward of the module that holds the weights, and "
    "return it."
)


class _ShardedUseError(FSDP2Error, RuntimeError):
    """Derives ``RuntimeError`` and quotes torch, so that the guard of the unit around it can say more."""


def guard_misuse(
    plan: FSDP2Plan,
    root: nn.Module,
    modules: Mapping[str, nn.Module],
    group: dist.ProcessGroup | None,
    device: torch.device,
    state: StepState,
) -> None:
    """Register the guards of this file and of those it imports (**in place**; every unit is sharded).

    Args:
        plan: The plan that was applied.
        root: The root unit's module.
        modules: fqn -> module, second names included.
        group: All data-parallel ranks.
        device: Where their collectives run.
        state: Tells whether a micro-batch is held.
    """
    units = {unit.name: [modules[fqn] for fqn in unit.fqns] for unit in plan.units}
    recast = [unit.name for unit in plan.units if unit.output_dtype is not None]
    refuse_hidden_outputs({name: members for name, members in units.items() if root not in members}, recast)
    refuse_unreduced(root, units.values())
    root.register_forward_hook(_watch_gradients)
    for unit, inner in _around_overrides(plan.units):
        for fqn in unit.fqns:
            modules[fqn].forward = _explained_dtypes(unit, inner, modules[fqn].forward)
    _guard_leaves(root, {module: name for name, members in units.items() for module in members})
    _refuse_late_hooks(root)
    if dist.get_world_size(group) > 1:
        RunningStatistics(root, group, device, state)
        if plan.config.optional_modules:
            let_inputs_require_grad(members for members in units.values() if root not in members)


def _refuse_late_hooks(root: nn.Module) -> None:
    """Refuse hooks on shards that FSDP, which sets their gradients, would never call (**in place**)."""
    shards = [(name, p, len(gradient_hooks(p) or ())) for name, p in root.named_parameters() if isinstance(p, DTensor)]

    def check(_module: nn.Module, _args: Any) -> None:
        for name, shard, ours in shards:
            if len(gradient_hooks(shard) or ()) > ours:
                raise FSDP2Error(
                    f"{name}: a hook of register_hook on a sharded parameter is never called, for FSDP2 sets its "
                    "gradient. Use register_post_accumulate_grad_hook, which sees the averaged gradient in param.grad."
                )

    root.register_forward_pre_hook(check)


def _watch_gradients(_module: nn.Module, _args: Any, output: Any) -> None:
    if torch.is_grad_enabled():
        for tensor in tensors_in(output, opaque=True):
            if tensor.requires_grad:
                tensor.register_hook(_check_gradient)  # type: ignore[no-untyped-call]


def _check_gradient(grad: torch.Tensor) -> None:
    if torch.is_grad_enabled():  # inside a backward that is so only with create_graph=True
        raise FSDP2Error(
            "backward: a gradient of a gradient (create_graph=True, as for a gradient penalty) is not possible: the "
            "second backward would meet weights that are sharded again. Compute such a term on an unwrapped model."
        )
    if isinstance(grad, DTensor):
        raise FSDP2Error(f"backward: the loss holds a term made of the model's sharded parameters. {_TERM}")


def _check_layout(name: str, placements: tuple[Placement, ...], grad: torch.Tensor) -> None:
    """Check a gradient that autograd itself brings to a sharded parameter; FSDP sets those of the loss."""
    if not isinstance(grad, DTensor):
        return
    # Along an axis of one rank sharded and whole are the same, and torch 2.7 takes the one for the other.
    axes = zip(grad.placements, placements, grad.device_mesh.shape)
    if any(theirs != ours for theirs, ours, ranks in axes if ranks > 1):
        raise FSDP2Error(
            f"backward: torch lays the gradient of a term made of the sharded parameter {name} out in another way than "
            f"the parameter. {_TERM}"
        )


def _guard_leaves(root: nn.Module, unit_of: Mapping[nn.Module, str]) -> None:
    """Guard the modules that hold sharded parameters themselves."""
    around: dict[str, str] = {}
    for fqn, module in root.named_modules():
        outer = fqn.rpartition(".")[0]
        around[fqn] = unit_of.get(module) or around[outer]
        shards = {name: p for name, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)}
        if not shards:
            continue
        for name, shard in shards.items():
            if shard.requires_grad:
                full_name = f"{fqn}.{name}" if fqn else name
                check = functools.partial(_check_layout, full_name, tuple(shard.placements))
                shard.register_hook(check)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(functools.partial(_cut_loaded, _layouts(shards)))
        if module not in unit_of:
            module.forward = _explained(fqn, around[fqn], module.forward)


def _explained(fqn: str, unit: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except RuntimeError as error:
            if _MIXED not in str(error) or isinstance(error, FSDP2Error):
                raise
            owner = "the model" if unit == "(root)" else f"the unit {unit}"
            raise _ShardedUseError(
                f"{fqn}: it ran while its weights are sharded, outside of a forward of {owner}, which gathers them. "
                f"Call {owner}, wrap this use in full_parameters(model), or list {fqn!r} in sub_modules_to_wrap. "
                f"({_MIXED})"
            ) from error

    return explained


@dataclass(frozen=True)
class _Layout:
    """How one parameter is spread over the ranks."""

    shape: torch.Size
    stride: tuple[int, ...]
    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def cut(self, whole: torch.Tensor, device: torch.device) -> DTensor:
        """Return this rank's shard of ``whole``, on ``device``; nothing is sent."""
        pieces = whole.chunk(self.mesh.size(self.mesh.ndim - 1))
        index = self.mesh.get_local_rank(self.mesh.ndim - 1)
        mine = (pieces[index] if index < len(pieces) else whole[:0]).to(device)
        return DTensor.from_local(
            mine, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


def _layouts(shards: Mapping[str, DTensor]) -> dict[str, _Layout]:
    return {name: _Layout(p.shape, p.stride(), p.device_mesh, tuple(p.placements)) for name, p in shards.items()}


def _cut_loaded(
    layouts: Mapping[str, _Layout],
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    *_lists: Any,
) -> None:
    """Cut whole tensors that ``load_state_dict`` brings into shards; every rank brings the same."""
    if local_metadata.get("assign_to_params_buffers"):
        raise FSDP2Error(
            "load_state_dict: assign=True would replace the sharded parameters, and an optimizer would go on with the "
            "old ones. Leave assign out: values are copied into the shards."
        )
    for name, layout in layouts.items():
        value = state_dict.get(prefix + name)
        # What has another shape is left to torch, which lists all of that together.
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.shape == layout.shape:
            shard = getattr(module, name)  # or the gathered parameter, after a forward without a backward
            device = shard.to_local().device if isinstance(shard, DTensor) else shard.device
            state_dict[prefix + name] = layout.cut(value.detach(), device)


def _around_overrides(units: Sequence[Unit]) -> Iterator[tuple[Unit, list[Unit]]]:
    """Yield each unit that has units of another compute dtype directly inside it, which keep it in their outputs."""
    unit_of = {fqn: n for n, unit in enumerate(units) for fqn in unit.fqns}
    inside: dict[int, list[Unit]] = {}
    for unit in units:
        if unit.param_dtype is None or unit.output_dtype is not None or unit.fqns == ("",):
            continue
        outer = unit.fqns[0]
        while outer and (outer == unit.fqns[0] or outer not in unit_of):
            outer = outer.rpartition(".")[0]
        if units[unit_of[outer]].param_dtype not in (None, unit.param_dtype):
            inside.setdefault(unit_of[outer], []).append(unit)
    yield from ((units[n], found) for n, found in inside.items())


def _explained_dtypes(outer: Unit, inner: Sequence[Unit], forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error, FSDP2Error) or not _OF_DTYPES.search(str(error)):
                raise
            dtype = _SHORT[outer.param_dtype] if outer.param_dtype is not None else "bf16"
            listed = ", ".join(f"{unit.name} ({_SHORT[unit.param_dtype]})" for unit in inner if unit.param_dtype)
            raise FSDP2Error(
                f"overrides: {listed} inside {outer.name} ({dtype}): the output keeps the dtype of the override, and "
                f"what follows does not take it (torch: {error}). Add output_dtype: {dtype} to the override."
            ) from error

    return explained
