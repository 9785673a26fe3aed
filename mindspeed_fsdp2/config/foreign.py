"""Files of other projects: recognised as such, with their sharding keys translated into ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .native import Translation, native_block, translate
from .source import write_yaml

_OWN_KEY = {
    "activation_checkpointing": "recompute_modules",
    "apply_modules": "sub_modules_to_wrap",
    "backward_prefetch": "num_to_backward_prefetch",
    "cpu_offload": "offload_to_cpu",
    "dp_shard_size": "sharding_size",
    "forward_prefetch": "num_to_forward_prefetch",
    "fully_shard_parallel_size": "sharding_size",
    "mixed_precision": "param_dtype",
    "modules": "sub_modules_to_wrap",
    "offload": "offload_to_cpu",
    "offload_params": "offload_to_cpu",
    "recompute_plan": "recompute_modules",
    "sharding_strategy": "reshard_after_forward",
    "size": "sharding_size",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
    "transformer_layer_cls_to_wrap": "transformer_layer_cls_to_wrap",
    "wrap_modules": "sub_modules_to_wrap",
}
_ACCELERATE_KEYS = ("fsdp_config", "compute_environment", "distributed_type", "parallelism_config")
# Keys of fsdp_config without its prefix that mean nothing here; one alone is rather a mistake in a file of ours.
_TRANSFORMERS_KEYS = frozenset(("version", "state_dict_type", "cpu_offload", "activation_checkpointing", "xla"))
_SHARED_KEYS = frozenset(
    ("reshard_after_forward", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "ignored_modules")
)


@dataclass(frozen=True)
class Foreign:
    """A file that follows another project's format.

    Attributes:
        key: The first key that gave it away.
        message: Whose format it is and what to write instead: the file's sharding settings in our keys, as YAML.
    """

    key: str
    message: str


def own_key(name: str) -> str | None:
    """Return our name for a key of another project, or ``None``."""
    return _OWN_KEY.get(name.removeprefix("fsdp_").removeprefix("fsdp2_"))


def recognise(data: Mapping[str, object], own_keys: Sequence[str], name: str | None) -> Foreign | None:
    """Return what ``data`` is if it is a file of Accelerate, Transformers or MindSpeed's native FSDP.

    Args:
        data: The whole file.
        own_keys: Our keys, in the order to write them. A file that has some is ours, whatever ``fsdp_`` keys stand
            beside them.
        name: The file, None for a mapping.
    """
    ours = any(key in own_keys for key in data)
    flat = [] if ours else [key for key in data if key.startswith("fsdp_") and not isinstance(data[key], Mapping)]
    found = [key for key in data if key in _ACCELERATE_KEYS or key in flat]
    if not found and len(_TRANSFORMERS_KEYS.intersection(data)) > 1 and not set(data) & set(own_keys) - _SHARED_KEYS:
        found = [key for key in data if key in _TRANSFORMERS_KEYS]
    if found:
        how = f"mindspeed-fsdp2 convert {name} -o converted.yaml" if name else "FSDP2Config.from_hf(...)"
        return Foreign(
            found[0],
            "this file follows the format of Hugging Face's Accelerate or Transformers, not this project's. Translate "
            f"it: {how}.",
        )
    if (first := native_block(data)) is not None:
        return Foreign(first, _message("MindSpeed's native FSDP", translate(data), own_keys))
    return None


def _message(whose: str, found: Translation, own_keys: Sequence[str]) -> str:
    lines = []
    for key in sorted(found.settings, key=list(own_keys).index):
        lines += write_yaml({key: found.settings[key]}, found.sources).splitlines()
    if found.needless:
        lines.append(f"# as here by default: {', '.join(found.needless)}")
    if found.left_out:
        lines.append(f"# without a counterpart here: {', '.join(found.left_out)}")
    block = "\n".join(f"    {line}" for line in lines)
    return f"this file follows the format of {whose}, not this project's. Write a file with these lines:\n{block}"
