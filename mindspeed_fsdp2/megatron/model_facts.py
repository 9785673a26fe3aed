"""What the adapter knows of Megatron models: default units, tied weights, random states, implied precision."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from ..config import FSDP2Config
from ..plan import Tie
from ..rng import RandomState

_DEFAULT_UNITS = (TransformerLayer, LanguageModelEmbedding, RotaryEmbedding)


def effective_config(config: FSDP2Config, args: Namespace) -> FSDP2Config:
    """Return the YAML's settings with what ``--bf16`` implies where the YAML says nothing.

    Megatron keeps fp32 master weights and, with ``--accumulate-allreduce-grads-in-fp32`` (which ``--bf16`` turns on),
    reduces and accumulates in fp32. Here the shards themselves are the fp32 masters: units compute in bf16 and their
    gradients are reduced in fp32, so no second copy is needed.
    """
    if not args.bf16:
        return config
    implied = {"param_dtype": config.param_dtype or "bf16", "reduce_dtype": config.reduce_dtype or "fp32"}
    return config.model_copy(update=implied)


def default_units(model: nn.Module) -> Sequence[str]:
    """Return the fqns of Megatron's default units: layers, embeddings, rotary, and classes in ``_fsdp_modules``."""
    classes = set(_DEFAULT_UNITS)
    for module in model.modules():
        classes.update(getattr(module, "_fsdp_modules", ()))
    kinds = tuple(classes)
    return [fqn for fqn, module in model.named_modules() if fqn and isinstance(module, kinds)]


def tied_modules(model: nn.Module) -> list[Tie]:
    """Return (embedding, output layer) of every language model that uses one weight for both.

    Megatron's tied output layer holds no weight; it is handed the embedding's as an argument, gathered only while the
    embedding's unit is.
    """
    return [
        (f"{fqn}.embedding".lstrip("."), f"{fqn}.output_layer".lstrip("."))
        for fqn, module in model.named_modules()
        if getattr(module, "share_embeddings_and_output_weights", False)
        and isinstance(getattr(module, "embedding", None), nn.Module)
        and isinstance(getattr(module, "output_layer", None), nn.Module)
    ]


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
