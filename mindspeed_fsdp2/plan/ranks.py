"""What depends on the number of ranks."""

from __future__ import annotations

from ..config import FSDP2Config


def shard_size(config: FSDP2Config, ranks: int, whole_world: bool, problems: list[str]) -> int | None:
    """Return the ranks per shard group, or None where they do not fit.

    Args:
        config: The settings.
        ranks: Data-parallel ranks, context parallelism included.
        whole_world: Whether these are all ranks of the job.
        problems: Gets a line for everything that does not fit.
    """
    size = ranks if config.sharding_size == "auto" else config.sharding_size
    if ranks % size:
        fits = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        problems.append(
            f"{config.where('sharding_size')}: {size} does not divide the {ranks} data-parallel ranks. "
            f"Use one of {fits}, or auto."
        )
        return None
    _check_reshard(config.where("reshard_after_forward"), config.reshard_after_forward, size, whole_world, problems)
    for i, override in enumerate(config.overrides):
        if override.reshard_after_forward is not None:
            where = config.where("overrides", i, "reshard_after_forward")
            _check_reshard(where, override.reshard_after_forward, size, whole_world, problems)
    return size


def _check_reshard(where: str, reshard: bool | int, size: int, whole_world: bool, problems: list[str]) -> None:
    if isinstance(reshard, bool):
        return
    if reshard > size or size % reshard:
        fits = ", ".join(["true", *(str(n) for n in range(2, size) if size % n == 0)])
        problems.append(f"{where}: {reshard} does not divide the {size} ranks of a shard group. Use {fits} or false.")
    elif reshard != size and not whole_world:
        problems.append(
            f"{where}: the number {reshard} needs a data-parallel group that holds all ranks; with tensor or "
            "pipeline parallelism PyTorch would hang building one mesh per group. Use true or false."
        )
