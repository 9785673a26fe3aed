"""``mindspeed-fsdp2 convert SOURCE``: a file of Transformers, Accelerate or MindSpeed as one of this project."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import FSDP2Config, load_config
from ..config.hf_convert import convert_hf
from ..config.native_convert import convert_native
from ..errors import ConfigError
from .models import build_model

if TYPE_CHECKING:
    from torch import nn


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``convert`` to the parser of the ``mindspeed-fsdp2`` command (**in place**)."""
    about = "translate an FSDP configuration of Transformers, Accelerate or MindSpeed's native FSDP2"
    parser = commands.add_parser("convert", help=about, description=f"{about[0].upper()}{about[1:]}.")
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="Accelerate's YAML, a fsdp_config in JSON, the Trainer's arguments, or MindSpeed's native file in blocks",
    )
    parser.add_argument("-o", "--output", metavar="CFG", help="the YAML file to write; without it, standard output")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="directory with a config.json of Transformers, or package.module:function that returns the model; needed "
        "for what only the model tells, and the result is then checked on it",
    )
    parser.add_argument("--mixed-precision", choices=("no", "fp16", "bf16"), help="where the source does not say")
    parser.add_argument("--strict", action="store_true", help="treat notes as errors")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing CFG")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the converted file, or print it to stdout; print notes to stderr; return 0.

    Raises:
        ConfigError: The source has mistakes, or what cannot be carried over, or the result cannot be written.
    """
    output = None if arguments.output is None else Path(arguments.output)
    if output is not None and output.exists():
        if not arguments.overwrite:
            raise ConfigError(f"{output}: the file exists already. Name another one, or add --overwrite.")
        if Path(arguments.source).exists() and output.samefile(arguments.source):
            raise ConfigError(f"{output}: this is the file to convert. Name another one.")
    model = None if arguments.model is None else build_model(arguments.model)
    conversion = convert_native(arguments.source, strict=arguments.strict)
    if conversion is None:
        conversion = convert_hf(arguments.source, model, arguments.mixed_precision, strict=arguments.strict)
    text = conversion.to_yaml(arguments.source)
    if model is not None:
        _check_on(model, load_config(conversion.settings))
    for note in conversion.notes:
        print(f"note: {note}", file=sys.stderr)
    if output is None:
        print(text, end="")
        return 0
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output}: the file cannot be written ({error.strerror}). Name another one.") from None
    print(f"{output}: written. Check it with mindspeed-fsdp2 check {output}.")
    return 0


def _check_on(model: nn.Module, config: FSDP2Config) -> None:
    """Raise unless the settings select modules of ``model``.

    Raises:
        ConfigError: Names everything that selects nothing.
    """
    from ..plan.index import build_index  # only here, so that the command runs without torch
    from ..plan.select import Selector

    problems: list[str] = []
    selector = Selector(config, build_index(model), problems)
    selector.units(None, selector.ignored())
    selector.modules("recompute_modules", config.recompute_modules, called=True)
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
