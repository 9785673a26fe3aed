"""``python -m mindspeed_fsdp2.run``: how a script is found and run, and what a user's mistakes say.

Megatron and the adaptor are stood in for by modules that note what happens: what they do is tested in tests/megatron.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ADAPTOR = """
import importlib.abc, importlib.machinery, sys, types
class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name == "mindspeed_fsdp2.megatron_adaptor":
            return importlib.machinery.ModuleSpec(name, self)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        print("adaptor")
sys.meta_path.insert(0, Finder())
"""
REPORT = """
import sys
print(__name__, sys.argv, sys.path[0])
"""


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A folder with a Megatron, and a ``sitecustomize`` that stands in for the adaptor."""
    site = tmp_path / "site"
    (site / "megatron" / "training").mkdir(parents=True)
    (site / "megatron" / "training" / "__init__.py").touch()
    (site / "sitecustomize.py").write_text(ADAPTOR)
    (tmp_path / "work").mkdir()
    return tmp_path


def run(host: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(host / "site"), str(ROOT)))}
    return subprocess.run(
        [sys.executable, "-m", "mindspeed_fsdp2.run", *argv],
        cwd=host / "work",
        env=env,
        text=True,
        capture_output=True,
        check=False,
    )


def test_script_sees_what_python_would_give_it(host: Path) -> None:
    folder = host / "scripts"
    folder.mkdir()
    (folder / "neighbour.py").write_text("print('neighbour')")
    (folder / "pretrain.py").write_text("import neighbour\n" + REPORT)
    done = run(host, str(folder / "pretrain.py"), "--lr", "1")
    assert (done.returncode, done.stderr) == (0, "")
    expected = f"__main__ {[str(folder / 'pretrain.py'), '--lr', '1']} {folder}"
    assert done.stdout.splitlines() == ["adaptor", "neighbour", expected]


def test_script_behind_a_link_finds_the_neighbours_of_the_file(host: Path) -> None:
    folder = host / "scripts"
    folder.mkdir()
    (folder / "pretrain.py").write_text(REPORT)
    (host / "work" / "link.py").symlink_to(folder / "pretrain.py")
    done = run(host, "link.py")
    assert done.stdout.splitlines()[1] == f"__main__ ['link.py'] {folder}"


def test_module_runs_from_the_working_folder(host: Path) -> None:
    package = host / "work" / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "pretrain.py").write_text(REPORT)
    done = run(host, "-m", "mine.pretrain", "--lr", "1")
    assert (done.returncode, done.stderr) == (0, "")
    expected = f"__main__ {[str(package / 'pretrain.py'), '--lr', '1']} {host / 'work'}"
    assert done.stdout.splitlines() == ["adaptor", expected]


def test_megatron_checkout_beside_the_script_is_found(host: Path) -> None:
    (host / "site" / "megatron").rename(host / "work" / "megatron")
    (host / "work" / "pretrain.py").write_text(REPORT)
    assert run(host, "pretrain.py").returncode == 0


@pytest.mark.parametrize("argv", [(), ("-m",)])
def test_nothing_to_run(host: Path, argv: tuple[str, ...]) -> None:
    done = run(host, *argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "mindspeed_fsdp2: python -m mindspeed_fsdp2.run: no script given. Write the pretrain script and its arguments, "
        "e.g. torchrun --nproc_per_node 8 -m mindspeed_fsdp2.run pretrain_gpt.py --use-torch-fsdp2 "
        "--fsdp2-config-path cfg.yaml\n"
    )


@pytest.mark.parametrize(
    ("argv", "what"), [(("no_such.py",), "script"), (("-m", "no_such"), "module"), (("-m", "no.such"), "module")]
)
def test_missing_script(host: Path, argv: tuple[str, ...], what: str) -> None:
    done = run(host, *argv, "--lr", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"mindspeed_fsdp2: {argv[-1]}: there is no such {what}. "
        "Give the path of a pretrain script, or -m and a module.\n"
    )


@pytest.mark.parametrize("part", ["megatron", "training"])
def test_without_megatron(host: Path, part: str) -> None:
    site = host / "site" / "megatron"
    (site if part == "megatron" else site / "training").rename(host / "elsewhere")
    if part == "training":  # as wheels below 0.17 are: megatron without megatron.training
        (site / "core").mkdir()
    (host / "work" / "pretrain.py").write_text(REPORT)
    # -I hides a Megatron that is installed beside the tests; it also ignores PYTHONPATH, hence the -c
    code = (
        f"import sys; sys.path[:0] = ['', {str(host / 'site')!r}, {str(ROOT)!r}]\n"
        "sys.path = [p for p in sys.path if 'site-packages' not in p]\n"
        "sys.argv = ['run', 'pretrain.py']\n"
        "from mindspeed_fsdp2.run import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=host / "work", text=True, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"mindspeed_fsdp2: megatron.training cannot be imported by {sys.executable}. Install megatron-core>=0.17 (it "
        "needs Python >= 3.12), or put a Megatron-LM checkout on PYTHONPATH.\n"
    )


def test_own_error_ends_with_its_message(host: Path) -> None:
    text = "raise __import__('mindspeed_fsdp2.errors').errors.ConfigError('cfg.yaml:3: one\\ncfg.yaml:5: two')"
    (host / "work" / "pretrain.py").write_text(text)
    done = run(host, "pretrain.py")
    assert (done.returncode, done.stdout) == (1, "adaptor\n")
    assert done.stderr == "mindspeed_fsdp2: cfg.yaml:3: one\ncfg.yaml:5: two\n"


def test_without_a_launcher(host: Path) -> None:
    init = "import torch.distributed as dist; dist.init_process_group('gloo')"
    (host / "work" / "pretrain.py").write_text(init)
    done = run(host, "pretrain.py", "--lr", "1")
    assert (done.returncode, done.stdout) == (2, "adaptor\n")
    assert done.stderr == (
        "mindspeed_fsdp2: pretrain.py joins a process group, and no launcher has told this process its place in it (Error "
        "initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not set). Start "
        "it with torchrun: torchrun --nproc_per_node N -m mindspeed_fsdp2.run pretrain.py …\n"
    )
    (host / "work" / "pretrain.py").write_text("if 'help' not in __import__('sys').argv: " + init)
    assert run(host, "pretrain.py", "help").returncode == 0  # what needs no group needs no launcher


def test_other_errors_keep_their_traceback(host: Path) -> None:
    (host / "work" / "pretrain.py").write_text("raise KeyError('theirs')")
    done = run(host, "pretrain.py")
    assert done.returncode == 1
    assert 'pretrain.py", line 1, in <module>' in done.stderr
    assert done.stderr.endswith("KeyError: 'theirs'\n")


def test_exit_code_of_the_script_passes_through(host: Path) -> None:
    (host / "work" / "pretrain.py").write_text("raise SystemExit(7)")
    assert run(host, "pretrain.py").returncode == 7
