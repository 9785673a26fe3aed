"""The data-parallel wrapper Megatron builds when ``--use-torch-fsdp2`` is given."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import TorchFullyShardedDataParallel as MegatronFSDP2  # a name no row follows
from megatron.training import get_args, print_rank_0
from torch import nn
from torch.distributed.tensor import DTensor

from ..accumulation import accumulate
from ..apply import Sharded
from ..config import check_supported, load_config
from ..device import current_device, find_device_type
from ..errors import ConflictError
from ..plan import below_wrappers
from ..wrap import Host, shard_model
from .meta_build import end_recording, prepare_own_sharding, refuse_left_on_meta
from .mindspeed.collectives import check_float64
from .mindspeed.own_sharding import check_own_sharding, equalise_own
from .model_facts import default_units, effective_config, tied_modules, tracker_states
from .saving.contract import check_contract
from .saving.dist_check import prepare_torch_dist
from .saving.model_values import load_values
from .startup import CHECKED, megatron_device_type

logger = logging.getLogger("mindspeed_fsdp2")


class FSDP2DataParallel(MegatronFSDP2):  # type: ignore[misc]
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
        super(MegatronFSDP2, self).__init__(config=config, module=module)  # past the stock wrapping
        args = get_args()
        if not getattr(args, CHECKED, False):
            raise ConflictError(
                "--use-torch-fsdp2: the arguments were never checked (--yaml-cfg, or arguments made by hand). "
                "Give the flags on the command line."
            )
        end_recording(module)
        self.ddp_config = ddp_config
        if process_group is None:
            process_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.process_group = process_group
        self.sharded: Sharded | None = None
        self._grads_checked = False
        self._masters = bool(args.bf16)
        self.refused_load: tuple[Any, Exception] | None = None  # the values and why; load_checkpoint swallows errors
        own = getattr(below_wrappers(module), "fully_shard", None)
        kind = type(below_wrappers(module)).__name__  # sharding changes the class
        device_type = megatron_device_type(args)
        check_float64(module, process_group, device_type)
        if callable(own):
            check_supported(load_config(args.fsdp2_config_path))
            device = current_device(device_type or find_device_type())
            prepare_own_sharding(module, (tracker_states(),), device)
        if callable(own) and own(process_group=process_group, fsdp2_config_path=args.fsdp2_config_path):
            refuse_left_on_meta(below_wrappers(module))
            check_own_sharding(below_wrappers(module), kind)
            equalise_own(below_wrappers(module), device, process_group)
            print_rank_0(f"FSDP2: {kind} sharded itself through its own fully_shard().")
            check_contract(below_wrappers(module), args)
            prepare_torch_dist(below_wrappers(module), args)
            return
        for param in module.parameters():
            # Megatron 0.19 reads this mark where TP and FSDP2 shard the same dimension of a checkpoint.
            param.is_torch_fsdp2_param = True  # type: ignore[attr-defined]
        self.sharded = shard_model(
            module,
            lambda: effective_config(load_config(args.fsdp2_config_path), args),
            process_group,
            device_type,
            Host(
                default_units=default_units,
                ties=tied_modules,
                random_states=(tracker_states(),),
                stored_dtype=torch.float32 if self._masters else None,
                same_start=bool(args.data_parallel_random_init),
            ),
        )
        if self._masters and args.loss_scale and self.sharded.plan.whole_trainable:
            raise ConflictError(
                f"--loss-scale {args.loss_scale:g}: Megatron unscales all gradients in one call, which cannot mix "
                "sharded and whole ones, and ignored_modules holds trainable parameters. Remove it, or freeze them."
            )
        check_contract(self.sharded.module, args)
        prepare_torch_dist(below_wrappers(module), args)
        self.device_mesh = self.sharded.mesh
        # Without it Megatron's schedules take a null context, and every micro-batch reduces as if it were the last.
        config.no_sync_func = self.no_sync
        if dist.get_rank() == 0:
            for notice in self.sharded.plan.notices:
                logger.warning("%s", notice)
        print_rank_0(str(self.sharded.plan))

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for every micro-batch but the last; Megatron's schedules enter it."""
        return accumulate(self.module, last=False) if self.sharded is not None else nullcontext()

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply every gradient (**in place**); Megatron calls this for ``--calculate-per-token-loss``.

        Megatron then divides a sum over data-parallel ranks by the tokens of all ranks, so what FSDP2 averaged is
        turned back into the sum.

        Args:
            scaling_factor: One over the number of tokens, all ranks and micro-batches together.
        """
        factor = scaling_factor * dist.get_world_size(self.process_group)
        for grad in self._grads():
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            local.mul_(factor)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Check gradients after a step's last backward, and lay them where Megatron's optimizer looks.

        Args:
            force_all_reduce: Passed by Megatron from 0.16 on; FSDP2 has reduced every gradient in backward.

        Raises:
            RuntimeError: A gradient is not finite and ``--check-for-nan-in-loss-and-grad`` is on, on every rank alike.
        """
        if not self._grads_checked:
            self._grads_checked = True
            self._warn_of_missing_gradients()
        if get_args().check_for_nan_in_loss_and_grad:
            self._check_finite()
        if self._masters:
            for param in self.module.parameters():
                if param.requires_grad and isinstance(param, DTensor):
                    param.main_grad = param.grad  # type: ignore[attr-defined]

    def zero_grad_buffer(self) -> None:
        """Let go of the last step's gradients; ``optimizer.zero_grad()`` drops the parameters' own."""
        if self._masters:
            for param in self.module.parameters():
                if isinstance(param, DTensor) or param.dtype == torch.float32:
                    param.main_grad = None
                elif hasattr(param, "main_grad"):
                    del param.main_grad  # the optimizer takes any main_grad of a bf16 parameter for a tensor

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:
        """Load whole or sharded values (**in place**); Megatron's own method does nothing.

        Args:
            state_dict: Key of the unwrapped model -> value, the same on every rank.
            strict: Whether the keys must be those of the model, extra state apart.

        Raises:
            CheckpointError: Keys or shapes do not fit, all of them listed.
        """
        if self.refused_load is not None and self.refused_load[0] is state_dict:
            # load_checkpoint tries a second time without strict, and would train on what is left out.
            raise self.refused_load[1]
        try:
            load_values(below_wrappers(self.module), state_dict, strict, dist.get_rank(self.process_group) == 0)
        except Exception as error:
            self.refused_load = (state_dict, error)
            raise
        self.refused_load = None

    def _grads(self) -> Iterator[torch.Tensor]:
        for param in self.module.parameters():
            grad = getattr(param, "main_grad", None)
            if grad is None:
                grad = param.grad
            if grad is not None:
                yield grad

    def _warn_of_missing_gradients(self) -> None:
        # Fused weight-gradient kernels fill a side buffer that FSDP2 never reduces; such a parameter would stay as it
        # is without any error.
        without = [
            name
            for name, p in self.module.named_parameters()
            if p.requires_grad and p.grad is None and getattr(p, "main_grad", None) is None
        ]
        if without and dist.get_rank(self.process_group) == 0:
            logger.warning(
                "no gradient after the first backward for %d trainable parameters: %s. They stay as they are: freeze "
                "them if they are unused; a fused weight-gradient kernel must be switched off.",
                len(without),
                ", ".join(without[:20]) + (", …" if len(without) > 20 else ""),
            )

    def _check_finite(self) -> None:
        # DDP's check of its buckets, after the reduction; the flag is shared so that all ranks end, not one.
        bad = [
            not bool(torch.isfinite(torch.linalg.vector_norm(grad.to_local() if isinstance(grad, DTensor) else grad)))
            for grad in self._grads()
        ]
        flag = torch.tensor(float(any(bad)), device=megatron_device_type(get_args()) or "cuda")
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item():
            raise RuntimeError(
                "a gradient is NaN or infinite after the backward. Lower the learning rate or find the batch; "
                "--no-check-for-nan-in-loss-and-grad switches this check off."
            )
