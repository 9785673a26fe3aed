"""Which tensor of a model a name in a file means."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from ..errors import CheckpointError


def names_in_model(model: nn.Module, own: Collection[str], keys: Iterable[str], where: str) -> dict[str, str]:
    """Return key of a file -> key of the model, as ``from_pretrained`` finds it for models of Transformers.

    Args:
        model: Any model.
        own: All keys of its state dict.
        keys: Those of the file. One that Transformers leaves out on loading is left out; one that the model lacks
            keeps its name.
        where: Begins the message.

    Raises:
        CheckpointError: Several keys mean one key of the model.
    """
    prefix: Any = getattr(model, "base_model_prefix", "")
    ignored: Any = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    names = {}
    for key in keys:
        # Files of a bare model, without a head, lack the name that the model with the head gives it; and the reverse.
        longer, shorter = f"{prefix}.{key}", key.removeprefix(f"{prefix}.")
        if key in own or not (isinstance(prefix, str) and prefix):
            names[key] = key
        elif longer in own or shorter in own:
            names[key] = longer if longer in own else shorter
        elif not any(re.search(pattern, key) for pattern in ignored):
            names[key] = key
    meaning: dict[str, list[str]] = {}
    for key, name in names.items():
        meaning.setdefault(name, []).append(key)
    if twice := [f"{' and '.join(several)} are both {name}" for name, several in meaning.items() if len(several) > 1]:
        raise CheckpointError(f"{where}: {', '.join(twice[:5])} in the model. Remove one of them from the files.")
    return names
