"""What Transformers wants beside the weights, and which names of shared tensors it finds again by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..errors import CheckpointError
from .folder import read_json
from .hf_work import RECORD
from .values import dtype_name

CONFIG = "config.json"
GENERATION = "generation_config.json"

_DTYPE_KEYS = ("dtype", "torch_dtype")  # the second until version 4.55
_COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
_NOT_COPIED = re.compile(
    r".*\.index\.json|trainer_state\.json|.*_results\.json|all_results\.json|optimizer.*|training_.*"
)


def describe_model(root: nn.Module, dtype: torch.dtype | None) -> dict[str, str]:
    """Return name -> content of the files that ``save_pretrained`` would write beside the weights.

    Args:
        root: The root unit's module; nothing comes back for one without a ``config`` of Transformers.
        dtype: What most of its weights are written in.

    Raises:
        CheckpointError: Its configuration cannot be written.
    """
    config: Any = getattr(root, "config", None)
    if not callable(getattr(config, "to_json_string", None)):
        return {}
    try:
        content = json.loads(config.to_json_string())
        content["architectures"] = [plain_class(root).__name__]
        texts = {CONFIG: config_text(content, dtype, _DTYPE_KEYS[not hasattr(config, _DTYPE_KEYS[0])])}
        generation: Any = getattr(root, "generation_config", None)
        if generation is not None and root.can_generate():  # type: ignore[operator]
            texts[GENERATION] = generation.to_json_string()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config: {type(config).__name__} cannot be written as JSON: {error}") from error
    return texts


def config_text(content: Mapping[str, Any], dtype: torch.dtype | None, key: str = _DTYPE_KEYS[0]) -> str:
    """Return the text of a ``config.json`` that names ``dtype``, in which ``from_pretrained`` then loads.

    Args:
        content: The configuration.
        dtype: What most weights are written in, None for none.
        key: Gets the name where ``content`` has none.
    """
    changed = _with_dtype(content, dtype_name(dtype)) if dtype is not None else dict(content)
    if dtype is not None and not any(name in changed for name in _DTYPE_KEYS):
        changed[key] = dtype_name(dtype)
    return json.dumps(changed, indent=2, sort_keys=True) + "\n"


def _with_dtype(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Replace the names of dtypes in ``content`` and in the configurations inside of it."""
    changed: dict[str, Any] = {}
    for key, value in content.items():
        if key in _DTYPE_KEYS and (value is None or isinstance(value, str)):
            changed[key] = name
        elif isinstance(value, dict) and key.endswith("config") and key != "quantization_config":
            changed[key] = _with_dtype(value, name)
        else:
            changed[key] = value
    return changed


def most_used_dtype(weights: Iterable[tuple[torch.dtype, int]]) -> torch.dtype | None:
    """Return the floating dtype of most elements, None if there is none; pairs are (dtype, elements)."""
    counts: dict[torch.dtype, int] = {}
    for dtype, elements in weights:
        if dtype.is_floating_point and dtype.itemsize > 1:
            counts[dtype] = counts.get(dtype, 0) + elements
    return max(counts, key=lambda dtype: counts[dtype], default=None)


def plain_class(root: nn.Module) -> type:
    """Return the class that ``root`` had before ``fully_shard`` gave it another one."""
    order = type(root).__mro__
    return order[order.index(FSDPModule) + 1] if FSDPModule in order else order[0]


def tied_on_load(root: nn.Module) -> Callable[[str, str], bool]:
    """Return a test of whether two names of one tensor are one again when a model like ``root`` is loaded."""
    if not callable(getattr(getattr(root, "config", None), "to_json_string", None)):
        return lambda _first, _second: True  # the code that shares them is that of the model itself
    expand = getattr(root, "get_expanded_tied_weights_keys", None)
    if callable(expand):  # from Transformers 5 on; empty where the configuration does not tie
        linked: dict[str, str] = expand(all_submodels=True)
        return lambda first, second: _source(first, linked) == _source(second, linked)
    patterns = list(getattr(root, "_tied_weights_keys", None) or [])
    on = bool(getattr(getattr(root, "config", None), "tie_word_embeddings", True))
    return lambda first, second: on and any(re.search(each, name) for each in patterns for name in (first, second))


def _source(name: str, linked: Mapping[str, str]) -> str:
    seen = {name}
    while (after := linked.get(name, name)) not in seen:
        name = after
        seen.add(name)
    return name


def files_to_copy(folder: Path) -> dict[str, Path]:
    """Return name -> path of what belongs to a model beside weights: tokenizer, templates, code of its own."""
    found = {}
    for path in sorted(folder.iterdir()):
        own = path.name in (CONFIG, RECORD) or _NOT_COPIED.fullmatch(path.name)
        if path.is_file() and path.suffix in _COPIED and not own and not path.name.startswith("."):
            found[path.name] = path
    return found


def read_config(folder: Path) -> dict[str, Any] | None:
    """Return the ``config.json`` in ``folder``, None if there is none.

    Raises:
        CheckpointError: It is no JSON object.
    """
    if not (folder / CONFIG).is_file():
        return None
    content = read_json(folder / CONFIG)
    if not isinstance(content, dict):
        raise CheckpointError(f"{folder / CONFIG}: it is no JSON object. Pass the directory of a model.")
    return content
