"""The names that saving and loading in torch_dist rebinds: rows of PATCHES."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ..patcher import Patch, accepts, resolves
from .dist_metadata import says_more

# The wrappers are imported when a row is applied: they need Megatron's checkpoint code, which a failing check of the
# other rows should not.


def _optimizer_state(original: Callable[..., Any]) -> Callable[..., Any]:
    from .dist_optimizer import wrap_sharded_state_dict

    return wrap_sharded_state_dict(original)


def _optimizer_load(original: Callable[..., Any]) -> Callable[..., Any]:
    from .dist_optimizer import wrap_load_state_dict

    return wrap_load_state_dict(original)


def _dist_load(original: Callable[..., Any]) -> Callable[..., Any]:
    from .dist_load import wrap_dist_load

    return wrap_dist_load(original)


def _uneven_to_torch(original: Callable[..., Any]) -> Callable[..., Any]:
    from .dist_uneven import wrap_to_torch

    return wrap_to_torch(original)


def _uneven_validation(original: Callable[..., Any]) -> Callable[..., Any]:
    from .dist_uneven import wrap_validation

    return wrap_validation(original)


def _plain_metadata(original: Callable[..., Any]) -> Callable[..., Any]:
    from .dist_metadata import wrap_tensors_metadata

    return wrap_tensors_metadata(original)


def _even_only() -> bool:
    return not resolves("megatron.core.dist_checkpointing.mapping:ShardedTensor.has_regular_grid")


_TENSORS_METADATA: Final = (
    "megatron.core.dist_checkpointing.strategies.torch:TorchDistLoadShardedStrategy.load_tensors_metadata"
)

TORCH_DIST: Final[tuple[Patch, ...]] = (
    Patch(
        name="optimizer-sharded-state",
        targets=(
            "megatron.core.optimizer.optimizer:FP32Optimizer.sharded_state_dict",
            "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.sharded_state_dict",
        ),
        make=_optimizer_state,
        why="The original finds shards by the id of DTensor.to_local(), a new tensor at every call since torch 2.13, "
        "forgets the fp32 shards of a bf16 run, and cannot build the state of SGD.",
        remove_when="get_param_id_to_sharded_param_map matches DTensor parameters, fp32 ones under --bf16 too.",
    ),
    Patch(
        name="optimizer-load-state",
        targets=(
            "megatron.core.optimizer.optimizer:FP32Optimizer.load_state_dict",
            "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.load_state_dict",
        ),
        make=_optimizer_load,
        why="Takes what the row above adds to the state: fp32 shards under --bf16, step counts of single parameters.",
        remove_when="With the row above.",
    ),
    Patch(
        name="tensor-properties",
        targets=(_TENSORS_METADATA,),
        make=_plain_metadata,
        why="From torch 2.15 on an index holds strides too, which Megatron passes to torch.empty: no checkpoint's "
        "contents can be compared before they are loaded.",
        remove_when="load_tensors_metadata passes the properties it knows.",
        applies=lambda: says_more() and accepts(_TENSORS_METADATA, "metadata"),
    ),
    Patch(
        name="dist-load",
        targets=("megatron.core.dist_checkpointing:load", "megatron.core.dist_checkpointing.serialization:load"),
        make=_dist_load,
        why="Names missing, unexpected and mis-shaped tensors on all ranks alike; the original raises on some, and "
        "ignores what the checkpoint has and the run has not.",
        remove_when="--dist-ckpt-strictness raise_all is the default and all ranks raise.",
    ),
    Patch(
        name="uneven-shards",
        targets=("megatron.core.dist_checkpointing.strategies.torch:sharded_tensor_to_torch_sharded_tensor",),
        make=_uneven_to_torch,
        why="Up to 0.14 it takes shards on a regular grid only, and lays SwiGLU's halves wrongly.",
        remove_when="0.14 is no longer supported.",
        applies=_even_only,
    ),
    Patch(
        name="uneven-validation",
        targets=("megatron.core.dist_checkpointing.validation:_validate_sharding_for_key",),
        make=_uneven_validation,
        why="As uneven-shards.",
        remove_when="As uneven-shards.",
        applies=_even_only,
    ),
)
