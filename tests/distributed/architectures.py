"""Ten Transformers architectures, built tiny from their configurations, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import transformers as hf
from torch import nn

VOCAB: Final = 96
LENGTH: Final = 12
TEXT: Final = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED: Final = {**TEXT, "num_key_value_heads": 2}
Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Architecture:
    """One kind of model.

    Attributes:
        build: Makes the tiny model; its values come from torch's default generator.
        layers: Module path of its layers, for ``recompute_modules``.
        inputs: Keyword arguments of one forward that returns a loss, drawn from the generator given.
    """

    build: Callable[[], nn.Module]
    layers: str
    inputs: Callable[[torch.Generator], Inputs]


def _tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(8, VOCAB, (2, LENGTH), generator=generator)


def _causal(generator: torch.Generator) -> Inputs:
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens}


def _translated(generator: torch.Generator) -> Inputs:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator)}


def _masked(generator: torch.Generator) -> Inputs:
    tokens = _tokens(generator)
    hidden = torch.rand(tokens.shape, generator=generator) < 0.3
    return {"input_ids": tokens.masked_fill(hidden, 3), "labels": tokens.masked_fill(~hidden, -100)}


IMAGE_TOKEN: Final = 5


def _pictures(generator: torch.Generator) -> Inputs:
    tokens = _tokens(generator)
    tokens[:, 1:5] = IMAGE_TOKEN  # a picture of 8 x 8 pixels in patches of 4 is four tokens
    return {
        "input_ids": tokens,
        "labels": tokens.masked_fill(tokens == IMAGE_TOKEN, -100),
        "pixel_values": torch.rand(2, 3, 8, 8, generator=generator),
    }


def _llava() -> nn.Module:
    vision = hf.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, image_size=8, patch_size=4
    )
    config = hf.LlavaConfig(vision_config=vision, text_config=hf.LlamaConfig(**GROUPED), image_token_index=IMAGE_TOKEN)
    return hf.LlavaForConditionalGeneration(config)


ARCHITECTURES: Final[dict[str, Architecture]] = {
    "Llama": Architecture(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)), "model.layers.{*}", _causal),
    "Qwen3": Architecture(
        lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, head_dim=8)), "model.layers.{*}", _causal
    ),
    "Qwen3-MoE": Architecture(
        lambda: hf.Qwen3MoeForCausalLM(
            hf.Qwen3MoeConfig(**GROUPED, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
        ),
        "model.layers.{*}",
        _causal,
    ),
    "Gemma": Architecture(
        lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**GROUPED, head_dim=8)), "model.layers.{*}", _causal
    ),
    "Mistral": Architecture(lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED)), "model.layers.{*}", _causal),
    "GPT-2": Architecture(
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=VOCAB,
                n_embd=32,
                n_layer=3,
                n_head=4,
                n_positions=64,
                bos_token_id=1,
                eos_token_id=2,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        ),
        "transformer.h.{*}",
        _causal,
    ),
    "LLaVA": Architecture(_llava, "model.language_model.layers.{*}", _pictures),
    "T5": Architecture(
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=VOCAB,
                d_model=32,
                d_kv=8,
                d_ff=48,
                num_layers=3,
                num_decoder_layers=3,
                num_heads=4,
                dropout_rate=0.0,
                decoder_start_token_id=0,
            )
        ),
        "decoder.block.{*}",
        _translated,
    ),
    "BERT": Architecture(
        lambda: hf.BertForMaskedLM(hf.BertConfig(**TEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)),
        "bert.encoder.layer.{*}",
        _masked,
    ),
    "Mamba": Architecture(
        lambda: hf.MambaForCausalLM(
            hf.MambaConfig(vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=3, pad_token_id=0)
        ),
        "backbone.layers.{*}",
        _causal,
    ),
}
