"""The dialects of MindSpeed: class paths, module paths, and native files in six blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mindspeed_fsdp2.cli import main
from mindspeed_fsdp2.config import FSDP2Config, load_config
from mindspeed_fsdp2.config.native_convert import convert_native
from mindspeed_fsdp2.errors import ConfigError
from mindspeed_fsdp2.plan import build_plan

REAL = Path(__file__).parent / "data" / "real_configs"
HERE = __name__


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.up(hidden)


class GatedLayer(Layer):
    pass


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), GatedLayer(), Layer()])
        self.head = nn.Linear(4, 4)


def units(*paths: str) -> list[tuple[str, ...]]:
    plan = build_plan(FSDP2Config(sharding_size="auto", sub_modules_to_wrap=list(paths)), Model())
    return sorted(unit.fqns for unit in plan.units if unit.fqns != ("",))


# Class paths


def test_import_path_selects_subclasses_too_as_in_mindspeed() -> None:
    assert units(f"{HERE}.Layer") == [("layers.0",), ("layers.1",), ("layers.2",)]
    assert units(f"{HERE}.GatedLayer") == [("layers.1",)]


def test_bare_name_selects_exactly_that_class() -> None:
    assert units("Layer") == [("layers.0",), ("layers.2",)]


def test_import_path_that_reexports_the_class() -> None:
    assert units("torch.nn.Linear") == [("head",), ("layers.0.up",), ("layers.1.up",), ("layers.2.up",)]


def test_a_misspelt_class_is_an_error() -> None:
    with pytest.raises(ConfigError) as error:
        units(f"{HERE}.Layre")
    assert str(error.value).startswith(f"sub_modules_to_wrap[0]: module path '{HERE}.Layre' selects no module: ")
    assert f"Classes with a similar name: {HERE}.Layer, " in str(error.value)


def test_absent_sharding_size_is_one_with_both_readings_named(tmp_path: Path) -> None:
    path = tmp_path / "classes.yaml"
    path.write_text(f"sub_modules_to_wrap:\n  - {HERE}.Layer\n")
    config = load_config(path)
    assert config.sharding_size == 1
    assert config.notices == (
        f"{path}: sharding_size: absent, so it is 1, as MindSpeed-MM documents it: nothing is sharded, every rank keeps "
        "the whole model as in plain data parallel. Write auto to shard over the whole data-parallel group, which is "
        "what an absent key means to MindSpeed itself.",
    )


# Native files


def test_convert_writes_what_the_refusal_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = REAL / "native_qwen3_5.yaml", tmp_path / "cfg.yaml"
    assert main(["convert", str(source), "-o", str(target)]) == 0
    note = (
        f"{source}:131: training.init_model_with_meta_device: is no key here. Give Megatron "
        "--init-model-with-meta-device, or build the model in meta_init()."
    )
    assert capsys.readouterr().err == f"note: {note}\n"
    with pytest.raises(ConfigError) as refused:
        load_config(source)
    shown = [line.strip() for line in str(refused.value).splitlines()[1:] if not line.strip().startswith("#")]
    written = target.read_text().splitlines()
    assert written[:3] == [
        f"# Converted from {source} (MindSpeed's native FSDP2) by mindspeed-fsdp2 convert.",
        f"# Note: {note}",
        "",
    ]
    assert [line.strip() for line in written[3:]] == shown
    config = load_config(target)
    assert config.sharding_size == "auto" and config.use_reentrant is False and config.param_dtype == "bf16"
    assert config.recompute_modules == ("model.visual.blocks.{*}", "model.language_model.layers.{*}")
    assert len(config.sub_modules_to_wrap or ()) == 7


def test_what_has_no_counterpart_is_noted_and_strict_refuses_it() -> None:
    source = {
        "parallel": {
            "fully_shard_parallel_size": 4,
            "ulysses_parallel_size": 2,
            "ring_attention_size": 1,
            "fsdp_plan": {"apply_modules": ["layers.{*}"], "pregather": True},
        },
        "features": {"recompute": False, "recompute_plan": {"apply_modules": ["layers.{*}"]}},
        "training": {"lr": 1e-5},
    }
    conversion = convert_native(source)
    assert conversion is not None
    assert conversion.settings == {"sharding_size": 4, "sub_modules_to_wrap": ["layers.{*}"]}
    notes = (
        "parallel.ulysses_parallel_size: the number 2 has no counterpart here and was left out.",
        "parallel.fsdp_plan.pregather: the boolean true has no counterpart here and was left out.",
    )
    assert conversion.notes == notes
    with pytest.raises(ConfigError) as error:
        convert_native(source, strict=True)
    assert str(error.value) == "\n".join(notes)


def test_mistakes_name_the_line_of_the_native_file(tmp_path: Path) -> None:
    path = tmp_path / "native.yaml"
    path.write_text(
        "parallel:\n  fully_shard_parallel_size: 0\n  fsdp_plan:\n    apply_modules: ['layers.{0-']\n"
        "    reduce_dtype: f8\ntraining: {}\n"
    )
    with pytest.raises(ConfigError) as error:
        convert_native(path)
    lines = str(error.value).splitlines()
    assert lines[0] == (
        f"{path}:2: parallel.fully_shard_parallel_size, here sharding_size: the number 0 is too small. Write a number of "
        "ranks, 1 or more, or auto."
    )
    assert lines[1].startswith(f"{path}:4: parallel.fsdp_plan.apply_modules, here sub_modules_to_wrap[0]: ")
    assert lines[2].startswith(f"{path}:5: parallel.fsdp_plan.reduce_dtype, here reduce_dtype: the text 'f8' ")
    assert len(lines) == 3


@pytest.mark.parametrize("name", ["qwen25vl.yaml", "hf/accelerate_template.yaml"])
def test_other_files_are_not_native(name: str) -> None:
    assert convert_native(REAL / name) is None
