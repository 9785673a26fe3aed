"""From the meta device to shards: storage for what a plan has sharded there, and its initial values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..errors import PlanError
from ..plan import Unit
from ..plan.checks import some
from ..rng import RandomState
from ..start_values import broadcast_whole, keep_own_part
from .build import Recording, forget_recording
from .slots import Slot, is_marked, mark
from .tape import Tape, View


class Deferred:
    """The tensors of one model that get storage and values while it is sharded."""

    def __init__(self, root: nn.Module, source: Recording, slots: Sequence[Slot]) -> None:
        """Made by ``deferred_values``."""
        self._root = root
        self._tape = source.recorder.tape
        self._slots = slots

    @property
    def digest(self) -> str:
        """Equal on ranks that will fill the same tensors."""
        text = "\n".join(f"{slot.name} {slot.unset}" for slot in self._slots)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def allocate_whole(self, ignored: Sequence[nn.Module], device: torch.device) -> None:
        """Give buffers, and the parameters of ``ignored`` modules, storage on ``device`` (**in place**)."""
        whole = {id(param) for module in ignored for param in module.parameters()}
        made: dict[int, torch.Tensor] = {}  # one tensor under several names stays one, in plain attributes too
        for slot in self._slots:
            tensor = slot.get()
            if slot.kind in ("buffer", "cache") or (slot.kind == "parameter" and id(tensor) in whole):
                if id(tensor) not in made:
                    made[id(tensor)] = _replaced(tensor, torch.empty_like(tensor, device=device))
                slot.put(made[id(tensor)])
        for slot in self._slots:
            if slot.kind == "attribute" and id(slot.get()) in made:
                slot.put(made[id(slot.get())])

    def allocate_shards(self, units: Sequence[Unit], modules: Mapping[str, nn.Module], device: torch.device) -> None:
        """Give the shards that ``fully_shard`` made on the meta device storage (**in place**).

        Args:
            units: In the order of application, so that a shard is its unit's unless a nested one has it.
            modules: fqn -> module.
            device: Where shards live that are not offloaded.
        """
        made: dict[int, nn.Parameter] = {}
        for unit in units:
            place = torch.device("cpu") if unit.offload else device
            members = [modules[fqn] for fqn in unit.fqns]
            for module in {module: None for member in members for module in member.modules()}:
                for key, param in module._parameters.items():
                    if isinstance(param, DTensor) and param.is_meta:
                        if id(param) not in made:
                            made[id(param)] = _with_storage(param, place)
                        module._parameters[key] = made[id(param)]
            for member in members:
                if isinstance(member, FSDPModule):
                    # FSDP takes over what now stands in its parameters' place.
                    member._apply(_unchanged, recurse=False)  # type: ignore[no-untyped-call]

    def complete_buffers(self, device: torch.device) -> None:
        """Give what these slots hold storage and values (**in place**); generators and the recording stay as they are.

        For a model that shards and initialises itself, which takes buffers and other tensors for made.
        """
        self.allocate_whole((), device)
        self._fill(device, None, False)

    def complete(
        self,
        device: torch.device,
        group: dist.ProcessGroup | None,
        same_start: bool,
        random_states: Sequence[RandomState],
    ) -> None:
        """Compute every value, settle the random generators, forget the recording (**in place**).

        **Collective** over ``group`` with ``same_start``.

        Args:
            device: This rank's device.
            group: The data-parallel group.
            same_start: Whether all ranks take the first rank's values.
            random_states: The sources of random numbers, the host's own ones included.
        """
        self._fill(device, group, same_start)
        settle(self._tape, random_states)
        forget_recording(self._root)
        self._guard(group, device)

    def _fill(self, device: torch.device, group: dist.ProcessGroup | None, same_start: bool) -> None:
        by_buffer: dict[int, list[tuple[Slot, View]]] = {}
        for slot in self._slots:
            if slot.view is not None and not slot.unset:
                by_buffer.setdefault(id(slot.view.buffer), []).append((slot, slot.view))
            elif slot.kind != "attribute":
                mark(slot.get())
        # In the order of draws: each is made once then, and what one tensor leaves a generator at is the next's start.
        for slots in sorted(by_buffer.values(), key=lambda slots: self._tape.last_draw(slots[0][1].buffer)):
            self._fill_buffer(slots, device, group, same_start)

    def _fill_buffer(
        self,
        slots: Sequence[tuple[Slot, View]],
        device: torch.device,
        group: dist.ProcessGroup | None,
        same_start: bool,
    ) -> None:
        # A function of its own, so that nothing holds these values while the next ones are computed.
        done: set[int] = set()
        for (slot, _), value in zip(slots, self._tape.values([view for _, view in slots])):
            if slot.kind == "attribute":
                if slot.get().is_meta:
                    slot.put(value)
            elif id(slot.get()) not in done:
                done.add(id(slot.get()))
                if same_start and slot.kind == "parameter":
                    broadcast_whole([value], device.type, group)
                keep_own_part(slot.get(), value)

    def _guard(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Refuse the first forward as long as a tensor has no value (**in place**; that forward is **collective**)."""
        unset = [slot for slot in self._slots if slot.unset and slot.kind in ("parameter", "buffer")]
        if not unset:
            return

        def refuse(_module: nn.Module, _args: object) -> None:
            flags = torch.tensor([is_marked(slot.get()) for slot in unset], dtype=torch.int32, device=device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
            if names := [slot.name for slot, flag in zip(unset, flags.tolist()) if flag]:
                raise PlanError(
                    f"model: nothing initialised or loaded {some(names)}, so it cannot run yet. Load a checkpoint that "
                    "holds them, build the model in meta_init(), or let reset_parameters() or init_weights() give them "
                    "values."
                )
            handle.remove()

        handle = self._root.register_forward_pre_hook(refuse, prepend=True)


def settle(tape: Tape, random_states: Sequence[RandomState]) -> None:
    """Leave every generator and every source of random numbers where ordinary construction would (**in place**)."""
    for source in random_states:
        settled = tape.settled(source.get())
        if settled is not None:
            source.set(settled)
    tape.settle()


def _replaced(tensor: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, tensor.requires_grad)
    vars(real).update(vars(tensor))
    return real


def _with_storage(param: DTensor, device: torch.device) -> nn.Parameter:
    shards = DTensor.from_local(
        torch.empty_like(param.to_local(), device=device),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    return nn.Parameter(shards, param.requires_grad)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
