"""``meta_init``: build a model on the meta device and record how it is initialised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from .recorder import Recorder

MARK = "_mindspeed_fsdp2_recording"
_FROM_DATA = ("tensor", "as_tensor", "asarray")  # by name: CPU mode puts other functions in their place
_READS_ALL = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
_META = torch.device("meta")


class Recording:
    """What ``meta_init`` saw; modules built inside hold it until their model is sharded."""

    def __init__(self, home: torch.device) -> None:
        """Start a recording; see :class:`Recorder`."""
        self.recorder = Recorder(home)

    def __deepcopy__(self, memo: Any) -> Recording:
        """Return the recording itself: a copy of a module was built in it as well."""
        return self


@contextmanager
def meta_init() -> Iterator[None]:
    """Build a model inside without memory for its parameters; ``wrap_model`` gives each rank its shards of the values.

    Every tensor that the code inside makes, wherever it puts it, lies on the meta device, and its initialisation is
    recorded. ``wrap_model`` draws each tensor whole, keeps this rank's shard, and lets go of the rest, so a rank never
    holds more than its shards and one tensor. The values, and the state of every random generator afterwards, are
    exactly those of building the model without ``meta_init``. Draw nothing between the two.

    Tensors made from data (``torch.tensor``, ``torch.from_numpy``) are real, and code that asks for a number
    (``.item()``, ``if tensor.any()``) gets it; arrays of ``.numpy()`` are read-only. Tensors that the code puts on the
    meta device by name get no values and draw nothing, as without ``meta_init``. Change the model inside only:
    ``model.bfloat16()``, tied weights.

    Raises:
        PlanError: Something inside cannot be recorded: random numbers drawn into a tensor made from data, a tensor
            given other memory, or an operator that does not run on the meta device.
    """
    around = torch.get_default_device() == _META  # torch.device("meta") around us is about all of the model
    with recording(None if around else _META) as made:
        built = False
        try:
            yield
            built = True
        finally:
            if not built:  # nobody will wrap it: the generators go on as after ordinary construction that failed there
                made.recorder.close()
                made.recorder.tape.settle()


@contextmanager
def recording(home: torch.device | None = None) -> Iterator[Recording]:
    """Record as :func:`meta_init` does and give out the recording.

    Args:
        home: Where meta tensors that were there before will live; None for the host. With the meta device itself, code
            that names it means it, and what is there gets no values; else it is a framework's, around all of the model.
    """
    made = Recording(home or torch.device("cpu"))

    def mark(module: nn.Module, _name: str, _tensor: object) -> None:
        vars(module)[MARK] = made

    with ExitStack() as entered:
        for register in (register_module_parameter_registration_hook, register_module_buffer_registration_hook):
            entered.callback(register(mark).remove)
        entered.enter_context(made.recorder)
        entered.enter_context(_Pretence(made.recorder, home == _META))
        entered.callback(made.recorder.close)
        yield made


def find_recording(root: nn.Module) -> Recording | None:
    """Return the recording in which a module of ``root`` was built, if any."""
    found = (vars(module).get(MARK) for module in root.modules())
    return next((mark for mark in found if isinstance(mark, Recording)), None)


def forget_recording(root: nn.Module) -> None:
    """Take the recording away from the modules of ``root`` (**in place**)."""
    for module in root.modules():
        vars(module).pop(MARK, None)


class _Pretence(TorchFunctionMode):
    """Lets recorded tensors say where they will live: ``torch.nn.init`` skips tensors on the meta device."""

    def __init__(self, recorder: Recorder, keeps_meta: bool) -> None:
        super().__init__()
        self._recorder = recorder
        self._keeps_meta = keeps_meta

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer in place of recorded tensors; everything else passes through."""
        kwargs = kwargs or {}
        if not self._recorder.open or self._recorder.busy:
            return func(*args, **kwargs)
        before = self._recorder.meant
        self._recorder.meant = self._keeps_meta and _names_meta(func, args, kwargs)
        try:
            return self._answer(func, args, kwargs)
        finally:
            self._recorder.meant = before

    def _answer(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(func, "__name__", "") in _FROM_DATA:
            meta = kwargs.get("device") is not None and torch.device(kwargs["device"]) == _META
            if meta and not self._keeps_meta and not isinstance(args[0] if args else None, torch.Tensor):
                # On the meta device the data would be lost. A framework's torch.device("meta") around us says so.
                kwargs = {name: value for name, value in kwargs.items() if name != "device"}
            return func(*args, **kwargs)
        view = self._recorder.view_of(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        if view is None:
            return func(*args, **kwargs)
        if func in _READS_ALL:
            return _read(func, self._recorder.value(args[0]), args[1:], kwargs)
        if func == _getter("device"):
            return view.buffer.device
        if func == _getter("is_meta"):
            return view.buffer.device == _META
        if func in (_getter("is_cuda"), _getter("is_cpu")):
            return func == _getter(f"is_{view.buffer.device.type}")
        return func(*args, **kwargs)


def _names_meta(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    asked = args[1] if func == torch.Tensor.to and len(args) > 1 else kwargs.get("device")
    return isinstance(asked, (str, torch.device)) and torch.device(asked) == _META


def _read(func: Callable[..., Any], value: torch.Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = func(value, *rest, **kwargs)
    if func != torch.Tensor.tolist and result.ctypes.data == value.data_ptr():
        result.flags.writeable = False  # what is written into a copy would be lost without a word
    return result


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__
