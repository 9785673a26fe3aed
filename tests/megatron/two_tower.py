"""Pretrain a language decoder behind an image encoder: the model of the documented sample, plain Megatron.

The children are named as in MindSpeed-MM's documentation, ``text_decoder`` and ``image_encoder``. The images are made of
the text itself, so that the language data set serves. Three variables change the encoder: ``ENCODER`` is its dtype,
``FREEZE`` freezes it, and with ``SKIP`` only every other data-parallel rank runs it, in turns.
"""

import os
import sys
from functools import partial
from pathlib import Path

import megatron.training.argument_utils as argument_utils
import megatron.training.arguments as arguments
import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.training import get_args, pretrain
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import pretrain_gpt

PATCHES, PATCH = 4, 8  # image positions in front of the text, numbers in each


class ImageEncoder(nn.Module):
    """Two linear layers over the patches, in a dtype of its own whatever the model around is cast to."""

    def __init__(self, width, dtype):
        super().__init__()
        self.dtype = dtype
        self.layers = nn.ModuleList([nn.Linear(PATCH, width), nn.Linear(width, width)])
        for number, layer in enumerate(self.layers):
            nn.init.normal_(layer.weight, std=0.1, generator=torch.Generator().manual_seed(number))
            nn.init.zeros_(layer.bias)
        self.to(dtype)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        return super()._apply(lambda tensor: tensor.to(self.dtype), recurse)

    def forward(self, images):
        return self.layers[1](torch.tanh(self.layers[0](images.to(self.dtype))))


class TwoTower(MegatronModule):
    """A GPT whose first positions are images."""

    def __init__(self, config, pre_process=True, post_process=True):
        super().__init__(config)
        args = get_args()
        self.pre_process, self.post_process = pre_process, post_process
        self.share_embeddings_and_output_weights = not args.untie_embeddings_and_output_weights
        self.image_encoder = ImageEncoder(config.hidden_size, getattr(torch, os.environ.get("ENCODER", "float32")))
        if os.environ.get("FREEZE"):
            self.image_encoder.requires_grad_(False)
        self.text_decoder = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization=config.normalization),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            share_embeddings_and_output_weights=self.share_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
        )
        self.runs = 0
        self.pg_collection = self.text_decoder.pg_collection  # the training loop asks the outermost model

    def set_input_tensor(self, input_tensor):
        """Do nothing: there is one pipeline stage."""

    def forward(self, images, tokens, position_ids, attention_mask, labels):
        self.runs += 1
        hidden = self.text_decoder.embedding(tokens, position_ids)
        if not (os.environ.get("SKIP") and (self.runs + mpu.get_data_parallel_rank()) % 2):
            seen = self.image_encoder(images).transpose(0, 1)
            hidden = torch.cat([seen.to(hidden.dtype), hidden[PATCHES:]])
        return self.text_decoder(tokens, position_ids, attention_mask, decoder_input=hidden, labels=labels)


def build_model(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    config = config or arguments.core_transformer_config_from_args(get_args())
    return TwoTower(config, pre_process, post_process)


def forward_step(data_iterator, model):
    batch = pretrain_gpt.next_batch(data_iterator)
    images = batch["tokens"][:, : PATCHES * PATCH].float().view(-1, PATCHES, PATCH) / 256
    losses = model(images, batch["tokens"], batch["position_ids"], batch.get("attention_mask"), batch["labels"])
    return losses, partial(pretrain_gpt.token_loss, batch["loss_mask"])


if __name__ == "__main__":
    parsed = arguments.parse_and_validate_args(args_defaults=pretrain_gpt.DEFAULTS)
    container = argument_utils.pretrain_cfg_container_from_args(parsed)
    pretrain(
        container,
        pretrain_gpt.build_datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider=build_model,
    )
