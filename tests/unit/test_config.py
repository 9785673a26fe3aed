"""Loading settings: every rule of the file format with its exact message."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mindspeed_fsdp2.config import FSDP2Config, Override, check_supported, load_config
from mindspeed_fsdp2.errors import ConfigError

KEYS = tuple(FSDP2Config.model_fields)
ALL_KEYS = f"one of {', '.join(KEYS)}"
START = "Write 'key: value' lines, e.g. 'sharding_size: auto'."
NOTHING_SHARDED = (
    "nothing is sharded, every rank keeps the whole model as in plain data parallel. "
    "Write auto to shard over the whole data-parallel group."
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def load(folder: Path) -> Callable[[str], FSDP2Config]:
    """Write a text to cfg.yaml and load it."""

    def write_and_load(text: str) -> FSDP2Config:
        (folder / "cfg.yaml").write_text(text)
        return load_config("cfg.yaml")

    return write_and_load


@pytest.fixture
def mistakes(load: Callable[[str], FSDP2Config]) -> Callable[[str], list[str]]:
    """Write a text to cfg.yaml, load it in vain and return the lines of the error."""

    def lines(text: str) -> list[str]:
        with pytest.raises(ConfigError) as error:
            load(text)
        return str(error.value).split("\n")

    return lines


# What loads


def test_defaults() -> None:
    config = load_config({})
    assert config.model_dump() == {
        "sharding_size": 1,
        "sub_modules_to_wrap": None,
        "ignored_modules": (),
        "recompute_modules": (),
        "use_reentrant": True,
        "reshard_after_forward": True,
        "param_dtype": None,
        "reduce_dtype": None,
        "output_dtype": None,
        "cast_forward_inputs": True,
        "keep_input_dtype": (
            "rotary_pos_emb",
            "rotary_pos_cos",
            "rotary_pos_sin",
            "freqs",
            "position_embeddings",
            "attention_bias",
        ),
        "num_to_forward_prefetch": 0,
        "num_to_backward_prefetch": 0,
        "offload_to_cpu": False,
        "pin_memory": True,
        "align_fsdp_param_groups": False,
        "expert_parallel_size": 1,
        "reshard_local_experts": True,
        "moe_modules": (),
        "overrides": (),
        "reduce_grads": "every_microbatch",
        "optional_modules": (),
        "check_unit_order": None,
        "auto_wrap_policy": None,
        "transformer_layer_cls_to_wrap": None,
        "min_num_params": None,
    }


@pytest.mark.parametrize(
    ("line", "key", "expected"),
    [
        ("sharding_size: auto", "sharding_size", "auto"),
        ("sharding_size: 'auto'", "sharding_size", "auto"),
        ("sharding_size: 4", "sharding_size", 4),
        ("sub_modules_to_wrap: []", "sub_modules_to_wrap", ()),
        ("sub_modules_to_wrap: [a, [b, c]]", "sub_modules_to_wrap", ("a", ("b", "c"))),
        ("sub_modules_to_wrap: ['layers.{0-20,22-40}']", "sub_modules_to_wrap", ("layers.{0-20,22-40}",)),
        ("sub_modules_to_wrap: [layers.<*>]", "sub_modules_to_wrap", ("layers.<*>",)),
        ("sub_modules_to_wrap:\n  - layers.{0-20,22-40}", "sub_modules_to_wrap", ("layers.{0-20,22-40}",)),
        ("recompute_modules: [pkg.mod.Layer, Layer]", "recompute_modules", ("pkg.mod.Layer", "Layer")),
        ("reshard_after_forward: no", "reshard_after_forward", False),
        ("reshard_after_forward: 2", "reshard_after_forward", 2),
        ("use_reentrant: off", "use_reentrant", False),
        ("pin_memory: on", "pin_memory", True),
        ("cast_forward_inputs: False", "cast_forward_inputs", False),
        ("keep_input_dtype: []", "keep_input_dtype", ()),
        ("param_dtype: bfloat16", "param_dtype", "bf16"),
        ("reduce_dtype: float32", "reduce_dtype", "fp32"),
        ("output_dtype: float16", "output_dtype", "fp16"),
        ("num_to_forward_prefetch: 3", "num_to_forward_prefetch", 3),
        ("offload_to_cpu: true", "offload_to_cpu", True),
        ("reduce_grads: last_microbatch", "reduce_grads", "last_microbatch"),
        ("reduce_grads: every_microbatch", "reduce_grads", "every_microbatch"),
        ("optional_modules: [image_encoder, 'towers.{*}']", "optional_modules", ("image_encoder", "towers.{*}")),
        ("optional_modules: []", "optional_modules", ()),
        ("check_unit_order: true", "check_unit_order", True),
        ("check_unit_order: off", "check_unit_order", False),
    ],
)
def test_values_that_load(load: Callable[[str], FSDP2Config], line: str, key: str, expected: object) -> None:
    value = getattr(load(f"{line}\n"), key)
    assert value == expected
    assert type(value) is type(expected)


def test_the_same_path_may_be_wrapped_and_recomputed(load: Callable[[str], FSDP2Config]) -> None:
    config = load("sub_modules_to_wrap: [a]\nrecompute_modules: [a]\n")
    assert config.sub_modules_to_wrap == config.recompute_modules == ("a",)


def test_overrides(load: Callable[[str], FSDP2Config]) -> None:
    config = load("overrides:\n  - modules: [a]\n    param_dtype: float32\n    reshard_after_forward: 2\n")
    assert config.overrides == (Override(modules=("a",), param_dtype="fp32", reshard_after_forward=2),)
    assert config.where("overrides", 0, "modules", 0) == "cfg.yaml:2: overrides[0].modules[0]"


def test_override_takes_every_key_of_its_own(load: Callable[[str], FSDP2Config]) -> None:
    (override,) = load(
        "overrides:\n  - modules: ['layers.{0-3}', Router]\n    param_dtype: fp32\n    reduce_dtype: float32\n"
        "    output_dtype: bf16\n    cast_forward_inputs: no\n    reshard_after_forward: false\n    offload_to_cpu: true\n"
    ).overrides
    assert override.model_dump() == {
        "modules": ("layers.{0-3}", "Router"),
        "param_dtype": "fp32",
        "reduce_dtype": "fp32",
        "output_dtype": "bf16",
        "cast_forward_inputs": False,
        "reshard_after_forward": False,
        "offload_to_cpu": True,
    }


def test_anchors_are_followed(load: Callable[[str], FSDP2Config]) -> None:
    config = load("sub_modules_to_wrap: &layers ['layers.{*}']\nrecompute_modules: *layers\n")
    assert config.recompute_modules == ("layers.{*}",)


def test_byte_order_mark_is_no_part_of_the_first_key(folder: Path) -> None:
    (folder / "cfg.yaml").write_bytes(b"\xef\xbb\xbfsharding_size: auto\n")
    assert load_config(folder / "cfg.yaml").sharding_size == "auto"


def test_finished_configuration_is_returned() -> None:
    config = FSDP2Config(sharding_size="auto")
    assert load_config(config) is config


def test_file_mapping_and_keywords_agree(load: Callable[[str], FSDP2Config]) -> None:
    from_file = load("param_dtype: bfloat16\nsub_modules_to_wrap:\n  - a\n  - [b, c]\nsharding_size: auto\n")
    settings: dict[str, Any] = {
        "sharding_size": "auto",
        "sub_modules_to_wrap": ["a", ["b", "c"]],
        "param_dtype": "bf16",
    }
    for other in (load_config(settings), FSDP2Config(**settings), load_config(from_file.model_dump())):
        assert other == from_file
        assert hash(other) == hash(from_file)
        assert other.digest() == from_file.digest()
    assert len(from_file.digest()) == 16
    digests = {from_file.digest()}
    for key, value in [
        ("sharding_size", 2),
        ("sub_modules_to_wrap", ["a", "b", "c"]),
        ("param_dtype", "fp16"),
        ("reduce_grads", "last_microbatch"),
        ("optional_modules", ["a"]),
        ("check_unit_order", True),
        ("check_unit_order", False),
        ("offload_to_cpu", True),
        ("overrides", [{"modules": ["a"], "offload_to_cpu": True}]),
        ("overrides", [{"modules": ["a"], "offload_to_cpu": False}]),
    ]:
        different = load_config({**settings, key: value})
        assert different != from_file
        digests.add(different.digest())
    assert len(digests) == 11


def test_defaults_written_out_change_nothing(load: Callable[[str], FSDP2Config]) -> None:
    written = load("reduce_grads: every_microbatch\noptional_modules: []\noffload_to_cpu: false\noverrides: []\n")
    assert written == load_config({})
    assert written.digest() == load_config({"check_unit_order": None}).digest() == load_config({}).digest()


def test_digest_is_the_same_in_every_process() -> None:
    assert load_config({"sharding_size": "auto"}).digest() == load_config({"sharding_size": "auto"}).digest()
    program = "from mindspeed_fsdp2.config import load_config; print(load_config({'sharding_size': 'auto'}).digest())"
    root = str(Path(__file__).parents[2])
    env = {"PYTHONPATH": root, "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=True)
    assert other.stdout.strip() == load_config({"sharding_size": "auto"}).digest()


def test_yaml_round_trip(load: Callable[[str], FSDP2Config]) -> None:
    config = load(
        "sharding_size: 4\nsub_modules_to_wrap: ['{*}', [a, b]]\nreshard_after_forward: 2\nparam_dtype: bf16\n"
        "overrides: [{modules: [a], cast_forward_inputs: false}]\nreduce_grads: last_microbatch\n"
        "optional_modules: [b]\ncheck_unit_order: false\noffload_to_cpu: true\n"
    )
    assert load(config.to_yaml()) == config
    assert "\nreduce_grads: last_microbatch\noptional_modules:\n  - b\ncheck_unit_order: false\n" in config.to_yaml()
    assert load(FSDP2Config().to_yaml()) == FSDP2Config()


def test_configuration_is_immutable_and_picklable(load: Callable[[str], FSDP2Config]) -> None:
    config = load("sharding_size: auto\n")
    with pytest.raises(ValidationError):
        config.sharding_size = 2
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.where("sharding_size") == "cfg.yaml:1: sharding_size"


def test_where(load: Callable[[str], FSDP2Config]) -> None:
    config = load("# comment\nsharding_size: auto\nsub_modules_to_wrap:\n  - a\n\n  - [b, c]\nignored_modules: [d]\n")
    assert config.where("sharding_size") == "cfg.yaml:2: sharding_size"
    assert config.where("sub_modules_to_wrap") == "cfg.yaml:3: sub_modules_to_wrap"
    assert config.where("sub_modules_to_wrap", 1) == "cfg.yaml:6: sub_modules_to_wrap[1]"
    assert config.where("sub_modules_to_wrap", 1, 0) == "cfg.yaml:6: sub_modules_to_wrap[1][0]"
    assert config.where("ignored_modules", 0) == "cfg.yaml:7: ignored_modules[0]"
    assert config.where("recompute_modules") == "cfg.yaml: recompute_modules"
    assert load_config({"ignored_modules": ["d"]}).where("ignored_modules", 0) == "ignored_modules[0]"


# Notices and what is not built yet


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sharding_size: auto\n", ()),
        ("sharding_size: 2\noffload_to_cpu: true\npin_memory: false\n", ()),
        (
            "param_dtype: bf16\n",
            (
                f"cfg.yaml: sharding_size: absent, so it is 1, as MindSpeed-MM documents it: {NOTHING_SHARDED[:-1]}, which "
                "is what an absent key means to MindSpeed itself.",
            ),
        ),
        ("sharding_size: 1\n", (f"cfg.yaml:1: sharding_size: 1: {NOTHING_SHARDED}",)),
        (
            "sharding_size: auto\npin_memory: false\n",
            ("cfg.yaml:2: pin_memory: has no effect without offload_to_cpu: true. Remove the key.",),
        ),
        (
            "sharding_size: auto\nuse_reentrant: false\n",
            ("cfg.yaml:2: use_reentrant: has no effect without recompute_modules. Remove the key.",),
        ),
        ("sharding_size: auto\nalign_fsdp_param_groups: false\nreshard_local_experts: true\nmoe_modules: []\n", ()),
        (
            "sharding_size: auto\nreshard_local_experts: false\n",
            (
                "cfg.yaml:2: reshard_local_experts: accepted but not applied: "
                "units are grouped as sub_modules_to_wrap says.",
            ),
        ),
        ("sharding_size: auto\noverrides: [{modules: [a], offload_to_cpu: true}]\npin_memory: false\n", ()),
        (
            "sharding_size: auto\noverrides: [{modules: [a], offload_to_cpu: false}]\npin_memory: false\n",
            ("cfg.yaml:3: pin_memory: has no effect without offload_to_cpu: true. Remove the key.",),
        ),
        ("sharding_size: auto\nreduce_grads: last_microbatch\noptional_modules: [a]\ncheck_unit_order: true\n", ()),
    ],
)
def test_notices(load: Callable[[str], FSDP2Config], text: str, expected: tuple[str, ...]) -> None:
    assert load(text).notices == expected


def test_all_unsupported_settings_are_named(load: Callable[[str], FSDP2Config]) -> None:
    config = load("sharding_size: auto\nexpert_parallel_size: 2\n")
    with pytest.raises(ConfigError) as error:
        check_supported(config)
    assert str(error.value) == "cfg.yaml:2: expert_parallel_size: 2 is not supported yet. Write 1 or remove the key."


def test_everything_else_is_supported(load: Callable[[str], FSDP2Config]) -> None:
    check_supported(
        load(
            "offload_to_cpu: true\noverrides: [{modules: [a], param_dtype: fp32}]\nreduce_grads: last_microbatch\n"
            "optional_modules: [b]\ncheck_unit_order: true\nexpert_parallel_size: 1\n"
        )
    )


# Mistakes in values


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sharding_size: 0", "the number 0 is too small. Write a number of ranks, 1 or more, or auto."),
        ("sharding_size: Auto", "the text 'Auto' is neither a number of ranks nor auto. Write auto."),
        ("sharding_size: '8'", "the text '8' is not a number. Drop the quotes: write 8."),
        ("sharding_size: 8.0", "the number 8.0 is not a whole number. Write 8."),
        ("sharding_size: true", "the boolean true is not a whole number. Write a number of ranks, 1 or more, or auto."),
        ("sharding_size: 010", "YAML reads 010 as the number 8. Write 8."),
        ("sharding_size: all", "the text 'all' is not a whole number. Write a number of ranks, 1 or more, or auto."),
        ("use_reentrant: 'true'", "the text 'true' is not a boolean. Drop the quotes: write true."),
        ("use_reentrant: 'off'", "the text 'off' is not a boolean. Drop the quotes: write false."),
        ("use_reentrant: 1", "the number 1 is not a boolean. Write true or false."),
        ("use_reentrant: ture", "the text 'ture' is not a boolean. Write true or false."),
        ("pin_memory: []", "the list [] is not a boolean. Write true or false."),
        ("reshard_after_forward: 0", "the number 0 is neither a boolean nor a number of ranks above 1. Write false."),
        ("reshard_after_forward: 1", "the number 1 is neither a boolean nor a number of ranks above 1. Write true."),
        (
            "reshard_after_forward: -2",
            "the number -2 is too small. Write true, false or a number of ranks of 2 or more.",
        ),
        ("reshard_after_forward: 2.0", "the number 2.0 is not a whole number. Write 2."),
        ("reshard_after_forward: '4'", "the text '4' is not a number. Drop the quotes: write 4."),
        ("reshard_after_forward: 'false'", "the text 'false' is not a boolean. Drop the quotes: write false."),
        (
            "reshard_after_forward: [2]",
            "the list [2] is not a boolean. Write true, false or a number of ranks of 2 or more.",
        ),
        ("num_to_forward_prefetch: -1", "the number -1 is too small. Write 0 or more."),
        ("num_to_backward_prefetch: true", "the boolean true is not a whole number. Write 0 or more."),
        (
            "param_dtype: torch.bfloat16",
            "the text 'torch.bfloat16' is not one of the dtypes bf16, fp16, fp32. Write bf16.",
        ),
        *(
            (f"{key}: {name}", f"the text '{name}' is not one of the dtypes bf16, fp16, fp32. Write {meant}.")
            for key in ("param_dtype", "reduce_dtype", "output_dtype")
            for name, meant in (
                ("float64", "fp32"),
                ("fp64", "fp32"),
                ("double", "fp32"),
                ("torch.double", "fp32"),
                ("single", "fp32"),
                ("float", "fp32"),
                ("half", "fp16"),
            )
        ),
        ("param_dtype: BF16", "the text 'BF16' is not one of the dtypes bf16, fp16, fp32. Write bf16."),
        (
            "param_dtype: no",
            "the boolean false is not one of the dtypes bf16, fp16, fp32. "
            "Write bf16, fp16 or fp32, or remove the key to leave the dtype unchanged.",
        ),
        ("recompute_modules:", "has no value. Write [] for none, or remove the key."),
        ("sub_modules_to_wrap:", "has no value. Write [] for none, or remove the key."),
        ("param_dtype:", "has no value. Write a value, or remove the key."),
        ("ignored_modules: ae", "the text 'ae' is not a list. Write ignored_modules: [\"ae\"]."),
        (
            "sub_modules_to_wrap: a.{0,1}, b",
            'the text \'a.{0,1}, b\' is not a list. Write sub_modules_to_wrap: ["a.{0,1}", "b"].',
        ),
        ("moe_modules: |\n  a\n  b", 'the text \'a\\nb\\n\' is not a list. Write moe_modules: ["a", "b"].'),
        (
            "recompute_modules: {a: b}",
            "the mapping {'a': 'b'} is not a list of module paths. Write one a line, each after '- '.",
        ),
        ("keep_input_dtype: x", "the text 'x' is not a list. Write keep_input_dtype: [\"x\"]."),
        (
            "reduce_grads: every",
            "the text 'every' is not one of every_microbatch, last_microbatch. Write every_microbatch.",
        ),
        (
            "reduce_grads: last_micro_batch",
            "the text 'last_micro_batch' is not one of every_microbatch, last_microbatch. Write last_microbatch.",
        ),
        (
            "reduce_grads: true",
            "the boolean true is not one of every_microbatch, last_microbatch. Write every_microbatch.",
        ),
        ("reduce_grads:", "has no value. Write a value, or remove the key."),
        ("optional_modules: a", "the text 'a' is not a list. Write optional_modules: [\"a\"]."),
        ("optional_modules: 3", "the number 3 is not a list of module paths. Write one a line, each after '- '."),
        ("check_unit_order: 'true'", "the text 'true' is not a boolean. Drop the quotes: write true."),
        ("check_unit_order: 20", "the number 20 is not a boolean. Write true or false."),
        ("check_unit_order:", "has no value. Write a value, or remove the key."),
        ("overrides: 3", "the number 3 is not a list. Write entries like '- modules: [...]' with keys to change."),
        ("<<: {sharding_size: 2}", "merged mappings are not read here. Write the keys out."),
        ("sharding_size: !!python/name:os.getcwd x", "the value 'x' cannot be read. Quote it, and write no tag."),
    ],
)
def test_wrong_value(mistakes: Callable[[str], list[str]], line: str, message: str) -> None:
    key = line.partition(":")[0]
    assert f"cfg.yaml:2: {key}: {message}" in mistakes(f"\n{line}\n")


def test_every_entry_of_a_list_is_checked(mistakes: Callable[[str], list[str]]) -> None:
    text = """\
sub_modules_to_wrap:
  - {0-3}
  - layers.3:
  - 0
  - on
  -
  - [a, [b]]
  - []
  - a
  - layers.<*>
  - layers.{*}
  - [c, a]
  - x.{3-1}
  - ''
"""
    at = "sub_modules_to_wrap"
    assert mistakes(text) == [
        f"cfg.yaml:2: {at}[0]: the mapping {{'0-3': None}} is not a module path. Quote it: \"{{0-3}}\".",
        f"cfg.yaml:3: {at}[1]: the mapping {{'layers.3': None}} is not a module path. Write \"layers.3\", without a colon.",
        f'cfg.yaml:4: {at}[2]: the number 0 is not a module path. Quote it if a module has that name: "0".',
        f'cfg.yaml:5: {at}[3]: the boolean true is not a module path. Quote it if a module has that name: "true".',
        f"cfg.yaml:6: {at}[4]: nothing is not a module path. "
        "Write the name of a module, e.g. decoder.layers.{*}, or remove the entry.",
        f"cfg.yaml:7: {at}[5][1]: the list ['b'] is a unit inside a unit. Write lists at most two deep.",
        f"cfg.yaml:8: {at}[6]: the unit is an empty list. List its modules; [] for the whole key means root only.",
        f"cfg.yaml:9: {at}[7]: 'a' is already listed as entry [5][0]. Remove one.",
        f"cfg.yaml:11: {at}[9]: 'layers.{{*}}' is already listed as entry [8]. Remove one.",
        f"cfg.yaml:12: {at}[10][1]: 'a' is already listed as entry [5][0]. Remove one.",
        f"cfg.yaml:13: {at}[11]: module path 'x.{{3-1}}': the range 3-1 runs backwards. Write 1-3.",
        f"cfg.yaml:14: {at}[12]: module path '' is empty. Write the name of a module, e.g. decoder.layers.{{*}}.",
    ]


@pytest.mark.parametrize("key", ["ignored_modules", "recompute_modules", "moe_modules", "optional_modules"])
def test_lists_of_paths(mistakes: Callable[[str], list[str]], key: str) -> None:
    assert mistakes(f"{key}: [a, [b], a, 'x..y']\n") == [
        f"cfg.yaml:1: {key}[1]: the list ['b'] is not a module path. "
        "Write the name of a module, e.g. decoder.layers.{*}, or remove the entry.",
        f"cfg.yaml:1: {key}[2]: 'a' is already listed as entry [0]. Remove one.",
        f"cfg.yaml:1: {key}[3]: module path 'x..y' has an empty segment. "
        "Write names joined by single dots, e.g. decoder.layers.0.",
    ]


def test_keep_input_dtype_holds_argument_names(mistakes: Callable[[str], list[str]]) -> None:
    assert mistakes("keep_input_dtype: [a, a-b, a, 3, class]\n") == [
        "cfg.yaml:1: keep_input_dtype[1]: the text 'a-b' is not the name of an argument. Write a name like rotary_pos_emb.",
        "cfg.yaml:1: keep_input_dtype[2]: 'a' is already listed as entry [0]. Remove one.",
        "cfg.yaml:1: keep_input_dtype[3]: the number 3 is not the name of an argument. Write a name like rotary_pos_emb.",
        "cfg.yaml:1: keep_input_dtype[4]: the text 'class' is not the name of an argument. "
        "Write a name like rotary_pos_emb.",
    ]


def test_every_override_is_checked(mistakes: Callable[[str], list[str]]) -> None:
    text = """\
overrides:
  - modules: [a]
  - modules: []
    param_dtype: fp32
  - a
  - modul: [x]
  - modules: [a, a]
    param_dtyp: x
    reduce_dtype:
    offload_to_cpu: 1
"""
    assert mistakes(text) == [
        "cfg.yaml:2: overrides[0]: nothing is overridden. Write a key to change, e.g. param_dtype: fp32.",
        "cfg.yaml:3: overrides[1].modules: the list is empty. Write the modules that this override is for.",
        "cfg.yaml:5: overrides[2]: the text 'a' is not a mapping. Write '- modules: [...]' with keys to change.",
        "cfg.yaml:6: overrides[3].modules: is missing. Write the module paths that this override is for.",
        "cfg.yaml:6: overrides[3].modul: unknown key. Write modules.",
        "cfg.yaml:7: overrides[4].modules[1]: 'a' is already listed as entry [0]. Remove one.",
        "cfg.yaml:8: overrides[4].param_dtyp: unknown key. Write param_dtype.",
        "cfg.yaml:9: overrides[4].reduce_dtype: has no value. Write a value, or remove the key.",
        "cfg.yaml:10: overrides[4].offload_to_cpu: the number 1 is not a boolean. Write true or false.",
    ]


# Mistakes in keys


@pytest.mark.parametrize("key", KEYS)
def test_misspelt_key_suggests_the_right_one(mistakes: Callable[[str], list[str]], key: str) -> None:
    for wrong in {key[:-1], f"{key[:3]}{key[4:]}", key.replace("_", "-"), key.upper()} - {key}:
        assert mistakes(f"{wrong}: 1\n") == [f"cfg.yaml:1: {wrong}: unknown key. Write {key}."]


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ("cpu_offload", "offload_to_cpu"),
        ("apply_modules", "sub_modules_to_wrap"),
        ("fully_shard_parallel_size", "sharding_size"),
        ("transformer_cls_names_to_wrap", "transformer_layer_cls_to_wrap"),
        ("activation_checkpointing", "recompute_modules"),
    ],
)
def test_keys_of_other_projects_suggest_ours(mistakes: Callable[[str], list[str]], wrong: str, key: str) -> None:
    assert mistakes(f"{wrong}: 1\n") == [f"cfg.yaml:1: {wrong}: unknown key. Write {key}."]
    pasted = mistakes(f"sharding_size: auto\nfsdp_{wrong}: 1\n")
    assert pasted == [f"cfg.yaml:2: fsdp_{wrong}: unknown key. Write {key}."]


def test_key_like_no_other_lists_all(mistakes: Callable[[str], list[str]]) -> None:
    assert mistakes("bogus: 1\non: 2\n") == [
        f"cfg.yaml:1: bogus: unknown key. Write {ALL_KEYS}.",
        f"cfg.yaml:2: on: unknown key. Write {ALL_KEYS}.",
    ]


def test_repeated_key_is_named_at_both_lines(mistakes: Callable[[str], list[str]]) -> None:
    assert mistakes("param_dtype: bf16\nsharding_size: auto\nparam_dtype: fp32\n") == [
        "cfg.yaml:1: param_dtype: is given more than once, in lines 1, 3. Keep one of them.",
        "cfg.yaml:3: param_dtype: is given more than once, in lines 1, 3. Keep one of them.",
    ]


def test_five_mistakes_give_five_lines_in_the_order_of_the_file(mistakes: Callable[[str], list[str]]) -> None:
    text = """\
shard_size: auto
sub_modules_to_wrap:
  - decoder.layers.{20-0}
reshard_after_forward: 'false'
num_to_forward_prefetch: -1
param_dtype: fp8
"""
    assert mistakes(text) == [
        "cfg.yaml:1: shard_size: unknown key. Write sharding_size.",
        "cfg.yaml:3: sub_modules_to_wrap[0]: module path 'decoder.layers.{20-0}': the range 20-0 runs backwards. "
        "Write 0-20.",
        "cfg.yaml:4: reshard_after_forward: the text 'false' is not a boolean. Drop the quotes: write false.",
        "cfg.yaml:5: num_to_forward_prefetch: the number -1 is too small. Write 0 or more.",
        "cfg.yaml:6: param_dtype: the text 'fp8' is not one of the dtypes bf16, fp16, fp32. "
        "Write bf16, fp16 or fp32, or remove the key to leave the dtype unchanged.",
    ]


# Mappings and keywords


def test_mapping_mistakes_have_no_line() -> None:
    settings: dict[Any, Any] = {"sharding_siz": 2, "recompute_modules": None, 3: 4, "ignored_modules": ("a", "a")}
    with pytest.raises(ConfigError) as error:
        load_config(settings)
    assert str(error.value).split("\n") == [
        "the key 3 is not text. Write the name of a setting.",
        "ignored_modules[1]: 'a' is already listed as entry [0]. Remove one.",
        "recompute_modules: nothing is not a list of module paths. Write one a line, each after '- '.",
        "sharding_siz: unknown key. Write sharding_size.",
    ]


def test_keywords_raise_the_same_error() -> None:
    with pytest.raises(ConfigError) as error:
        FSDP2Config(sharding_size=0, use_reentrant=1)  # type: ignore[arg-type]
    assert str(error.value).split("\n") == [
        "sharding_size: the number 0 is too small. Write a number of ranks, 1 or more, or auto.",
        "use_reentrant: the number 1 is not a boolean. Write true or false.",
    ]


@pytest.mark.parametrize(("source", "named"), [(None, "nothing"), (3, "the number 3"), ([], "the list []")])
def test_no_configuration_at_all(source: Any, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(source)
    assert str(error.value) == f"{named} is no configuration. Pass the path of a YAML file or a mapping."


# YAML itself


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"cfg.yaml: the file is empty. {START}"),
        ("# nothing but a comment\n", f"cfg.yaml: the file is empty. {START}"),
        ("- a\n- b\n", f"cfg.yaml:1: the file holds a list. {START}"),
        ("\nhello\n", f"cfg.yaml:2: the file holds only the text 'hello'. {START}"),
        ("42\n", f"cfg.yaml:1: the file holds only the text '42'. {START}"),
        ("a:1\nb:2\n", "cfg.yaml:1: a:1 lacks the space after the colon. Write 'a: 1'."),
        ("a:1\nb: 2\n", "cfg.yaml:1: a:1 lacks the space after the colon. Write 'a: 1'."),
        ("a: b\n---\nc: d\n", "cfg.yaml:3: a second YAML document starts here. Keep one document in the file."),
        ("a: b\n...\nc: d\n", "cfg.yaml:3: a second YAML document starts here. Keep one document in the file."),
        (
            "sub_modules_to_wrap: [layers.{*}]\n",
            'cfg.yaml:1: the module path layers.{*} stands without quotes. Quote module paths: "layers.{*}".',
        ),
        (
            "sub_modules_to_wrap: [\n  a,\n  layers.{0-20,22-40}.mlp]\n",
            "cfg.yaml:3: the module path layers.{0-20,22-40}.mlp stands without quotes. "
            'Quote module paths: "layers.{0-20,22-40}.mlp".',
        ),
        ("a:\n  - {*}\n", 'cfg.yaml:2: the module path {*} stands without quotes. Quote module paths: "{*}".'),
        (
            "sub_modules_to_wrap: [layers.<0-20,22-40>, b]\n",
            "cfg.yaml:1: sub_modules_to_wrap[0]: 'layers.<0-20' and '22-40>' are one module path, cut at its comma. "
            'Quote module paths: "layers.<0-20,22-40>".',
        ),
        (
            "sub_modules_to_wrap: [b, [layers.<0,1,2>, c]]\n",
            "cfg.yaml:1: sub_modules_to_wrap[1][0]: 'layers.<0', '1' and '2>' are one module path, cut at its comma. "
            'Quote module paths: "layers.<0,1,2>".',
        ),
        (
            "sub_modules_to_wrap: [layers.<0-20, b]\n",
            "cfg.yaml:1: sub_modules_to_wrap[0]: module path 'layers.<0-20': '<' has no partner in '<0-20'. "
            'Write a group as "layers.{0-3}".',
        ),
        (
            "sub_modules_to_wrap:\n - x\n  - y\n",
            "cfg.yaml:2: sub_modules_to_wrap[0]: module path 'x - y' is two list entries run together. "
            "Indent all entries alike.",
        ),
        ("a:\n\t- b\n", "cfg.yaml:2: a tab stands where YAML wants spaces. Indent with spaces."),
        (
            "a:\n  - *foo\n",
            "cfg.yaml:2: a value that starts with '*' is an alias. Quote it, or write \"{*}\" for every child.",
        ),
        ("\na: 'b\nc: d\n", "cfg.yaml:2: the quotation mark opened here is never closed. Close it."),
        (
            "\na: [b,\nc: d\n",
            'cfg.yaml:2: the list or mapping that starts here is not closed, or lacks a comma. Write ["a", "b"].',
        ),
        ("a: b: c\n", "cfg.yaml:1: a colon does not fit here. Write one 'key: value' a line, keys indented alike."),
        ("a: b\n c: d\n", "cfg.yaml:2: a colon does not fit here. Write one 'key: value' a line, keys indented alike."),
        (
            "a: b\n\nc\n",
            "cfg.yaml:3: this line is neither a key nor a list entry. Write 'key: value' or '- entry'.",
        ),
        ("a: - b\n", "cfg.yaml:1: a list entry starts in the middle of a line. Write '- entry' on its own line."),
        (
            "a: b\n- c\n",
            "cfg.yaml:2: the indentation does not fit the lines above. Indent keys alike, and entries of a list alike.",
        ),
        ("a: @b\n", "cfg.yaml:1: a value cannot start with '@'. Quote it."),
        ("a: |b\n", "cfg.yaml:1: a value that starts with '|' or '>' is a block of text. Quote it."),
        ("a: &\n", "cfg.yaml:1: a value that starts with '&' is an anchor. Quote it."),
        ('"a\\nb": 1\n', f"cfg.yaml:1: 'a\\nb': unknown key. Write {ALL_KEYS}."),
        ("a: [b]]\n", "cfg.yaml:1: the ']' closes nothing. Remove it or open the list with '['."),
        ("a: &b [*b]\n", "cfg.yaml:1: a[0]: contains itself through an alias. Write the values out."),
        ("? [a]\n: b\n", "cfg.yaml:1: a key is not a word. Write 'key: value' lines."),
        ("a: b\nc: \x01\n", "cfg.yaml:2: the character U+0001 does not belong in text. Remove it."),
        ("a: " + "[" * 2000, "cfg.yaml: lists are nested too deeply. Write module paths at most two lists deep."),
    ],
)
def test_files_that_are_no_settings(mistakes: Callable[[str], list[str]], text: str, message: str) -> None:
    assert mistakes(text)[0] == message


def test_flow_lists_cut_at_a_comma_are_one_mistake(mistakes: Callable[[str], list[str]]) -> None:
    assert len(mistakes("ignored_modules: [a.<0-20,22-40>, b]\n")) == 1


def test_bytes_that_are_not_utf8(folder: Path) -> None:
    (folder / "cfg.yaml").write_bytes(b"a: b\n\nc: \xff\n")
    with pytest.raises(ConfigError) as error:
        load_config("cfg.yaml")
    assert str(error.value) == "cfg.yaml:3: the byte 0xff is not UTF-8. Save the file as UTF-8."


# Files that cannot be read


def test_missing_file_names_the_nearest(folder: Path) -> None:
    (folder / "configs").mkdir()
    (folder / "configs" / "qwen.yaml").write_text("")
    for name, message in [
        ("configs/qwen.yml", "configs/qwen.yml: there is no such file. Write configs/qwen.yaml."),
        ("cfg.yaml", "cfg.yaml: there is no such file. Write the path of an existing YAML file."),
        (
            "other/cfg.yaml",
            "other/cfg.yaml: there is no such file. There is no folder 'other' either. "
            "Write the path of an existing YAML file.",
        ),
        ("configs", "configs: this is a directory. Name a YAML file, e.g. configs/qwen.yaml."),
        ("", "the path of the YAML file is empty. Write the name of a file."),
        (
            "sharding_size: auto\n",
            "the path of the YAML file is text of several lines. Pass a path, or a mapping of settings.",
        ),
        ("a\0b", "'a\\x00b': the file cannot be read (embedded null byte). Name a readable YAML file."),
    ]:
        with pytest.raises(ConfigError) as error:
            load_config(name)
        assert str(error.value) == message


def test_file_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError) as error:
        load_config(folder / "cfg.yaml")
    expected = f"{folder / 'cfg.yaml'}: the file may not be read. Give this user the right to read it."
    assert str(error.value) == expected


# Files of other projects; whole real ones are in test_real_configs.py


def translation(text: str, mistakes: Callable[[str], list[str]]) -> list[str]:
    first, *block = mistakes(text)
    assert first.endswith("not this project's. Write a file with these lines:")
    return [line.removeprefix("    ") for line in block]


HF = "this file follows the format of Hugging Face's Accelerate or Transformers, not this project's. Translate it: "


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n", "distributed_type"),
        ("fsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n", "fsdp_config"),
        ("fsdp_offload_params: false\nfsdp_forward_prefetch: true\n", "fsdp_offload_params"),
        # fsdp_config by itself shares some keys with us
        ("cpu_offload: true\nreshard_after_forward: true\nversion: 2\n", "cpu_offload"),
        ("version: 2\nauto_wrap_policy: NO_WRAP\nstate_dict_type: FULL_STATE_DICT\n", "version"),
    ],
)
def test_files_of_hugging_face_are_recognised(mistakes: Callable[[str], list[str]], text: str, key: str) -> None:
    assert mistakes(text) == [f"cfg.yaml:1: {key}: {HF}mindspeed-fsdp2 convert cfg.yaml -o converted.yaml."]
    with pytest.raises(ConfigError) as error:
        load_config({"version": 2, "xla": False})
    assert str(error.value) == f"version: {HF}FSDP2Config.from_hf(...)."


def test_one_key_of_theirs_in_a_file_of_ours_is_a_mistake(mistakes: Callable[[str], list[str]]) -> None:
    assert mistakes("sharding_size: auto\ncpu_offload: true\nactivation_checkpointing: true\n") == [
        "cfg.yaml:2: cpu_offload: unknown key. Write offload_to_cpu.",
        "cfg.yaml:3: activation_checkpointing: unknown key. Write recompute_modules.",
    ]


def test_native_keys_of_both_spellings(mistakes: Callable[[str], list[str]]) -> None:
    text = """\
training:
  lr: 1.0e-5
parallel:
  fsdp_size: 8
  fsdp_modules: ['model.layers.{*}']
  ignored_modules: [model.visual]
  recompute: true
  recompute_modules: ['model.layers.{*}']
  fsdp_plan:
    cpu_offload: true
    hook_modules: [lm_head]
"""
    assert translation(text, mistakes) == [
        "sharding_size: 8  # parallel.fsdp_size",
        "sub_modules_to_wrap:  # parallel.fsdp_modules",
        "  - model.layers.{*}",
        "ignored_modules:  # parallel.ignored_modules",
        "  - model.visual",
        "recompute_modules:  # parallel.recompute_modules",
        "  - model.layers.{*}",
        "use_reentrant: false  # the default there",
        "offload_to_cpu: true  # parallel.fsdp_plan.cpu_offload",
        "# without a counterpart here: parallel.fsdp_plan.hook_modules",
    ]


def test_native_recompute_switched_off(mistakes: Callable[[str], list[str]]) -> None:
    text = "parallel: {}\nfeatures:\n  recompute: false\n  recompute_plan: {apply_modules: [a]}\n"
    assert translation(text, mistakes) == ["sharding_size: auto  # the default there"]


# Imports


def test_configuration_needs_no_torch() -> None:
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['torch_npu'] = sys.modules['megatron'] = None\n"
        "import mindspeed_fsdp2.module_path\n"
        "from mindspeed_fsdp2.config import load_config\n"
        "print(load_config({'sharding_size': 'auto'}).sharding_size)\n"
    )
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "auto\n", "")
