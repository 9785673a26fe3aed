"""What was done to tensors that have no storage yet, so that their values can be computed later, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .._torch_private import TreeSpec, tree_flatten, tree_unflatten
from .streams import Draw, Streams


@dataclass(eq=False)
class Buffer:
    """Memory to come. Writing all of it anew begins another buffer, so that what it held before is not computed.

    Attributes:
        device: Where ordinary construction would have it.
        dtype: Element type of the tensor it was made for.
        nbytes: Size.
        writers: Indices of the steps that write into it; none: nobody has given it a value.
    """

    device: torch.device
    dtype: torch.dtype
    nbytes: int
    writers: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class View:
    """How a tensor lies in its buffer."""

    buffer: Buffer
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Step:
    """One recorded call.

    Attributes:
        func: An operator of torch.
        leaves: Its arguments, flattened: views where they were recorded tensors, copies of other tensors.
        spec: How to unflatten them into ``(args, kwargs)``.
        touched: Buffers it reads or writes.
        overwritten: The buffer that it fills without reading it, if any.
        created: Index among the flattened outputs -> the view made there.
        draw: Set if it takes random numbers.
    """

    func: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: TreeSpec
    touched: tuple[Buffer, ...]
    overwritten: Buffer | None
    created: dict[int, View]
    draw: Draw | None


_Memory = dict[Buffer, torch.UntypedStorage]


class Tape:
    """The recorded steps, in their order. Values are computed anew for each question; nothing is kept."""

    def __init__(self) -> None:
        """Start empty."""
        self.steps: list[Step] = []
        self.streams = Streams()
        self._step_of_draw: list[int] = []
        self._memory: _Memory = {}
        self._done: set[int] = set()

    def add(self, step: Step, writes: Iterable[Buffer]) -> None:
        """Append ``step``, which writes into ``writes`` (what it creates included)."""
        for buffer in writes:
            buffer.writers.append(len(self.steps))
        if step.draw is not None:
            self._step_of_draw.append(len(self.steps))
        self.steps.append(step)

    def values(self, views: Sequence[View]) -> list[torch.Tensor]:
        """Return the values of ``views``; the draws among them leave the generators as they are.

        Only what these values depend on is computed, and memory is given back as soon as no step needs it any more.
        """
        wanted = {view.buffer for view in views}
        memory: _Memory = {}
        with torch.no_grad(), self.streams.kept():
            self._run(self._closure(dict.fromkeys(wanted, len(self.steps))), memory, wanted)
        return [_tensor(view, memory) for view in views]

    def last_draw(self, buffer: Buffer) -> int:
        """Return the number of the last draw that the value of ``buffer`` depends on, -1 for none."""
        draws = (self.steps[index].draw for index in self._closure({buffer: len(self.steps)}))
        return max((draw.number for draw in draws if draw is not None), default=-1)

    def peek(self, view: View) -> torch.Tensor:
        """Return the value of ``view`` while the recording goes on.

        What the last question needed is kept for the next: rejection sampling asks after each round.
        """
        closure = self._closure({view.buffer: len(self.steps)})
        todo = [index for index in closure if index not in self._done]
        if not self._continues(todo) or view.buffer not in self._memory and not todo:
            self.forget()
            todo = closure
        with torch.no_grad(), self.streams.kept():
            self._run(todo, self._memory, None)
        if todo:
            recent = {buffer for index in todo for buffer in self._buffers(index)} | {view.buffer}
            self._memory = {buffer: kept for buffer, kept in self._memory.items() if buffer in recent}
        self._done.update(todo)
        return _tensor(view, self._memory).clone()

    def forget(self) -> None:
        """Give back what :meth:`peek` keeps."""
        self._memory, self._done = {}, set()

    def check(self) -> None:
        """Raise unless every generator is where the recording left it, or was seeded since.

        Raises:
            PlanError: Random numbers were drawn since the recording ended.
        """
        self.streams.check()

    def settle(self) -> None:
        """Leave every generator where ordinary construction would have left it (**in place**)."""
        with torch.no_grad():
            self.streams.settle(self._make)

    def settled(self, state: Any) -> Any:
        """Return a random state of the host's with its tokens resolved, None if there are none."""
        with torch.no_grad():
            return self.streams.settled(state, self._make)

    def _continues(self, todo: Sequence[int]) -> bool:
        if todo and self._done and todo[0] < max(self._done):
            return False
        return all(
            buffer in self._memory or not any(writer in self._done for writer in buffer.writers)
            for index in todo
            for buffer in self.steps[index].touched
        )

    def _closure(self, upto: dict[Buffer, int]) -> list[int]:
        """Return, in order, the steps on which buffers depend.

        Args:
            upto: Buffer -> the index of the step before which its value is asked for (**changed in place**).
        """
        found: set[int] = set()
        pending = list(upto.items())
        while pending:
            buffer, before = pending.pop()
            for index in buffer.writers:
                if index >= before or index in found:
                    continue
                found.add(index)
                for touched in self.steps[index].touched:
                    if upto.get(touched, -1) < index:
                        upto[touched] = index
                        pending.append((touched, index))
        return sorted(found)

    def _buffers(self, index: int) -> Iterable[Buffer]:
        step = self.steps[index]
        return (*step.touched, *(view.buffer for view in step.created.values()))

    def _run(self, order: Sequence[int], memory: _Memory, wanted: set[Buffer] | None) -> None:
        """Carry out the steps of ``order`` in ``memory`` (**in place**).

        Args:
            order: Indices, ascending, closed under what they depend on.
            memory: Where their tensors live.
            wanted: The buffers to keep; None keeps all.
        """
        last = {buffer: index for index in order for buffer in self._buffers(index)}
        for index in order:
            step = self.steps[index]
            for buffer in step.touched:
                if buffer not in memory:
                    memory[buffer] = _storage(buffer, overwritten=buffer is step.overwritten)
            leaves = [_tensor(leaf, memory) if isinstance(leaf, View) else leaf for leaf in step.leaves]
            args, kwargs = tree_unflatten(leaves, step.spec)
            if step.draw is not None:
                self.streams.enter(step.draw, self._make)
            result = step.func(*args, **kwargs)
            if step.draw is not None:
                self.streams.leave(step.draw)
            if step.created:
                outputs, _ = tree_flatten(result)
                for at, view in step.created.items():
                    memory[view.buffer] = _laid_out(outputs[at], view)
            del leaves, args, kwargs, result
            if wanted is not None:
                for buffer in self._buffers(index):
                    if last[buffer] == index and buffer not in wanted:
                        memory.pop(buffer, None)
        if wanted is not None:
            for buffer in wanted - memory.keys():
                memory[buffer] = _storage(buffer, overwritten=False)

    def _make(self, draw: Draw) -> None:
        """Make one draw for the sake of its generator alone."""
        index = self._step_of_draw[draw.number]
        self._run([*self._closure({buffer: index for buffer in self.steps[index].touched}), index], {}, set())


def _tensor(view: View, memory: _Memory) -> torch.Tensor:
    storage = memory[view.buffer]
    whole = torch.empty(0, dtype=view.dtype, device=storage.device)
    return whole.set_(storage, view.offset, view.size, view.stride)


def _storage(buffer: Buffer, overwritten: bool) -> torch.UntypedStorage:
    """Return memory for ``buffer``. What nobody writes into is not a number: it must not pass for a value."""
    if not overwritten and buffer.dtype.is_floating_point and buffer.dtype.itemsize > 1 and buffer.nbytes:
        length = buffer.nbytes // buffer.dtype.itemsize
        return torch.full((length,), torch.nan, dtype=buffer.dtype, device=buffer.device).untyped_storage()
    return torch.empty(buffer.nbytes, dtype=torch.uint8, device=buffer.device).untyped_storage()


def _laid_out(output: torch.Tensor, view: View) -> torch.UntypedStorage:
    """Return the storage of ``output`` if it lies in it as recorded, else that of a copy that does."""
    storage = output.untyped_storage()
    same = output.stride() == view.stride and output.storage_offset() == view.offset
    if same and storage.nbytes() == view.buffer.nbytes:
        return storage
    memory = {view.buffer: torch.empty(view.buffer.nbytes, dtype=torch.uint8, device=output.device).untyped_storage()}
    _tensor(view, memory).copy_(output)
    return memory[view.buffer]
