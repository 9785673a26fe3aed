"""Files of MindSpeed's native FSDP2, in six blocks: recognised, and their sharding keys translated into ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_BLOCKS = ("parallel", "fsdp_plan", "features", "training", "model", "data", "tools")
_ALONE = ("parallel", "fsdp_plan", "features")  # one of these by itself is enough
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


@dataclass
class Translation:
    """What became of a foreign file's keys: ours and their sources; keys that need no line here; all others."""

    settings: dict[str, object] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    needless: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def take(self, settings: Mapping[str, object], source: str) -> None:
        """Note ``settings`` and the key they come from (**in place**)."""
        self.settings.update(settings)
        self.sources.update(dict.fromkeys(settings, source))


def native_block(data: Mapping[str, object]) -> str | None:
    """Return the first block of a native file, None for any other file."""
    found = [key for key in data if key in _BLOCKS and isinstance(data[key], Mapping)]
    return found[0] if len(found) > 1 or found[:1] in ([key] for key in _ALONE) else None


def translate(data: Mapping[str, object]) -> Translation:
    """Return what a native file says in our keys; the defaults it relies on are written out where ours differ."""
    leaves = dict(_leaves(data, ""))
    found = Translation()
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
