"""PATCHES: every name of Megatron this package rebinds, in one table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .arguments import DOWNCAST_FLAG, add_arguments
from .cpu import skip_if_compiled
from .meta_build import META
from .norms import wrap_clip, wrap_count_zeros, wrap_data_parallel_group, wrap_grad_norm, wrap_params_norm
from .patcher import Patch, accepts
from .saving.dist_patches import TORCH_DIST
from .saving.rows import SAVING
from .startup import Startup, wrap_excepthook, wrap_initialize_distributed, wrap_load_yaml


def _wrapped_class(original: Any) -> Any:
    # Imported here: the subclass must be defined after the rows above it are known to resolve, and importing it
    # initialises Megatron's model code, which a failing check should not need.
    from .data_parallel import FSDP2DataParallel

    return FSDP2DataParallel


def _with_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_megatron_arguments(parser: Any) -> Any:
        # MindSpeed-MM's provider, which argparse asks after this, registers that flag without looking.
        skip = (DOWNCAST_FLAG,) if "mindspeed_mm" in sys.modules else ()
        return add_arguments(original(parser), skip=skip)

    return add_megatron_arguments


STARTUP = Startup()
"""Shared by the rows between parsing and the first collective."""

PATCHES: tuple[Patch, ...] = (
    Patch(
        name="flags",
        targets=("megatron.training.arguments:add_megatron_arguments",),
        make=_with_arguments,
        why="Adds --fsdp2-config-path and --downcast-to-bf16, and the dual backends. From 0.18 on scripts parse "
        "before pretrain(), so its extra_args_provider comes too late.",
        remove_when="Megatron reads an FSDP2 configuration file itself.",
    ),
    Patch(
        name="conflicts",
        targets=("megatron.training.arguments:validate_args", "megatron.training.initialize:validate_args"),
        make=STARTUP.wrap_validate_args,
        why="Reports every conflict at once, before Megatron's assertions name the first; switches to CPU mode.",
        remove_when="Never: the YAML's own conflicts stay ours.",
    ),
    Patch(
        name="yaml-arguments",
        targets=("megatron.training.yaml_arguments:load_yaml",),
        make=wrap_load_yaml,
        why="--yaml-cfg goes around validate_args, and so around every check of ours.",
        remove_when="Megatron validates arguments of a YAML file in validate_args.",
        required=False,
    ),
    Patch(
        name="early-cpu",
        targets=(
            "megatron.training.initialize:initialize_megatron",
            "megatron.training:initialize_megatron",
            "megatron.training.training:initialize_megatron",
        ),
        make=STARTUP.wrap_initialize_megatron,
        why="Up to 0.17 initialize_megatron asserts a CUDA device before it parses the backend.",
        remove_when="0.17 is no longer supported.",
        applies=lambda: accepts("megatron.training.initialize:initialize_megatron", "parsed_args"),
    ),
    Patch(
        name="dataset-helpers",
        targets=("megatron.core.datasets.utils:compile_helpers",),
        make=skip_if_compiled,
        why="In wheels it runs make where no Makefile is, and ends the run although the helper is there.",
        remove_when="Wheels ship the Makefile, or compile_helpers looks first.",
        required=False,
    ),
    Patch(
        name="agreement",
        targets=("megatron.training.initialize:_initialize_distributed",),
        make=wrap_initialize_distributed,
        why="The first moment at which ranks can tell each other that a file is missing or different.",
        remove_when="Never.",
    ),
    Patch(
        name="wrapper",
        targets=(
            "megatron.core.distributed:TorchFullyShardedDataParallel",
            "megatron.core.distributed.torch_fully_sharded_data_parallel:TorchFullyShardedDataParallel",
            "megatron.training.training:torch_FSDP",
            "megatron.training.checkpointing:torch_FSDP",
            "megatron.training.utils:torch_FSDP",
            "megatron.training.models.dist_utils:TorchFullyShardedDataParallel",
        ),
        make=_wrapped_class,
        also_aliases=True,
        why="The class that shards. Both build paths construct it by one of these names: get_model up to 0.18, "
        "models/dist_utils.py in 0.19.",
        remove_when="Megatron's class takes units, precision, mesh and recompute from a file.",
    ),
    Patch(
        name="norm-mesh",
        targets=(
            "megatron.core.utils:get_data_parallel_group_if_dtensor",
            "megatron.core.optimizer.clip_grads:get_data_parallel_group_if_dtensor",
            "megatron.training.utils:get_data_parallel_group_if_dtensor",
            "megatron.training.utils.common_utils:get_data_parallel_group_if_dtensor",
        ),
        make=wrap_data_parallel_group,
        why="The original raises on a (replicate, shard) mesh, which sharding_size 1 and int bring.",
        remove_when="DeviceMesh.get_group() is called with the shard axis upstream.",
    ),
    Patch(
        name="grad-norm",
        targets=(
            "megatron.core.optimizer.clip_grads:get_grad_norm_fp32",
            "megatron.core.optimizer.optimizer:get_grad_norm_fp32",
        ),
        make=wrap_grad_norm,
        why="The original lets the last gradient decide whether the norm is summed over ranks.",
        remove_when="get_grad_norm_fp32 groups gradients by mesh.",
    ),
    Patch(
        name="zero-count",
        targets=(
            "megatron.core.optimizer.clip_grads:count_zeros_fp32",
            "megatron.core.optimizer.optimizer:count_zeros_fp32",
        ),
        make=wrap_count_zeros,
        why="The same mistake as in the norm.",
        remove_when="count_zeros_fp32 groups gradients by mesh.",
    ),
    Patch(
        name="clip",
        targets=(
            "megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32",
            "megatron.core.optimizer.optimizer:clip_grad_by_total_norm_fp32",
        ),
        make=wrap_clip,
        why="The original asserts CUDA gradients; offloaded ones lie in host memory.",
        remove_when="clip_grad_by_total_norm_fp32 takes CPU gradients.",
    ),
    Patch(
        name="params-norm",
        targets=(
            "megatron.training.utils.common_utils:calc_params_l2_norm",
            "megatron.training.utils:calc_params_l2_norm",
            "megatron.training.training:calc_params_l2_norm",
        ),
        make=wrap_params_norm,
        why="--log-params-norm measures this rank's shards only (0.19), or raises on a 2-D mesh.",
        remove_when="calc_params_l2_norm sums DTensor shards.",
    ),
    *META,
    *SAVING,
    *TORCH_DIST,
    Patch(
        name="excepthook",
        targets=("sys:excepthook",),
        make=wrap_excepthook,
        stacks=True,  # init_process_group wraps it, to put the rank before each line
        why="A user's mistake ends with its message, not with a traceback.",
        remove_when="Never.",
    ),
)
