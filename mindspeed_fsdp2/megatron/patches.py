"""PATCHES: every name of Megatron this package rebinds, in one table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import PatchError
from .arguments import add_arguments
from .cpu import skip_if_compiled
from .meta_build import META
from .norms import wrap_clip, wrap_count_zeros, wrap_data_parallel_group, wrap_grad_norm, wrap_params_norm
from .patcher import Installation, Patch, accepts
from .patcher import install as install_patches
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
        return add_arguments(original(parser))

    return add_megatron_arguments


_startup = Startup()

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
        make=_startup.wrap_validate_args,
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
        make=_startup.wrap_initialize_megatron,
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


@dataclass
class _Installed:
    """The one installation of this process: a second import must find it, or every name would be wrapped twice."""

    patches: Installation | None = None


_installed = _Installed()


def installed() -> bool:
    """Return whether Megatron is patched in this process."""
    return _installed.patches is not None


def install() -> None:
    """Patch Megatron (**in place**); a second call does nothing.

    Raises:
        PatchError: A name does not exist in this Megatron, all of them listed; nothing is changed then.
    """
    if _installed.patches is not None:
        return
    if "megatron.training" not in sys.modules:
        _require_megatron()
    _installed.patches = install_patches(PATCHES)


def uninstall() -> None:
    """Give every patched name back, CPU mode included (**in place**); without an installation nothing happens.

    Raises:
        PatchError: Somebody rebound one of the names since; nothing is restored then.
    """
    if _installed.patches is None:
        return
    _startup.leave_cpu_mode()  # first: it may lie over our own names
    _installed.patches.uninstall()
    _installed.patches = None


def _require_megatron() -> None:
    try:
        import megatron.training  # noqa: F401
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megatron"):
            raise
        raise PatchError(
            "megatron.training cannot be imported. Install megatron-core 0.17 or newer (Python 3.12), or put a "
            "Megatron-LM checkout on PYTHONPATH."
        ) from None
