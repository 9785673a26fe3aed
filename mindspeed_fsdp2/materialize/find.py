"""Find out how every tensor of a model on the meta device comes to its value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import nn

from ..errors import PlanError
from ..plan import below_wrappers
from ..plan.checks import some
from .build import Recording, find_recording, recording
from .fill import Deferred
from .slots import Slot, no_mark, slots, slots_of

_OWN_BUFFERS = ("reset_running_stats", "reset_buffers", "init_buffers")
_OWN = ("reset_parameters", "_reset_parameters", "init_weights")


def deferred_values(model: nn.Module, device: torch.device) -> Deferred | None:
    """Return what is to be filled in ``model``, None if nothing of it is on the meta device.

    A model that was not built in ``meta_init`` is initialised by its own methods here, on the meta device: by
    ``_init_weights(module)`` of a module around, by ``init_weights()``, or by each module's ``reset_parameters()``.

    Args:
        model: Not sharded yet, possibly below wrappers.
        device: This rank's device.

    Raises:
        PlanError: Something would stay without value for good; all of it is named.
    """
    root = below_wrappers(model)
    source = find_recording(root)
    own = source is None
    if source is not None:
        source.recorder.close()
        source.recorder.tape.check()  # here, where all ranks learn of it
    if source is None and not any(tensor.is_meta for tensor in (*root.parameters(), *root.buffers())):
        return None  # nothing else is looked into, which takes time in a large model
    if source is None:
        with recording(device) as source, torch.no_grad():
            _initialise(root, source)
    found = [
        Slot(slot.name, slot.get, slot.put, slot.kind, source.recorder.view_of(slot.get()))
        for slot in slots(root)
        if slot.get().is_meta
    ]
    if not own and (strange := [slot.name for slot in found if slot.view is None]):
        raise PlanError(
            f"model: {some(strange)} came to the meta device outside of meta_init, or was changed since. Build the "
            "whole model in meta_init(), and convert it there: model.bfloat16()."
        )
    held = {id(slot.get()) for slot in found if slot.kind in ("parameter", "buffer")}
    lost = [
        slot
        for slot in found
        if slot.unset and (no_mark(slot.get()) or slot.kind == "cache" or id(slot.get()) not in held)
    ]
    if lost:
        raise PlanError(
            f"model: nothing computes {some([slot.name for slot in lost])}, and no checkpoint holds it. Build the "
            "model in meta_init(), or let reset_parameters() or init_weights() of its module compute it."
        )
    return Deferred(root, source, found)


def deferred_buffers(model: nn.Module) -> Deferred | None:
    """Return what is to be filled of ``model`` apart from its parameters, None if it was not built in ``meta_init``.

    Args:
        model: Not sharded yet, possibly below wrappers.
    """
    root = below_wrappers(model)
    source = find_recording(root)
    if source is None:
        return None
    source.recorder.close()
    found = [slot for slot in slots(root) if slot.get().is_meta]
    params = {id(slot.get()) for slot in found if slot.kind == "parameter"}
    chosen = [slot for slot in found if id(slot.get()) not in params]
    return Deferred(root, source, [replace(slot, view=source.recorder.view_of(slot.get())) for slot in chosen])


def _initialise(root: nn.Module, source: Recording) -> None:
    """Let the model's own methods initialise what is on the meta device.

    A method is not called where it would give parameters other values than a method of a module around has.
    """

    def unset(tensor: torch.Tensor) -> bool:
        view = source.recorder.view_of(tensor)
        return tensor.is_meta if view is None else not view.buffer.writers

    for slot in slots(root):
        if slot.get().is_meta:
            source.recorder.adopt(slot.get())
    order = list(reversed(list(_children_last(root))))
    below: set[int] = set()  # modules with something to initialise in them or below
    for module in order:
        if any(id(child) in below for child in module.children()) or any(unset(s.get()) for s in slots_of(module)):
            below.add(id(module))
    around: dict[int, Callable[[nn.Module], None]] = {}
    for module in root.modules():  # outer modules come first, inner ones override them
        own = getattr(module, "_init_weights", None)
        if callable(own):
            around.update(dict.fromkeys((id(inner) for inner in module.modules()), own))
    whole = getattr(root, "init_weights", None)
    if not around and callable(whole):
        whole()
    for module in order:
        if id(module) in around and id(module) in below:  # it may initialise parameters of a child too
            around[id(module)](module)
        valued = [not unset(param) for param in module._parameters.values() if param is not None]
        names = _OWN if not any(valued) else _OWN_BUFFERS if all(valued) else ()
        method = next((own for name in names if callable(own := getattr(module, name, None))), None)
        missing = any(unset(slot.get()) for slot in slots_of(module))
        if missing and method is not None and (module is not root or method != whole):
            method()


def _children_last(root: nn.Module) -> Iterator[nn.Module]:
    seen: set[int] = set()
    pending = [root]
    while pending:
        module = pending.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            pending.extend(module.children())
