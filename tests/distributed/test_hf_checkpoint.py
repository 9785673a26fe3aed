"""Weights of wrapped Transformers models as from_pretrained reads them, and back."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_fsdp2 import (
    CheckpointError,
    export_hf,
    full_parameters,
    load_checkpoint,
    load_full_state_dict,
    meta_init,
    save_checkpoint,
    wrap_model,
)
from mindspeed_fsdp2.cli import main
from tests.distributed.hf_models import VOCABULARY, build, different, loaded, logits
from tests.distributed.ranks import RankPool

CONFIG: dict[str, Any] = {"sharding_size": "auto"}
KINDS = ["llama", "tied llama", "gpt2", "moe", "t5"]
RECORD = "mindspeed_fsdp2.json"


@pytest.fixture(scope="module")
def ranks1() -> Iterator[RankPool]:
    pool = RankPool(1)
    yield pool
    pool.close()


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> RankPool:
    found: RankPool = request.getfixturevalue(request.param)
    return found


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the whole values of a wrapped model."""
    return {
        key: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for key, value in model.state_dict().items()
    }


def _export(kind: str, folder: str, config: dict[str, Any], options: dict[str, Any]) -> str:
    model = wrap_model(build(kind), config)
    return os.fspath(export_hf(model, Path(folder, "out"), **options))


@pytest.mark.parametrize("pool", ["ranks1", "ranks2", "ranks4"], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_from_pretrained_gives_the_same_model(pool: RankPool, kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = dict(CONFIG)
    if pool.world_size == 4 and kind == "gpt2":
        config["sharding_size"] = 2
    elif pool.world_size == 2 and kind == "llama":
        config["ignored_modules"] = ["model.embed_tokens"]
    paths = pool.run(_export, kind, os.fspath(tmp_path), config, {"max_shard_size": "6KB"})
    assert paths == [os.fspath(out)] * pool.world_size
    model, expected = loaded(out, seq2seq=kind == "t5"), build(kind)
    assert different(model, expected) == []
    assert torch.equal(logits(model), logits(expected))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [*files, "model.safetensors.index.json", "config.json", "generation_config.json", RECORD]
    )
    assert os.listdir(tmp_path) == ["out"]
    for name in files:
        with safe_open(out / name, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            assert all(index["weight_map"][key] == name for key in opened.keys())  # noqa: SIM118
        size = sum(value.nbytes for value in load_file(out / name).values())
        assert size <= 6000 or len(load_file(out / name)) == 1
    assert index["metadata"]["total_parameters"] == sum(param.numel() for param in expected.parameters())


def test_the_directory_is_that_of_save_pretrained(ranks2: RankPool, tmp_path: Path) -> None:
    for kind in ("tied llama", "gpt2"):
        folder = tmp_path / kind
        folder.mkdir()
        ranks2.run(_export, kind, os.fspath(folder), CONFIG, {})
        build(kind).save_pretrained(folder / "theirs")
        ours, theirs = (load_file(folder / name / "model.safetensors") for name in ("out", "theirs"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        for name in ("config.json", "generation_config.json"):
            assert json.loads((folder / "out" / name).read_text()) == json.loads((folder / "theirs" / name).read_text())


def _tied_by_hand(folder: str) -> None:
    model = build("llama")
    model.lm_head.weight = model.model.embed_tokens.weight  # the configuration does not tell
    wrapped = wrap_model(model, CONFIG)
    export_hf(wrapped, Path(folder, "out"))
    save_checkpoint(Path(folder, "ckpt"), wrapped, step=1)


def test_names_that_loading_would_not_tie_are_both_written(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(_tied_by_hand, os.fspath(tmp_path))
    values = build("llama").state_dict()
    values["lm_head.weight"] = values["model.embed_tokens.weight"]
    for name, more in (("out", ()), ("other", ("--model", str(tmp_path / "out")))):
        if more:
            assert main(["checkpoint", "export", str(tmp_path / "ckpt"), str(tmp_path / name), *more]) == 0
        found = load_file(tmp_path / name / "model.safetensors")
        assert found.keys() == values.keys() and all(torch.equal(found[key], values[key]) for key in values)
        assert loaded(tmp_path / name).lm_head.weight.equal(values["lm_head.weight"])


def _train_and_export(folder: str) -> dict[str, torch.Tensor]:
    model = wrap_model(build("gpt2").train(), CONFIG | {"param_dtype": "bf16"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        tokens = torch.randint(VOCABULARY, (2, 8))
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(Path(folder, "ckpt"), model, optimizer, step=2)
    for name, dtype in (("keep", None), ("bf16", torch.bfloat16), ("fp16", "fp16")):
        export_hf(model, Path(folder, name), dtype=dtype)
    return whole(model)


def test_trained_values_in_each_dtype(ranks2: RankPool, tmp_path: Path) -> None:
    values, _ = ranks2.run(_train_and_export, os.fspath(tmp_path))
    assert main(["checkpoint", "verify", str(tmp_path / "ckpt")]) == 0  # the optimizer's tensors too
    start = build("gpt2").state_dict()
    assert not any(torch.equal(values[key], start[key]) for key in values)  # all of it was trained
    del values["lm_head.weight"]
    for name, dtype in (("keep", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        found = load_file(tmp_path / name / "model.safetensors")
        assert found.keys() == values.keys()
        assert all(torch.equal(found[key], value.to(dtype)) for key, value in values.items())
        model = loaded(tmp_path / name)
        assert model.dtype == dtype
        # The command makes the same of the checkpoint.
        arguments = [str(tmp_path / "ckpt"), str(tmp_path / f"{name} 2"), "--model", str(tmp_path / name)]
        assert main(["checkpoint", "export", *arguments, "--dtype", name]) == 0
        for file in ("model.safetensors", "config.json", "generation_config.json"):
            assert (tmp_path / name / file).read_bytes() == (tmp_path / f"{name} 2" / file).read_bytes()


class Plain(nn.Module):
    """No model of Transformers, with what files of tensors make awkward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(3, 5, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.first(self.norm(x)) + self.second(x)
        return result


def _plain(folder: str) -> tuple[dict[str, torch.Tensor], list[bool]]:
    torch.manual_seed(5)
    model = wrap_model(Plain(), CONFIG | {"sub_modules_to_wrap": []})
    values = whole(model)
    model.train()
    torch.manual_seed(dist.get_rank())
    model(torch.randn(4, 3))  # now the running means differ
    values |= {key: value for key, value in whole(model).items() if "running" in key or "batches" in key}
    export_hf(model, Path(folder, "out"), max_shard_size=70)
    torch.manual_seed(6)
    other = wrap_model(Plain(), CONFIG | {"sub_modules_to_wrap": []})
    load_full_state_dict(other, Path(folder, "out"))
    first = [values] if dist.get_rank() == 0 else [{}]
    dist.broadcast_object_list(first, src=0)
    return values, [torch.equal(value, whole(other)[key]) for key, value in first[0].items()]


def test_any_module_goes_and_comes_back(ranks2: RankPool, tmp_path: Path) -> None:
    (values, equal), (_, other) = ranks2.run(_plain, os.fspath(tmp_path))
    assert equal == other == [True] * len(values) and len(values) == 10
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    found = {key: value for file in files for key, value in load_file(file).items()}
    assert found.keys() == values.keys() - {"second.weight"}
    assert all(torch.equal(found[key], values[key]) for key in found)  # those of rank 0


def _import(kind: str, folder: str) -> tuple[list[str], list[str], Any]:
    """Import with the command, on all ranks together; load by each of the ways."""
    assert main(["checkpoint", "import", f"{folder}/hf", f"{folder}/ckpt"]) == 0
    expected = build(kind).state_dict()
    with meta_init():
        model = wrap_model(build(kind, seed=8), CONFIG)
    found = load_checkpoint(f"{folder}/ckpt", model)
    first = [key for key, value in whole(model).items() if not torch.equal(value, expected[key])]
    other = wrap_model(build(kind, seed=9), CONFIG)
    load_full_state_dict(other, f"{folder}/hf")
    second = [key for key, value in whole(other).items() if not torch.equal(value, expected[key])]
    return first, second, (found.step, tuple(found.report.missing), tuple(found.report.unexpected))


@pytest.mark.parametrize("kind", KINDS)
def test_what_save_pretrained_wrote_is_loaded(ranks2: RankPool, kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_shard_size": "6KB"} if kind != "gpt2" else {}
    build(kind).save_pretrained(
        tmp_path / "hf", **options, **({"save_original_format": False} if kind == "moe" else {})
    )
    assert ranks2.run(_import, kind, os.fspath(tmp_path)) == [([], [], (0, (), ()))] * 2


def test_experts_that_only_transformers_can_put_together(ranks2: RankPool, tmp_path: Path) -> None:
    build("moe").save_pretrained(tmp_path / "hf")
    text, _ = ranks2.run(_refused, "moe", os.fspath(tmp_path))
    assert text.splitlines()[:2] == [
        f"on rank 0 of 2: {tmp_path}/hf: the values do not fit the model:",
        "  missing: model.layers.0.mlp.experts.gate_up_proj, model.layers.0.mlp.experts.down_proj, "
        "model.layers.1.mlp.experts.gate_up_proj, model.layers.1.mlp.experts.down_proj",
    ]


def _refused(kind: str, folder: str) -> str:
    try:
        load_full_state_dict(wrap_model(build(kind), CONFIG), f"{folder}/hf")
    except CheckpointError as error:
        return str(error)
    return ""


def _faults(folder: str) -> list[str]:
    rank = dist.get_rank()
    model = wrap_model(build("gpt2"), CONFIG)
    place = Path(folder, "out")
    texts = []

    def expect(**arguments: Any) -> None:
        try:
            export_hf(**{"model": model, "directory": place, **arguments})
        except CheckpointError as error:
            texts.append(str(error))
        else:
            texts.append("")
        dist.barrier()

    expect(model=build("gpt2"))
    expect(dtype="int8")
    expect(max_shard_size="5 stones")
    expect(directory=Path(folder, f"out{rank}"))
    with full_parameters(model):
        expect()
    (Path(folder, "full").mkdir(exist_ok=True), Path(folder, "full", "file").touch())
    expect(directory=Path(folder, "full"))
    with torch.no_grad():
        model.get_parameter("transformer.ln_f.weight").to_local().fill_(1e6 if rank else 1.0)
    expect(dtype="fp16")
    with torch.no_grad():
        model.get_parameter("transformer.ln_f.weight").to_local().fill_(1.0)
    if rank == 0:
        Path(folder, "file").touch()
    dist.barrier()
    expect(directory=Path(folder, "file", "out"))
    return texts


def test_mistakes_end_all_ranks_alike_and_leave_nothing(ranks2: RankPool, tmp_path: Path) -> None:
    first, second = ranks2.run(_faults, os.fspath(tmp_path))
    assert [text.replace(str(tmp_path), "DIR") for text in first] == [
        "export_hf: the model is not wrapped. Call wrap_model first.",
        "dtype: 'int8' is no dtype for weights. Write bf16, fp16, fp32 or keep.",
        'max_shard_size: \'5 stones\' is no size. Write a number of bytes or text such as "5GB" or "500MB".',
        "export_hf: rank 1 would write other files than rank 0. Pass the same model, directory and arguments on every "
        "rank.",
        "export_hf: the model is inside full_parameters. Export outside.",
        "DIR/full: it exists and is not empty. Name a new directory, or remove this one first.",
        "on rank 1 of 2: dtype: transformer.ln_f.weight has values above 65504, which fp16 turns into infinity. Pass "
        "bf16 or fp32.",
        "DIR/file: it cannot be written: Not a directory. Nothing is published and earlier checkpoints are untouched. "
        "Make room or allow writing there, or pass another directory.",
    ]
    assert second == first
    assert sorted(os.listdir(tmp_path)) == ["file", "full"]


def _full_disk(folder: str) -> str:
    model = wrap_model(build("llama"), CONFIG)
    from mindspeed_fsdp2.checkpoint import hf_work

    original = hf_work.FileWriter._write

    def fails(self: Any, data: memoryview) -> None:
        if dist.get_rank() == 1 and self._size > 3000:
            raise OSError(28, "No space left on device")
        original(self, data)

    hf_work.FileWriter._write = fails  # type: ignore[method-assign]
    try:
        export_hf(model, Path(folder, "out"), max_shard_size="6KB")
    except CheckpointError as error:
        return str(error)
    finally:
        hf_work.FileWriter._write = original  # type: ignore[method-assign]
    return ""


def test_a_disk_that_fills_up_on_one_rank_ends_all(ranks2: RankPool, tmp_path: Path) -> None:
    first, second = ranks2.run(_full_disk, os.fspath(tmp_path))
    assert first == second and "on rank 1 of 2" in first and "No space left on device" in first
    assert os.listdir(tmp_path) == []


def _killed(folder: str, rank: int) -> None:
    """Die while a file is written; for a process of its own."""
    from mindspeed_fsdp2.checkpoint import hf_work

    written = 0
    original = hf_work.WorkFolder.mark

    def mark(self: Any, *arguments: Any) -> None:
        nonlocal written
        written += 1
        if written > 2:
            os._exit(9)
        original(self, *arguments)

    hf_work.WorkFolder.mark = mark  # type: ignore[method-assign]
    main(["checkpoint", "export", f"{folder}/ckpt", f"{folder}/out", "--max-shard-size", "6KB"])


def _save(folder: str) -> None:
    save_checkpoint(Path(folder, "ckpt"), wrap_model(build("llama"), CONFIG), step=4)


def test_a_killed_export_goes_on(ranks2: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks2.run(_save, os.fspath(tmp_path))
    process = torch.multiprocessing.get_context("spawn").Process(target=_killed, args=(os.fspath(tmp_path), 0))
    process.start()
    process.join(100)
    assert process.exitcode == 9
    hidden = tmp_path / ".exporting-out" / "files"
    assert not (tmp_path / "out").exists()
    kept = {path.name: path.stat().st_mtime_ns for path in hidden.iterdir()}
    assert sorted(kept) == [f"model-{number:05d}-of-00004.safetensors" for number in (1, 2, 3)]
    command = ["checkpoint", "export", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--max-shard-size", "6KB"]
    assert main(command) == 0
    assert f"{tmp_path / 'out'}: going on, 2 of 4 files are there\n" in capsys.readouterr().err
    out = tmp_path / "out"
    for name in sorted(kept)[:2]:
        assert (out / name).stat().st_mtime_ns == kept[name]
    found = {key: value for file in out.glob("*.safetensors") for key, value in load_file(file).items()}
    expected = build("llama").state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
    assert not (tmp_path / ".exporting-out").exists()
    assert main(["checkpoint", "verify", str(out)]) == 0


def test_another_export_does_not_go_on_with_it(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(_save, os.fspath(tmp_path))
    command = ["checkpoint", "export", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--max-shard-size", "6KB"]
    process = torch.multiprocessing.get_context("spawn").Process(target=_killed, args=(os.fspath(tmp_path), 0))
    process.start()
    process.join(100)
    assert main([*command, "--dtype", "bf16"]) == 0
    found = {key: value for file in (tmp_path / "out").glob("*.safetensors") for key, value in load_file(file).items()}
    expected = build("llama").state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key].bfloat16()) for key in found)


def _together(folder: str) -> int:
    return main(["checkpoint", "export", f"{folder}/ckpt", f"{folder}/out", "--max-shard-size", "6KB"])


def test_ranks_share_an_export(ranks4: RankPool, tmp_path: Path) -> None:
    ranks4.run(_save, os.fspath(tmp_path))
    assert ranks4.run(_together, os.fspath(tmp_path)) == [0] * 4
    assert (
        main(["checkpoint", "export", str(tmp_path / "ckpt"), str(tmp_path / "alone"), "--max-shard-size", "6KB"]) == 0
    )
    names = sorted(os.listdir(tmp_path / "out"))
    assert names == sorted(os.listdir(tmp_path / "alone")) and len(names) == 6
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


def _without_prefix(folder: str) -> list[Any]:
    model = wrap_model(build("gpt2", seed=8), CONFIG)
    report = load_full_state_dict(model, f"{folder}/hf")
    first = [key for key, value in whole(model).items() if not torch.equal(value, build("gpt2").state_dict()[key])]
    assert main(["checkpoint", "import", f"{folder}/hf", f"{folder}/ckpt"]) == 0
    other = wrap_model(build("gpt2", seed=9), CONFIG)
    load_checkpoint(f"{folder}/ckpt", other)
    second = [key for key, value in whole(other).items() if not torch.equal(value, build("gpt2").state_dict()[key])]
    return [first, second, tuple(report)]


def test_files_of_the_bare_model_as_the_first_gpt2_s(
    ranks2: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build("gpt2").save_pretrained(tmp_path / "hf")
    values = load_file(tmp_path / "hf" / "model.safetensors")
    bare = {key.removeprefix("transformer."): value.clone() for key, value in values.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)  # which the model once saved
    save_file(bare, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    assert different(loaded(tmp_path / "hf"), build("gpt2")) == []
    answer = [[], [], ((), ("h.0.attn.bias",))]
    assert ranks2.run(_without_prefix, os.fspath(tmp_path)) == [answer, answer]
    assert main(["checkpoint", "import", str(tmp_path / "hf"), str(tmp_path / "alone")]) == 0
    text = f"importing {tmp_path / 'hf'}: left out, as from_pretrained() does: h.0.attn.bias\n"
    assert text in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(tmp_path / "hf"), "--model", str(tmp_path / "hf")]) == 0


@pytest.mark.skipif(not hasattr(dcp, "HuggingFaceStorageReader"), reason="from PyTorch 2.8 on")
def test_torch_reads_and_writes_the_same_directories(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(_export, "llama", os.fspath(tmp_path), CONFIG, {"max_shard_size": "6KB"})
    expected = build("llama").state_dict()
    found = {key: torch.zeros_like(value) for key, value in expected.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "out")))
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    mapping = {key: 1 + number % 2 for number, key in enumerate(expected)}
    shutil.rmtree(tmp_path / "out")
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "hf"), fqn_to_index_mapping=mapping)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(dict(expected), storage_writer=writer)
    shutil.copy(_config_of(tmp_path), tmp_path / "hf")
    assert ranks2.run(_import, "llama", os.fspath(tmp_path)) == [([], [], (0, (), ()))] * 2


def _config_of(folder: Path) -> Path:
    build("llama").config.save_pretrained(folder)
    return folder / "config.json"


def _damaged(folder: str) -> tuple[str, str]:
    model = wrap_model(build("gpt2"), CONFIG)
    export_hf(model, Path(folder, "out"), max_shard_size="6KB")
    first = dist.get_rank() == 0
    texts = []
    for damage in (False, True):
        if damage and first:
            name = sorted(Path(folder, "out").glob("*.safetensors"))[1]
            content = bytearray(name.read_bytes())
            content[-5] ^= 1
            name.write_bytes(content)
        dist.barrier()
        try:
            load_full_state_dict(wrap_model(build("gpt2", seed=8), CONFIG), Path(folder, "out") if first else None)
            texts.append("")
        except CheckpointError as error:
            texts.append(str(error).replace(folder, "DIR"))
    return texts[0], texts[1]


def test_damaged_files_of_an_export_are_not_loaded_silently(ranks2: RankPool, tmp_path: Path) -> None:
    (fine, text), other = ranks2.run(_damaged, os.fspath(tmp_path))
    assert fine == "" and other == (fine, text)
    name = sorted((tmp_path / "out").glob("*.safetensors"))[1].name
    assert re.fullmatch(
        rf"on rank 0 of 2: DIR/out/{name}: its checksum is \w{{8}}, not \w{{8}} as when it was written\n"
        r"Get the files again, or remove DIR/out/mindspeed_fsdp2.json if they were changed on purpose. Damaged values are "
        r"loaded: load again before training.",
        text,
    )


def test_ranks_compare_checksums_together(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(_export, "gpt2", os.fspath(tmp_path), CONFIG, {"max_shard_size": "6KB"})
    assert ranks2.run(_import_in_parts, os.fspath(tmp_path), "fine") == [0, 0]
    name = sorted((tmp_path / "out").glob("*.safetensors"))[1]
    content = bytearray(name.read_bytes())
    content[-5] ^= 1
    name.write_bytes(content)
    assert ranks2.run(_import_in_parts, os.fspath(tmp_path), "damaged") == [1, 1]
    assert os.listdir(tmp_path / "damaged") == []


def _import_in_parts(folder: str, name: str) -> int:
    from mindspeed_fsdp2.checkpoint import hf_import

    original = hf_import._PART
    hf_import._PART = 3000  # so that tensors of one file are read by different ranks
    try:
        return main(["checkpoint", "import", f"{folder}/out", f"{folder}/{name}"])
    finally:
        hf_import._PART = original
