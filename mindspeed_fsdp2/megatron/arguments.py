"""Command-line flags of the plugin, added to Megatron's parser."""

from __future__ import annotations

from argparse import Action, ArgumentParser
from collections.abc import Collection
from typing import Final

CONFIG_FLAG: Final = "--fsdp2-config-path"
DOWNCAST_FLAG: Final = "--downcast-to-bf16"
BACKEND_FLAG: Final = "--distributed-backend"
DUAL_BACKENDS: Final = ("npu:hccl,cpu:gloo", "cuda:nccl,cpu:gloo")

_CONFIG_HELP = (
    "YAML file that says how --use-torch-fsdp2 shards the model: units, ranks per shard group, recompute, dtypes, "
    "prefetch. Every mistake in it is reported before training: `mindspeed-fsdp2 check FILE` does so without a job."
)
_DOWNCAST_HELP = "Round fp32 weights to bf16 while loading a checkpoint. Only with --use-torch-fsdp2."


def add_arguments(parser: ArgumentParser, *, skip: Collection[str] = ()) -> ArgumentParser:
    """Add the plugin's flags and widen the choices of ``--distributed-backend``, **in place**.

    Calling it again changes nothing, and a flag that is registered already, by MindSpeed for example, is left alone.

    Args:
        parser: A parser with or without Megatron's own flags.
        skip: Flags somebody else registers on this parser later on; argparse allows no second registration.

    Returns:
        The same parser.
    """
    wanted = [flag for flag in (CONFIG_FLAG, DOWNCAST_FLAG) if _find(parser, flag) is None and flag not in skip]
    if wanted:
        group = parser.add_argument_group("mindspeed_fsdp2")
        if CONFIG_FLAG in wanted:
            group.add_argument(CONFIG_FLAG, metavar="FILE", default=None, help=_CONFIG_HELP)
        if DOWNCAST_FLAG in wanted:
            group.add_argument(DOWNCAST_FLAG, action="store_true", help=_DOWNCAST_HELP)
    backend = _find(parser, BACKEND_FLAG)
    if backend is not None and backend.choices is not None:
        # A list, a tuple, or whatever the values of a Literal came as; argparse only needs a container.
        backend.choices = list(dict.fromkeys([*backend.choices, "gloo", *DUAL_BACKENDS]))
    return parser


def _find(parser: ArgumentParser, flag: str) -> Action | None:
    # argparse has no public way to ask for a registered flag.
    return next((action for action in parser._actions if flag in action.option_strings), None)
