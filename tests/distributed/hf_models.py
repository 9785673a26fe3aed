"""Tiny models of Transformers with random weights, built from configurations: nothing is downloaded."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

with warnings.catch_warnings():  # of what it imports
    warnings.simplefilter("ignore")
    import transformers
    from transformers import AutoModelForCausalLM

VOCABULARY = 67  # a prime, so that no number of ranks divides it
SMALL = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}
LLAMA = {
    **SMALL,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


def build(kind: str, seed: int = 3) -> Any:
    """Return a model in evaluation mode, the same for the same arguments."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _build(kind).eval()


def _build(kind: str) -> nn.Module:
    if kind == "gpt2":
        config = transformers.GPT2Config(**SMALL, n_embd=16, n_layer=2, n_head=2, n_positions=32)
        return transformers.GPT2LMHeadModel(config)
    if kind == "moe":
        more = {"moe_intermediate_size": 8, "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 8}
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**LLAMA, **more))
    if kind == "t5":
        config = transformers.T5Config(
            **{"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 1, "num_heads": 2}
        )
        return transformers.T5ForConditionalGeneration(config)
    tied = kind == "tied llama"
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, tie_word_embeddings=tied))


def loaded(folder: object, **options: Any) -> Any:
    """Return what ``from_pretrained`` makes of a directory, in evaluation mode; a missing weight is an error."""
    kind = transformers.AutoModelForSeq2SeqLM if options.pop("seq2seq", False) else AutoModelForCausalLM
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, report = kind.from_pretrained(str(folder), local_files_only=True, output_loading_info=True, **options)
    wrong = {name: found for name, found in report.items() if found}
    if wrong:
        raise AssertionError(f"from_pretrained: {wrong}")
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    """Return the logits of fixed tokens."""
    tokens = torch.arange(12).view(1, 12) * 5 % VOCABULARY
    more = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        result: torch.Tensor = model(tokens, **more).logits
    return result


def different(one: nn.Module, other: nn.Module) -> list[str]:
    """Return the keys whose values or dtypes differ between two models."""
    first, second = one.state_dict(), other.state_dict()
    keys = first.keys() | second.keys()
    return sorted(
        key
        for key in keys
        if key not in first
        or key not in second
        or first[key].dtype != second[key].dtype
        or not torch.equal(first[key], second[key])
    )
