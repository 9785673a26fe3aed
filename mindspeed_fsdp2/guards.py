"""Turn mistakes that would train wrongly, or hang, into errors that say what to do."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .backward import Backward
from .errors import FSDP2Error
from .gathering import reshard_all
from .recovery import Recovery
from .step_hooks import before_each_step
from .step_state import StepState

logger = logging.getLogger("mindspeed_fsdp2")

_REPLACED = "_mindspeed_fsdp2_replaced"
_GATHERED = "_mindspeed_fsdp2_gathered"
_MIXED = "mixed torch.Tensor and DTensor"


def mark_replaced(params: Mapping[str, nn.Parameter]) -> None:
    """Mark parameters that ``fully_shard`` has replaced, so that an optimizer holding them is found out (**in place**).

    Args:
        params: fqn -> the parameter object of before.
    """
    for name, param in params.items():
        setattr(param, _REPLACED, name)


def watch_optimizers(root: nn.Module, state: StepState, backward: Backward) -> None:
    """Keep optimizers and gathered parameters apart for as long as ``root`` lives.

    An optimizer built before the model was wrapped, or between a forward and its backward, holds parameters that the
    model drops: nothing would be learnt, without any error, so its first step is refused. And what a forward without
    a backward left gathered is resharded before each step, or the next forward would use the old values. A step before
    the last micro-batch, which reduces the gradients, is refused, and one after a backward that failed.

    Args:
        root: The root unit's module, every unit sharded.
        state: Tells whether a micro-batch is held.
        backward: Announces backwards, and knows of failed ones.
    """
    own = {id(param) for param in root.parameters()}
    model, watch = weakref.ref(root), weakref.ref(backward)  # whose listeners hold the model
    seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
    sizes: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()

    def note_forward(module: nn.Module, _args: Any, _output: Any) -> None:
        if not any(seen.values()):  # once an optimizer is known to hold the right ones, no other is expected
            for name, param in module.named_parameters():
                if id(param) not in own:
                    setattr(param, _GATHERED, name)

    def begins() -> None:
        state.unfinished = state.holding

    def before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        module, backward = model(), watch()
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if sizes.get(optimizer) != size:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            _refuse_stale(params)
            if module is not None:
                _refuse_added(params, own, module)
            seen[optimizer] = any(id(param) in own for param in params)
            sizes[optimizer] = size
            if seen[optimizer]:
                _update_one_by_one(optimizer)
        if module is None or backward is None or not seen[optimizer]:
            return
        if state.unfinished:
            raise FSDP2Error(
                "optimizer: step() came after a micro-batch that is not its step's last, so gradients are not reduced "
                "yet. Run the last micro-batch of every step in accumulate(model, last=True)."
            )
        if backward.failed or (backward.running and backward.stopped()):
            raise FSDP2Error(
                "optimizer: step() came after a backward that ended with an exception, so the gradients of this step "
                "are incomplete. Call model.zero_grad() and run the step again from its first micro-batch."
            )
        # Any forward since the backward, of the root or of a part of it, may have left units gathered; the next one
        # would compute with the values of before the step. An optimizer that steps inside backward leaves them be.
        if not backward.running:
            reshard_all(module)

    root.register_forward_hook(note_forward)
    backward.on_begin(begins)
    before_each_step(root, before_step)


def _update_one_by_one(optimizer: torch.optim.Optimizer) -> None:
    """Switch off ``foreach`` for groups that hold sharded and whole parameters on an accelerator (**in place**).

    There it is torch's default, and it cannot update the two kinds together; on the host it is off anyway.
    """
    for group in optimizer.param_groups:
        kinds = {isinstance(param, DTensor) for param in group["params"] if param.device.type != "cpu"}
        if len(kinds) == 2 and "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = False
            logger.warning(
                "optimizer: a parameter group holds both sharded and whole parameters, which PyTorch cannot update "
                "together: foreach=False is set for it. Give the parameters of ignored modules a group of their own."
            )


def _refuse_stale(params: Sequence[nn.Parameter]) -> None:
    for mark, when in (
        (_REPLACED, "before the model was wrapped"),
        (_GATHERED, "while parameters were gathered, after a forward without a backward,"),
    ):
        stale = [name for param in params if (name := getattr(param, mark, None)) is not None]
        if stale:
            more = f" and {len(stale) - 3} more" if len(stale) > 3 else ""
            raise FSDP2Error(
                f"optimizer: it was built {when} and steps on parameters that the model no longer uses: "
                f"{', '.join(stale[:3])}{more}. Build the optimizer right after wrap_model."
            )


def _refuse_added(params: Sequence[nn.Parameter], own: set[int], module: nn.Module) -> None:
    names = {id(param): name for name, param in module.named_parameters() if not isinstance(param, DTensor)}
    added = [names[id(param)] for param in params if id(param) in names and id(param) not in own]
    if added:
        more = f" and {len(added) - 3} more" if len(added) > 3 else ""
        raise FSDP2Error(
            f"optimizer: it holds parameters that came into the model after wrap_model: {', '.join(added[:3])}{more}. "
            "Their gradients would not be averaged over the ranks. Add modules before wrap_model."
        )


def complete_zero_grad(root: nn.Module, recovery: Recovery) -> None:
    """Let ``zero_grad`` reach gradients it would not see (**in place**).

    Those of parameters that a forward without a backward left gathered, and what a step that was given up left behind.
    """
    original = root.zero_grad

    @functools.wraps(original)
    def zero_grad(set_to_none: bool = True) -> None:
        recovery.drop()
        reshard_all(root)
        original(set_to_none)

    vars(root)["zero_grad"] = zero_grad


def explain_sharded_use(modules: Mapping[str, nn.Module]) -> None:
    """Say the way out where a forward meets a weight that is sharded at that moment (**in place**).

    Args:
        modules: Name -> module of every unit.
    """
    for name, module in modules.items():
        module.forward = _explained(name, module.forward)


def _explained(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except RuntimeError as error:
            if _MIXED not in str(error):
                raise
            raise FSDP2Error(
                f"{name}: a weight was used while it is sharded. Either a module's forward() was called directly: call "
                "the module itself, so that its unit gathers. Or code reads the weight of a unit from outside, as a "
                "fused loss does with the head's: leave that module to the root unit, or wrap the use in "
                "full_parameters(model)."
            ) from error

    return explained


def refuse_deepcopy(root: nn.Module) -> None:
    """Make ``copy.deepcopy`` of a wrapped model say what to do instead (**in place**)."""

    def deepcopy(_memo: Any) -> Any:
        raise FSDP2Error(
            "a wrapped model cannot be copied. For an average of the weights keep "
            "[p.detach().clone() for p in model.parameters()] and update these shards after each step; for a second "
            "model build it anew and wrap it."
        )

    vars(root)["__deepcopy__"] = deepcopy


def refuse_conversion(root: nn.Module) -> None:
    """Let ``to()``, ``half()``, ``cuda()`` and the like pass only while they change nothing (**in place**).

    The plan, the gathered parameters and their buffers were made for one dtype and device.
    """
    apply: Callable[..., nn.Module] = root._apply

    def guarded(convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        kinds = dict.fromkeys((tensor.dtype, tensor.device) for tensor in (*root.parameters(), *root.buffers()))
        for dtype, device in kinds:
            new = convert(torch.empty(0, dtype=dtype, device=device))
            if (new.dtype, new.device) != (dtype, device):
                raise FSDP2Error(
                    f"a wrapped model cannot be converted from {_kind(dtype, device)} to "
                    f"{_kind(new.dtype, new.device)}. Convert it before wrap_model, which moves it to the device too."
                )
        return apply(convert, recurse)

    vars(root)["_apply"] = guarded


def _kind(dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')} on {device}"
