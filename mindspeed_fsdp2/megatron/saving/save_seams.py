"""Megatron's save of FSDP2 models, wrapped where it collects and where it writes."""

from __future__ import annotations

import functools
import inspect
import os
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from megatron.training import get_args
from megatron.training.async_utils import maybe_finalize_async_save
from torch import nn

from ...checkpoint.coordination import Coordination, coordination_of
from ...checkpoint.publish import discard
from ...checkpoint.write import explained
from ...errors import CheckpointError
from ...plan import below_wrappers
from .background import NAME, strategy
from .dcp_write import MegatronState, Prepared, prepare_write
from .folders import TORCH_DCP, TORCH_DIST, begin_iteration, drop_empty, prepare, publish_iteration
from .named_optimizer import NamedOptimizer
from .tracker import stage

_ITERATION = re.compile(r"iter_(\d{7,})")


def sharded_run(args: Namespace) -> bool:
    """Return whether this run uses FSDP2: without it everything stays Megatron's own."""
    return bool(getattr(args, "use_torch_fsdp2", False))


def root_of(model: Any) -> nn.Module:
    """Return the model below Megatron's wrappers; Megatron passes a list of one chunk, or the chunk."""
    return below_wrappers(model[0] if isinstance(model, list) else model)


class SaveSeams:
    """The wrappers share the save that is under way."""

    def __init__(self) -> None:
        """Start without one."""
        self._ranks: Coordination | None = None

    def wrap_save_checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``save_checkpoint`` that clears what interrupted saves have left and finds out whether it can write.

        An error of the first rank alone would leave the others waiting.
        """

        @functools.wraps(original)
        def save_checkpoint(*rest: Any, **named: Any) -> Any:
            args = get_args()
            if not sharded_run(args):
                return original(*rest, **named)
            given = inspect.signature(original).bind(*rest, **named).arguments
            directory = _directory(args, bool(given.get("non_persistent_ckpt", False)))
            if args.async_save:
                # Two saves at once would mix up their agreements.
                maybe_finalize_async_save(blocking=True)
            ranks = coordination_of(root_of(given["model"]), None)
            ranks.from_first(lambda: explained(directory, lambda: prepare(directory)), "save_checkpoint")
            self._ranks = ranks
            try:
                return original(*rest, **named)
            except CheckpointError:
                if ranks.rank == 0:
                    drop_empty(directory)
                raise
            finally:
                self._ranks = None

        return save_checkpoint

    def wrap_generate_state_dict(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``generate_state_dict`` that keys the optimizer's state by name, for torch_dcp."""

        @functools.wraps(original)
        def generate_state_dict(args: Namespace, model: Any, optimizer: Any, *rest: Any, **named: Any) -> Any:
            if self._ranks is None or args.ckpt_format != TORCH_DCP:
                return original(args, model, optimizer, *rest, **named)
            root = root_of(model)
            stand_in = None if optimizer is None else NamedOptimizer(optimizer, root)
            return MegatronState(original(args, model, stand_in, *rest, **named), root)

        return generate_state_dict

    def wrap_dcp_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return PyTorch's ``save`` that writes Megatron's torch_dcp state itself; anything else is not its affair."""

        @functools.wraps(original)
        def save(state_dict: Any, *rest: Any, **named: Any) -> Any:
            if not isinstance(state_dict, MegatronState) or self._ranks is None:
                return original(state_dict, *rest, **named)
            self._prepare(state_dict, Path(named["storage_writer"].path)).write()
            return None

        return save

    def wrap_async_strategy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``get_async_strategy`` that has a strategy of its own for torch_dcp."""

        @functools.wraps(original)
        def get_async_strategy(*rest: Any, **named: Any) -> Any:
            args = get_args()
            module = inspect.signature(original).bind(*rest, **named).arguments.get("module")
            if module is not None or not sharded_run(args) or not args.async_save or args.ckpt_format != TORCH_DCP:
                return original(*rest, **named)
            return NAME, strategy(self._prepare)

        return get_async_strategy

    def _prepare(self, state: Any, target: Path) -> Prepared:
        if self._ranks is None or not isinstance(state, MegatronState):
            raise CheckpointError(f"{target}: only Megatron's save_checkpoint saves in torch_dcp. Call that.")
        return prepare_write(state, target, self._ranks, parallel_state.get_data_parallel_rank())

    def wrap_dist_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``dist_checkpointing.save`` that writes into a hidden folder and renames it when it is complete."""

        @functools.wraps(original)
        def save(*rest: Any, **named: Any) -> Any:
            ranks = self._ranks
            bound = inspect.signature(original).bind(*rest, **named)
            if ranks is None or bound.arguments.get("async_sharded_save", False):
                return original(*rest, **named)
            target = Path(bound.arguments["checkpoint_dir"])
            what = f"save of {target.name}"
            folder = ranks.from_first(lambda: explained(target, lambda: begin_iteration(target)), what)
            bound.arguments["checkpoint_dir"] = os.fspath(folder)
            try:
                ranks.agree(lambda: explained(target, lambda: original(*bound.args, **bound.kwargs)), what)
                ranks.from_first(lambda: explained(target, lambda: _publish_dist(folder, target)), what)
            except CheckpointError:
                if ranks.rank == 0:
                    discard(folder)
                raise
            return None

        return save


def _publish_dist(folder: Path, target: Path) -> None:
    if found := _ITERATION.fullmatch(target.name):
        stage(target.parent, str(int(found[1])))
    publish_iteration(folder, target, TORCH_DIST)


def _directory(args: Namespace, non_persistent: bool) -> Path:
    if not non_persistent:
        return Path(args.save)
    return Path(getattr(args, "non_persistent_global_ckpt_dir", None) or os.path.join(args.save, "non_persistent"))
