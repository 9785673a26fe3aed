"""Recognise checkpoints that other programs wrote."""

from __future__ import annotations

import re
from collections.abc import Sequence

_OTHERS = (
    (
        r"latest_checkpointed_iteration\.txt|iter_\d+|mp_rank_\d+.*",
        "a Megatron checkpoint ({}). load_checkpoint reads what save_checkpoint wrote; load this one with Megatron's "
        "--load.",
    ),
    (
        r".*\.safetensors(\.index\.json)?|pytorch_model.*\.bin(\.index\.json)?",
        "Hugging Face weights ({}). Load them with from_pretrained() before wrap_model, or with load_full_state_dict() "
        "after it.",
    ),
    (
        r"\.metadata|.*\.distcp",
        "a checkpoint of torch.distributed.checkpoint ({}) that save_checkpoint did not write. Read it with "
        "torch.distributed.checkpoint.load before or after wrap_model, then save it with save_checkpoint.",
    ),
    (
        r".*\.(pt|pth|ckpt|bin)",
        "a file of torch.save ({}). Load it with torch.load(..., weights_only=True) and load_state_dict before "
        "wrap_model.",
    ),
)


def describe_other_format(names: Sequence[str]) -> str:
    """Return what the files of these names are and how to load them, or an empty string if they say nothing."""
    for pattern, text in _OTHERS:
        for name in names:
            if re.fullmatch(pattern, name):
                return "it holds " + text.format(name)
    return (
        f"it holds no checkpoint ({', '.join(names[:3])}). Pass the directory given to save_checkpoint."
        if any(not name.startswith(".") for name in names)
        else ""
    )
