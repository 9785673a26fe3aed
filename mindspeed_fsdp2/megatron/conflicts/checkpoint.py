"""Conflicts with how Megatron saves and loads checkpoints."""

from __future__ import annotations

from typing import Final

from ..arguments import DOWNCAST_FLAG
from .row import Conflict, Flag, Situation, Text

_SAVE = Flag("--save")
_WRITE_DCP = Text("Write --ckpt-format torch_dcp.", "写 --ckpt-format torch_dcp。")


def _remote(situation: Situation) -> str | None:
    flags = (_SAVE, Flag("--load"), Flag("--pretrained-checkpoint"))
    typed = [text for flag in flags if (text := flag.typed(situation)) and "://" in text]
    return ", ".join(typed) or None


def _saves_in_background(situation: Situation) -> bool:
    return situation.value("async_strategy") is not None  # it came with Megatron's background save of torch_dcp


CHECKPOINT: Final[tuple[Conflict, ...]] = (
    Conflict(
        "ckpt_format",
        (Flag("--ckpt-format", off=("torch_dist", "torch_dcp"), shown="≠ torch_dist, torch_dcp"),),
        Text(
            "Megatron writes the sharded weights of FSDP2 in the formats torch_dist and torch_dcp only.",
            "Megatron 只能用 torch_dist 和 torch_dcp 两种格式写 FSDP2 的分片权重。",
        ),
        _WRITE_DCP,
    ),
    Conflict(
        "ckpt_step_zero",
        (Flag("--ckpt-step", off=(None,), only=(0,), shown="0"),),
        Text(
            "Megatron takes 0 for not given, and loads the newest checkpoint.",
            "Megatron 把 0 当作没有给出，会加载最新的检查点。",
        ),
        Text(
            "Remove it, or give the iteration of a checkpoint; without --load the run starts from initial weights.",
            "去掉它，或给出某个检查点的迭代数；不加 --load 时训练从初始权重开始。",
        ),
    ),
    Conflict(
        "torch_dcp_tensor_parallel",
        (Flag("--ckpt-format", only=("torch_dcp",), shown="torch_dcp"),),
        Text(
            "this format does not tell tensor-parallel ranks apart, so they overwrite each other's weights.",
            "该格式不区分张量并行的各个进程，它们会互相覆盖权重。",
        ),
        Text("Write --ckpt-format torch_dist.", "写 --ckpt-format torch_dist。"),
        together=(Flag("--tensor-model-parallel-size", off=(None, 0, 1), shown="> 1"),),
        until="torch_dcp with tensor parallel",
    ),
    Conflict(
        "non_persistent_dcp",
        (Flag("--ckpt-format", only=("torch_dcp",), shown="torch_dcp"),),
        Text(
            "Megatron reads non-persistent checkpoints in torch_dist only.",
            "Megatron 只能以 torch_dist 格式读取非持久检查点。",
        ),
        Text(
            "Write --ckpt-format torch_dist, or remove it and use a smaller --save-interval.",
            "写 --ckpt-format torch_dist；或去掉它，改用更小的 --save-interval。",
        ),
        together=(Flag("--non-persistent-ckpt-type", only=("global",), shown="global"),),
    ),
    Conflict(
        "object_storage",
        (),
        Text(
            "checkpoints are made complete or absent by renaming folders, which object storage does not offer.",
            "检查点靠重命名文件夹来保证要么完整、要么不存在，对象存储没有这种操作。",
        ),
        Text("Give a folder of a file system that all nodes share.", "给出所有节点共享的文件系统中的文件夹。"),
        found=_remote,
        shown=Text(
            "`--save`, `--load`, `--pretrained-checkpoint` with a path like `s3://bucket`",
            "`--save`、`--load`、`--pretrained-checkpoint` 为 `s3://bucket` 之类的路径",
        ),
    ),
    Conflict(
        "conversion",
        (Flag("--ckpt-convert-format"),),
        Text(
            "converting checkpoints between formats inside a run is not supported with FSDP2.",
            "不支持在使用 FSDP2 的运行中转换检查点格式。",
        ),
        Text(
            "Remove it; to change formats, convert in a run without --use-torch-fsdp2.",
            "去掉它；需要换格式时，在不带 --use-torch-fsdp2 的运行中转换。",
        ),
    ),
    Conflict(
        "upcycling",
        (Flag("--moe-use-upcycling"),),
        Text(
            "it copies whole weights of a dense model into experts, and FSDP2 holds slices of them.",
            "它把稠密模型的整块权重复制到各专家，而 FSDP2 只保存权重的分片。",
        ),
        Text(
            "Upcycle in a run without --use-torch-fsdp2 and load what it saved.",
            "在不带 --use-torch-fsdp2 的运行中做 upcycling，再加载它保存的检查点。",
        ),
    ),
    Conflict(
        "no_initialization",
        (Flag("--no-initialization", "perform_initialization", off=(True,)),),
        Text(
            "weights that no checkpoint fills would be whatever lies in memory.",
            "没有检查点填充的权重会是内存中的任意数值。",
        ),
        Text(
            "Add --init-model-with-meta-device, which finds such weights before training, or remove it.",
            "加上 --init-model-with-meta-device（它会在训练前找出这样的权重），或去掉它。",
        ),
        unless=(Flag("--init-model-with-meta-device"),),
    ),
    Conflict(
        "downcast",
        (Flag(DOWNCAST_FLAG),),
        Text("it rounds loaded weights, and nothing is loaded.", "它转换加载的权重，而这里没有加载任何权重。"),
        Text(
            "Add --load or --pretrained-checkpoint, or remove it.", "加上 --load 或 --pretrained-checkpoint，或去掉它。"
        ),
        unless=(Flag("--load"), Flag("--pretrained-checkpoint")),
    ),
    Conflict(
        "async_save",
        (Flag("--async-save"),),
        Text(
            "with FSDP2 only torch_dcp is saved in the background.",
            "在 FSDP2 下只有 torch_dcp 能在后台保存。",
        ),
        Text("Write --ckpt-format torch_dcp, or remove it.", "写 --ckpt-format torch_dcp，或去掉它。"),
        when=lambda situation: _saves_in_background(situation) and situation.value("ckpt_format") != "torch_dcp",
        shown=Text(
            "`--async-save` with `--ckpt-format` torch_dist", "`--async-save` 与 `--ckpt-format` torch_dist 同用"
        ),
        until="asynchronous saving in torch_dist",
    ),
    Conflict(
        "async_older",
        (Flag("--async-save"),),
        Text(
            "with FSDP2 only Megatron 0.17 or newer saves in the background.",
            "在 FSDP2 下只有 Megatron 0.17 及以上版本能在后台保存。",
        ),
        Text("Remove it.", "去掉它。"),
        when=lambda situation: not _saves_in_background(situation),
        shown=Text("`--async-save` with Megatron below 0.17", "`--async-save`，而 Megatron 低于 0.17"),
    ),
    Conflict(
        "async_worker",
        (Flag("--async-save"),),
        Text(
            "Megatron then saves synchronously, with a warning.",
            "Megatron 会给出警告并改为同步保存。",
        ),
        Text("Add --use-persistent-ckpt-worker.", "加上 --use-persistent-ckpt-worker。"),
        unless=(Flag("--use-persistent-ckpt-worker"),),
        when=lambda situation: _saves_in_background(situation),
    ),
    Conflict(
        "local_checkpoints",
        (Flag("--non-persistent-ckpt-type", only=("local", "in_memory"), shown="local, in_memory"),),
        Text(
            "checkpoints that each rank keeps for itself are not supported with FSDP2.",
            "不支持在 FSDP2 下由各进程自行保存的检查点。",
        ),
        Text("Write --non-persistent-ckpt-type global.", "写 --non-persistent-ckpt-type global。"),
    ),
)
