"""``mindspeed-fsdp2 check CFG``: say what is wrong with a file before a job is started. Needs no torch."""

from __future__ import annotations

import argparse
import sys

from ..config import check_supported, load_config


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``check`` to the parser of the ``mindspeed-fsdp2`` command (**in place**)."""
    about = "print every mistake of a configuration file, or the settings it stands for"
    parser = commands.add_parser("check", help=about, description=f"{about[0].upper()}{about[1:]}.")
    parser.add_argument("config", metavar="CFG", help="the YAML file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the settings to stdout, as YAML with defaults marked, and notices to stderr; return 0.

    Raises:
        ConfigError: The file has mistakes, or asks for what is not supported yet.
    """
    config = load_config(arguments.config)
    check_supported(config)
    for notice in config.notices:
        print(f"notice: {notice}", file=sys.stderr)
    print(f"# {arguments.config}: no mistakes")
    print(config.to_yaml(), end="")
    return 0
