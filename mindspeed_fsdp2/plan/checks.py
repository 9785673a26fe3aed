"""What FSDP2 cannot hold, and what the user should know about the parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from .._torch_private import has_gradient_hooks
from ..config import FSDP2Config
from ..errors import PlanError
from .index import ModelIndex, below_wrappers
from .ownership import IGNORED, Ownership, owner_name

_NAMED_AT_MOST = 8
_SCRIPTED = "was made by torch.jit, whose modules take neither sharded parameters nor hooks."
_OTHER_WAYS = (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel)


def check_wrappers(model: nn.Module) -> None:
    """Check what is around the module that will be sharded.

    Raises:
        PlanError: Another way of data parallelism is, or the model itself was made by ``torch.jit``.
    """
    if any(isinstance(m, torch.jit.ScriptModule) for m in (model, getattr(model, "module", None))):
        raise PlanError(f"model: it {_SCRIPTED} Wrap the original module.")
    root, path = below_wrappers(model), "model"
    while model is not root:
        path += ".module"
        if isinstance(model, _OTHER_WAYS):
            raise PlanError(
                f"model: it is wrapped in {type(model).__name__}, which expects whole parameters and averages their "
                f"gradients itself. Wrap the module inside: wrap_model({path}, ...)."
            )
        model = next(model.children())


def check_modules(index: ModelIndex, ignored: Sequence[str]) -> None:
    """Check the modules that will be sharded.

    Raises:
        PlanError: Some cannot be; all of them.
    """
    below = tuple(f"{fqn}." for fqn in ignored)
    problems = []
    for fqn, module in index.modules.items():
        if not isinstance(module, (torch.jit.ScriptModule, *_OTHER_WAYS)) or f"{fqn}.".startswith(below):
            continue
        name = repr(fqn)
        if isinstance(module, torch.jit.ScriptModule):
            if not isinstance(index.modules[fqn.rpartition(".")[0]], torch.jit.ScriptModule):
                problems.append(
                    f"model: {name} {_SCRIPTED} Put the original module in its place, or list it in ignored_modules."
                )
        else:
            problems.append(
                f"model: {name} is a {type(module).__name__}, which expects whole parameters and averages their "
                "gradients itself. Put the module inside it in its place."
            )
    if problems:
        raise PlanError("\n".join(problems))


def check_parameters(owned: Ownership, config: FSDP2Config, stored_dtype: torch.dtype | None) -> list[str]:
    """Return notices about the parameters of every unit.

    Raises:
        PlanError: Parameters that FSDP2 cannot shard; all of them.
    """
    if sharded := [n for params in owned.units.values() for n, p in params.items() if isinstance(p, DTensor)]:
        raise PlanError(
            f"model: these parameters are sharded already: {some(sharded)}. "
            "Wrap a model once, before anything shards it."
        )
    key = "ignored_modules" if config.ignored_modules else "optional_modules"  # a list of both goes by the first
    problems = [*_check_shared(owned, key)]
    for unit, params in owned.units.items():
        problems.extend(_check_unit(owner_name(unit), params))
    if hooked := [n for params in owned.units.values() for n, p in params.items() if has_gradient_hooks(p)]:
        problems.append(
            f"model: gradient hooks on {some(hooked)} would never run, because sharding replaces the parameters. "
            "Register them after wrap_model with register_post_accumulate_grad_hook, where param.grad is the averaged "
            "shard."
        )
    if problems:
        raise PlanError("\n".join(problems))
    stored = {stored_dtype or p.dtype for params in owned.units.values() for p in params.values() if p.requires_grad}
    notices = []
    if trainable := [name for name, param in owned.ignored.items() if param.requires_grad]:
        notices.append(
            f"{config.where(key)}: trainable parameters stay whole on every rank: {some(trainable)}. "
            "Their gradients are averaged over all data-parallel ranks in each backward."
        )
    if low := {d for d in stored if d.is_floating_point and d.itemsize < 4}:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in low))
        # With 64 micro-batches the sum was 5 times further off than one rounding of the exact one.
        also = (
            f", and gradients of micro-batches add up in {names}" if config.reduce_grads == "every_microbatch" else ""
        )
        notices.append(
            f"trainable parameters are stored in {names}: the optimizer steps on {names} values and loses small "
            f"updates (at lr 1e-5 no weight moves){also}. Load the model in float32; param_dtype alone sets the "
            "compute precision."
        )
    return notices


def _check_shared(owned: Ownership, key: str) -> Iterator[str]:
    def called(owner: str) -> str:
        return f"an {key.partition('_')[0]} module" if owner == IGNORED else owner

    for name, first, second in owned.shared:
        advice = (
            "FSDP2 needs both ends in one unit: nest the two modules in one entry of sub_modules_to_wrap, or leave "
            "both to the root."
        )
        if IGNORED in (first, second):
            both = key == "ignored_modules"
            advice = "Ignore both modules or none." if both else f"List both modules in {key} or none."
        yield f"parameter {name!r} is shared by {called(first)} and {called(second)}. {advice}"
    for name, fqn, first, second in owned.shared_modules:
        listed = key if IGNORED in (first, second) else "sub_modules_to_wrap"
        yield (
            f"module {fqn!r} is also {name!r} and so belongs to {called(first)} and to {called(second)}. Add {fqn!r} "
            f"to {listed}."
        )


def _check_unit(unit: str, params: Mapping[str, nn.Parameter]) -> Iterator[str]:
    sound = all(p.is_contiguous() and p.dim() and p.numel() for p in params.values())
    if sound and len({p.dtype for p in params.values() if p.requires_grad}) <= 1:
        return  # models have tens of thousands of parameters, nearly all of them fine
    if scalar := [n for n, p in params.items() if p.dim() == 0]:
        yield (
            f"{unit}: FSDP2 cannot shard the scalar parameter {some(scalar)}. Give it the shape (1,), "
            "or freeze it and list its module in ignored_modules."
        )
    if strided := [n for n, p in params.items() if p.dim() and not p.is_contiguous()]:
        yield f"{unit}: FSDP2 cannot shard the non-contiguous parameter {some(strided)}. Make it contiguous()."
    if empty := [n for n, p in params.items() if p.requires_grad and not p.numel()]:
        yield f"{unit}: FSDP2 cannot reduce the gradient of the empty parameter {some(empty)}. Freeze or remove it."
    dtypes: dict[str, list[str]] = {}
    for name, param in params.items():
        if param.requires_grad:
            dtypes.setdefault(str(param.dtype).removeprefix("torch."), []).append(name)
    if len(dtypes) > 1:
        listed = "; ".join(f"{dtype}: {some(names)}" for dtype, names in sorted(dtypes.items()))
        yield (
            f"{unit}: trainable parameters of several dtypes in one unit ({listed}). "
            "Cast them to one dtype before wrapping."
        )


def layout_of(owned: Ownership) -> str:
    """Return a digest of all parameters and buffers: name, owner, shape, dtype and whether it is trainable.

    Ranks with different layouts would run different collectives: gradients of frozen parameters are not reduced,
    buffers and ignored parameters are broadcast at start.
    """
    parts: list[str] = []
    kinds: dict[tuple[torch.Size, torch.dtype, bool], str] = {}  # few different ones, and their text is slow to make
    for owner, params in (*owned.units.items(), (None, owned.ignored)):
        parts.append(owner_name(owner))
        for name, param in params.items():
            kind = (param.shape, param.dtype, param.requires_grad)
            if kind not in kinds:
                kinds[kind] = str(kind)
            parts.append(f"{name} {kinds[kind]}")
    parts += [f"{name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in owned.buffers.items()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def some(names: Sequence[str]) -> str:
    """Return the first few of ``names`` and how many more there are, for messages."""
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")
