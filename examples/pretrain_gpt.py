"""Pretrain a GPT on text bytes with Megatron's own ``pretrain``.

Apart from the import below this is plain Megatron: without FSDP flags it trains with Megatron's DDP. With
``--use-torch-fsdp2 --fsdp2-config-path FILE.yaml`` the same script trains with FSDP2 as the file says, and with
``--distributed-backend gloo`` on a machine without an accelerator it trains on CPU. Works with megatron-core 0.12 and
newer. Data: ``make_dataset.py``; the launch line with all flags: ``../scripts/quickstart.sh``.
"""

import mindspeed_fsdp2.megatron_adaptor  # noqa: F401  isort: skip  before anything of Megatron

import inspect
from functools import partial

import megatron.training.arguments as arguments
import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args, get_tokenizer, pretrain, print_rank_0
from megatron.training.utils import get_blend_and_blend_per_split

BYTES = 256
END_OF_DOCUMENT = BYTES  # the one token that is not a byte
DEFAULTS = {"tokenizer_type": "NullTokenizer", "vocab_size": BYTES + 1}


def accepted(function, **values):
    """Return those of ``values`` that ``function`` has parameters for; versions of Megatron differ in them."""
    return {name: value for name, value in values.items() if name in inspect.signature(function).parameters}


def layers(config):
    """Return the spec of one transformer layer; Megatron's local modules need no Transformer Engine."""
    transformer = getattr(config, "transformer", config)
    return get_gpt_layer_local_spec(
        num_experts=transformer.num_moe_experts,
        moe_grouped_gemm=transformer.moe_grouped_gemm,
        qk_layernorm=transformer.qk_layernorm,
        normalization=transformer.normalization,
    )


def build_model(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    """Build this pipeline stage's part of the model (Megatron up to 0.18; 0.19 builds it from its own config)."""
    args = get_args()
    config = config or arguments.core_transformer_config_from_args(args)
    return GPTModel(
        config,
        layers(config),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        **accepted(GPTModel, vp_stage=vp_stage, pg_collection=pg_collection),
    )


def build_datasets(num_samples, vp_stage=None):
    """Return the training, validation and test set of ``num_samples`` samples each, on every rank."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    settings = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "split": args.split,
        "full_validation": getattr(args, "full_validation", False),
        "path_to_cache": args.data_cache_path,
        "mmap_bin_files": args.mmap_bin_files,
        "tokenizer": get_tokenizer(),
        "reset_position_ids": args.reset_position_ids,
        "reset_attention_mask": args.reset_attention_mask,
        "eod_mask_loss": args.eod_mask_loss,
        "create_attention_mask": args.create_attention_mask_in_dataloader,
    }
    config = GPTDatasetConfig(**accepted(GPTDatasetConfig, **settings))
    print_rank_0("building the data sets")
    return BlendedMegatronDatasetBuilder(GPTDataset, num_samples, lambda: True, config).build()


build_datasets.is_distributed = True  # tells Megatron that every rank may call it


def next_batch(data_iterator):
    """Return the next micro-batch on this rank's device, its part of the sequence under context parallelism."""
    batch = {name: value.cuda(non_blocking=True) for name, value in next(data_iterator).items()}
    if get_args().context_parallel_size > 1:
        options = {"is_hybrid_cp": False, "cp_group": mpu.get_context_parallel_group()}
        batch = get_batch_on_this_cp_rank(batch, **accepted(get_batch_on_this_cp_rank, **options))
    return batch


def token_loss(loss_mask, losses):
    """Return the summed loss of a micro-batch, its number of tokens, and both for the log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    logged = torch.stack([loss.detach(), tokens.to(loss.dtype)])
    if not accepted(GPTModel, vp_stage=None):  # up to 0.12 Megatron logs sums over ranks that the script has made
        torch.distributed.all_reduce(logged, group=mpu.get_data_parallel_group())
        logged = tuple(logged)
    return loss, tokens, {"lm loss": logged}


def forward_step(data_iterator, model):
    """Run the model on the next micro-batch."""
    batch = next_batch(data_iterator)
    losses = model(batch["tokens"], batch["position_ids"], batch.get("attention_mask"), labels=batch["labels"])
    return losses, partial(token_loss, batch["loss_mask"])


def main():
    if not hasattr(arguments, "parse_and_validate_args"):  # up to 0.17 pretrain() parses the arguments itself
        pretrain(build_datasets, build_model, ModelType.encoder_or_decoder, forward_step, args_defaults=DEFAULTS)
        return
    from megatron.training import argument_utils

    args = arguments.parse_and_validate_args(args_defaults=DEFAULTS)
    if hasattr(argument_utils, "gpt_config_from_args"):
        model = argument_utils.gpt_config_from_args(args)
        model.transformer_layer_spec = layers
        config = argument_utils.pretrain_cfg_container_from_args(args, model)
        pretrain(config, build_datasets, ModelType.encoder_or_decoder, forward_step)
    else:  # 0.18
        config = argument_utils.pretrain_cfg_container_from_args(args)
        pretrain(config, build_datasets, build_model, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
