"""Building a model without memory: every tensor is made on the meta device, and what is done to it is recorded."""

from __future__ import annotations

from typing import Any

import torch

from .._torch_private import TorchDispatchMode, schema_of, tree_flatten, tree_unflatten
from ..errors import PlanError
from .streams import default_generator
from .tape import Buffer, Step, Tape, View

_META = torch.device("meta")
_HOST = torch.device("cpu")
# Operators that make a tensor without giving it a value.
_EMPTY = {"empty", "empty_strided", "empty_permuted", "empty_like", "new_empty", "new_empty_strided"}
# In-place operators whose result does not depend on what the tensor held.
_OVERWRITE = {
    *("normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_", "log_normal_", "cauchy_"),
    *("geometric_", "bernoulli_"),
}
# Operators that hand on what they are given: nothing, if nobody has given it a value.
_COPY = {"clone", "_to_copy", "copy_"}
_NEW_STORAGE = {"set_", "resize_", "resize_as_"}


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sends what makes tensors to the meta device and records calls on such tensors, while it is entered."""

    def __init__(self, home: torch.device) -> None:
        """Start with an empty tape.

        Args:
            home: The device of meta tensors that were there before.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape()
        self.open = True
        self.busy = False
        self.meant = False  # whether the call under way names the meta device and means it, unlike torch's own code
        self._home = home
        # Storage objects are kept, so that no later one gets their id; on the meta device they take no memory.
        self._buffers: dict[int, tuple[torch.UntypedStorage, Buffer]] = {}

    def close(self) -> None:
        """Record nothing more; calls pass through from here on."""
        self.open = False
        self.tape.forget()

    def view_of(self, tensor: torch.Tensor) -> View | None:
        """Return how a meta tensor lies in what was recorded; None for any other tensor."""
        if tensor.layout is not torch.strided:
            return None
        found = self._buffers.get(id(tensor.untyped_storage()))
        return None if found is None else _view(tensor, found[1])

    def adopt(self, tensor: torch.Tensor) -> None:
        """Record what happens to a meta tensor that was there before; nobody has given it a value yet."""
        self._known(tensor)

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what a recorded tensor holds at this point of the recording.

        Raises:
            PlanError: Nobody has given it a value.
        """
        view = self._known(tensor)
        if not view.buffer.writers:
            raise PlanError(
                "meta_init: the model's constructor reads a tensor that has no value: nothing wrote into it, or it "
                "was made on the meta device by name. Give it a value with torch's operators before."
            )
        before, self.busy = self.busy, True
        try:
            return self.tape.peek(view)
        finally:
            self.busy = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` on the meta device and record it, if it makes a tensor or is given a recorded one."""
        kwargs = dict(kwargs or {})
        if not self.open or self.busy:
            return func(*args, **kwargs)
        self.busy = True  # tensors must not say here that they are elsewhere
        try:
            return self._answer(func, args, kwargs)
        finally:
            self.busy = False

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        name = func.overloadpacket.__name__
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if tensors and not any(tensor.is_meta for tensor in tensors) and kwargs.get("device") != _META:
            if draws:
                raise PlanError(
                    f"meta_init: {name} draws random numbers into a tensor made from data, which would come out of "
                    "order. Make it with torch.empty, torch.zeros or the like."
                )
            return func(*args, **kwargs)
        if not tensors:
            if not any(argument.name == "device" for argument in schema_of(func).arguments):
                return func(*args, **kwargs)
            leaves, spec = tree_flatten((args, {"device": _HOST, **kwargs}))
        elif schema_of(func).returns and all("Tensor" not in str(given.type) for given in schema_of(func).returns):
            values = [self.value(leaf) if _is_meta(leaf) else leaf for leaf in leaves]  # a number decides what follows
            args, kwargs = tree_unflatten(values, spec)
            return func(*args, **kwargs)
        if name in _NEW_STORAGE:
            hint = " torch.load does: load after wrap_model, with load_full_state_dict." if name == "set_" else ""
            raise PlanError(f"meta_init: {name} gives a tensor other memory, which cannot be recorded.{hint}")
        return self._record(func, name, leaves, spec, draws)

    def _record(self, func: Any, name: str, leaves: list[Any], spec: Any, draws: bool) -> Any:
        args, kwargs = tree_unflatten(leaves, spec)
        views = {at: self._known(leaf) for at, leaf in enumerate(leaves) if _is_meta(leaf)}
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        device = _intended(kwargs.get("device"), tensors, views, self.meant)
        written = _written(func, args, kwargs)
        if any(not tensor.is_meta for tensor in written):
            raise PlanError(f"meta_init: {name} writes values that are not there yet into a tensor made from data.")
        on_meta = [leaf.to(_META) if isinstance(leaf, torch.Tensor) and not leaf.is_meta else leaf for leaf in leaves]
        meta_args, meta_kwargs = tree_unflatten(on_meta, spec)
        sizes = [tensor.untyped_storage().nbytes() for tensor in written]
        nowhere = all(place == _META for place in [self._known(tensor).buffer.device for tensor in written] or [device])
        try:
            result = func(*meta_args, **_placed(meta_kwargs, _META))
        except NotImplementedError as error:
            if nowhere:
                raise
            raise PlanError(  # code around may take the other for an answer, as torch's parametrizations do
                f"meta_init: {name} cannot be recorded: torch has no meta kernel for it, or the shape of its result "
                "depends on values. Build this part before meta_init, or the model without meta_init."
            ) from error
        if sizes != [tensor.untyped_storage().nbytes() for tensor in written]:
            raise PlanError(f"meta_init: {name} gives a tensor other memory, which cannot be recorded.")
        writes = {self._known(tensor).buffer for tensor in written}
        outputs = [out for out in tree_flatten(result)[0]]
        fresh = {at: out for at, out in enumerate(outputs) if _is_meta(out) and self._unknown(out)}
        if not writes and not fresh:
            return result  # a view
        if nowhere:  # ordinary construction would compute and draw nothing either
            for out in fresh.values():
                self._new(out, device)
            return result
        source = next((view.buffer for view in views.values() if view.buffer not in writes), None)
        if name in _COPY and source is not None and source.device == _META:
            raise PlanError(
                f"meta_init: {name} copies a tensor from the meta device, where it has no value. Call to_empty() and "
                "initialise it then."
            )
        valueless = name in _EMPTY or (name in _COPY and source is not None and not source.writers)
        created = {at: self._new(out, device) for at, out in fresh.items()}
        overwritten = None
        if name in _OVERWRITE and self._whole(written[0]):
            overwritten = self._renew(written[0])
            writes = {overwritten}
            views = {at: self._known(leaves[at]) if leaves[at] is written[0] else view for at, view in views.items()}
        if valueless and (overwritten is not None or not writes):
            return result
        _, kept_kwargs = tree_unflatten(leaves, spec)
        draw = None
        if draws:
            draw = self.tape.streams.record(kept_kwargs.get("generator") or default_generator(device))
        kept = [
            views.get(at, leaf.clone() if isinstance(leaf, torch.Tensor) else leaf) for at, leaf in enumerate(leaves)
        ]
        kept_args, kept_kwargs = tree_unflatten(kept, spec)
        flat, kept_spec = tree_flatten((kept_args, _placed(kept_kwargs, device)))
        touched = tuple({view.buffer for view in views.values()} | writes)
        step = Step(func, tuple(flat), kept_spec, touched, overwritten, created, draw)
        self.tape.add(step, [*writes, *(view.buffer for view in created.values())])
        return result

    def _known(self, tensor: torch.Tensor) -> View:
        """Return the view of a meta tensor; one that was there before the recording gets a buffer without value."""
        found = self._buffers.get(id(tensor.untyped_storage()))
        return self._new(tensor, self._home) if found is None else _view(tensor, found[1])

    def _unknown(self, tensor: torch.Tensor) -> bool:
        return id(tensor.untyped_storage()) not in self._buffers

    def _new(self, tensor: torch.Tensor, device: torch.device) -> View:
        storage = tensor.untyped_storage()
        buffer = Buffer(device, tensor.dtype, storage.nbytes())
        self._buffers[id(storage)] = (storage, buffer)
        return _view(tensor, buffer)

    def _whole(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()

    def _renew(self, tensor: torch.Tensor) -> Buffer:
        storage, old = self._buffers[id(tensor.untyped_storage())]
        new = Buffer(old.device, tensor.dtype, old.nbytes)
        self._buffers[id(storage)] = (storage, new)
        return new


def _is_meta(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _view(tensor: torch.Tensor, buffer: Buffer) -> View:
    return View(buffer, tensor.dtype, tensor.size(), tuple(tensor.stride()), int(tensor.storage_offset()))


def _intended(asked: Any, tensors: list[torch.Tensor], views: dict[int, View], meant: bool) -> torch.device:
    """Return where ordinary construction would put the result."""
    if asked is not None and (torch.device(asked) != _META or meant):
        return torch.device(asked)
    devices = [view.buffer.device for view in views.values()] + [t.device for t in tensors if not t.is_meta]
    elsewhere = [device for device in devices if device.type != "cpu"]  # a scalar may stay on the host
    return elsewhere[0] if elsewhere else devices[0] if devices else _HOST


def _placed(kwargs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return ``kwargs`` with another device, if they name one."""
    if kwargs.get("device") is None:
        return kwargs
    return {**kwargs, "device": device, **({"pin_memory": False} if "pin_memory" in kwargs else {})}


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for at, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = kwargs.get(argument.name) if argument.kwarg_only or at >= len(args) else args[at]
        found += [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]
    return found
