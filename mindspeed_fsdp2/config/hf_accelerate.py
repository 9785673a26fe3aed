"""The top level of an Accelerate configuration and its ``parallelism_config``."""

from __future__ import annotations

from collections.abc import Mapping

from .hf_fields import Fields, Found, anything, flag, whole_number
from .hf_fsdp import convert_fsdp
from .hf_model import HFModel
from .hf_policy import Around
from .hf_precision import precision_of
from .hf_source import CLUSTER_KEYS
from .source import Origin
from .values import describe

_PREFIX = "parallelism_config_"
_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
_WAYS = ("cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable")
_OTHER_PARALLELISM = {
    "tp_size": "tensor parallelism is Megatron's (--tensor-model-parallel-size)",
    "cp_size": "context parallelism is Megatron's (--context-parallel-size)",
    "sp_size": "sequence parallelism of this kind is not supported",
}
_OTHER_ENGINES = {"deepspeed_config": "DeepSpeed", "megatron_lm_config": "Accelerate's Megatron-LM"}
_OLD = {"fp16": "Write mixed_precision: fp16.", "dynamo_backend": "Remove it."}
_NOT_CARRIED = {
    "fp8_config": "fp8 is not supported and was left out",
    "dynamo_config": "compiling is left to your trainer and was left out",
}


def convert_accelerate(
    fields: Fields, data: Mapping[str, object], origin: Origin, model: HFModel | None
) -> tuple[int, tuple[str, str]]:
    """Take every key of the file; return the version of FSDP and the precision with its key."""
    kind = fields.take("distributed_type", anything)
    if kind is not None and str(kind) != "FSDP":
        text = f"is {kind}, not FSDP, so there is nothing to convert. Make a file with accelerate config, for FSDP."
        fields.error("distributed_type", text)
    environment = fields.take("compute_environment", anything)
    if environment is not None and str(environment) != "LOCAL_MACHINE":
        fields.error("compute_environment", f"{describe(environment)} is not supported. Write LOCAL_MACHINE.")
    precision = fields.take("mixed_precision", precision_of) or "no"
    ranks, nodes = fields.take("num_processes", _ranks), fields.take("num_machines", whole_number)
    if fields.take("use_cpu", flag):
        text = "Accelerate trains on CPU with plain data parallel; here the model is sharded there too."
        fields.note("use_cpu", text)
    around = Around(True, ranks_per_node=ranks // nodes if ranks and nodes else None, model=model)
    version = 2
    inner = fields.take("fsdp_config", _mapping)
    if inner:
        at = ("fsdp_config",)
        version = convert_fsdp(Fields(inner, origin, fields.found, at=at, prefix="fsdp_", always=True), around)
    elif inner is not None or "fsdp_config" not in fields:
        text = "is absent" if inner is None else "is empty"
        fields.error("fsdp_config", f"{text}, so there is nothing to convert. Make a file with accelerate config.")
    if shape := fields.take("parallelism_config", _mapping):
        if version == 1:
            text = "is refused by Accelerate under FSDP version 1. Write fsdp_version: 2 in fsdp_config."
            fields.error("parallelism_config", text)
        _convert_shape(shape, origin, fields.found, ranks)
    for key, name in _OTHER_ENGINES.items():
        if fields.take(key, anything):
            fields.error(key, f"sets up {name} beside FSDP. Remove it.")
    for key, text in _NOT_CARRIED.items():
        if fields.take(key, anything):
            fields.note(key, f"{text}.")
    for key in CLUSTER_KEYS:  # the rest is about starting processes
        fields.take(key, anything)
    fields.refuse_left(sorted(CLUSTER_KEYS), _OLD, "Accelerate refuses")
    return version, (precision, "mixed_precision")


def _ranks(value: object) -> int:
    return 0 if value == -1 else whole_number(value)  # -1: the launcher finds out


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{describe(value)} is not a mapping. Write 'key: value' lines below it.")
    return value


def _convert_shape(shape: Mapping[str, object], origin: Origin, found: Found, ranks: int | None) -> None:
    fields = Fields(shape, origin, found, at=("parallelism_config",))
    bare = [key for key in fields.left() if key in (*_SIZES, *_WAYS, "sp_attn_implementation")]
    for key in bare:
        fields.take(key, anything)
        fields.error(key, f"lacks its prefix, so Accelerate drops it without a word. Write {_PREFIX}{key}.")
    sizes = {name: fields.take(f"{_PREFIX}{name}", whole_number) for name in _SIZES}
    for name in (*_WAYS, "sp_attn_implementation"):
        key = f"{_PREFIX}{name}"
        if key in fields:
            fields.take(key, anything)
            fields.note(key, f"has no effect at {name[:2]}_size 1, there as here.")
    for name, text in _OTHER_PARALLELISM.items():
        if sizes[name] not in (None, 1):
            fields.error(f"{_PREFIX}{name}", f"{text}, and {sizes[name]} cannot be converted. Write 1 or remove it.")
    fields.refuse_left([f"{_PREFIX}{name}" for name in (*_SIZES, *_WAYS)], {})
    if bare or not any(f"{_PREFIX}{name}" in fields for name in _SIZES):
        return
    shards, copies = sizes["dp_shard_size"], sizes["dp_replicate_size"] or 1
    if shards in (None, 0, 1):
        text = (
            f"{'absent, so it is 1' if shards is None else shards}: nothing would be sharded, which Accelerate's FSDP2"
        )
        fields.error(f"{_PREFIX}dp_shard_size", f"{text} refuses. Write the number of ranks that share one copy.")
        return
    others = [size for name, size in sizes.items() if name in _OTHER_PARALLELISM and size]
    total = shards * copies
    if ranks and not any(size > 1 for size in others) and total != ranks:
        text = (
            f"{copies} copies times {shards} shards are {total} ranks, and num_processes is {ranks}. Make them equal."
        )
        fields.error(f"{_PREFIX}dp_shard_size", text)
    found.set("sharding_size", shards, fields.source(f"{_PREFIX}dp_shard_size"))
