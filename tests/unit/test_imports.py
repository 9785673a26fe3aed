"""What importing needs, each in a fresh interpreter, and what is exported."""

from __future__ import annotations

import importlib
import pathlib
import subprocess
import sys

import pytest

import mindspeed_fsdp2

ROOT = pathlib.Path(__file__).parents[2]
PUBLIC = [
    "CheckpointError",
    "ConfigError",
    "ConflictError",
    "FSDP2Config",
    "FSDP2Error",
    "FSDP2Plan",
    "ModulePathError",
    "PatchError",
    "PlanError",
    "accumulate",
    "build_plan",
    "clip_grad_norm_",
    "export_hf",
    "full_parameters",
    "list_checkpoints",
    "load_checkpoint",
    "load_config",
    "load_full_state_dict",
    "meta_init",
    "save_checkpoint",
    "save_checkpoint_async",
    "wrap_model",
]


def run_without(blocked: tuple[str, ...], code: str) -> str:
    """Run ``code`` where importing one of ``blocked`` fails; return what it prints."""
    start = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in blocked)
    command = [sys.executable, "-W", "error", "-c", start + code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_package_needs_neither_torch_nor_megatron() -> None:
    code = "import mindspeed_fsdp2 as m; print(m.__version__, 'wrap_model' in dir(m))"
    assert run_without(("torch", "megatron", "torch_npu"), code) == f"{mindspeed_fsdp2.__version__} True\n"


def test_sharding_needs_no_megatron() -> None:
    code = (
        "import mindspeed_fsdp2 as m\n"
        "from mindspeed_fsdp2.device import find_device_type\n"
        "print(m.wrap_model.__name__, m.build_plan.__name__, find_device_type() in ('cpu', 'cuda'))"
    )
    assert run_without(("megatron",), code) == "wrap_model build_plan True\n"


def test_configuration_needs_no_torch() -> None:
    code = (
        "from mindspeed_fsdp2.config import load_config, FSDP2Config\n"
        "from mindspeed_fsdp2 import load_config as same\n"
        "assert same is load_config\n"
        "from mindspeed_fsdp2.cli import main\n"
        "print(load_config({'sharding_size': 'auto'}).sharding_size, FSDP2Config.from_hf({}).auto_wrap_policy)"
    )
    assert run_without(("torch", "megatron", "torch_npu"), code) == "auto TRANSFORMER_BASED_WRAP\n"


def test_module_paths_need_neither_torch_nor_yaml() -> None:
    code = (
        "from mindspeed_fsdp2.module_path import ModulePath, ModuleTree\n"
        "print(ModulePath.parse('a.{*}').select(ModuleTree(['a', 'a.0', 'a.1'])))"
    )
    assert run_without(("torch", "megatron", "torch_npu", "yaml", "pydantic"), code) == "['a.0', 'a.1']\n"


def test_exported_names() -> None:
    assert mindspeed_fsdp2.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(mindspeed_fsdp2))


@pytest.mark.parametrize("name", PUBLIC)
def test_exported_name_is_the_one_of_its_home(name: str) -> None:
    value = getattr(mindspeed_fsdp2, name)
    home = importlib.import_module(value.__module__)
    assert getattr(home, name) is value
    assert value.__doc__


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match=r"^module 'mindspeed_fsdp2' has no attribute 'fully_shard'$"):
        mindspeed_fsdp2.fully_shard  # noqa: B018
