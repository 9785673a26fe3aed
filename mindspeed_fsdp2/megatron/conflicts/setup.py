"""Conflicts between the flags, the YAML file and the environment that switch FSDP2 on."""

from __future__ import annotations

from typing import Final

from ..arguments import CONFIG_FLAG, DOWNCAST_FLAG, DUAL_BACKENDS
from .row import Conflict, Flag, Situation, Text

_REMOVE = Text("Remove it.", "去掉它。")


def _no_config(situation: Situation) -> str | None:
    return None if situation.value("fsdp2_config_path") else f"--use-torch-fsdp2 without {CONFIG_FLAG}"


def _one_connection(situation: Situation) -> str | None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    return f"{name}=1" if situation.environ.get(name) == "1" else None


def _reshard(situation: Situation) -> str | None:
    config, typed = situation.config, situation.value("torch_fsdp2_reshard_after_forward") is False
    if config is None or not typed or config.reshard_after_forward is False:
        return None
    value = str(config.reshard_after_forward).lower()
    return f"--torch-fsdp2-no-reshard-after-forward with {config.where('reshard_after_forward')}: {value}"


def _offload(situation: Situation) -> str | None:
    backend, config = str(situation.value("distributed_backend", "")), situation.config
    if config is None or "gloo" in backend:
        return None
    keys = [
        ("overrides", index, "offload_to_cpu") for index, some in enumerate(config.overrides) if some.offload_to_cpu
    ]
    wanted = [config.where("offload_to_cpu")] if config.offload_to_cpu else [config.where(*key) for key in keys]
    return f"{', '.join(wanted)}: true with --distributed-backend {backend}" if wanted else None


YAML_ARGUMENTS: Final = Conflict(
    "yaml_arguments",
    (Flag("--yaml-cfg"),),
    Text(
        "Megatron then drops the command line and takes all arguments from that file, in a nested form that these "
        "checks do not see.",
        "此时 Megatron 丢弃命令行，全部参数都来自该文件，且是嵌套的，这里的检查看不到。",
    ),
    Text("Write the arguments as flags.", "用命令行选项写这些参数。"),
)

SETUP: Final[tuple[Conflict, ...]] = (
    Conflict(
        "config_without_fsdp2",
        (Flag(CONFIG_FLAG),),
        Text("the file is read with --use-torch-fsdp2 only.", "只有使用 --use-torch-fsdp2 时才读取该文件。"),
        Text("Add --use-torch-fsdp2, or remove it.", "加上 --use-torch-fsdp2，或去掉它。"),
        shown=Text(f"`{CONFIG_FLAG}` without `--use-torch-fsdp2`", f"`{CONFIG_FLAG}`，且没有 `--use-torch-fsdp2`"),
        without_fsdp2=True,
    ),
    Conflict(
        "downcast_without_fsdp2",
        (Flag(DOWNCAST_FLAG),),
        Text("it acts with --use-torch-fsdp2 only.", "它只在使用 --use-torch-fsdp2 时起作用。"),
        Text("Add --use-torch-fsdp2, or remove it.", "加上 --use-torch-fsdp2，或去掉它。"),
        shown=Text(f"`{DOWNCAST_FLAG}` without `--use-torch-fsdp2`", f"`{DOWNCAST_FLAG}`，且没有 `--use-torch-fsdp2`"),
        without_fsdp2=True,
    ),
    Conflict(
        "fsdp2_without_config",
        (),
        Text("nothing says how to shard the model.", "没有说明如何切分模型。"),
        Text(f"Add {CONFIG_FLAG} FILE.yaml.", f"加上 {CONFIG_FLAG} FILE.yaml。"),
        found=_no_config,
        shown=Text(f"`--use-torch-fsdp2` without `{CONFIG_FLAG}`", f"`--use-torch-fsdp2`，且没有 `{CONFIG_FLAG}`"),
    ),
    YAML_ARGUMENTS,
    Conflict(
        "skip_train",
        (Flag("--skip-train"),),
        Text(
            "Megatron does not wrap a model that it only evaluates, so nothing would be sharded.",
            "只做评估时 Megatron 不包装模型，什么也不会切分。",
        ),
        Text("Remove --use-torch-fsdp2 from such a run.", "这样的运行请去掉 --use-torch-fsdp2。"),
    ),
    Conflict(
        "fake_process_group",
        (Flag("--fake-process-group"),),
        Text(
            "its collectives exchange nothing, so the ranks cannot compare their configuration and plan.",
            "它的通信不交换任何数据，各进程无法比较彼此的配置和切分方案。",
        ),
        _REMOVE,
    ),
    Conflict(
        "one_connection",
        (),
        Text(
            "with one hardware queue the all-gathers of FSDP2 wait for the computation they should overlap with.",
            "只有一个硬件队列时，FSDP2 的 all-gather 要等待本应与之重叠的计算。",
        ),
        Text("Unset it, or set a larger number.", "取消设置，或设成更大的数。"),
        found=_one_connection,
        shown=Text("`CUDA_DEVICE_MAX_CONNECTIONS=1`", "`CUDA_DEVICE_MAX_CONNECTIONS=1`"),
    ),
    Conflict(
        "reshard_after_forward",
        (),
        Text("the flag and the YAML say different things.", "命令行与 YAML 说法不一。"),
        Text(
            "Remove the flag and write reshard_after_forward: false in the YAML if that is what you want.",
            "去掉该选项；若需要如此，在 YAML 中写 reshard_after_forward: false。",
        ),
        found=_reshard,
        shown=Text(
            "`--torch-fsdp2-no-reshard-after-forward` with `reshard_after_forward` ≠ false in the YAML",
            "`--torch-fsdp2-no-reshard-after-forward`，而 YAML 的 `reshard_after_forward` 不是 false",
        ),
    ),
    Conflict(
        "offload_backend",
        (),
        Text(
            "gradients in host memory need a backend for CPU tensors beside the one for the device.",
            "主机内存中的梯度除设备后端外还需要一个 CPU 后端。",
        ),
        Text(
            f"Write --distributed-backend {DUAL_BACKENDS[0]} (Ascend) or {DUAL_BACKENDS[1]} (NVIDIA).",
            f"写 --distributed-backend {DUAL_BACKENDS[0]}（昇腾）或 {DUAL_BACKENDS[1]}（NVIDIA）。",
        ),
        found=_offload,
        shown=Text(
            "`offload_to_cpu: true` with a `--distributed-backend` without gloo",
            "`offload_to_cpu: true`，而 `--distributed-backend` 不含 gloo",
        ),
    ),
)
