"""READMEs, docs and configs/ say what the code does: tables, keys, defaults, commands, links and examples."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import logging
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_fsdp2.cli import main as command
from mindspeed_fsdp2.config import FSDP2Config, check_supported, load_config
from mindspeed_fsdp2.errors import ConfigError
from mindspeed_fsdp2.plan import build_plan
from tests.distributed.ranks import RankPool

ROOT = Path(__file__).parents[2]
PAIRS = [("README.md", "README.zh.md")] + [
    (f"docs/en/{page.name}", f"docs/zh/{page.name}") for page in sorted((ROOT / "docs" / "en").glob("*.md"))
]
PAGES = [page for pair in PAIRS for page in pair if (ROOT / page).exists()]
CONFIGS = sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))
WRONG = "<!-- wrong on purpose -->\n"
ABSENT = {"en": "absent", "zh": "不写"}
GPT = [
    "embedding",
    "rotary_pos_emb",
    *(f"decoder.layers.{i}" for i in range(16)),
    "decoder.final_layernorm",
    "output_layer",
]
GPT_UNITS = {"embedding", *GPT[2:18], "decoder.final_layernorm + output_layer", "(root)"}
LLAMA = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
VISION = ["image_encoder", *(f"text_decoder.{name}" for name in GPT[:4] + GPT[-1:])]
MODELS: dict[str, tuple[list[str], set[str]]] = {
    **{
        f"gpt_{name}.yaml": (GPT, GPT_UNITS) for name in ("quickstart", "zero2", "hsdp", "recompute", "bf16", "offload")
    },
    "llama_hf.yaml": (LLAMA, {*LLAMA[:3], "model.norm + lm_head", "(root)"}),
    "multimodal.yaml": (VISION, {*VISION[1:], "(root)"}),
}


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", read(page), re.MULTILINE | re.DOTALL)


def headings(page: str) -> list[tuple[int, str]]:
    prose = re.sub(r"^```.*?^```", "", read(page), flags=re.MULTILINE | re.DOTALL)
    return [(len(marks), text) for marks, text in re.findall(r"^(#+) (.*)$", prose, re.MULTILINE)]


def default_of(key: str, absent: str) -> str:
    value = FSDP2Config.model_fields[key].default
    if value is None:
        return absent
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    """scripts/conflicts_table.py as a module."""
    spec = importlib.util.spec_from_file_location("conflicts_table", ROOT / "scripts" / "conflicts_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_conflict_tables_are_up_to_date(tables: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(["--check"]) == 0, capsys.readouterr().err
    for page in PAIRS[0]:
        assert len(re.findall(r"^\| .*--use-distributed-optimizer", read(page), re.MULTILINE)) == 1


def test_stale_conflict_table_is_found_and_mended(
    tables: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for page in PAIRS[0]:
        shutil.copy(ROOT / page, tmp_path)
    stale = tmp_path / "README.zh.md"
    stale.write_text(read("README.zh.md").replace("--qk-clip", "--other", 1), encoding="utf-8")
    assert tables.main(["--check"], tmp_path) == 1
    message = "README.zh.md: the table of conflicts is stale. Run: python scripts/conflicts_table.py\n"
    assert capsys.readouterr().err == message
    assert tables.main([], tmp_path) == 0
    assert stale.read_text(encoding="utf-8") == read("README.zh.md")
    assert capsys.readouterr().out == "README.zh.md: updated\n"
    stale.write_text("# without markers\n", encoding="utf-8")
    assert tables.main([], tmp_path) == 1


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_key_is_documented_with_its_default(language: str) -> None:
    found = dict(
        re.findall(
            r"^### `(\w+)`\n\n- [^\n]*\n- (?:Default: |默认：)(.*)$", read(f"docs/{language}/configuration.md"), re.M
        )
    )
    wanted = {key: default_of(key, ABSENT[language]) for key in FSDP2Config.model_fields}
    assert {key: text.strip("`") for key, text in found.items()} == wanted


@pytest.mark.parametrize(("page", "language"), [*zip(PAIRS[0], ABSENT)])
def test_the_readme_lists_every_key(page: str, language: str) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", read(page).split("## Megatron")[0], re.M))
    assert rows.keys() == FSDP2Config.model_fields.keys()
    del rows["keep_input_dtype"]  # described, the list is too long for the table
    assert {key: text.strip("`") for key, text in rows.items()} == {
        key: default_of(key, ABSENT[language]) for key in rows
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_say_what_they_are_and_load(name: str) -> None:
    text = read(f"configs/{name}")
    opening = text.split("\n\n")[0]
    assert re.findall(r"^# (\w+): ", opening, re.MULTILINE) == ["What", "Launch", "Override"]
    assert f"configs/{name}" in opening
    config = load_config(ROOT / "configs" / name)
    check_supported(config)
    assert config.notices == ()


class Part(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def skeleton(names: list[str]) -> nn.Module:
    root = Part()
    for name in names:
        *path, leaf = name.split(".")
        module: nn.Module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, Part())
            module = module.get_submodule(part)
        module.add_module(leaf, nn.Linear(2, 2))
    return root


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_plan_the_units_they_describe(name: str) -> None:
    names, units = MODELS[name]
    plan = build_plan(load_config(ROOT / "configs" / name), skeleton(names), data_parallel_size=16)
    assert {unit.name for unit in plan.units} == units
    assert plan.shard_size == (8 if name == "gpt_hsdp.yaml" else 16)


def yaml_blocks() -> Iterator[tuple[str, int, bool, str, str]]:
    """Page, number, whether it is marked as wrong, the block, and the text block that directly follows."""
    pattern = re.compile(
        rf"({re.escape(WRONG)})?^```yaml\n(.*?)^```\n(?:\n[^\n`]+\n\n```text\n(.*?)^```)?", re.M | re.S
    )
    for page in PAGES:
        for number, (wrong, block, answer) in enumerate(pattern.findall(read(page))):
            yield page, number, bool(wrong), block, answer


@pytest.mark.parametrize(("page", "number", "wrong", "block", "answer"), [*yaml_blocks()])
def test_yaml_blocks_load_or_fail_as_printed(
    page: str, number: int, wrong: bool, block: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cfg.yaml").write_text(block, encoding="utf-8")
    if not wrong:
        assert load_config("cfg.yaml").model_fields_set
        return
    with pytest.raises(ConfigError) as error:
        load_config("cfg.yaml")
    if answer:
        assert str(error.value) + "\n" == answer


@pytest.mark.parametrize("page", PAIRS[0])
def test_the_answer_to_a_native_file_is_the_printed_one(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "tests" / "unit" / "data" / "real_configs" / "native_qwen3_5.yaml", "native.yaml")
    with pytest.raises(ConfigError) as error:
        load_config("native.yaml")
    (printed,) = blocks(page, "text")
    *shown, dots = printed.splitlines()
    assert dots.strip() == "..."
    assert shown == str(error.value).splitlines()[: len(shown)]


def test_both_languages_have_the_same_structure() -> None:
    assert {page.name for page in (ROOT / "docs" / "zh").glob("*.md")} == {Path(en).name for en, _ in PAIRS[1:]}
    for en, zh in PAIRS:
        assert [level for level, _ in headings(en)] == [level for level, _ in headings(zh)], en
        keys = [[text for _, text in headings(page) if text.startswith("`")] for page in (en, zh)]
        assert keys[0] == keys[1], en
        for kind in ("yaml", "bash", "python", "text"):
            assert len(blocks(en, kind)) == len(blocks(zh, kind)), (en, kind)
        assert read(en).count("<!-- figures: quickstart -->") == read(zh).count("<!-- figures: quickstart -->")


def test_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(map(read, [*PAGES, *(f"configs/{name}" for name in CONFIGS)]))
    scripts = re.findall(r"bash (scripts/[\w./-]+)((?: +--[\w-]+(?: [\w./]+)?)*)", text)
    assert {"scripts/quickstart.sh", "scripts/test.sh", "scripts/check.sh"} <= {script for script, _ in scripts}
    for script, options in scripts:
        assert all(option in read(script) for option in re.findall(r"--[\w-]+", options)), (script, options)
    modules = re.findall(r"-m (mindspeed_fsdp2[\w.]*\w)", text)
    assert all(importlib.util.find_spec(module) for module in modules) and "mindspeed_fsdp2.run" in modules
    subcommands = set(re.findall(r"mindspeed-fsdp2 ([a-z]+)", text))
    assert "check" in subcommands
    for subcommand in subcommands:
        with pytest.raises(SystemExit) as end:
            command([subcommand, "--help"])
        assert end.value.code == 0, capsys.readouterr().err
    for extra in re.findall(r'pip install -e "\.\[(\w+)\]"', text):
        assert re.search(rf"^{extra} = \[", read("pyproject.toml"), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_shell_blocks_parse(page: str) -> None:
    for block in blocks(page, "bash"):
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", read(page)):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        if anchor:
            slugs = [re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for _, text in headings(str(path))]
            assert anchor in slugs, (target, anchor)


def _run_example(source: str) -> tuple[list[str], set[str]]:
    """Run the README's train.py in a group that exists already; return what it prints and its parameters' types."""
    namespace: dict[str, Any] = {"__name__": "train"}
    exec(compile(source, "train.py", "exec"), namespace)
    wrap, kinds, printed = namespace["wrap_model"], set(), io.StringIO()

    def recording(model: nn.Module, config: Any) -> nn.Module:
        wrapped: nn.Module = wrap(model, config, device_type="cpu")
        kinds.update(
            "DTensor" if isinstance(param, DTensor) else type(param).__name__ for param in wrapped.parameters()
        )
        return wrapped

    namespace["wrap_model"] = recording
    names = ("torch.distributed.init_process_group", "torch.distributed.destroy_process_group")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch(name))
        stack.enter_context(mock.patch("torch.accelerator.is_available", return_value=False))
        stack.enter_context(mock.patch.object(logging, "basicConfig"))
        stack.enter_context(contextlib.redirect_stdout(printed))
        namespace["main"]()
    return printed.getvalue().splitlines(), kinds


def test_the_readme_example_trains(ranks2: RankPool) -> None:
    (source,) = [block for block in blocks("README.md", "python") if "wrap_model" in block]
    (translated,) = [block for block in blocks("README.zh.md", "python") if "wrap_model" in block]
    assert ast.dump(ast.parse(source)) == ast.dump(ast.parse(translated))
    (lines, kinds), (silent, other_kinds) = ranks2.run(_run_example, source)
    assert kinds == other_kinds == {"DTensor"}
    assert silent == []
    losses = [
        float(match[1])
        for line in lines
        if (match := re.fullmatch(r"step \d: loss (\d\.\d{4}), gradient norm \d\.\d{4}", line))
    ]
    assert len(losses) == len(lines) == 5
    assert losses[-1] < losses[0]
