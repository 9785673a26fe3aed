"""torch_dist: the optimizer's part of a checkpoint, under the keys that Megatron's own optimizers use.

Megatron finds a parameter's entry by the id of its local tensor, which PyTorch makes anew at every call since 2.13, and
knows one step count for all parameters. Here entries are found by the parameter itself, and parameters that have taken
fewer steps than the others (an optional tower, an expert without tokens) keep their own count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor, optim_state_to_sharding_state
from torch.distributed.tensor import DTensor

from ...errors import CheckpointError
from .dist_model import parameter_entries
from .dist_pieces import ShardFactory

_STEP = "step"
_COMMON_STEP = "common_step"
_OWN_STEPS = "fsdp2_steps"
_NAMES = "fsdp2_names"
_MAIN = "fsdp2_main_params"
_MEGATRON_MAIN = "fp32_from_fp16_params"


def wrap_sharded_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an optimizer's ``sharded_state_dict`` for models under FSDP2; for others it is ``original``."""

    @functools.wraps(original)
    def sharded_state_dict(
        self: Any, model_sharded_state_dict: Any, is_loading: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        entries = parameter_entries(model_sharded_state_dict)
        if not entries:
            return original(self, model_sharded_state_dict, is_loading, *args, **kwargs)
        if is_loading:
            _fill_states(self)
        return _sharded_state(self, entries, is_loading)

    return sharded_state_dict


def wrap_load_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an optimizer's ``load_state_dict`` that takes what :func:`wrap_sharded_state_dict` asked for."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        names = state_dict.pop(_NAMES, None) if isinstance(state_dict, dict) else None
        if names is None:
            original(self, state_dict)
            return
        steps = state_dict.pop(_OWN_STEPS, {})
        main = state_dict.pop(_MAIN, None)
        inner = state_dict
        if main is not None:
            state_dict[_MEGATRON_MAIN] = []
            inner = state_dict["optimizer"]
        _unwrap_plain_states(self, inner["state"])
        try:
            original(self, state_dict)
        except ValueError as error:
            if "parameter group" not in str(error):
                raise
            raise CheckpointError(
                f"load_checkpoint: the optimizer's parameter groups are others than those saved ({error}). In "
                "torch_dist Megatron knows them by their learning rates and decays: give --lr, --min-lr and "
                "--weight-decay as they were, add --no-load-optim, or save in torch_dcp."
            ) from error
        if main is not None:
            with torch.no_grad():
                for number, param in enumerate(_parameters(self)):
                    param.copy_(main[number])
        _restore_steps(self, {number: steps[name] for number, name in names.items() if name in steps})

    return load_state_dict


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    """Return what the inner optimizer steps on, in the order of the ids in its state dict."""
    return list({id(p): p for group in optimizer.optimizer.param_groups for p in group["params"]}.values())


def _model_parameters(optimizer: Any) -> list[torch.Tensor]:
    """Return the model's parameters in the order of :func:`_parameters`: fp32 copies stand for bf16 ones."""
    model_of = {
        id(main): model
        for models, mains in zip(
            getattr(optimizer, "float16_groups", ()), getattr(optimizer, "fp32_from_float16_groups", ())
        )
        for model, main in zip(models, mains)
    }
    return [model_of.get(id(param), param) for param in _parameters(optimizer)]


def _fill_states(optimizer: Any) -> None:
    """Give every parameter the state that a checkpoint is read into (**in place**)."""
    inner = optimizer.optimizer
    if optimizer.init_state_fn is not None:
        optimizer.init_state_fn(inner, optimizer.config)
        return
    if not isinstance(inner, torch.optim.SGD):
        raise CheckpointError(
            f"optimizer: Megatron does not say which state {type(inner).__name__} keeps, so it cannot be read from a "
            "torch_dist checkpoint. Add --no-load-optim, or write --ckpt-format torch_dcp."
        )
    for group in inner.param_groups:
        for param in group["params"]:
            if group["momentum"] and inner.state[param].get("momentum_buffer") is None:
                inner.state[param]["momentum_buffer"] = torch.zeros_like(param.detach())


def _sharded_state(optimizer: Any, entries: Mapping[int, tuple[str, ShardFactory]], is_loading: bool) -> dict[str, Any]:
    """Return the optimizer's sharded state dict; see :func:`wrap_sharded_state_dict`."""
    state_dict: dict[str, Any] = optimizer.state_dict()
    inner = state_dict.get("optimizer", state_dict)
    model_params = _model_parameters(optimizer)
    missing = [str(tuple(param.shape)) for param in model_params if id(param) not in entries]
    if missing:
        raise CheckpointError(
            f"optimizer: it holds parameters of the shapes {', '.join(missing[:5])} that are not in the model's "
            "sharded_state_dict(). Build the optimizer from this model's parameters."
        )
    named = [entries[id(param)] for param in model_params]
    by_number = {number: entry for number, (_, entry) in enumerate(named)}
    states, steps = _completed(inner["state"], _parameters(optimizer))
    inner = {"state": states, "param_groups": inner["param_groups"]}
    optim_state_to_sharding_state(inner, by_number, exclude_keys=(_STEP,))
    if steps:
        common = max(steps.values(), key=float)
        inner["state"][_COMMON_STEP] = common
        own = {named[number][0]: float(step) for number, step in steps.items() if float(step) != float(common)}
        if own:
            state_dict[_OWN_STEPS] = own
    if is_loading:
        state_dict[_NAMES] = LocalNonpersistentObject({number: name for number, (name, _) in enumerate(named)})
    if "optimizer" not in state_dict:
        return {**state_dict, **inner}
    state_dict["optimizer"] = inner
    # Megatron's lists hold only the copies of bf16 parameters. Here shards are their own fp32 copies, and a list that
    # is empty on some ranks would not survive Megatron's own handling.
    del state_dict[_MEGATRON_MAIN]
    state_dict[_MAIN] = {
        # The same shard is read as the model's weight too, and its bf16 values must not win: read apart.
        number: make_sharded_optimizer_tensor(
            by_number[number], param.detach().clone() if is_loading else param.detach(), "optimizer.state.fp32_param"
        )
        for number, param in enumerate(_parameters(optimizer))
    }
    return state_dict


def _completed(
    states: Mapping[int, dict[str, Any]], params: list[torch.Tensor]
) -> tuple[dict[int, dict[str, Any]], dict[int, Any]]:
    """Return the state tensors of every parameter, and its step count where the optimizer keeps one.

    A parameter that has no state yet gets zeros and step 0, for a reader asks for all parameters alike.

    Raises:
        CheckpointError: A state is neither like its parameter nor a step count.
    """
    tensors: dict[int, dict[str, Any]] = {}
    steps: dict[int, Any] = {}
    strange = set()
    for number, param in enumerate(params):
        tensors[number] = {}
        for name, value in states.get(number, {}).items():
            if name == _STEP:
                steps[number] = value.full_tensor() if isinstance(value, DTensor) else value
            elif isinstance(value, torch.Tensor) and _lies_as(value, param):
                tensors[number][name] = value
            elif value is not None:
                strange.add(name)
    if strange:
        raise CheckpointError(
            f"optimizer: its state {', '.join(map(repr, sorted(strange)))} has not the shape of its parameter. Write "
            "--ckpt-format torch_dcp, or add --no-save-optim."
        )
    shape = next((values for values in tensors.values() if values), {})
    for number, param in enumerate(params):
        if not tensors[number]:
            tensors[number] = {name: torch.zeros_like(param.detach(), dtype=v.dtype) for name, v in shape.items()}
            if steps:
                steps.setdefault(number, 0)
    return tensors, steps


def _lies_as(value: torch.Tensor, param: torch.Tensor) -> bool:
    if isinstance(param, DTensor):
        local = param.to_local()
        return value.placements == param.placements if isinstance(value, DTensor) else value.shape == local.shape
    return value.shape == param.shape


def _unwrap_plain_states(optimizer: Any, loaded: Mapping[Any, Any]) -> None:
    """Give shards of state back as plain tensors where the optimizer keeps them so (**in place**)."""
    for number, param in enumerate(_parameters(optimizer)):
        for name, value in loaded.get(number, {}).items():
            kept = optimizer.optimizer.state[param].get(name)
            if isinstance(value, DTensor) and kept is not None and not isinstance(kept, DTensor):
                loaded[number][name] = value.to_local()


def _restore_steps(optimizer: Any, steps: Mapping[int, float]) -> None:
    """Give parameters their own step counts; those that never took a step lose the zeros they were saved with."""
    state = optimizer.optimizer.state
    for number, param in enumerate(_parameters(optimizer)):
        step = steps.get(number)
        if step == 0:
            state.pop(param, None)
        elif step is not None:
            kept = state[param][_STEP]
            state[param][_STEP] = torch.full_like(kept, step) if isinstance(kept, torch.Tensor) else int(step)
