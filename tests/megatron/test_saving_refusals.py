"""A checkpoint that cannot be loaded or written ends every rank with one message, soon and without a traceback."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.jobs import MegatronJobs
from tests.megatron.saving import Flags, Runs
from tests.megatron.test_refusals import refused

WEIGHTS_ALONE = "--no-load-optim (keeps the iteration) or --finetune loads the weights alone."
FLAGS_OF_THE_MODEL = (
    "Build the model with the flags it was saved with; --use-checkpoint-args takes them from the checkpoint. --finetune "
    "--dist-ckpt-strictness log_all loads what fits."
)


@pytest.fixture(scope="module")
def runs(megatron_jobs: MegatronJobs, topics: str, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(megatron_jobs, topics, tmp_path_factory.mktemp("refusals"))


@pytest.fixture(scope="module")
def saved(runs: Runs) -> Path:
    """Checkpoints of FSDP2 after two and four steps."""
    folder = runs.folder / "saved"
    runs.fsdp2("--save", str(folder), "--save-interval", "2", "--exit-interval", "4", "--no-save-rng")
    return folder


@dataclass(frozen=True)
class Case:
    """A load that is refused.

    Attributes:
        name: Identifier.
        expected: The message, ``{ckpt}`` for the folder of the newest checkpoint, ``{dir}`` for the one around it.
        extra: Flags beside ``--load``.
        flags: Changes to the tiny GPT's.
        saving: Changes of ``saving_specs``.
        damage: Called with a copy of the directory first.
        ckpt_format: Megatron's.
        core: Whether it always runs.
    """

    name: str
    expected: str
    extra: Sequence[str] = ("--no-load-rng",)
    flags: Flags = field(default_factory=dict)
    saving: str = ""
    damage: Callable[[Path], object] | None = None
    ckpt_format: str = "torch_dcp"
    core: bool = False


def cut(directory: Path) -> None:
    shard = next(iter(sorted((directory / "iter_0000004").glob("__1_*.distcp"))))
    shard.write_bytes(shard.read_bytes()[:-100])


LAYER = "decoder.layers.1"
CASES = (
    Case(
        "one layer more",
        "{ckpt}: the checkpoint does not fit the model:\n"
        "  missing in the checkpoint: decoder.layers.2.input_layernorm.weight, "
        "decoder.layers.2.self_attention.linear_proj.weight, decoder.layers.2.self_attention.linear_qkv.weight, "
        "decoder.layers.2.pre_mlp_layernorm.weight, decoder.layers.2.mlp.linear_fc1.weight, "
        "decoder.layers.2.mlp.linear_fc2.weight\n" + FLAGS_OF_THE_MODEL,
        flags={"num_layers": "3"},
        core=True,
    ),
    Case(
        "one layer less",
        "{ckpt}: the checkpoint does not fit the model:\n"
        f"  only in the checkpoint: {LAYER}.input_layernorm.weight, {LAYER}.mlp.linear_fc1.weight, "
        f"{LAYER}.mlp.linear_fc2.weight, {LAYER}.pre_mlp_layernorm.weight, {LAYER}.self_attention.linear_proj.weight, "
        f"{LAYER}.self_attention.linear_qkv.weight\n" + FLAGS_OF_THE_MODEL,
        flags={"num_layers": "1"},
    ),
    Case(
        "another width",
        "{ckpt}: the checkpoint does not fit the model:\n"
        "  other shape: decoder.layers.0.mlp.linear_fc1.weight is (192, 64) here and (256, 64) in the checkpoint, "
        "decoder.layers.0.mlp.linear_fc2.weight is (64, 96) here and (64, 128) in the checkpoint, "
        "decoder.layers.1.mlp.linear_fc1.weight is (192, 64) here and (256, 64) in the checkpoint, "
        "decoder.layers.1.mlp.linear_fc2.weight is (64, 96) here and (64, 128) in the checkpoint\n"
        + FLAGS_OF_THE_MODEL,
        flags={"ffn_hidden_size": "96"},
    ),
    Case(
        "other parameters trained",
        "{ckpt}: the optimizer state does not fit:\n"
        "  trained when it was saved, not here: decoder.final_layernorm.weight\n"
        "Train the same parameters in the same groups; " + WEIGHTS_ALONE,
        saving="frozen_norm",
    ),
    Case(
        "another optimizer",
        "{ckpt}: the optimizer state does not fit:\n"
        "  the optimizer is SGD, the checkpoint has the state of AdamW\n"
        "Train the same parameters in the same groups; " + WEIGHTS_ALONE,
        flags={"optimizer": "sgd"},
    ),
    Case(
        "bf16 switched on",
        "{ckpt}: it was saved without --bf16 and this run is with it; the training would go on in another precision. "
        "Remove --bf16; " + WEIGHTS_ALONE,
        flags={"bf16": None},
    ),
    Case(
        "no random states",
        "{ckpt}: it holds no random states: it was saved with --no-save-rng. Add --no-load-rng or --finetune.",
        extra=(),
    ),
    Case(
        "another schedule",
        "{dir}: OptimizerParamScheduler: class input value 0.002 and checkpointvalue 0.001 for learning rate do not "
        "match. Give the flags it was saved with; --override-opt_param-scheduler takes the schedule from the command "
        "line, --finetune starts a new one.",
        flags={"lr": "2e-3"},
    ),
    Case(
        "a step that was not saved",
        "{dir}/iter_0000003: it does not exist. Complete are iter_0000002, iter_0000004: write --ckpt-step 4 for the "
        "last of them.",
        extra=("--ckpt-step", "3"),
    ),
    Case(
        "an empty folder",
        "{dir}/iter_0000003: it is empty: a save was interrupted. Complete are iter_0000002, iter_0000004: write "
        "--ckpt-step 4 for the last of them.",
        extra=("--ckpt-step", "3"),
        damage=lambda directory: (directory / "iter_0000003").mkdir(),
    ),
    Case(
        "a shard cut short",
        "{ckpt}: its __1_0.distcp has another size than was written. Complete are iter_0000002: write --ckpt-step 2 for "
        "the last of them.",
        damage=cut,
        core=True,
    ),
    Case(
        "half a folder of others",
        "{ckpt}: a save of it was never finished. Complete are iter_0000002: write --ckpt-step 2 for the last of them.",
        damage=lambda directory: [
            (directory / "iter_0000004" / name).unlink() for name in ("checkpoint.json", ".metadata")
        ],
    ),
    Case(
        "no number in the tracker",
        "{dir}/latest_checkpointed_iteration.txt: 'four' is neither an iteration nor 'release'. Complete are "
        "iter_0000002, iter_0000004: write --ckpt-step 4 for the last of them. Write the number of one of them into the "
        "file.",
        damage=lambda directory: (directory / "latest_checkpointed_iteration.txt").write_text("four"),
    ),
    Case(
        "torch_dcp for torch_dist",
        "{ckpt}: it is in the format torch_dcp, and this run has --ckpt-format torch_dist. Write --ckpt-format torch_dcp.",
        ckpt_format="torch_dist",
    ),
    Case(
        "stock torch_dcp",
        "{ckpt}: Megatron wrote it in torch_dcp without mindspeed_fsdp2, with optimizer state by position and everything "
        "else pickled. --finetune loads its weights.",
        damage=lambda directory: (directory / "iter_0000004" / "checkpoint.json").unlink(),
    ),
    Case(
        "other keys to save",
        "GPTModel.state_dict_for_save_checkpoint(): it must return what state_dict() returns, for "
        "torch_dcp loads by these keys:\n  it lacks decoder.final_layernorm.weight\n  state_dict() lacks last_norm\n"
        "Return self.state_dict(prefix=prefix, keep_vars=keep_vars), or write --ckpt-format torch_dist.",
        saving="other_names",
    ),
)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[] if case.core else [pytest.mark.slow]) for case in CASES]
)
def test_load_is_refused(runs: Runs, saved: Path, tmp_path: Path, case: Case) -> None:
    directory = saved
    if case.damage is not None:
        directory = tmp_path / "copy"
        shutil.copytree(saved, directory)
        case.damage(directory)
    options: dict[str, Any] = {"flags": case.flags, "saving": case.saving, "ckpt_format": case.ckpt_format}
    job = runs.fsdp2("--load", str(directory), *case.extra, check=False, **options)
    assert refused(job) == case.expected.format(ckpt=directory / "iter_0000004", dir=directory)


@pytest.mark.slow
def test_formats_of_ddp(runs: Runs, tmp_path: Path) -> None:
    for ckpt_format in ("torch", "torch_dist"):
        argv = ["--save", str(tmp_path / ckpt_format), "--save-interval", "2", "--exit-interval", "2"]
        runs.ddp(*argv, ckpt_format=ckpt_format)
    legacy, dist = tmp_path / "torch", tmp_path / "torch_dist"
    assert refused(runs.fsdp2("--load", str(dist), check=False)) == (
        f"{dist}/iter_0000002: it is in the format torch_dist, and this run has --ckpt-format torch_dcp. Write "
        "--ckpt-format torch_dist."
    )
    for ckpt_format in ("torch_dcp", "torch_dist"):
        assert refused(runs.fsdp2("--load", str(legacy), check=False, ckpt_format=ckpt_format)) == (
            f"{legacy}/iter_0000002: it is in Megatron's legacy torch format, whose optimizer state is that of unsharded "
            "parameters by position. Add --no-load-optim (keeps the iteration) or --finetune to load its weights."
        )
    for strictness in ("assume_ok_unexpected", "log_all"):
        argv = ["--load", str(legacy), "--finetune", "--dist-ckpt-strictness", strictness]
        wider = runs.fsdp2(*argv, check=False, flags={"ffn_hidden_size": "96"})
        assert refused(wider).startswith(
            "load_state_dict: the values do not fit the model:\n  other shape: decoder.layers.0.mlp.linear_fc1.weight"
        )
    wider = runs.fsdp2("--load", str(legacy), "--finetune", check=False, flags={"num_layers": "1"})
    assert refused(wider).startswith(
        "load_state_dict: the values do not fit the model:\n  only in the checkpoint: decoder.layers.1."
    )


@pytest.mark.slow
def test_pretrained_that_is_not_there(runs: Runs, tmp_path: Path) -> None:
    job = runs.fsdp2("--load", str(tmp_path / "a"), "--pretrained-checkpoint", str(tmp_path / "b"), check=False)
    assert refused(job) == (
        f"--pretrained-checkpoint: there is no latest_checkpointed_iteration.txt in {tmp_path}/a and {tmp_path}/b. Give "
        "the folder that holds iter_… or release and this file."
    )


def test_directory_that_cannot_be_made(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "ckpt"
    job = runs.fsdp2("--save", str(folder), "--save-interval", "2", check=False)
    assert refused(job) == (
        f"{folder}: it cannot be written: Not a directory. Nothing is published and earlier checkpoints are untouched. "
        "Make room or allow writing there, or pass another directory."
    )


def test_full_disk_on_one_rank(runs: Runs, saved: Path, tmp_path: Path) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(saved, directory)
    argv = ["--load", str(directory), "--no-load-rng", "--save", str(directory), "--save-interval", "2"]
    text = refused(runs.fsdp2(*argv, saving="small_disk_on_rank_1", check=False))
    assert text.startswith("on rank 1 of 2: ") and "Nothing is published and earlier checkpoints are untouched." in text
    assert sorted(path.name for path in directory.iterdir()) == [
        "iter_0000002",
        "iter_0000004",
        "latest_checkpointed_iteration.txt",
    ]
    assert (directory / "latest_checkpointed_iteration.txt").read_text() == "4"
