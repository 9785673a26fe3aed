"""The keys of ``fsdp_config``, as Transformers and Accelerate read them, in the keys of this project."""

from __future__ import annotations

from .hf_fields import Fields, anything, flag, plain_flag, word_of
from .hf_model import HFModel
from .hf_policy import Around, convert_policy
from .values import describe

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_KEEPS_GATHERED = ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
_BACKWARD = "FSDP2 gathers one unit ahead in the backward by itself, and num_to_backward_prefetch sets how many"
_OF_VERSION_1 = {
    "backward_prefetch": _BACKWARD,
    "backward_prefetch_policy": _BACKWARD,
    "forward_prefetch": "FSDP2 lets the host run ahead instead; num_to_forward_prefetch: 1 gathers one unit ahead",
    "use_orig_params": "FSDP2 always keeps the original parameters",
    "sync_module_states": "load the same weights on every rank before wrap_model",
    "limit_all_gathers": "FSDP2 always limits them",
}
_SIZE = "Remove it, and write sharding_size in the converted file."
_OF_MEGATRON = "Remove it; the sizes of other kinds of parallelism are set where these are, e.g. by Megatron's flags."
_ELSEWHERE = {
    "fsdp_size": _SIZE,
    "size": _SIZE,
    "dp_shard_size": _SIZE,
    "dp_replicate_size": _SIZE,
    **dict.fromkeys(("tp_size", "ep_size", "cp_size", "sp_size", "pp_size", "tp_plan", "fsdp_plan"), _OF_MEGATRON),
    "mixed_precision": "Write it at the top level of an Accelerate file, or convert with --mixed-precision.",
    "mixed_precision_policy": "Remove it, and write param_dtype, reduce_dtype and output_dtype in the converted file.",
}
_OF_ACCELERATE = {
    "offload_params": "That is Accelerate's name, Transformers reads cpu_offload. Write cpu_offload.",
    "ignored_modules": "Only Accelerate reads it. Remove it, and write ignored_modules in the converted file.",
    "activation_checkpointing_offload": "Only Accelerate reads it. Remove it.",
    "sharding_strategy": "Only Accelerate reads it. Write reshard_after_forward.",
}
_OF_TRANSFORMERS = {"cpu_offload": "That is Transformers' name, Accelerate reads fsdp_offload_params. Write that."}


def convert_fsdp(fields: Fields, around: Around) -> int:
    """Take every key of ``fields`` and return the version of FSDP it is for."""
    version = fields.take("version", _version)
    if version is None:
        version = 1 if around.accelerate else 2
        if around.accelerate and "version" not in fields:
            fields.note("version", "absent, which is 1 there. It was converted to FSDP2, as accelerate to-fsdp2 does.")
    elif version == 1:
        fields.note("version", "1 was converted to FSDP2, as accelerate to-fsdp2 does.")
    fields.found.set("sharding_size", "auto", "all ranks, as there")
    if version == 1:
        _convert_strategy(fields, around)
    else:
        _convert_reshard(fields, around)
    _convert_offload(fields, around)
    convert_policy(fields, around)
    if around.accelerate:
        _convert_ignored(fields, around)
    _convert_files(fields)
    for key in ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings"):
        if fields.take(key, anything if key == "xla_fsdp_settings" else plain_flag):
            fields.error(key, "is for TPUs, which this project does not train on. Remove the key.")
    for key, text in _OF_VERSION_1.items():
        if key in fields:
            fields.take(key, anything)
            fields.note(key, f"belongs to FSDP version 1 and has no counterpart: {text}.")
    known = ["version", "reshard_after_forward", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params"]
    known += ["activation_checkpointing", "state_dict_type", "cpu_ram_efficient_loading"]
    known.append("offload_params" if around.accelerate else "cpu_offload")
    fields.refuse_left(known, {**_ELSEWHERE, **(_OF_TRANSFORMERS if around.accelerate else _OF_ACCELERATE)})
    return version


def _version(value: object) -> int:
    if isinstance(value, (int, str)) and str(value).strip() in ("1", "2"):
        return int(value)
    raise ValueError(f"{describe(value)} is no version of FSDP. Write 2.")


def _strategy(value: object) -> str:
    if isinstance(value, bool):
        return "FULL_SHARD" if value else "SHARD_GRAD_OP"
    name = str(value).strip().upper()
    number = dict(zip("12345", _STRATEGIES)).get(name)
    return number or word_of(*_STRATEGIES)(value)


def _convert_strategy(fields: Fields, around: Around) -> None:
    """Version 1: one word says what is sharded, over which ranks, and when it is gathered again."""
    keys = ("sharding_strategy", "reshard_after_forward") if around.accelerate else ("reshard_after_forward",)
    given = {key: strategy for key in keys if (strategy := fields.take(key, _strategy)) is not None}
    if len(set(given.values())) > 1:
        first, second = given
        fields.error(second, f"says {given[second]}, and {first} says {given[first]}. Keep one of the two keys.")
    key = next(iter(given), "reshard_after_forward")
    strategy = given.get(key) or around.strategy or "FULL_SHARD"
    if strategy == "NO_SHARD":
        fields.error(
            key,
            "NO_SHARD shards nothing, and Hugging Face's FSDP2 has nothing like it. Write FULL_SHARD or "
            "SHARD_GRAD_OP; for plain data parallel write a file with sharding_size: 1 instead.",
        )
        return
    source = fields.source(key) or "the default there"
    fields.found.set("reshard_after_forward", strategy not in _KEEPS_GATHERED, source)
    if not strategy.startswith("HYBRID"):
        return
    if around.ranks_per_node is None:
        fields.error(
            key,
            f"{strategy} shards over the ranks of one node, and nothing says how many these are. Write num_processes "
            "and num_machines in an Accelerate file, or write FULL_SHARD and set sharding_size in the converted file.",
        )
    else:
        fields.found.set("sharding_size", around.ranks_per_node, f"{source}: the ranks of one node")


def _convert_reshard(fields: Fields, around: Around) -> None:
    def check(value: object) -> bool:
        if str(value).strip().upper() in _STRATEGIES:
            meant = "false" if str(value).strip().upper() in _KEEPS_GATHERED else "true"
            raise ValueError(f"{describe(value)} belongs to version 1. Write {meant}.")
        if type(value) is int and value > 1:
            raise ValueError(
                f"{describe(value)} is not a boolean, and Hugging Face takes no number of ranks. Write true here and "
                f"reshard_after_forward: {value} in the converted file."
            )
        return flag(value)

    reshard = fields.take("reshard_after_forward", check)
    if around.accelerate and "sharding_strategy" in fields:
        strategy = fields.take("sharding_strategy", _strategy)
        if reshard is None and strategy not in ("FULL_SHARD", None):
            fields.error(
                "sharding_strategy",
                f"{strategy} is ignored under version 2, which would free parameters after the forward over all ranks. "
                "Write reshard_after_forward: true or false instead.",
            )
        elif strategy is not None:
            fields.note("sharding_strategy", "ignored under version 2, there as here; reshard_after_forward decides.")
    if reshard is not None:
        fields.found.set("reshard_after_forward", reshard, fields.source("reshard_after_forward"))
    elif around.strategy is not None:
        fields.found.set("reshard_after_forward", around.strategy not in _KEEPS_GATHERED, "fsdp")


def _convert_offload(fields: Fields, around: Around) -> None:
    key = "offload_params" if around.accelerate else "cpu_offload"
    offload = fields.take(key, flag if around.accelerate else plain_flag)
    if offload or (offload is None and around.offload):
        fields.found.set("offload_to_cpu", True, fields.source(key) or "fsdp")
        fields.note(key, "on an accelerator the process group needs a backend for CPU tensors: npu:hccl,cpu:gloo.")


def _convert_ignored(fields: Fields, around: Around) -> None:
    pattern = fields.take("ignored_modules", anything)
    if pattern is None:
        return
    try:
        modules = HFModel.modules_matching(around.model, pattern)
    except ValueError as error:
        fields.error("ignored_modules", str(error))
        return
    fields.found.set("ignored_modules", modules, fields.source("ignored_modules"))


def _convert_files(fields: Fields) -> None:
    """Loading and saving, which are no settings of this project's file."""
    words = ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT")
    kind = fields.take("state_dict_type", word_of(*words))
    if kind == "LOCAL_STATE_DICT":
        fields.error("state_dict_type", "LOCAL_STATE_DICT is refused by FSDP2. Write SHARDED_STATE_DICT.")
    elif kind is not None:
        how = {
            "FULL_STATE_DICT": "export_hf(model, directory) writes whole weights",
            "SHARDED_STATE_DICT": "save_checkpoint always saves shards; under Megatron write --ckpt-format torch_dcp",
        }
        fields.note("state_dict_type", f"{kind} is about checkpoints and no setting of this file; {how[kind]}.")
    if fields.take("cpu_ram_efficient_loading", flag):
        text = (
            "is about loading and no setting of this file. Build the model in meta_init(), wrap it, then let "
            "load_full_state_dict read the weights on one rank."
        )
        fields.note("cpu_ram_efficient_loading", text)
