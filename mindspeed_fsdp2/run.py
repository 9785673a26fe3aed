"""Run a Megatron pretrain script with FSDP2, without editing it.

    torchrun --nproc_per_node N -m mindspeed_fsdp2.run SCRIPT ARGS…
    torchrun --nproc_per_node N -m mindspeed_fsdp2.run -m MODULE ARGS…

Does what ``import mindspeed_fsdp2.megatron_adaptor`` at the top of the script does, and then runs the script as
``python SCRIPT ARGS…`` would.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from typing import NoReturn

from .errors import FSDP2Error

USAGE = (
    "python -m mindspeed_fsdp2.run: no script given. Write the pretrain script and its arguments, e.g. "
    "torchrun --nproc_per_node 8 -m mindspeed_fsdp2.run pretrain_gpt.py --use-torch-fsdp2 --fsdp2-config-path cfg.yaml"
)
NO_MEGATRON = (
    "megatron.training cannot be imported by {python}. Install megatron-core>=0.17 (it needs Python >= 3.12), or put a "
    "Megatron-LM checkout on PYTHONPATH."
)
NOT_LAUNCHED = (
    "{target} joins a process group, and no launcher has told this process its place in it ({error}). Start it with "
    "torchrun: torchrun --nproc_per_node N -m mindspeed_fsdp2.run {arguments}"
)
USAGE_ERROR = 2  # what python itself exits with when it cannot open a script


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script named in ``argv`` (default: the command line) and return when it does.

    A mistake of the user ends the process with its message on stderr: exit code 2 where no script can be run, or only
    under a launcher such as torchrun, 1 for this package's own errors. Whatever else the script raises,
    ``SystemExit`` included, passes through.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_module = arguments[:1] == ["-m"]
    if as_module:
        del arguments[0]
    if not arguments:
        _end(USAGE, USAGE_ERROR)
    target = arguments[0]
    # As python does it: a script finds its neighbours. First of all, because a checkout's script has Megatron there.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if as_module else os.path.dirname(os.path.realpath(target))
    if not (_importable(target) if as_module else os.path.exists(target)):
        what = "module" if as_module else "script"
        _end(f"{target}: there is no such {what}. Give the path of a pretrain script, or -m and a module.", USAGE_ERROR)
    sys.argv = arguments
    try:
        if not _importable("megatron.training"):
            raise FSDP2Error(NO_MEGATRON.format(python=sys.executable))
        importlib.import_module("mindspeed_fsdp2.megatron_adaptor")
        if as_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except FSDP2Error as error:
        _end(str(error), 1)
    except ValueError as error:
        if "env:// rendezvous" not in str(error):
            raise
        shown = f"{'-m ' if as_module else ''}{target}{' …' if len(arguments) > 1 else ''}"
        _end(NOT_LAUNCHED.format(target=target, error=error, arguments=shown), USAGE_ERROR)


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def _end(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"mindspeed_fsdp2: {message}\n")
    sys.stderr.flush()
    raise SystemExit(code)


if __name__ == "__main__":
    main()
