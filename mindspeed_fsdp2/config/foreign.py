"""Files of other projects: recognised as such, with their sharding keys translated into ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .source import write_yaml

_Fields = Mapping[str, object]
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
    "transformer_layer_cls_to_wrap": "sub_modules_to_wrap",
    "wrap_modules": "sub_modules_to_wrap",
}
_NATIVE_BLOCKS = ("parallel", "fsdp_plan", "features", "training", "model", "data", "tools")
_ACCELERATE_KEYS = ("fsdp_config", "compute_environment", "distributed_type", "parallelism_config")
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
_STRATEGIES: dict[str, _Settings] = {
    "FULL_SHARD": {"sharding_size": "auto", "reshard_after_forward": True},
    "SHARD_GRAD_OP": {"sharding_size": "auto", "reshard_after_forward": False},
    "NO_SHARD": {"sharding_size": 1},
    "HYBRID_SHARD": {"sharding_size": "ranks of one node", "reshard_after_forward": True},
    "HYBRID_SHARD_ZERO2": {"sharding_size": "ranks of one node", "reshard_after_forward": False},
}
_STRATEGY_NUMBERS = dict(zip("12345", _STRATEGIES))


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


def recognise(data: Mapping[str, object], own_keys: Sequence[str]) -> Foreign | None:
    """Return what ``data`` is if it is a file of Accelerate, Transformers or MindSpeed's native FSDP.

    Args:
        data: The whole file.
        own_keys: Our keys, in the order to write them. A file that has some is ours, whatever ``fsdp_`` keys stand
            beside them.
    """
    ours = any(key in own_keys for key in data)
    flat = [] if ours else [key for key in data if key.startswith("fsdp_") and not isinstance(data[key], Mapping)]
    found = [key for key in data if key in _ACCELERATE_KEYS or key in flat]
    if found:
        whose = "Hugging Face's Accelerate or Transformers"
        return Foreign(found[0], _message(whose, _from_accelerate(data), own_keys))
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
        first, _, rest = write_yaml({key: found.settings[key]}, ()).rstrip("\n").partition("\n")
        lines += [f"{first}  # {found.sources[key]}", *filter(None, rest.split("\n"))]
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


def _from_accelerate(data: Mapping[str, object]) -> _Translation:
    fsdp = data.get("fsdp_config")
    inner = fsdp if isinstance(fsdp, Mapping) else {}
    full_names = {f"fsdp_config.{key}": value for key, value in inner.items()}
    full_names.update((key, value) for key, value in data.items() if key.startswith("fsdp_") and key != "fsdp_config")
    fields = {_bare(name): value for name, value in full_names.items()}
    found = _Translation()
    found.take({"sharding_size": "auto"}, "the default there")
    for name, value in full_names.items():
        translate = _ACCELERATE.get(_bare(name))
        settings = translate(value, fields) if translate else None
        if settings is None:
            found.left_out.append(name)
        elif settings:
            found.take(settings, name)
        else:
            found.needless.append(name)
    precision = data.get("mixed_precision")
    if precision in ("bf16", "fp16"):
        found.take(dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"), precision), "mixed_precision")
    size = "parallelism_config_dp_shard_size"
    shape = data.get("parallelism_config")
    if isinstance(shape, Mapping) and isinstance(shape.get(size), int):
        found.take({"sharding_size": shape[size]}, f"parallelism_config.{size}")
    return found


def _bare(name: str) -> str:
    return name.removeprefix("fsdp_config.").removeprefix("fsdp_")


def _strategy(value: object, _: _Fields) -> _Settings | None:
    name = str(value).upper()
    return _STRATEGIES.get(_STRATEGY_NUMBERS.get(name, name))


def _reshard(value: object, fields: _Fields) -> _Settings | None:
    return _strategy(value, fields) or {"reshard_after_forward": _is_true(value)}


def _units(_: object, fields: _Fields) -> _Settings:
    return {"sub_modules_to_wrap": _classes(fields)}


def _policy(value: object, _: _Fields) -> _Settings | None:
    # TRANSFORMER_BASED_WRAP without classes takes the model's own, which is what an absent key means here.
    policies: dict[str, _Settings] = {"NO_WRAP": {"sub_modules_to_wrap": []}, "TRANSFORMER_BASED_WRAP": {}}
    return policies.get(str(value).upper())


def _recompute(value: object, fields: _Fields) -> _Settings:
    if not _is_true(value):
        return {}
    return {"recompute_modules": _classes(fields) or ["class name of your layers"], "use_reentrant": False}


def _offload(value: object, _: _Fields) -> _Settings:
    return {"offload_to_cpu": True} if _is_true(value) else {}


def _prefetch(value: object, _: _Fields) -> _Settings:
    return {"num_to_forward_prefetch": 1} if _is_true(value) else {}


def _is_true(value: object) -> bool:
    return str(value).strip().lower() in ("true", "yes", "1", "on")


def _classes(fields: _Fields) -> list[str]:
    names = fields.get("transformer_layer_cls_to_wrap")
    listed = names.split(",") if isinstance(names, str) else names if isinstance(names, list) else []
    return [str(name).strip() for name in listed]


_ACCELERATE: dict[str, Callable[[object, _Fields], _Settings | None]] = {
    "sharding_strategy": _strategy,
    "reshard_after_forward": _reshard,
    "transformer_layer_cls_to_wrap": _units,
    "auto_wrap_policy": _policy,
    "activation_checkpointing": _recompute,
    "offload_params": _offload,
    "cpu_offload": _offload,
    "forward_prefetch": _prefetch,
}


def _leaves(data: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
