"""What users install: the extras resolve, and the wheel works without the checkout."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = Path(__file__).parents[2]


def megatron_requirement(python: str) -> Requirement:
    """Return the one megatron-core requirement of the extra that applies to this Python."""
    table = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    texts = table["project"]["optional-dependencies"]["megatron"]
    found = [Requirement(text) for text in texts if text.startswith("megatron-core")]
    applying = [r for r in found if r.marker is None or r.marker.evaluate({"python_version": python})]
    assert len(applying) == 1
    return applying[0]


def resolve(requirement: Requirement, python: str, folder: Path) -> Version:
    """Return the version pip would install on that Python."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed"]
    command += ["--python-version", python, "--only-binary=:all:", "--target", str(folder), "--report", str(report)]
    if sys.version_info < tuple(map(int, python.split("."))):
        command.append("--ignore-requires-python")  # pip up to 23.2 compares it with the Python that pip runs on
    subprocess.run([*command, f"{requirement.name}{requirement.specifier}"], check=True, capture_output=True, text=True)
    return Version(json.loads(report.read_text())["install"][0]["metadata"]["version"])


@pytest.mark.parametrize(
    ("python", "inside", "outside"),
    [
        ("3.10", ["0.12.1", "0.16.1"], ["0.12.0", "0.17.0"]),
        ("3.11", ["0.12.1", "0.16.1"], ["0.12.0", "0.17.0"]),
        ("3.12", ["0.17.0", "0.19.2"], ["0.16.1"]),
        ("3.13", ["0.17.0", "0.19.2"], ["0.16.1"]),
    ],
)
def test_the_extra_asks_for_versions_that_python_can_run(python: str, inside: list[str], outside: list[str]) -> None:
    specifier = megatron_requirement(python).specifier
    assert all(specifier.contains(version) for version in inside)
    assert not any(specifier.contains(version) for version in outside)


@pytest.mark.parametrize(("python", "least", "below"), [("3.10", "0.12.1", "0.17"), ("3.12", "0.17", "1000")])
def test_pip_resolves_the_extra(python: str, least: str, below: str, tmp_path: Path) -> None:
    version = resolve(megatron_requirement(python), python, tmp_path)
    assert Version(least) <= version < Version(below)


def test_the_wheel_works_without_the_checkout(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(PROJECT)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {p.relative_to(PROJECT).as_posix() for p in (PROJECT / "mindspeed_fsdp2").rglob("*.py")}
    assert sources <= names
    assert "mindspeed_fsdp2/py.typed" in names
    assert not {name for name in names if name.startswith(("tests/", "examples/", "benchmarks/"))}
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    config = tmp_path / "cfg.yaml"
    config.write_text("sharding_size: auto\n", encoding="utf-8")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import mindspeed_fsdp2; "
        "from mindspeed_fsdp2.cli import main; print(mindspeed_fsdp2.__file__); sys.exit(main(['check', sys.argv[2]]))"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-c", code, str(site), str(config)], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0] == str(site / "mindspeed_fsdp2" / "__init__.py")
    assert "sharding_size: auto" in run.stdout


def test_the_version_is_the_package_s() -> None:
    import mindspeed_fsdp2

    table = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    assert table["project"]["version"] == mindspeed_fsdp2.__version__
    try:
        assert importlib.metadata.version("mindspeed_fsdp2") == mindspeed_fsdp2.__version__
    except importlib.metadata.PackageNotFoundError:
        assert "site-packages" not in mindspeed_fsdp2.__file__  # run from a checkout that was not installed
