"""Random states that are not known yet: what a generator will hold once the draws recorded so far have been made."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..device import device_module
from ..errors import PlanError

_FAMILY = 0x4D45  # upper 16 bits of every seed set here


@dataclass(frozen=True)
class Draw:
    """One recorded call that takes random numbers.

    Attributes:
        number: Its place in the recording's order of draws.
        generator: Where it draws from.
        before: The generator's state before it, or the number of the draw after which that state comes about.
    """

    number: int
    generator: torch.Generator
    before: torch.Tensor | int


class Streams:
    """Follows generators through a recording in which nothing is drawn.

    After each recorded draw its generator is given a state of its own, a token that stands for the state to come.
    Whatever code does with states (seeding again, keeping one and putting it back, as Megatron's tracker does around
    each weight) moves tokens like the states they stand for, so every draw's stream is known without asking anybody.
    """

    def __init__(self) -> None:
        """Start without draws."""
        self._own: int | None = None
        self._draws: list[Draw] = []
        self._tokens: dict[bytes, int] = {}
        self._after: dict[int, torch.Tensor] = {}
        self._generators: dict[int, torch.Generator] = {}

    def record(self, generator: torch.Generator) -> Draw:
        """Return the draw that takes place now, and move ``generator`` past it (**in place**)."""
        state = generator.get_state()
        known = self._tokens.get(_key(state))
        if known is None:
            self._check(generator)
        if self._own is None:
            # Recordings that are under way at the same time must not take each other's tokens for their own. Each run
            # makes the same tokens all the same, should they ever be drawn from.
            self._own = (_FAMILY << 48) | (int.from_bytes(_key(state)[:2], "big") << 32)
        draw = Draw(len(self._draws), generator, state if known is None else known)
        self._draws.append(draw)
        self._generators[id(generator)] = generator
        generator.manual_seed(self._own | draw.number)
        self._tokens[_key(generator.get_state())] = draw.number
        return draw

    def enter(self, draw: Draw, make: Callable[[Draw], None]) -> None:
        """Bring the draw's generator to the state before it (**in place**).

        Args:
            draw: The draw about to be made.
            make: Makes an earlier draw whose outcome is not known yet, and calls :meth:`leave`.
        """
        missing: list[Draw] = []
        before = draw.before
        while isinstance(before, int) and before not in self._after:
            missing.append(self._draws[before])
            before = self._draws[before].before
        for earlier in reversed(missing):
            make(earlier)
        state = self._after[draw.before] if isinstance(draw.before, int) else draw.before
        draw.generator.set_state(state)

    def leave(self, draw: Draw) -> None:
        """Note the state of the generator after ``draw`` was made."""
        self._after[draw.number] = draw.generator.get_state()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Give every generator its present state back at exit."""
        states = [(generator, generator.get_state()) for generator in self._generators.values()]
        try:
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)

    def check(self) -> None:
        """Raise ``PlanError`` if a generator was drawn from since the recording ended."""
        for generator in self._generators.values():
            if _key(generator.get_state()) not in self._tokens:
                self._check(generator)

    def settle(self, make: Callable[[Draw], None]) -> None:
        """Turn every generator's token into the state it stands for (**in place**)."""
        for generator in self._generators.values():
            state = self.settled(generator.get_state(), make)
            if state is not None:
                generator.set_state(state)

    def settled(self, value: Any, make: Callable[[Draw], None]) -> Any:
        """Return ``value`` with the states that tokens in it stand for, None if it holds none.

        Args:
            value: A state as a tensor, a generator (settled **in place**), or a mapping of such.
            make: See :meth:`enter`.
        """
        if isinstance(value, torch.Generator):
            state = self.settled(value.get_state(), make)
            return None if state is None else value.set_state(state)
        if isinstance(value, Mapping):
            found = {name: self.settled(inner, make) for name, inner in value.items()}
            if all(inner is None for inner in found.values()):
                return None
            return {name: inner if found[name] is None else found[name] for name, inner in value.items()}
        number = self._tokens.get(_key(value)) if isinstance(value, torch.Tensor) else None
        if number is None:
            return None
        if number not in self._after:
            with self.kept():
                make(self._draws[number])
        return self._after[number].clone()

    def _check(self, generator: torch.Generator) -> None:
        seed = generator.initial_seed()
        if seed >> 48 != _FAMILY:
            return  # somebody seeded it
        if self._own is not None and seed >> 32 == self._own >> 32:
            raise PlanError(
                "meta_init: random numbers were drawn between building the model on the meta device and sharding it. "
                "The model's own draws come first and are made when it is sharded: draw after wrap_model."
            )
        raise PlanError(
            "meta_init: a model that was built before, in another meta_init, has not been wrapped yet, and its draws "
            "come first. Wrap it before, or build both in one meta_init."
        )


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator from which ``device`` draws unless it is given one."""
    if device.type == "cpu":
        return torch.default_generator
    module = device_module(device.type)
    current = module.current_device()  # this also makes the generators exist
    generator: torch.Generator = module.default_generators[current if device.index is None else device.index]
    return generator


def _key(state: torch.Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()  # a state of the host's has 5 kB
