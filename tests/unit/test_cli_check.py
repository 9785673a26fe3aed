"""`mindspeed-fsdp2 check CFG`: exit status, what goes to stdout and what to stderr."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_fsdp2.cli import main
from mindspeed_fsdp2.config import load_config


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_prints_settings_that_load_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "cfg.yaml").write_text(
        "sharding_size: auto\nsub_modules_to_wrap:\n  - [norm, 'layers.{*}']\nparam_dtype: bfloat16\n"
    )
    assert main(["check", "cfg.yaml"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(
        "# cfg.yaml: no mistakes\n"
        "sharding_size: auto\n"
        "sub_modules_to_wrap:\n"
        "  - - norm\n"
        "    - layers.{*}\n"
        "ignored_modules: []  # default\n"
    )
    assert "\nparam_dtype: bf16\ncast_forward_inputs: true  # default\n" in out
    assert "\nreduce_grads: every_microbatch  # default\noptional_modules: []  # default\n" in out
    (folder / "again.yaml").write_text(out)
    assert load_config("again.yaml") == load_config("cfg.yaml")


def test_accepts_every_key_that_is_built(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "cfg.yaml").write_text(
        "sharding_size: auto\noffload_to_cpu: true\npin_memory: false\nreduce_grads: last_microbatch\n"
        "optional_modules: [a]\ncheck_unit_order: true\noverrides: [{modules: [b], param_dtype: fp32}]\n"
    )
    assert main(["check", "cfg.yaml"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\noverrides:\n  - modules:\n      - b\n    param_dtype: fp32\n" in out
    assert "\nreduce_grads: last_microbatch\noptional_modules:\n  - a\ncheck_unit_order: true\n" in out


def test_prints_notices_to_stderr(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "cfg.yaml").write_text("sharding_size: auto\npin_memory: true\n")
    assert main(["check", "cfg.yaml"]) == 0
    expected = "notice: cfg.yaml:2: pin_memory: has no effect without offload_to_cpu: true. Remove the key.\n"
    assert capsys.readouterr().err == expected


def test_prints_every_mistake_and_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "cfg.yaml").write_text("sharding_size: 0\npin_memory: 'true'\n")
    assert main(["check", "cfg.yaml"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "cfg.yaml:1: sharding_size: the number 0 is too small. Write a number of ranks, 1 or more, or auto.\n"
        "cfg.yaml:2: pin_memory: the text 'true' is not a boolean. Drop the quotes: write true.\n"
    )


def test_refuses_what_is_not_supported_yet(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "cfg.yaml").write_text("sharding_size: auto\nexpert_parallel_size: 2\n")
    assert main(["check", "cfg.yaml"]) == 1
    expected = "cfg.yaml:2: expert_parallel_size: 2 is not supported yet. Write 1 or remove the key.\n"
    assert capsys.readouterr().err == expected


def test_without_a_command_the_usage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    assert "usage: mindspeed-fsdp2" in capsys.readouterr().err


def test_a_missing_file_ends_without_traceback_or_torch(folder: Path) -> None:
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['torch_npu'] = sys.modules['megatron'] = None\n"
        "from mindspeed_fsdp2.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    root = str(Path(__file__).parents[2])
    (folder / "cfg.yaml").write_text("sharding_size: auto\n")
    command = [sys.executable, "-c", program, "check"]
    env = {"PYTHONPATH": root, "PATH": ""}
    good = subprocess.run([*command, "cfg.yaml"], capture_output=True, text=True, env=env, timeout=60)
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.startswith("# cfg.yaml: no mistakes\nsharding_size: auto\n")
    bad = subprocess.run([*command, "cfg.yml"], capture_output=True, text=True, env=env, timeout=60)
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr == "cfg.yml: there is no such file. Write cfg.yaml.\n"
