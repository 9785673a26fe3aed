"""Changes to a job's model or data, for what Megatron's local parts cannot do on a CPU or its flags cannot ask for.

A job names them in the variable ``SPECS`` and the runner's hook, :func:`prepare`, makes them before the script starts:
the DDP reference and the FSDP2 run get the same ones.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


def prepare(extra: dict[str, Any]) -> None:
    """Hook of the runner: note what the comparison needs besides the probes, and make the changes of ``SPECS``."""
    _note_start(extra)
    _note_params_norm(extra)
    _note_logits(extra)
    _note_traffic(extra)
    for name in os.environ.get("SPECS", "").split():
        CHANGES[name]()


def _note_start(extra: dict[str, Any]) -> None:
    """Keep what training starts from: equal in both runs, and different from where it ends."""
    from megatron.training import training

    from tests.megatron.jobs_probes import _values

    original = training.train

    @functools.wraps(original)
    def train(forward_step: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        extra["start"] = _values(model)
        result = original(forward_step, model, *args, **kwargs)
        extra["buffers"] = {name: b.clone() for chunk in model for name, b in chunk.named_buffers()}
        return result

    training.train = train


def _note_params_norm(extra: dict[str, Any]) -> None:
    from megatron.training import training

    original = training.calc_params_l2_norm
    extra["params_norms"] = []

    @functools.wraps(original)
    def calc_params_l2_norm(*args: Any, **kwargs: Any) -> Any:
        norm = original(*args, **kwargs)
        extra["params_norms"].append(float(norm))
        return norm

    training.calc_params_l2_norm = calc_params_l2_norm


def _note_logits(extra: dict[str, Any]) -> None:
    """Keep the logits of the first forward, (sequence, batch, vocabulary)."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    original = LanguageModule.compute_language_model_loss

    @functools.wraps(original)
    def compute_language_model_loss(self: Any, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        extra.setdefault("logits", logits.detach().float().clone())
        return original(self, labels, logits)

    LanguageModule.compute_language_model_loss = compute_language_model_loss


class _Traffic(TorchDispatchMode):
    """Counts the gathers and reduce-scatters that c10d is asked for while it is on."""

    KINDS = {"c10d::_allgather_base_": "gathers", "c10d::_reduce_scatter_base_": "scatters"}

    def __init__(self) -> None:
        super().__init__()
        self.counts = dict.fromkeys(self.KINDS.values(), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kind := self.KINDS.get(func._schema.name):
            self.counts[kind] += 1
        return func(*args, **(kwargs or {}))


def _note_traffic(extra: dict[str, Any]) -> None:
    """Count each step's collectives, if the variable ``TRAFFIC`` is set."""
    from megatron.training import training

    if not os.environ.get("TRAFFIC"):
        return
    original = training.train_step
    extra["traffic"] = []

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        with _Traffic() as traffic:
            result = original(*args, **kwargs)
        extra["traffic"].append(traffic.counts)
        return result

    training.train_step = train_step


# --- layers for context and sequence parallelism ----------------------------------------------------------------------


def own_layers() -> None:
    """Attention that gathers keys and values over the context-parallel ranks, and norms that mark their weights."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import transformer_block

    original = gpt_layer_specs.get_gpt_layer_local_spec

    @functools.wraps(original)
    def get_gpt_layer_local_spec(*args: Any, **kwargs: Any) -> Any:
        spec = original(*args, **kwargs)
        layer = spec.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = MarkedNorm
        layer.self_attention.submodules.core_attention = GatheredAttention
        return spec

    gpt_layer_specs.get_gpt_layer_local_spec = get_gpt_layer_local_spec
    transformer_block.LayerNormImpl = MarkedNorm


class MarkedNorm:
    """torch's norm, its weights marked for Megatron's sum over tensor-parallel ranks under sequence parallelism."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_named: Any) -> nn.Module:  # type: ignore[misc]
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm = kind(hidden_size, eps=eps)
        for param in norm.parameters():
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class _GatherSequence(torch.autograd.Function):
    """Concatenate the ranks' parts along the sequence; backward sums over the ranks and keeps this rank's part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()].contiguous(), None


class GatheredAttention(nn.Module):
    """Causal attention of this rank's queries over the whole sequence. Tensors are (sequence, batch, heads, width)."""

    def __init__(self, config: Any, *_args: Any, pg_collection: Any = None, **_named: Any) -> None:
        super().__init__()
        self.group = pg_collection.cp
        self.dropout = nn.Dropout(config.attention_dropout)
        self.sequence_parallel = config.sequence_parallel

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_args: Any, **_named: Any) -> Any:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        if self.group.size() > 1:
            key, value = (_GatherSequence.apply(tensor, self.group) for tensor in (key, value))
        places = self._places(key.shape[0])
        mine = places.chunk(self.group.size())[self.group.rank()]
        scores = torch.einsum("qbnh,kbnh->bnqk", query, key).float() / query.shape[-1] ** 0.5
        scores = scores.masked_fill(places[None, :] > mine[:, None], float("-inf"))
        weights = scores.softmax(dim=-1).to(value.dtype)
        if self.sequence_parallel:
            weights = self.dropout(weights)
        else:
            with get_cuda_rng_tracker().fork():
                weights = self.dropout(weights)
        return torch.einsum("bnqk,kbnh->qbnh", weights, value).flatten(2)

    def _places(self, length: int) -> torch.Tensor:
        """Return the place in the sequence of every gathered key: rank r holds the pieces r and 2 * ranks - 1 - r."""
        ranks = self.group.size()
        if ranks == 1:
            return torch.arange(length)
        pieces = torch.arange(length).chunk(2 * ranks)
        return torch.cat([torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]]) for rank in range(ranks)])


# --- models and data --------------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """A frozen linear layer of Megatron's and a trainable product of two small matrices beside it."""

    RANK = 4

    def __init__(self, base: nn.Module, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base
        rows, columns = base.weight.shape  # type: ignore[union-attr, misc]
        self.down = nn.Parameter(torch.randn(self.RANK, columns, generator=generator) * 0.1)  # type: ignore[arg-type]
        self.up = nn.Parameter(torch.randn(rows, self.RANK, generator=generator) * 0.1)  # type: ignore[arg-type]

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, bias = self.base(hidden, *args, **kwargs)
        return output + hidden @ self.down.t() @ self.up.t(), bias


def lora() -> None:
    """Freeze a GPT and train adapters beside its qkv projections."""

    def adapt(model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(7)
        model.requires_grad_(False)
        for layer in model.decoder.layers:  # type: ignore[union-attr]
            layer.self_attention.linear_qkv = Adapter(layer.self_attention.linear_qkv, generator)  # type: ignore

    _after_init(adapt)


def frozen_embedding() -> None:
    """Freeze a GPT's embedding."""
    _after_init(lambda model: model.embedding.requires_grad_(False))  # type: ignore[union-attr, operator]


def sharp_attention() -> None:
    """Multiply a GPT's qkv weights by 12, so that attention reacts to the smallest error in what it is given."""

    def sharpen(model: nn.Module) -> None:
        with torch.no_grad():
            for layer in model.decoder.layers:  # type: ignore[union-attr]
                layer.self_attention.linear_qkv.weight.mul_(12)  # type: ignore[operator, union-attr]

    _after_init(sharpen)


def own_class_unit() -> None:
    """Let a GPT name a class of its own, the MLP, as a unit of the default set."""
    from megatron.core.transformer.mlp import MLP

    _after_init(lambda model: setattr(model, "_fsdp_modules", [MLP]))


def own_fully_shard() -> None:
    """Give a GPT the method by which models shard themselves."""
    from megatron.core.models.gpt import GPTModel
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard as shard

    def fully_shard(self: nn.Module, process_group: dist.ProcessGroup, fsdp2_config_path: str) -> bool:
        print(f"own fully_shard: {process_group.size()} ranks, {os.path.basename(fsdp2_config_path)}")
        mesh = DeviceMesh.from_group(process_group, "cpu")
        for layer in self.decoder.layers:  # type: ignore[union-attr]
            shard(layer, mesh=mesh)
        shard(self, mesh=mesh)
        return True

    GPTModel.fully_shard = fully_shard


def declined_fully_shard() -> None:
    """Give a GPT a ``fully_shard`` that leaves the sharding to us."""
    from megatron.core.models.gpt import GPTModel

    def fully_shard(self: nn.Module, process_group: dist.ProcessGroup, fsdp2_config_path: str) -> None:
        print(f"own fully_shard: {process_group.size()} ranks, {os.path.basename(fsdp2_config_path)}")

    GPTModel.fully_shard = fully_shard


# --- faults -----------------------------------------------------------------------------------------------------------


def own_folders() -> None:
    """Work in the folder ``rank0``, ``rank1``, … below the one of the variable ``FOLDERS``, as if on nodes apart."""
    os.chdir(os.path.join(os.environ["FOLDERS"], f"rank{os.environ['RANK']}"))


def frozen_on_rank_1() -> None:
    """Freeze the output layer on rank 1 only."""
    if os.environ["RANK"] == "1":
        _after_init(lambda model: model.output_layer.requires_grad_(False))  # type: ignore[union-attr, operator]


def nan_gradient_on_rank_1() -> None:
    """Make the gradient of one layer NaN on rank 1, losses staying finite."""

    def _nan(grads: Any) -> Any:
        return tuple(None if grad is None else grad * float("nan") for grad in grads)

    def poison(model: nn.Module) -> None:
        layer = model.decoder.layers[1]  # type: ignore[union-attr, index]
        layer.register_full_backward_pre_hook(lambda _module, grads: _nan(grads))

    if os.environ["RANK"] == "1":
        _after_init(poison)


def _after_init(change: Callable[[nn.Module], None]) -> None:
    from megatron.core.models.gpt import GPTModel

    original = GPTModel.__init__

    @functools.wraps(original)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        change(self)

    GPTModel.__init__ = init


def uneven_tokens() -> None:
    """Mask the loss of each sample from a place of its own on: micro-batches and ranks differ in their tokens."""
    from megatron.core.datasets.gpt_dataset import GPTDataset

    original = GPTDataset.__getitem__

    @functools.wraps(original)
    def getitem(self: Any, index: Any) -> dict[str, torch.Tensor]:
        sample = dict(original(self, index))
        mask = sample["loss_mask"].clone()
        mask[4 + (int(index) * 29) % (len(mask) - 4) :] = 0
        return {**sample, "loss_mask": mask}

    GPTDataset.__getitem__ = getitem


CHANGES: dict[str, Callable[[], None]] = {
    change.__name__: change
    for change in (
        own_layers,
        lora,
        frozen_embedding,
        sharp_attention,
        own_class_unit,
        uneven_tokens,
        own_fully_shard,
        declined_fully_shard,
        own_folders,
        frozen_on_rank_1,
        nan_gradient_on_rank_1,
    )
}
