"""From the parsed arguments to the first collective: check, switch to CPU mode, agree over ranks."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from types import TracebackType
from typing import Any

from megatron.training import get_args

from ..agreement import exchange
from ..config import FSDP2Config, load_config
from ..errors import FSDP2Error
from .conflicts import check_conflicts, check_yaml_arguments, notices
from .cpu import CpuMode, cpu_mode_wanted, enable_cpu

logger = logging.getLogger("mindspeed_fsdp2")

# Attributes on Megatron's args: they live as long as the run's own arguments and need no state of ours.
CHECKED = "mindspeed_fsdp2_checked"
_KEPT_ERROR = "mindspeed_fsdp2_error"
_DIGEST = "mindspeed_fsdp2_digest"


def megatron_device_type(args: Namespace) -> str | None:
    """Return ``"cpu"`` in CPU mode, where torch.cuda only pretends to be there; None lets the device be found."""
    return "cpu" if args.distributed_backend == "gloo" else None


class Startup:
    """What happens between parsing and the first collective, and the CPU mode it may have switched on."""

    def __init__(self) -> None:
        self._cpu_mode: CpuMode | None = None

    def wrap_validate_args(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``validate_args`` that first reports every conflict, before Megatron's own assertions see one."""

        @functools.wraps(original)
        def validate_args(args: Namespace, *rest: Any, **named: Any) -> Any:
            check_arguments(args)
            self._enter_cpu_mode(args)
            if args.use_torch_fsdp2 and args.ckpt_format == "torch_dcp" and getattr(args, "async_save", False):
                args.async_strategy = "mcore"  # ours takes its place; the default asserts a package that is not used
            tied = args.use_torch_fsdp2 and not args.untie_embeddings_and_output_weights
            if tied:
                # Megatron asserts untied weights for FSDP2, because it would shard the two ends apart; our plan keeps
                # them in one unit. Nothing else in the check reads the flag.
                args.untie_embeddings_and_output_weights = True
            try:
                return original(args, *rest, **named)
            finally:
                if tied:
                    args.untie_embeddings_and_output_weights = False

        return validate_args

    def wrap_initialize_megatron(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``initialize_megatron`` of 0.17 and older, which asks for a CUDA device before it parses.

        Parsing early and handing the result over lets CPU mode begin before that question.
        """

        @functools.wraps(original)
        def initialize_megatron(*rest: Any, **named: Any) -> Any:
            bound = inspect.signature(original).bind(*rest, **named)
            given = bound.arguments
            if given.get("parsed_args") is None:
                from megatron.training.arguments import parse_args

                args = parse_args(given.get("extra_args_provider"), given.get("ignore_unknown_args", False))
                given["parsed_args"] = args
                self._enter_cpu_mode(args)
            return original(*bound.args, **bound.kwargs)

        return initialize_megatron

    def _enter_cpu_mode(self, args: Namespace) -> None:
        if self._cpu_mode is None and cpu_mode_wanted(args.distributed_backend):
            self._cpu_mode = enable_cpu()

    def leave_cpu_mode(self) -> bool:
        """Give back every name that CPU mode redirected (**in place**); return whether it was on."""
        if self._cpu_mode is None:
            return False
        self._cpu_mode.restore()
        self._cpu_mode = None
        return True

    def resume_cpu_mode(self) -> None:
        """Switch CPU mode on again after :meth:`leave_cpu_mode` (**in place**)."""
        self._cpu_mode = enable_cpu()


def check_arguments(args: Namespace) -> None:
    """Refuse what cannot work, and note on ``args`` what was found (**in place**).

    A configuration that cannot be loaded may be missing on this node only. Nothing can be told to the other ranks
    before the process group exists, so that error is kept on ``args`` for :func:`wrap_initialize_distributed`.

    Raises:
        ConflictError: Flags, environment and YAML do not go together.
    """
    config: FSDP2Config | None = None
    error: FSDP2Error | None = None
    if args.use_torch_fsdp2 and args.fsdp2_config_path:
        try:
            config = load_config(args.fsdp2_config_path)
        except FSDP2Error as caught:
            error = caught
    try:
        check_conflicts(args, config, os.environ)
    except FSDP2Error as conflict:
        if error is None:
            raise
        raise type(conflict)(f"{conflict}\n{error}") from None
    if args.rank == 0:
        for text in notices(args, config):
            logger.warning("%s", text)
    setattr(args, CHECKED, True)
    setattr(args, _KEPT_ERROR, error)
    setattr(args, _DIGEST, config.digest() if config is not None else "")


def wrap_initialize_distributed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``_initialize_distributed`` after which all ranks compare what they loaded."""

    @functools.wraps(original)
    def initialize_distributed(*rest: Any, **named: Any) -> Any:
        result = original(*rest, **named)
        args = get_args()
        if getattr(args, "use_torch_fsdp2", False):  # --yaml-cfg brings arguments of its own
            kept = getattr(args, _KEPT_ERROR, None)
            exchange((kept, getattr(args, _DIGEST, "")), None, f"--fsdp2-config-path {args.fsdp2_config_path}")
        return result

    return initialize_distributed


def wrap_load_yaml(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``load_yaml`` that refuses ``--yaml-cfg`` with FSDP2: ``validate_args`` is never reached there."""

    @functools.wraps(original)
    def load_yaml(yaml_path: str) -> Any:
        args = original(yaml_path)
        check_yaml_arguments(yaml_path, args, sys.argv)
        return args

    return load_yaml


def wrap_excepthook(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an exception hook that shows our own errors as their message alone."""

    @functools.wraps(original)
    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, FSDP2Error):
            sys.stderr.write(f"mindspeed_fsdp2: {error}\n")
            sys.stderr.flush()
        else:
            original(kind, error, trace)

    return excepthook
