"""Turn mistakes that would train wrongly, or hang, into errors that say what to do."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ._torch_private import tree_flatten
from .errors import FSDP2Error

_REPLACED = "_mindspeed_fsdp2_replaced"
_GATHERED = "_mindspeed_fsdp2_gathered"
_MIXED = "mixed torch.Tensor and DTensor"
_FIRST_FORWARDS = 20


class UnitOrderCheck:
    """Compares, before each unit gathers, which unit every rank is about to run (**collective** in forward).

    A rank that skips a unit leaves the others waiting in its all-gather, or pairs it with another unit's. Here every
    rank sends the number of its next unit first, so a difference is seen by all of them at the same moment.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Mapping[str, Sequence[nn.Module]],
        group: dist.ProcessGroup | None,
        device: torch.device,
        always: bool,
    ) -> None:
        """Register the hooks (**in place**; after ``fully_shard``, so that they run before its own).

        Args:
            root: The root unit's module.
            units: Name -> modules of every unit that gathers something.
            group: The data-parallel ranks.
            device: Where their collectives run.
            always: Whether to go on after the first 20 forwards.
        """
        self._names = [*units, "the end of the forward"]
        self._root = root
        self._group = group
        self._device = device
        self._left = -1 if always else _FIRST_FORWARDS
        self._inside = False
        for number, modules in enumerate(units.values()):
            for module in modules:
                if module is not root:
                    module.register_forward_pre_hook(functools.partial(self._before, number), prepend=True)
        root.register_forward_pre_hook(self._begin, prepend=True)
        root.register_forward_hook(self._end, always_call=True)

    def _begin(self, _module: nn.Module, _args: Any) -> None:
        self._inside = self._left != 0

    def _before(self, number: int, _module: nn.Module, _args: Any) -> None:
        if self._inside:  # outside lies recomputation, whose order follows from the forward's
            self._compare(number)

    def _end(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if not self._inside:
            return
        self._inside = False
        self._left -= self._left > 0
        if output is not None:  # None: the forward raised
            self._compare(len(self._names) - 1)

    def _compare(self, number: int) -> None:
        mine = torch.tensor([number], device=self._device)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(every, mine, group=self._group)
        numbers = [int(other) for other in every]
        if len(set(numbers)) == 1:
            return
        self._inside = False
        ranks = dist.get_process_group_ranks(self._group) if self._group is not None else range(len(numbers))
        at: dict[int, list[int]] = {}
        for rank, other in zip(ranks, numbers):
            at.setdefault(other, []).append(rank)
        seen = "; ".join(
            f"{self._names[n]} on rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}" for n, r in at.items()
        )
        raise FSDP2Error(
            f"the ranks run different units: {seen}. Every rank must run the same units in the same order. List a "
            "tower that some ranks skip in optional_modules, or run it on every rank with a dummy input."
        )


def mark_replaced(params: Mapping[str, nn.Parameter]) -> None:
    """Mark parameters that ``fully_shard`` has replaced, so that an optimizer holding them is found out (**in place**).

    Args:
        params: fqn -> the parameter object of before.
    """
    for name, param in params.items():
        setattr(param, _REPLACED, name)


def watch_optimizers(root: nn.Module) -> None:
    """Keep optimizers and gathered parameters apart for as long as ``root`` lives.

    An optimizer built before the model was wrapped, or between a forward and its backward, holds parameters that the
    model drops: nothing would be learnt, without any error, so its first step is refused. And what a forward without
    a backward left gathered is resharded before each step, or the next forward would use the old values.

    Args:
        root: The root unit's module, every unit sharded.
    """
    own = {id(param) for param in root.parameters()}
    model = weakref.ref(root)
    seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
    waits_for_backward = False

    def backward_begins(_grad: torch.Tensor) -> None:
        nonlocal waits_for_backward
        waits_for_backward = False

    def note_forward(module: nn.Module, _args: Any, output: Any) -> None:
        nonlocal waits_for_backward
        tensors = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        waits_for_backward = bool(tensors)
        for tensor in tensors:
            tensor.register_hook(backward_begins)  # type: ignore[no-untyped-call]
        if not any(seen.values()):  # once an optimizer is known to hold the right ones, no other is expected
            for name, param in module.named_parameters():
                if id(param) not in own:
                    setattr(param, _GATHERED, name)

    def before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if optimizer not in seen:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            _refuse_stale(params)
            seen[optimizer] = any(id(param) in own for param in params)
        module = model()
        if module is not None and seen[optimizer] and waits_for_backward:
            for unit in module.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()

    root.register_forward_hook(note_forward)
    weakref.finalize(root, register_optimizer_step_pre_hook(before_step).remove)


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
