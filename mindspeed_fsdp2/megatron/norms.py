"""Megatron's norms and zero counts over DTensors and plain tensors, one- and two-dimensional meshes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch.distributed.tensor import DTensor

from ..grad_sync import power_sum
from ..mesh import shard_group


def wrap_data_parallel_group(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``get_data_parallel_group_if_dtensor`` that takes the shard axis of a (replicate, shard) mesh.

    The original asks a 2-D mesh for its one group and raises. Replicas hold equal gradients: only shards are summed.
    """

    @functools.wraps(original)
    def get_data_parallel_group_if_dtensor(tensor: Any, data_parallel_group: Any = None) -> Any:
        if isinstance(tensor, DTensor) and tensor.device_mesh.ndim == 2:
            return shard_group(tensor.device_mesh)
        return original(tensor, data_parallel_group)

    return get_data_parallel_group_if_dtensor


def wrap_grad_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``get_grad_norm_fp32`` that measures sharded and plain gradients apart and adds the two.

    The original lets the last gradient decide whether squares are summed over data-parallel ranks: plain gradients,
    equal on every rank, then count once per rank, or sharded ones are not summed at all.
    """

    @functools.wraps(original)
    def get_grad_norm_fp32(grads_for_norm: Any, norm_type: float = 2, *rest: Any, **named: Any) -> Any:
        grads = [grads_for_norm] if isinstance(grads_for_norm, torch.Tensor) else list(grads_for_norm)
        shards, whole = _split(grads, lambda grad: grad)
        if not shards:
            return original(whole, norm_type, *rest, **named)
        host = [grad for grad in shards if _on_host(grad)]
        parts = [original([grad for grad in shards if not _on_host(grad)], norm_type, *rest, **named)]
        # Always asked, even without plain gradients: with tensor parallelism one rank may have some that its peer
        # leaves out as duplicates, and both take part in the sum over model-parallel ranks.
        parts.append(original(whole, norm_type, *rest, **named))
        if host:
            parts.append(_host_norm(host, norm_type, *rest, **named))
        others = [part for part in parts[1:] if float(part) != 0.0]
        if not others:
            return parts[0]
        if math.isinf(norm_type):
            return max(parts[0], *others)
        return sum(part**norm_type for part in (parts[0], *others)) ** (1.0 / norm_type)

    return get_grad_norm_fp32


def wrap_count_zeros(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``count_zeros_fp32`` that counts sharded and plain gradients apart, for the same reason."""

    @functools.wraps(original)
    def count_zeros_fp32(parameters: Any, *rest: Any, **named: Any) -> Any:
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        shards, whole = _split(params, lambda param: param.grad)
        if not shards:
            return original(params, *rest, **named)
        return original(shards, *rest, **named) + original(whole, *rest, **named)

    return count_zeros_fp32


def wrap_params_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``calc_params_l2_norm`` that sums the shards of an FSDP2 model.

    The original measures this rank's shards only.
    """

    @functools.wraps(original)
    def calc_params_l2_norm(model: Any, *rest: Any, **named: Any) -> Any:
        chunks = model if isinstance(model, list) else [model]
        params = [param for chunk in chunks for param in chunk.parameters()]
        if not any(isinstance(param, DTensor) and hasattr(param, "is_torch_fsdp2_param") for param in params):
            return original(model, *rest, **named)
        counted = [p.detach() for p in params if param_is_not_shared(p) and param_is_not_tensor_parallel_duplicate(p)]
        squares = power_sum(counted, 2.0)
        dist.all_reduce(squares, group=parallel_state.get_model_parallel_group())
        return squares.item() ** 0.5

    return calc_params_l2_norm


def wrap_clip(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``clip_grad_by_total_norm_fp32`` that scales gradients in host memory itself.

    The original asserts that every gradient lies on a CUDA device.
    """

    @functools.wraps(original)
    def clip_grad_by_total_norm_fp32(
        parameters: Any, max_norm: float, total_norm: Any, *rest: Any, **named: Any
    ) -> None:
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        host = [param for param in params if param.grad is not None and _on_host(param.grad)]
        factor = float(max_norm) / (float(total_norm) + 1.0e-6)
        if host and factor < 1.0:
            for param in host:
                grad: Any = param.grad
                (grad.to_local() if isinstance(grad, DTensor) else grad).mul_(factor)
        original([param for param in params if not any(param is h for h in host)], max_norm, total_norm, *rest, **named)

    return clip_grad_by_total_norm_fp32


def _on_host(grad: torch.Tensor) -> bool:
    """Return whether ``grad`` was offloaded; in CPU mode, where tensors call themselves CUDA ones, none is."""
    return grad.device.type == "cpu" and "cuda" not in grad.type()


def _host_norm(
    grads: Sequence[torch.Tensor], norm_type: float, grad_stats_parallel_group: dist.ProcessGroup | None = None
) -> float:
    total = power_sum(grads, norm_type)
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    dist.all_reduce(total, op=op, group=grad_stats_parallel_group)
    return total.item() if math.isinf(norm_type) else total.item() ** (1.0 / norm_type)


def _split(tensors: Sequence[Any], grad_of: Callable[[Any], Any]) -> tuple[list[Any], list[Any]]:
    shards = [t for t in tensors if isinstance(grad_of(t), DTensor)]
    return shards, [t for t in tensors if not isinstance(grad_of(t), DTensor)]
