"""Megatron's load into FSDP2 models, wrapped where it chooses a folder and where it reads."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.training import get_args

from ...checkpoint.coordination import Coordination, coordination_of
from ...errors import CheckpointError
from .choice import check_directory, examine
from .dcp_read import Wanted, read
from .folders import STOCK_DCP, TORCH_DCP, kind_of, unfinished_in
from .model_values import round_to_bf16
from .named_optimizer import NamedOptimizer
from .plain_state import read_state
from .save_seams import root_of, sharded_run
from .stock_dcp import read_weights

logger = logging.getLogger("mindspeed_fsdp2")


def partial_load(args: Namespace) -> bool:
    """Return whether the flags ask for what fits of a checkpoint, and a report of the rest."""
    return getattr(args, "dist_ckpt_strictness", None) in ("log_all", "ignore_all")


@dataclass
class _Loading:
    """The load that is under way."""

    ranks: Coordination
    args: Namespace
    named: NamedOptimizer | None
    strict: bool
    folder: Path | None = None

    def wanted(self) -> Wanted:
        released = self.folder is not None and self.folder.name == "release"
        fresh = released or self.args.finetune
        return Wanted(
            optimizer=not (fresh or self.args.no_load_optim),
            random_states=not (fresh or self.args.no_load_rng),
            bf16=bool(self.args.bf16),
            partial=not self.strict,
            own_schedule=bool(self.args.override_opt_param_scheduler),
        )


def wrap_fp8_repair(original: Callable[..., None]) -> Callable[..., None]:
    """Return ``fix_fp8_params_lose_precision_when_loading_dist_ckpt`` that has nothing to do without that package.

    0.12 asks for the version of Transformer Engine at every load of torch_dist, and fails where there is none.
    """

    @functools.wraps(original)
    def fix_fp8_params_lose_precision_when_loading_dist_ckpt(state_dict: Any) -> None:
        if importlib.util.find_spec("transformer_engine") is not None:
            original(state_dict)

    return fix_fp8_params_lose_precision_when_loading_dist_ckpt


class _NoScheduler:
    """Megatron's load of torch_dcp asks for the scheduler's state even where it was given none."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Any) -> None:
        """Nothing: there is no scheduler."""


class LoadSeams:
    """The wrappers share the load that is under way."""

    def __init__(self) -> None:
        """Start without one."""
        self._loading: _Loading | None = None

    def wrap_load_checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``load_checkpoint`` that loads what the flags say, or raises the same error on every rank."""

        @functools.wraps(original)
        def load_checkpoint(*rest: Any, **named: Any) -> Any:
            args = get_args()
            if not sharded_run(args):
                return original(*rest, **named)
            bound = inspect.signature(original).bind(*rest, **named)
            bound.apply_defaults()
            given = bound.arguments
            root = root_of(given["ddp_model"])
            loading = _Loading(
                coordination_of(root, None), args, None, bool(given["strict"]) and not partial_load(args)
            )
            directory = loading.ranks.agree(lambda: check_directory(args, given["load_arg"]), "load_checkpoint")
            traces = (
                []
                if directory is None
                else loading.ranks.from_first(lambda: unfinished_in(directory), "load_checkpoint")
            )
            for line in traces if loading.ranks.rank == 0 else ():
                logger.warning("%s: %s; it is not loaded.", directory, line)
            if args.ckpt_format == TORCH_DCP:
                loading.named = given["optimizer"] = NamedOptimizer(given["optimizer"], root)
                given["opt_param_scheduler"] = given["opt_param_scheduler"] or _NoScheduler()
            # Megatron's callers ask for torch_dist to be left as what was filled in place: it would drop step counts,
            # what a factory merged, and every value of a legacy checkpoint.
            given["skip_load_to_model_and_opt"] = False
            given["strict"] = loading.strict
            self._loading = loading
            try:
                result = original(*bound.args, **bound.kwargs)
            except AssertionError as error:  # flags that differ from those of the checkpoint, equal on all ranks
                raise CheckpointError(
                    f"{directory}: {error}. Give the flags it was saved with; --override-opt_param-scheduler takes the "
                    "schedule from the command line, --finetune starts a new one."
                ) from error
            except SystemExit as end:
                if loading.folder is None:  # --exit-on-missing-checkpoint
                    raise
                raise CheckpointError(f"{loading.folder}: it cannot be loaded; Megatron says why above.") from end
            finally:
                self._loading = None
            for chunk in given["ddp_model"] if isinstance(given["ddp_model"], list) else [given["ddp_model"]]:
                if (refused := getattr(chunk, "refused_load", None)) is not None:  # swallowed where strict is off
                    raise refused[1]
            _downcast(loading, root)
            return result

        return load_checkpoint

    def wrap_checkpoint_format(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``_get_checkpoint_format`` that refuses what is half there or cannot be loaded in this run.

        Megatron asks for the format of the folder it has chosen, before it reads anything.
        """

        @functools.wraps(original)
        def _get_checkpoint_format(checkpoint_name: Any, *rest: Any, **named: Any) -> Any:
            folder, loading = Path(checkpoint_name), self._loading
            if loading is not None:
                loading.folder = folder
                loading.ranks.agree(
                    lambda: examine(folder, loading.args, loading.wanted().optimizer), "load_checkpoint"
                )
            else:
                early = rest[0] if rest else named.get("args")
                if isinstance(early, Namespace) and sharded_run(early):  # --use-checkpoint-args
                    examine(folder, None, False)
            return original(checkpoint_name, *rest, **named)

        return _get_checkpoint_format

    def wrap_dcp_load_state_dict(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return PyTorch's ``load_state_dict`` that fills Megatron's template for torch_dcp itself."""

        @functools.wraps(original)
        def load_state_dict(state_dict: Any, *rest: Any, **named: Any) -> Any:
            loading = self._loading
            ours = loading is not None and loading.named is not None and isinstance(state_dict, dict)
            if loading is None or not ours or state_dict.get("optimizer") is not loading.named:
                return original(state_dict, *rest, **named)
            reader = rest[0] if rest else named["storage_reader"]
            folder, wanted = Path(reader.path), loading.wanted()
            if kind_of(folder) == STOCK_DCP:
                read_weights(state_dict, folder, loading.ranks, wanted.partial)
            else:
                read(state_dict, folder, loading.ranks, wanted)
            return None

        return load_state_dict

    def wrap_to_dtensor(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``_to_dtensor`` that leaves whole values whole: our ``load_state_dict`` takes this rank's shards.

        Megatron puts a whole copy of the model on every device.
        """

        @functools.wraps(original)
        def _to_dtensor(wrapped_model: Any, model_state_dict: Any) -> Any:
            return model_state_dict if self._loading is not None else original(wrapped_model, model_state_dict)

        return _to_dtensor

    def wrap_dcp_load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return PyTorch's ``load`` that gives Megatron the arguments in our torch_dcp, for --use-checkpoint-args."""

        @functools.wraps(original)
        def load(state_dict: Any, *rest: Any, **named: Any) -> Any:
            folder = named.get("checkpoint_id")
            asked = {"args", "iteration", "checkpoint_version"}
            if folder is None or set(state_dict) - asked or kind_of(Path(folder)) != TORCH_DCP:
                return original(state_dict, *rest, **named)
            found = read_state(Path(folder))
            state_dict.update({name: found.get(name) for name in asked})
            return None

        return load


def _downcast(loading: _Loading, root: Any) -> None:
    if loading.folder is None or not getattr(loading.args, "downcast_to_bf16", False):
        return
    if loading.wanted().optimizer:
        if loading.ranks.rank == 0:
            logger.warning(
                "--downcast-to-bf16: nothing is rounded, because the optimizer state was loaded too: rounding the "
                "weights of a run that goes on would change it. It acts with --finetune, --no-load-optim and "
                "--pretrained-checkpoint."
            )
        return
    count = round_to_bf16(root)
    if loading.ranks.rank == 0:
        logger.warning("--downcast-to-bf16: the values of %d parameters were rounded to bf16.", count)
