"""Which device is found, what a broken torch_npu says, and the list of names that the stand-in for it keeps to."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_fsdp2 import device
from mindspeed_fsdp2.cli import main
from mindspeed_fsdp2.errors import ConfigError, ConflictError
from mindspeed_fsdp2.megatron.cpu.mode import cpu_mode_wanted
from tests.unit.npu_stand_in import NAMES, Npu, modules

ROOT = Path(__file__).parents[2]
# What `import torch_npu` says where CANN is not installed (wheels 2.7.1.post11 and 2.14.0).
NO_CANN = "libhccl.so: cannot open shared object file: No such file or directory"
WAY_OUT = (
    "Source the CANN environment (set_env.sh), install the torch_npu that belongs to this torch, or uninstall torch_npu "
    "on machines without an NPU."
)


def python(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": ":".join(map(str, [*paths, ROOT])), "PATH": "/usr/bin:/bin", "HOME": "/nowhere"}
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Npu:
    """torch_npu's stand-in as far as detection goes: no device type of torch is renamed."""
    stand_in = Npu()
    made = modules(stand_in)
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch, "npu", made["torch_npu.npu"], raising=False)
    return stand_in


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torch_npu" else real(name, *rest)
    )


def test_torch_npu_is_not_imported_where_it_is_absent(absent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # an import would raise
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.find_device_type() == device.resolve_device_type(None) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device.find_device_type() == device.resolve_device_type(None) == "cuda"
    with pytest.raises(ConfigError) as caught:
        device.resolve_device_type("npu")
    assert str(caught.value) == (
        "device_type: 'npu' needs torch_npu, which is not installed. Install the version that belongs to torch "
        f"{torch.__version__}, or use cuda or cpu."
    )


def test_a_broken_torch_npu_is_heard(tmp_path: Path) -> None:
    failures = [f"ImportError({NO_CANN!r})", "RuntimeError('Two accelerators')", "AttributeError('no _C')"]
    code = (
        "import importlib, pathlib\n"
        "from mindspeed_fsdp2.device import find_device_type, resolve_device_type\n"
        "from mindspeed_fsdp2 import ConfigError\n"
        f"for failure in {failures!r}:\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'torch_npu.py').write_text('raise ' + failure)\n"
        "    importlib.invalidate_caches()\n"
        "    for call in (find_device_type, lambda: resolve_device_type('npu')):\n"
        "        try: call()\n"
        "        except ConfigError as error: print(error, '/', type(error.__cause__).__name__)\n"
        "print(resolve_device_type('cpu'))"
    )
    (tmp_path / "torch_npu.py").write_text("", encoding="utf-8")
    done = python(f"import sys; sys.dont_write_bytecode = True\n{code}", tmp_path)
    said = [f"ImportError: {NO_CANN}", "RuntimeError: Two accelerators", "AttributeError: no _C"]
    lines = [
        f"torch_npu is installed but cannot be imported ({text}). {WAY_OUT} / {text.split(':')[0]}" for text in said
    ]
    assert done.stdout.splitlines() == [line for line in lines for _ in range(2)] + ["cpu"], done.stderr


def test_npus_come_first(npu: Npu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device.find_device_type() == "npu"
    assert npu.calls["is_available"] == 1
    assert device.resolve_device_type("npu") == "npu"
    npu.available = False
    assert device.find_device_type() == "cuda"
    with pytest.raises(ConfigError) as caught:
        device.resolve_device_type("npu")
    assert str(caught.value) == (
        "device_type: 'npu' is asked for, but torch_npu sees no NPU. Look at `npu-smi info` and at "
        "ASCEND_RT_VISIBLE_DEVICES, or use cpu."
    )


def test_cuda_means_npu_where_transfer_to_npu_is_in_force(npu: Npu, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.resolve_device_type("cuda") == "cuda" and not device.cuda_means_npu()
    monkeypatch.setattr(torch.cuda, "is_available", torch.npu.is_available)  # type: ignore[attr-defined]
    assert device.cuda_means_npu() and device.find_device_type() == "npu"
    assert [device.resolve_device_type(asked) for asked in ("cuda", "npu", "cpu", None)] == ["npu", "npu", "cpu", "npu"]


def test_gloo_beside_npus_names_hccl(npu: Npu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", torch.npu.is_available)  # type: ignore[attr-defined]
    with pytest.raises(ConflictError, match="--distributed-backend npu:hccl,cpu:gloo"):
        cpu_mode_wanted("gloo")


def test_unknown_device_types_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        device.resolve_device_type("tpu")
    assert str(caught.value) == "device_type: 'tpu' is not a device type. Use one of npu, cuda, cpu."


def test_facts_of_a_device(npu: Npu) -> None:
    npu.set_device(3)
    assert device.current_device("cpu") == torch.device("cpu")
    assert device.device_module("npu").current_device() == 3
    assert device.library_versions("npu") == {"CANN": "stand-in"} and device.library_versions("cpu") == {}
    assert device.supports_bf16("npu") and device.supports_bf16("cpu")
    npu.bf16 = False
    assert not device.supports_bf16("npu") and device.supports_bf16("cuda")
    assert npu.calls["get_cann_version"] == 1 and npu.calls["is_bf16_supported"] == 2


def test_the_stand_in_offers_names_of_the_wheel_only() -> None:
    made = modules(Npu())["torch_npu.npu"]
    with pytest.raises(AttributeError) as unknown:
        _ = made.no_such_name
    assert str(unknown.value) == f"torch_npu {NAMES['version']} has no torch_npu.npu.no_such_name"
    with pytest.raises(NotImplementedError) as missing:
        _ = made.memory_summary
    assert str(missing.value) == "the stand-in does not implement torch_npu.npu.memory_summary"


def test_a_mesh_of_the_npu_device_type_and_the_lines_of_the_docs() -> None:
    pages = [(ROOT / "docs" / language / "ascend.md").read_text("utf-8") for language in ("en", "zh")]
    block, translated = (re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0] for page in pages)
    assert block == translated
    code = (
        "import os, tempfile, unittest.mock, torch, torch.distributed as dist\n"
        "from tests.unit.npu_stand_in import Npu, install\n"
        "npu = install(Npu())\n"
        "store = dist.FileStore(tempfile.mkdtemp() + '/store', 1)\n"
        "dist.init_process_group('npu:hccl,cpu:gloo', store=store, rank=0, world_size=1)\n"
        "from mindspeed_fsdp2.device import current_device, find_device_type\n"
        "from mindspeed_fsdp2.mesh import build_mesh\n"
        "os.environ['LOCAL_RANK'] = '5'\n"
        "with unittest.mock.patch('torch.distributed.init_process_group') as init:\n"
        f"    exec({block!r})\n"
        "print(init.call_args.args)\n"
        "mesh = build_mesh(1, None, find_device_type())\n"
        "print(mesh.device_type, current_device(mesh.device_type), dist.get_backend_config(mesh.get_group()))\n"
        "dist.destroy_process_group()"
    )
    done = python(code)
    assert done.stdout == "('npu:hccl,cpu:gloo',)\nnpu npu:5 npu:hccl,cpu:gloo\n", done.stderr


def test_doctor_says_why_torch_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == "torch.distributed":
                raise RuntimeError(f"Failed to load the backend extension: torch_npu ({NO_CANN})")

    monkeypatch.delitem(sys.modules, "torch.distributed")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == (
        "torch: it cannot be imported (RuntimeError: Failed to load the backend extension: torch_npu "
        f"({NO_CANN})). Where torch_npu is installed, importing torch loads it: source the CANN environment "
        "(set_env.sh) first.\n"
    )


@pytest.fixture
def script() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("npu_names", ROOT / "scripts" / "npu_names.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_names_are_read_from_a_wheel(script: types.ModuleType, tmp_path: Path) -> None:
    files = {
        "torch_npu/__init__.py": "import os\nfrom torch_npu.version import __version__\nfoo = 1\n",
        "torch_npu/version.py": "__version__ = '9.9'\n",
        "torch_npu/npu/__init__.py": "__all__ = ['one']\nfrom .utils import *\nfrom .random import two as three\n",
        "torch_npu/npu/utils.py": "__all__ = ['one']\ndef one(): ...\ndef hidden(): ...\n",
        "torch_npu/npu/random.py": "def two(): ...\nif True:\n    inner = 1\n",
        "torch_npu/npu/streams.py": "class Stream:\n    def wait(self): ...\nclass Event:\n    at = 0\n",
        "torch_npu/contrib/transfer_to_npu.py": "device_kwargs_list = ['b', 'a']\ntorch.Tensor.cuda = torch.Tensor.npu\n",
        "torch_npu-9.9.dist-info/METADATA": "Name: torch_npu\nVersion: 9.9\nRequires-Dist: torch==9.9.*\n",
    }
    wheel = tmp_path / "torch_npu-9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        for name, text in files.items():
            packed.writestr(name, text)
    found = script.collect(wheel)
    assert found["version"] == "9.9" and found["needs"] == ["torch==9.9.*"]
    assert found["modules"]["torch_npu"] == ["foo", "npu", "os", "version"]
    assert found["modules"]["torch_npu.npu"] == ["one", "random", "streams", "three", "utils"]
    assert found["modules"]["torch_npu.npu.utils"] == ["hidden", "one"]
    assert found["exported"] == {"torch_npu.npu": ["one"]}
    assert found["classes"] == {"Stream": ["wait"], "Event": ["at"]}
    assert found["transfer_to_npu"]["device_kwargs_list"] == ["a", "b"]
    assert found["transfer_to_npu assigns"] == ["torch.Tensor.cuda"]
    output = tmp_path / "names.json"
    assert script.main([str(wheel), str(output)]) == 0 and '"version": "9.9"' in output.read_text("utf-8")
    assert script.main([]) == 2


def test_the_list_says_where_it_is_from() -> None:
    assert re.fullmatch(r"torch_npu-[\d.]+-cp311-cp311-\w+\.whl", NAMES["wheel"])
    assert NAMES["needs"] == [f"torch=={NAMES['version']}.*"]
