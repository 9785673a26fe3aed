"""Files of other projects: recognised as such, with their sharding keys translated into ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .source import write_yaml

_Settings = dict[str, object]

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
_NATIVE_BLOCKS = ("parallel", "fsdp_plan", "features", "training", "model", "data", "tools")
_ACCELERATE_KEYS = ("fsdp_config", "compute_environment", "distributed_type", "parallelism_config")
# Keys of fsdp_config without its prefix that mean nothing here; one alone is rather a mistake in a file of ours.
_TRANSFORMERS_KEYS = frozenset(("version", "state_dict_type", "cpu_offload", "activation_checkpointing", "xla"))
_SHARED_KEYS = frozenset(
    ("reshard_after_forward", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "ignored_modules")
)
# Native key -> our key. The first name is MindSpeed-MM's, the others are MindSpeed-LLM's or older.
_NATIVE = (
    (("parallel.fully_shard_parallel_size", "parallel.fsdp_size"), "sharding_size"),
    (("parallel.fsdp_plan.apply_modules", "parallel.fsdp_modules", "fsdp_plan.apply_modules"), "sub_modules_to_wrap"),
    (
        ("parallel.fsdp_plan.ignored_modules", "parallel.ignored_modules", "fsdp_plan.ignored_modules"),
        "ignored_modules",
    ),
    (
        (
            "features.recompute_plan.apply_modules",
            "parallel.recompute_plan.apply_modules",
            "parallel.recompute_modules",
        ),
        "recompute_modules",
    ),
    (("features.recompute_plan.use_reentrant", "parallel.recompute_plan.use_reentrant"), "use_reentrant"),
    (("parallel.fsdp_plan.cpu_offload", "fsdp_plan.cpu_offload"), "offload_to_cpu"),
    *(
        ((f"parallel.fsdp_plan.{key}", f"parallel.{key}", f"fsdp_plan.{key}"), key)
        for key in (
            "reshard_after_forward",
            "param_dtype",
            "reduce_dtype",
            "output_dtype",
            "cast_forward_inputs",
            "num_to_forward_prefetch",
            "num_to_backward_prefetch",
        )
    ),
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
    found = [key for key in data if key in _NATIVE_BLOCKS and isinstance(data[key], Mapping)]
    if len(found) > 1 or found[:1] in (["parallel"], ["fsdp_plan"], ["features"]):
        return Foreign(found[0], _message("MindSpeed's native FSDP", _from_native(data), own_keys))
    return None


@dataclass
class _Translation:
    """What became of a foreign file's keys: ours and their sources; keys that need no line here; all others."""

    settings: dict[str, object] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    needless: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def take(self, settings: Mapping[str, object], source: str) -> None:
        self.settings.update(settings)
        self.sources.update(dict.fromkeys(settings, source))


def _message(whose: str, found: _Translation, own_keys: Sequence[str]) -> str:
    lines = []
    for key in sorted(found.settings, key=list(own_keys).index):
        lines += write_yaml({key: found.settings[key]}, found.sources).splitlines()
    if found.needless:
        lines.append(f"# as here by default: {', '.join(found.needless)}")
    if found.left_out:
        lines.append(f"# without a counterpart here: {', '.join(found.left_out)}")
    block = "\n".join(f"    {line}" for line in lines)
    return f"this file follows the format of {whose}, not this project's. Write a file with these lines:\n{block}"


def _from_native(data: Mapping[str, object]) -> _Translation:
    leaves = dict(_leaves(data, ""))
    found = _Translation()
    found.take({"sharding_size": "auto"}, "the default there")
    used = {"features.recompute", "parallel.recompute"}
    for names, key in _NATIVE:
        name = next((name for name in names if leaves.get(name) is not None), None)
        if name:
            used.add(name)
            found.take({key: leaves[name]}, name)
    if False in (leaves.get("features.recompute"), leaves.get("parallel.recompute")):
        found.settings.pop("recompute_modules", None)
    elif "recompute_modules" in found.settings and "use_reentrant" not in found.settings:
        found.take({"use_reentrant": False}, "the default there")
    found.left_out += [name for name in leaves if name.startswith(("parallel.", "fsdp_plan.")) and name not in used]
    return found


def _leaves(data: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
