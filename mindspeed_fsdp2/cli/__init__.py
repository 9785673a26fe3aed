"""The ``mindspeed-fsdp2`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..errors import FSDP2Error
from . import check, checkpoint, convert, doctor


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 1 after an error was printed to stderr.

    Args:
        argv: Arguments after the command's name; ``None`` takes those of the process.
    """
    parser = argparse.ArgumentParser(prog="mindspeed-fsdp2", description="Tools around the FSDP2 configuration file.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    check.add_command(commands)
    checkpoint.add_command(commands)
    convert.add_command(commands)
    doctor.add_command(commands)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except FSDP2Error as error:
        print(error, file=sys.stderr)
        return 1
    return status
