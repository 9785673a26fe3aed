"""What can be said about settings that are not wrong: keys without an effect, and what is not built yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .source import Problem, report

if TYPE_CHECKING:
    from .settings import FSDP2Config


def notices_of(config: FSDP2Config) -> Iterator[tuple[str, str]]:
    """Yield a key and what to know about it."""
    written = config.model_fields_set
    if config.sharding_size == 1:
        state = "1" if "sharding_size" in written else "absent, so it is 1, as MindSpeed-MM documents it"
        other = "" if "sharding_size" in written else ", which is what an absent key means to MindSpeed itself"
        yield (
            "sharding_size",
            f"{state}: nothing is sharded, every rank keeps the whole model as in plain data parallel. "
            f"Write auto to shard over the whole data-parallel group{other}.",
        )
    offloads = config.offload_to_cpu or any(override.offload_to_cpu for override in config.overrides)
    if "pin_memory" in written and not offloads:
        yield "pin_memory", "has no effect without offload_to_cpu: true. Remove the key."
    if not config.use_reentrant and not config.recompute_modules:
        yield "use_reentrant", "has no effect without recompute_modules. Remove the key."
    unused = {
        "reshard_local_experts": not config.reshard_local_experts,
        "moe_modules": bool(config.moe_modules),
    }
    keys = [key for key, given in unused.items() if given]
    if keys and config.expert_parallel_size == 1:
        also = f" (so are {', '.join(keys[1:])})" if keys[1:] else ""
        yield keys[0], f"accepted but not applied{also}: units are grouped as sub_modules_to_wrap says."


def check_supported(config: FSDP2Config) -> None:
    """Check that nothing valid is asked for that is not built yet.

    Raises:
        ConfigError: Names every such key, a line each.
    """
    problems = []
    if config.expert_parallel_size != 1:
        text = f"{config.expert_parallel_size} is not supported yet. Write 1 or remove the key."
        problems.append(Problem(("expert_parallel_size",), text))
    if problems:
        raise report(problems, config._origin)
