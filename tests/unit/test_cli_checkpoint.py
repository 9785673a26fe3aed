"""`mindspeed-fsdp2 checkpoint`: what it prints, its exit status, and what it finds wrong. One process, no group."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mindspeed_fsdp2.checkpoint import hf_work, publish
from mindspeed_fsdp2.cli import main

VALUES = {
    "embedding.weight": torch.arange(40, dtype=torch.float32).view(10, 4) / 7,
    "layers.0.weight": torch.arange(16, dtype=torch.float32).view(4, 4).bfloat16(),
    "layers.0.bias": torch.tensor([0.1, -3.0, 1e-8, 5.0]),
    "steps": torch.tensor(9),
    "mask": torch.tensor([True, False, True]),
    "none": torch.empty(0, 3),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(VALUES["layers.0.weight"].clone())
        self.bias = nn.Parameter(VALUES["layers.0.bias"].clone())


class Model(nn.Module):
    """Has the tensors above; the output layer shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([Layer()])
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        for name in ("steps", "mask", "none"):
            self.register_buffer(name, VALUES[name].clone())


def build() -> nn.Module:
    return Model()


def build_other() -> nn.Module:
    model = Model()
    model.layers[0].bias = nn.Parameter(torch.zeros(5))  # type: ignore[union-attr]
    model.register_buffer("flag", torch.zeros(1))
    del model.mask
    return model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("hf").mkdir()
    save_file(VALUES, "hf/model.safetensors", metadata={"format": "pt"})
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], list[str]]:
    """Return exit status and the lines of stdout and stderr."""
    status = main(["checkpoint", *arguments])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err.splitlines()


def imported(capsys: pytest.CaptureFixture[str], *more: str) -> None:
    assert run(capsys, "import", "hf", "ckpt", *more)[0] == 0


def files(where: str) -> dict[str, torch.Tensor]:
    return {key: value for file in Path(where).glob("*.safetensors") for key, value in load_file(file).items()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[key].dtype == value.dtype and torch.equal(found[key], value) for key, value in expected.items()
    )


def test_there_and_back(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "import", "hf", "ckpt", "--step", "12")
    assert status == 0
    assert out == [f"{folder}/ckpt/step-00000012: written. Load it with load_checkpoint('ckpt', model)."]
    assert err[0] == (
        "note: no model to compare with, so the checkpoint gets the names in the files; a tied weight may lack one. "
        "Install transformers, or add --model."
    )
    assert err[1] == "importing hf: 1 of 1 files of this process"
    status, out, err = run(capsys, "export", "ckpt", "back", "--max-shard-size", "100")
    assert (status, out) == (0, [f"{folder}/back: written."])
    assert err[:3] == [f"exporting to {folder}/back: {number} of 3 files" for number in (1, 2, 3)]
    assert err[-1] == (
        "note: there is no config.json beside the weights, which from_pretrained() needs. Copy it there, or export with "
        "--model DIRECTORY."
    )
    assert same(files("back"), VALUES)
    assert sorted(path.name for path in Path("back").iterdir()) == [
        "mindspeed_fsdp2.json",
        *(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["back", "ckpt", "hf"]


@pytest.mark.parametrize(
    ("word", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32), ("keep", None)]
)
@pytest.mark.parametrize("when", ["import", "export"])
def test_dtypes(folder: Path, capsys: pytest.CaptureFixture[str], word: str, dtype: Any, when: str) -> None:
    imported(capsys, *(["--dtype", word] if when == "import" else []))
    assert run(capsys, "export", "ckpt", "back", *(["--dtype", word] if when == "export" else []))[0] == 0
    expected = {
        key: value.to(dtype) if dtype is not None and value.is_floating_point() else value
        for key, value in VALUES.items()
    }
    assert same(files("back"), expected)


def test_values_that_fp16_cannot_hold(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"fine": torch.full((2,), torch.inf), "w": torch.tensor([7e4])}, "hf/model.safetensors")
    text = "dtype: w has values above 65504, which fp16 turns into infinity. Pass bf16 or fp32."
    status, _, err = run(capsys, "import", "hf", "half", "--dtype", "fp16")
    assert (status, err[-1]) == (1, text)
    assert list(Path("half").iterdir()) == []
    imported(capsys)
    status, _, err = run(capsys, "export", "ckpt", "half16", "--dtype", "fp16")
    assert (status, err[-1], Path("half16").exists()) == (1, text, False)


def test_a_model_gives_shared_tensors_all_their_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "import", "hf", "ckpt", "--model", f"{__name__}:build")
    assert status == 0 and not any(line.startswith("note") for line in err)
    _, out, _ = run(capsys, "info", "ckpt")
    assert out[:4] == [
        "ckpt/step-00000000: a checkpoint of save_checkpoint",
        "step: 0",
        "ranks: none, it was imported",
        "beside the model: nothing",
    ]
    assert re.fullmatch(r"files: 3, \d+\.\d\d kB", out[4])
    assert out[-1] == "  head.weight       is embedding.weight"
    assert run(capsys, "verify", "ckpt", "--model", f"{__name__}:build")[0] == 0
    assert run(capsys, "export", "ckpt", "back", "--model", f"{__name__}:build")[0] == 0
    assert same(files("back"), VALUES)  # once: the code of the model shares them
    # What was left out is told in the file, so nothing is lost without the model.
    assert run(capsys, "import", "back", "again")[0] == 0
    assert run(capsys, "info", "again")[1][-1] == "  head.weight       is embedding.weight"


def test_weights_that_hold_both_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = VALUES | {"head.weight": VALUES["embedding.weight"].clone()}
    save_file(both, "hf/model.safetensors")
    model = f"{__name__}:build"
    assert run(capsys, "import", "hf", "ckpt", "--model", model)[0] == 0
    assert run(capsys, "info", "ckpt")[1][-1] == "  head.weight       is embedding.weight"
    assert run(capsys, "verify", "hf", "--model", model)[0] == 0
    save_file(both | {"head.weight": both["head.weight"] + 1}, "hf/model.safetensors")
    status, _, err = run(capsys, "import", "hf", "other", "--model", model)
    assert status == 1
    assert "  head.weight and embedding.weight are one tensor in the model and two different ones here" in err
    status, _, err = run(capsys, "verify", "hf", "--model", model)
    assert (status, err[0]) == (1, "hf: head.weight and embedding.weight are one tensor in the model and two here")


def test_a_model_that_does_not_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    differences = [
        "  missing: flag",
        "  not in the model: mask",
        "  layers.0.bias is (4,) and (5,) in the model",
    ]
    status, _, err = run(capsys, "import", "hf", "ckpt", "--model", f"{__name__}:build_other")
    assert status == 1
    assert err[:4] == ["hf: it does not fit the model:", *differences]
    assert not Path("ckpt").exists()
    imported(capsys)
    status, _, err = run(capsys, "export", "ckpt", "back", "--model", f"{__name__}:build_other")
    first = "ckpt/step-00000000: it does not hold the model that --model describes:"
    assert (status, err) == (1, [first, *differences, "Name the model that was saved."])
    for path, at in (("hf", "hf"), ("ckpt", "ckpt/step-00000000")):
        status, _, err = run(capsys, "verify", path, "--model", f"{__name__}:build_other")
        last = f"{path}: 3 problems. Copy or export it again, or use another checkpoint."
        assert (status, err) == (1, [*(f"{at}: {line.strip()}" for line in differences), last])


def test_info_of_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    imported(capsys)
    assert run(capsys, "export", "ckpt", "back")[0] == 0
    status, out, err = run(capsys, "info", "back")
    assert (status, err) == (0, [])
    assert out[:3] == ["back: Hugging Face weights", f"exported from: {folder}/ckpt/step-00000000", "step: 0"]
    assert out[4] == "tensors: 6, 219 bytes; elements: 16 bfloat16, 3 bool, 44 float32, 1 int64"
    assert sorted(out[5:]) == [
        "  embedding.weight  float32   [10, 4]  160 bytes",
        "  layers.0.bias     float32   [4]  16 bytes",
        "  layers.0.weight   bfloat16  [4, 4]  32 bytes",
        "  mask              bool      [3]  3 bytes",
        "  none              float32   [0, 3]  0 bytes",
        "  steps             int64     []  8 bytes",
    ]


def flip(path: str, position: int) -> None:
    with open(path, "r+b") as stream:
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ 1]))


def header_of(path: str) -> tuple[int, dict[str, Any]]:
    data = Path(path).read_bytes()
    length = int.from_bytes(data[:8], "little")
    return 8 + length, json.loads(data[8 : 8 + length])


def damage_hf(kind: str) -> None:
    first, second = "back/model-00001-of-00003.safetensors", "back/model-00002-of-00003.safetensors"
    if kind == "flipped":
        flip(first, Path(first).stat().st_size - 1)
    elif kind == "cut":
        Path(first).write_bytes(Path(first).read_bytes()[:-1])
    elif kind == "longer":
        Path(first).write_bytes(Path(first).read_bytes() + b"x")
    elif kind == "missing":
        Path(second).unlink()
    elif kind == "text":
        Path(second).write_text("not here")
    elif kind == "index":
        index = json.loads(Path("back/model.safetensors.index.json").read_text())
        index["weight_map"]["new"] = Path(first).name
        del index["weight_map"]["mask"]
        Path("back/model.safetensors.index.json").write_text(json.dumps(index))
    elif kind == "shape":
        begin, header = header_of(first)
        header["steps"]["shape"] = [2]
        text = json.dumps(header).encode()
        Path(first).write_bytes(len(text).to_bytes(8, "little") + text + Path(first).read_bytes()[begin:])


FIRST, SECOND = "back/model-00001-of-00003.safetensors", "back/model-00002-of-00003.safetensors"


@pytest.mark.parametrize(
    ("kind", "problems"),
    [
        ("flipped", [rf"{FIRST}: its checksum is \w{{8}}, not \w{{8}} as when it was written"]),
        ("cut", [rf"{FIRST}: it cannot be read: '[\w.]+' lies beyond the end of the file"]),
        (
            "longer",
            [
                rf"{FIRST}: it has \d+ bytes, but its tensors end at \d+",
                rf"{FIRST}: its checksum is \w{{8}}, not \w{{8}} as when it was written",
            ],
        ),
        ("missing", [rf"{SECOND}: it is missing, though the index names it"]),
        ("text", [rf"{SECOND}: it cannot be read: it is no safetensors file, or it was cut off"]),
        (
            "index",
            [
                rf"{FIRST}: it lacks 'new', which the index places there",
                r"back/model-0000\d-of-00003.safetensors: it holds 'mask', which the index does not place there",
            ],
        ),
        (
            "shape",
            [rf"{FIRST}: it cannot be read: 'steps' has 8 bytes, not the 16 of its shape and type"],
        ),
    ],
)
def test_damaged_weights(folder: Path, capsys: pytest.CaptureFixture[str], kind: str, problems: list[str]) -> None:
    imported(capsys)
    assert run(capsys, "export", "ckpt", "back", "--max-shard-size", "100")[0] == 0
    status, out, err = run(capsys, "verify", "back")
    total = sum(path.stat().st_size for path in Path("back").glob("*.safetensors"))
    assert (status, out, err) == (0, [f"back: 6 tensors are there; all {total} bytes can be read."], [])
    damage_hf(kind)
    status, out, err = run(capsys, "verify", "back")
    assert (status, out) == (1, [])
    assert len(err) == len(problems) + 1, err
    for line, pattern in zip(err, problems):
        assert re.fullmatch(pattern, line), line
    count = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
    assert err[-1] == f"back: {count}. Copy or export it again, or use another checkpoint."
    status, _, err = run(capsys, "import", "back", "again")
    assert status == 1 and not [path for path in Path().glob("again/*")]
    if kind == "flipped":  # which only reading all of it shows
        assert re.fullmatch(problems[0], err[-2])
        record = "back/mindspeed_fsdp2.json"
        assert err[-1] == f"Get the files again, or remove {record} if they were changed on purpose."
        Path(record).unlink()
        assert run(capsys, "import", "back", "again")[0] == 0
    else:
        told = problems[:1] if kind == "longer" else problems
        assert len(err) == 1 + len(told) and all(map(re.fullmatch, told, err[1:]))  # a note goes before


def test_damaged_checkpoints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    imported(capsys)
    status, out, _ = run(capsys, "verify", "ckpt")
    assert status == 0 and re.fullmatch(r"ckpt: 6 tensors are there; all \d\.\d\d kB can be read\.", out[0])
    file = "ckpt/step-00000000/__0_0.distcp"
    data = Path(file).read_bytes()
    place = data.index(VALUES["embedding.weight"].numpy().tobytes())
    flip(file, place + 80)
    status, _, err = run(capsys, "verify", "ckpt")
    assert status == 1
    assert re.fullmatch(rf"{file}: model\.embedding\.weight: \S+/data/0 has another checksum than was written", err[0])
    Path(file).write_bytes(data[:-1])
    status, _, err = run(capsys, "verify", "ckpt")
    assert (status, err) == (
        1,
        [
            "ckpt: there is no complete checkpoint: step-00000000 lacks __0_0.distcp or has it in another size. Start "
            "without load_checkpoint, or copy a complete one here."
        ],
    )
    Path(file).write_bytes(data)
    state = Path("ckpt/step-00000000/state.json")
    state.write_text(state.read_text().replace("{", "{ ", 1))
    status, _, err = run(capsys, "verify", "ckpt")
    assert status == 1
    assert "lacks state.json or has it in another size" in err[0]
    manifest = Path("ckpt/step-00000000/checkpoint.json")
    manifest.write_text(
        manifest.read_text().replace(
            f'"state.json": {state.stat().st_size - 1}', f'"state.json": {state.stat().st_size}'
        )
    )
    status, _, err = run(capsys, "verify", "ckpt")
    assert status == 1
    assert re.fullmatch(
        r"ckpt/step-00000000/state.json: its checksum is \w+, not \w+: it was changed after the save. .*", err[0]
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["export", "ckp", "o"], "ckp: it does not exist. There is ckpt."),
        (["export", "nothing/at/all", "o"], "nothing/at/all: it does not exist. Look at the path."),
        (["export", "hf", "o"], "hf: it holds Hugging Face weights already. Name what save_checkpoint wrote."),
        (["import", "ckpt", "o"], "ckpt: it holds a checkpoint of save_checkpoint already. Name Hugging Face weights."),
        (["export", "ckpt", "hf"], "DIR/hf: it exists and is not empty. Name a new directory, or remove this one first."),
        (["export", "ckpt", "hf/model.safetensors"], "DIR/hf/model.safetensors: it is a file. Name a new directory, or "
         "remove this one first."),
        (["import", "hf", "hf"], "hf: it is the directory that is read. Name another directory."),
        (["import", "hf/model.safetensors", "link"], "link: it is the directory that is read. Name another directory."),
        (["import", "hf", "link/new"], "link/new: it lies in hf, which is read. Name a directory outside of it."),
        (["export", "ckpt", "ckpt/new"], "DIR/ckpt/new: it lies in ckpt, which is read. Name a directory outside of it."),
        (["import", "hf", "ckpt"], "DIR/ckpt: it holds a checkpoint, step-00000000. Name a new directory."),
        (["import", "hf", "new", "--step", "-1"], "--step: -1 is not a number of finished steps. Write 0 or more."),
        (["export", "ckpt", "o", "--step", "3"], "ckpt: there is no checkpoint of step 3, only of 0. Pass one of these as "
         "step."),
        (["export", "ckpt", "o", "--max-shard-size", "big"], "--max-shard-size: 'big' is no size. Write a number of bytes "
         'or text such as "5GB" or "500MB".'),
        (["info", "old"], "old: it holds neither model.safetensors.index.json nor model.safetensors, but pytorch_model.bin: "
         "save it again with save_pretrained(), which writes safetensors. Pass a directory that save_pretrained() wrote."),
        (["info", "megatron"], "megatron: it holds a Megatron checkpoint (latest_checkpointed_iteration.txt)."),
        (["info", "plain.pt"], "plain.pt: it is a file. Pass a directory of save_checkpoint or of Hugging Face weights, or "
         "a .safetensors."),
        (["info", "empty"], "empty: it is empty. This command reads what save_checkpoint or save_pretrained() wrote."),
        (["verify", "empty/.."], ".: "),
        (["export", "ckpt", "o", "--model", "empty"], "--model: empty holds no config.json. "),
        (["verify", "hf", "--model", "nowhere:build"], "--model: there is no module 'nowhere'. "),
    ],
)  # fmt: skip
def test_mistakes(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    imported(capsys)
    for name in ("old", "megatron", "empty"):
        Path(name).mkdir()
    Path("old/pytorch_model.bin").touch()
    Path("megatron/latest_checkpointed_iteration.txt").touch()
    Path("plain.pt").touch()
    Path("link").symlink_to("hf")
    before = sorted(str(path) for path in folder.rglob("*"))
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (1, [])
    assert text.replace("DIR", str(folder)) in "\n".join(err), err
    assert sorted(str(path) for path in folder.rglob("*")) == before


class Crash(BaseException):
    """The process ends here, as far as files are concerned."""


def crash_at(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Make the export end before it changes the disk for the ``number``-th time; return what was changed."""
    done: list[str] = []

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any, **options: Any) -> Any:
            if len(done) == number:
                raise Crash
            done.append(name)
            return original(*arguments, **options)

        return act

    for owner, name in (
        (Path, "rename"),
        (Path, "mkdir"),
        (Path, "write_text"),
        (hf_work, "sync_files"),
        (hf_work, "write_json"),
        (hf_work.shutil, "rmtree"),
        (hf_work.FileWriter, "_write"),
    ):
        monkeypatch.setattr(owner, name, counted(name, getattr(owner, name)))
    return done


def test_an_export_that_ends_anywhere_is_complete_or_absent(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    imported(capsys)
    command = ["export", "ckpt", "back", "--max-shard-size", "100"]
    points, resumed = 0, set()
    while True:
        with monkeypatch.context() as patches:
            done = crash_at(patches, points)
            try:
                run(capsys, *command)
            except Crash:
                pass
            else:
                break
        there = Path("back").exists()
        if there:  # then all of it is
            assert done.count("rename") == 7
            assert run(capsys, "verify", "back")[0] == 0
        else:
            status, _, err = run(capsys, *command)
            assert status == 0
            resumed |= {line for line in err if "going on" in line}
        assert same(files("back"), VALUES)
        assert not [path for path in folder.iterdir() if path.name.startswith(".")] or there
        shutil.rmtree("back")
        shutil.rmtree(".exporting-back", ignore_errors=True)
        points += 1
    assert points > 30
    assert resumed == {f"{folder}/back: going on, {number} of 3 files are there" for number in (1, 2, 3)}


def test_two_exports_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    imported(capsys)
    other = hf_work.WorkFolder(folder / "back")
    other.begin({"another": "one"}, resume=True)
    status, _, err = run(capsys, "export", "ckpt", "back")
    text = f"{folder}/back: another process is exporting to it. Wait for it, or name another directory."
    assert (status, err) == (1, [text])
    other.release()
    assert run(capsys, "export", "ckpt", "back")[0] == 0
    assert not (folder / ".exporting-back").exists()


def test_a_tokenizer_and_code_come_along(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    imported(capsys, "--model", f"{__name__}:build")
    Path("model").mkdir()
    config = {"model_type": "own", "torch_dtype": "float16", "text_config": {"dtype": "float16", "hidden_size": 4}}
    texts = {
        "tokenizer.json": "{}",
        "modeling_own.py": "x = 1\n",
        "chat_template.jinja": "y",
        "generation_config.json": "{}",
    }
    for name, text in texts.items():
        Path("model", name).write_text(text)
    for name in ("model.safetensors.index.json", "trainer_state.json", "pytorch_model.bin"):
        Path("model", name).write_text("{}")
    from mindspeed_fsdp2.checkpoint.hf_config import config_text, files_to_copy

    assert {name: path.read_text() for name, path in files_to_copy(Path("model")).items()} == texts
    changed = json.loads(config_text(config, torch.bfloat16))
    assert changed == {
        "model_type": "own",
        "torch_dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16", "hidden_size": 4},
    }
    assert json.loads(config_text({"model_type": "own"}, torch.float32)) == {"model_type": "own", "dtype": "float32"}
    assert json.loads(config_text(config, None)) == config


@pytest.mark.parametrize(("tied", "names"), [(True, 1), (False, 2), (None, 2)])
def test_shared_tensors_without_transformers(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tied: bool | None, names: int
) -> None:
    imported(capsys, "--model", f"{__name__}:build")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    Path("model").mkdir()
    config = {"model_type": "own"} | ({} if tied is None else {"tie_word_embeddings": tied})
    Path("model/config.json").write_text(json.dumps(config))
    Path("model/tokenizer.json").write_text("{}")
    assert run(capsys, "export", "ckpt", "back", "--model", "model")[0] == 0
    # Only what says that it will be shared again may be written once.
    both = {"head.weight": VALUES["embedding.weight"]} if names == 2 else {}
    assert same(files("back"), VALUES | both)
    written = json.loads(Path("back/config.json").read_text())
    assert written == {**config, "dtype": "float32"} and Path("back/tokenizer.json").exists()


def test_a_config_that_transformers_does_not_know(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text('{"model_type": "nothing"}')
    status, out, err = run(capsys, "verify", "hf", "--model", "model")
    assert (status, out, len(err)) == (1, [], 1)
    assert err[0].startswith("--model: model: The checkpoint you are trying to load has model type `nothing` but ")
    assert err[0].endswith(" Name the directory of a model of Transformers.")


def test_a_damaged_newer_checkpoint_is_passed_over_aloud(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    imported(capsys)
    assert run(capsys, "import", "hf", "other", "--step", "5")[0] == 0
    newest = Path("other/step-00000005").rename("ckpt/step-00000005")
    about = json.loads((newest / "checkpoint.json").read_text())
    (newest / "checkpoint.json").write_text(json.dumps(about | {"serial": 2}))
    (newest / "__0_0.distcp").unlink()
    lacking = "step-00000005 lacks __0_0.distcp or has it in another size"
    assert f"passed over: {lacking}" in run(capsys, "info", "ckpt")[1]
    status, _, err = run(capsys, "export", "ckpt", "back")
    assert status == 0 and err[0] == f"ckpt: {lacking}; it is not exported."
    status, _, err = run(capsys, "verify", "ckpt")
    assert (status, err[0]) == (1, "ckpt/step-00000005: it lacks __0_0.distcp or has it in another size")


def write_header(header: Any, data: bytes = bytes(12)) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    Path("hf/model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def tensor(shape: Any, *offsets: int, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


NO_SIZES = "it cannot be read: 'a' has no proper shape and data_offsets in the header"


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ({"a": tensor([3.0], 0, 12)}, NO_SIZES),
        ({"a": tensor([True, 3], 0, 12)}, NO_SIZES),
        ({"a": tensor([-1, -3], 0, 12)}, NO_SIZES),
        ({"a": tensor("3", 0, 12)}, NO_SIZES),
        ({"a": tensor([3], 0)}, NO_SIZES),
        ({"a": tensor([0, 1 << 62, 1 << 62], 0, 0)}, NO_SIZES),
        ({"a": 5}, NO_SIZES),
        ({"a": tensor([3], 0, 12, dtype=["F32"])}, "it cannot be read: 'a' is of the unknown type ['F32']"),
        (
            {"__metadata__": "x", "a": tensor([3], 0, 12)},
            "it cannot be read: its __metadata__ does not consist of texts",
        ),
        (
            {"__metadata__": {"b": ["a"]}, "a": tensor([3], 0, 12)},
            "it cannot be read: its __metadata__ does not consist of texts",
        ),
        (b"[" * 100_000, "it cannot be read: its JSON is nested too deeply"),
        (
            {"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)},
            r"'b' begins at byte \d+, not at \d+ where the tensor before it ends",
        ),
        ({"a": tensor([2], 0, 8)}, r"it has \d+ bytes, but its tensors end at \d+"),
    ],
)
def test_malformed_headers(folder: Path, capsys: pytest.CaptureFixture[str], header: Any, text: str) -> None:
    write_header(header)
    pattern = text if "\\" in text else re.escape(text)
    for action in (["verify", "hf"], ["import", "hf", "ckpt"]):
        status, out, err = run(capsys, *action)
        lines = [line for line in err if not line.startswith("note")]
        assert (status, out) == (1, []) and re.fullmatch(f"hf/model.safetensors: {pattern}", lines[0]), err
        assert len(lines) == (2 if action[0] == "verify" else 1)
    assert not Path("ckpt").exists()


def test_weights_without_tensors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_header({"empty": tensor([0], 0, 0), "a": tensor([3], 0, 12), "last": tensor([0, 2], 12, 12)})
    assert run(capsys, "import", "hf", "ckpt")[0] == 0  # empty tensors lie where others begin
    write_header({}, b"")
    for action in (["verify", "hf"], ["import", "hf", "other"]):
        status, _, err = run(capsys, *action)
        assert status == 1 and "hf/model.safetensors: it holds no tensors" in err
    for text, problem in (
        ('{"weight_map": {}}', "its weight_map is empty"),
        ("[" * 10**5, "its JSON is nested too deeply"),
    ):
        Path("hf/model.safetensors.index.json").write_text(text)
        for action in (["verify", "hf"], ["import", "hf", "other"], ["info", "hf"]):
            status, _, err = run(capsys, *action)
            line = f"hf/model.safetensors.index.json: it cannot be read: {problem}. Get the file again."
            assert (status, err[-1]) == (1, line)
    assert not Path("other").exists()


class Prefixed(nn.Module):
    base_model_prefix = "model"

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(2, 2, bias=False)


def build_prefixed() -> nn.Module:
    return Prefixed()


def test_two_names_for_one_tensor_of_the_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"weight": torch.ones(2, 2), "model.weight": torch.zeros(2, 2)}, "hf/model.safetensors")
    for action in (["verify", "hf"], ["import", "hf", "ckpt"]):
        status, _, err = run(capsys, *action, "--model", f"{__name__}:build_prefixed")
        text = r"hf: (weight and model.weight|model.weight and weight) are both model.weight in the model\. "
        assert status == 1 and re.fullmatch(text + "Remove one of them from the files\\.", err[0]), err
    assert not Path("ckpt").exists()
    save_file({"weight": torch.ones(2, 2)}, "hf/model.safetensors")
    assert run(capsys, "import", "hf", "ckpt", "--model", f"{__name__}:build_prefixed")[0] == 0


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_disk_that_is_full_from_the_start(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    imported(capsys)
    for action, owner in ((["export", "ckpt", "back"], hf_work), (["import", "hf", "other"], publish)):
        with monkeypatch.context() as patches:
            patches.setattr(owner, "write_json", full)
            status, _, err = run(capsys, *action)
        assert status == 1 and "it cannot be written: No space left on device. Nothing is published" in err[-1]
    assert sorted(str(path) for path in folder.iterdir()) == [f"{folder}/{name}" for name in ("ckpt", "hf", "other")]
    assert list(Path("other").iterdir()) == []


def test_a_failed_export_names_what_it_keeps(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    imported(capsys)
    command = ["export", "ckpt", "back", "--max-shard-size", "100"]
    original, kept = hf_work.FileWriter.finish, folder / ".exporting-back"
    for number in (0, 2):

        def finish(self: hf_work.FileWriter, finished: int = number) -> None:
            if len(list((kept / "done").iterdir())) == finished:
                full()
            original(self)

        with monkeypatch.context() as patches:
            patches.setattr(hf_work.FileWriter, "finish", finish)
            status, _, err = run(capsys, *command)
        text = f" Finished files stay in {kept}: the same command goes on with them. Remove it if you do not want them."
        assert status == 1 and "No space left on device" in err[-1]
        assert err[-1].endswith(text) == kept.exists() == bool(number)
    status, _, err = run(capsys, *command)
    assert status == 0 and f"{folder}/back: going on, 2 of 3 files are there" in err
    assert same(files("back"), VALUES)
