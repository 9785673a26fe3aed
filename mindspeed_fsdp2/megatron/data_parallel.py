"""The data-parallel wrapper Megatron builds when ``--use-torch-fsdp2`` is given."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import TorchFullyShardedDataParallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training import get_args, print_rank_0
from torch import nn

from ..apply import Sharded
from ..config import load_config
from ..errors import CheckpointError, ConflictError
from ..model_index import below_wrappers
from ..rng import RandomState
from ..wrap import shard_model
from .startup import CHECKED, megatron_device_type

logger = logging.getLogger("mindspeed_fsdp2")

_DEFAULT_UNITS = (TransformerLayer, LanguageModelEmbedding, RotaryEmbedding)


class FSDP2DataParallel(TorchFullyShardedDataParallel):
    """Megatron's FSDP2 wrapper, set up by the YAML of ``--fsdp2-config-path``.

    Every signature is the parent's. A model that has its own ``fully_shard(process_group, fsdp2_config_path)``
    (MindSpeed-MM's contract) shards itself, unless that method returns a false value.

    Args:
        config: Megatron's transformer config.
        ddp_config: Megatron's data-parallel config; the optimizer builder reads it from here.
        module: The model, possibly inside ``Float16Module``.
        sub_modules_to_wrap: Unused: the YAML, or the default set, says which modules become units.
        disable_bucketing: Unused: FSDP2 has no buckets.
        process_group: Data-parallel group; None means Megatron's own, context parallelism included.

    Raises:
        FSDP2Error: On every rank alike; see ``wrap_model``.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: Any,
        module: nn.Module,
        sub_modules_to_wrap: Any = None,
        disable_bucketing: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super(TorchFullyShardedDataParallel, self).__init__(config=config, module=module)  # past the stock wrapping
        args = get_args()
        if not getattr(args, CHECKED, False):
            raise ConflictError(
                "--use-torch-fsdp2: the arguments were never checked (--yaml-cfg, or arguments made by hand). "
                "Give the flags on the command line."
            )
        self.ddp_config = ddp_config
        if process_group is None:
            process_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.process_group = process_group
        self.sharded: Sharded | None = None
        self._grads_checked = False
        own = getattr(below_wrappers(module), "fully_shard", None)
        if callable(own) and own(process_group=process_group, fsdp2_config_path=args.fsdp2_config_path):
            print_rank_0(f"FSDP2: {type(below_wrappers(module)).__name__} sharded itself through its own fully_shard().")
            return
        for param in module.parameters():
            # Megatron 0.19 reads this mark where TP and FSDP2 shard the same dimension of a checkpoint.
            param.is_torch_fsdp2_param = True  # type: ignore[attr-defined]
        self.sharded = shard_model(
            module,
            lambda: load_config(args.fsdp2_config_path),
            process_group,
            megatron_device_type(args),
            default_units=default_units,
            more_random_states=(tracker_states(),),
        )
        self.device_mesh = self.sharded.mesh
        if dist.get_rank() == 0:
            for notice in self.sharded.plan.notices:
                logger.warning("%s", notice)
        print_rank_0(str(self.sharded.plan))

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Check once, after the first backward, that every trainable parameter has a gradient.

        Fused weight-gradient kernels fill a side buffer that FSDP2 never reduces; such a parameter would stay as it
        is without any error.

        Args:
            force_all_reduce: Passed by Megatron from 0.16 on; FSDP2 has reduced every gradient in backward.
        """
        if self._grads_checked:
            return
        self._grads_checked = True
        without = [name for name, p in self.module.named_parameters() if p.requires_grad and p.grad is None]
        if without and dist.get_rank(self.process_group) == 0:
            logger.warning(
                "no gradient after the first backward for %d trainable parameters: %s. They stay as they are: freeze "
                "them if they are unused; a fused weight-gradient kernel must be switched off.",
                len(without),
                ", ".join(without[:20]) + (", …" if len(without) > 20 else ""),
            )

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:
        """Refuse: loading into sharded parameters is not built yet, and the stock method does nothing in silence.

        Raises:
            CheckpointError: Always.
        """
        raise CheckpointError(
            "load_state_dict: loading a checkpoint into an FSDP2 model is not supported yet. Load the weights before "
            "the model is wrapped."
        )


def default_units(model: nn.Module) -> Sequence[str]:
    """Return the fqns of Megatron's default units: layers, embeddings, rotary, and classes in ``_fsdp_modules``."""
    classes = set(_DEFAULT_UNITS)
    for module in model.modules():
        classes.update(getattr(module, "_fsdp_modules", ()))
    kinds = tuple(classes)
    return [fqn for fqn, module in model.named_modules() if fqn and isinstance(module, kinds)]


def tracker_states() -> RandomState:
    """Return Megatron's tracked random states as one source for recomputation.

    Attention dropout draws from the tracker, not from the default generator: without this the recomputed masks
    differ and gradients are wrong while the loss is not.
    """

    def copy_of(state: Any) -> Any:
        return state.clone_state() if isinstance(state, torch.Generator) else state

    def get() -> dict[str, Any]:
        return {name: copy_of(state) for name, state in get_cuda_rng_tracker().get_states().items()}

    def put(states: dict[str, Any]) -> None:
        # A copy, because the tracker writes advanced states into the mapping it is given.
        get_cuda_rng_tracker().set_states({name: copy_of(state) for name, state in states.items()})

    return RandomState(get, put)
