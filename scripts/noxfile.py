"""One environment per supported combination of Python, PyTorch and Megatron; started by scripts/test_matrix.sh.

Each session installs its versions from the package index and appends the cells of tests/megatron/test_tags.py to
``build/compatibility/<session>.tsv``; scripts/compatibility_table.py makes the tables of the docs from these files.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "build" / "compatibility"
TESTS = ("pytest>=8", "psutil", "setuptools")
# What megatron.training of the checkouts imports, and what compiles their dataset helper. Up to 0.15 they use names
# that NumPy 2 dropped.
CHECKOUT = ("numpy<2", "six", "regex", "einops", "sentencepiece", "pybind11", "tensorboard", "transformers", "wandb")

nox.options.error_on_missing_interpreters = True
nox.options.default_venv_backend = "venv"


@dataclass(frozen=True)
class Setup:
    """One combination.

    Attributes:
        python: Version of the interpreter.
        torch: Exact release; empty takes the newest one the index offers.
        core: Exact release of megatron-core; empty takes the newest.
        wheel: Whether the wheel contains ``megatron.training``; older ones hold ``megatron.core`` only.
        tags: Checkouts that run here, where ``MEGATRON_LM_TAGS`` has them.
    """

    python: str
    torch: str
    core: str
    wheel: bool
    tags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"py{self.python}-torch{self.torch or 'newest'}-core{self.core or 'newest'}"


SETUPS = (
    Setup("3.11", "2.7.1", "0.12.3", False, ("core_v0.12.3", "core_v0.13.1")),
    Setup("3.11", "2.13.0", "0.16.1", False, ("core_v0.12.3", "core_v0.14.0", "core_v0.15.3", "core_v0.16.1")),
    Setup("3.12", "2.13.0", "0.17.1", True, ("core_v0.17.1",)),
    Setup("3.12", "2.14.1", "0.18.2", True, ("core_v0.18.2",)),
    Setup("3.12", "", "0.19.2", True, ("core_v0.19.0",)),
    Setup("3.13", "", "", True),
)


@nox.session
@nox.parametrize("python,setup", [(setup.python, setup) for setup in SETUPS], ids=[str(setup) for setup in SETUPS])
def cells(session: nox.Session, setup: Setup) -> None:
    """Run every cell of the compatibility table that this combination can answer."""
    session.chdir(ROOT)
    session.install(
        f"torch=={setup.torch}" if setup.torch else "torch",
        f"megatron-core=={setup.core}" if setup.core else "megatron-core",
        *TESTS,
        *(CHECKOUT if not setup.wheel else ()),
        "-e",
        str(ROOT),
    )
    REPORTS.mkdir(parents=True, exist_ok=True)
    report = REPORTS / f"{setup}.tsv"
    report.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        places = _places(setup, Path(folder))
        env = {"MEGATRON_LM_TAGS": places, "MEGATRON_LM_REPORT": str(report), "OMP_NUM_THREADS": "1"}
        # 1: a cell is wrong; it stands in the report, and the other combinations are to run all the same.
        command = ("python", "-m", "pytest", "-q", "tests/megatron/test_tags.py", *session.posargs)
        session.run(*command, env=env, success_codes=[0, 1])


def _places(setup: Setup, folder: Path) -> str:
    """Return what ``MEGATRON_LM_TAGS`` is to name: the wheel, and a folder with this combination's checkouts."""
    given = os.environ.get("MEGATRON_LM_TAGS", "")
    for tag in setup.tags:
        if given and (checkout := Path(given, tag)).is_dir():
            (folder / tag).symlink_to(checkout.resolve())
    return os.pathsep.join(["installed", str(folder)])
