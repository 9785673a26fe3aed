"""The hook of jobs whose model is built on the meta device: notes how much of it has memory when it is sharded."""

from __future__ import annotations

import functools
from typing import Any

from tests.megatron import saving_specs


def prepare(extra: dict[str, Any]) -> None:
    """Hook of the runner: what ``saving_specs.prepare`` does, and the note."""
    saving_specs.prepare(extra)
    from mindspeed_fsdp2 import wrap

    original = wrap.deferred_values

    @functools.wraps(original)
    def deferred_values(model: Any, device: Any) -> Any:
        extra["real_bytes"] = sum(param.nbytes for param in model.parameters() if not param.is_meta)
        extra["meta_bytes"] = sum(param.nbytes for param in model.parameters() if param.is_meta)
        return original(model, device)

    wrap.deferred_values = deferred_values
