"""``fsdp`` and ``fsdp_config`` among the arguments of the Transformers Trainer."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from ..module_path import nearest
from .hf_fields import Fields, anything, flag
from .hf_fsdp import convert_fsdp
from .hf_model import HFModel
from .hf_policy import Around
from .hf_source import read_source
from .source import Origin
from .values import describe

_READ = ("fsdp", "fsdp_config", "bf16", "fp16", "gradient_checkpointing", "activation_checkpointing", "deepspeed")
_ALIKE = 0.8  # of the Trainer's many other arguments none looks as much like one of these
_STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "no_shard")
_MOVED = {
    "fsdp_min_num_params": "min_num_params",
    "fsdp_transformer_layer_cls_to_wrap": "transformer_layer_cls_to_wrap",
}


def convert_training_arguments(
    fields: Fields, data: Mapping[str, object], origin: Origin, model: HFModel | None
) -> tuple[int, tuple[str, str]]:
    """Take every argument; return the version of FSDP and the precision with its key."""
    words = fields.take("fsdp", _words)
    if words is None and "fsdp" in fields:
        words = []  # said already
    elif not words:
        state = "is off" if "fsdp" in fields else "is absent"
        text = f"{state}, so Transformers ignores fsdp_config without a word. Write fsdp: true."
        fields.error("fsdp", text)
        words = []
    strategies = [word for word in words if word in _STRATEGIES]
    if len(strategies) > 1:
        fields.error("fsdp", f"names {' and '.join(strategies)}. Keep one of them.")
    inner = _fsdp_config(fields, origin)
    around = Around(
        False, strategy=strategies[0].upper() if strategies else None, offload="offload" in words, model=model
    )
    version = 2
    if inner is not None:
        version = convert_fsdp(inner, around)
        if version == 2 and strategies and strategies[0] not in _STRATEGIES[:2]:
            text = f"{strategies[0]} belongs to FSDP version 1. Write fsdp: true and set sharding_size in the result."
            fields.error("fsdp", text)
    _check_own_checkpointing(fields, "recompute_modules" in fields.found.settings)
    if fields.take("deepspeed", anything):
        fields.error("deepspeed", "sets up DeepSpeed beside FSDP. Remove it.")
    if fields.take("parallelism_config", anything):
        text = "is an object of the Python API. Remove it, and write sharding_size in the converted file."
        fields.error("parallelism_config", text)
    precision = _precision(fields)
    _note_left(fields)
    return version, precision


def _words(value: object) -> list[str]:
    """Return the words of ``fsdp``; ``["on"]`` for true."""
    if isinstance(value, bool) or value in ("", [], None):
        return ["on"] if value is True else []
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{describe(value)} is not a boolean. Write true.")
    known = (*_STRATEGIES, "offload", "auto_wrap")
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        raise ValueError(f"{describe(value)} is not a boolean. Drop the quotes: write {value.strip().lower()}.")
    for word in words:
        if word not in known:
            near = nearest(word.lower(), known, limit=1)
            raise ValueError(f"{word!r} is not one of {', '.join(known)}. Write {near[0] if near else 'true'}.")
    return words


def _fsdp_config(fields: Fields, origin: Origin) -> Fields | None:
    value = fields.take("fsdp_config", anything)
    if isinstance(value, str) and value.strip():
        path = Path(value)
        if not path.exists() and origin.name is not None:  # Transformers looks from where the job starts
            path = Path(origin.name).parent / value
        inner, inner_origin = read_source(path)
        return Fields(inner, inner_origin, fields.found, prefix="fsdp_", number=1)
    if value is None or value == "":
        value = {}
    if not isinstance(value, Mapping):
        fields.error("fsdp_config", f"{describe(value)} is no mapping. Write a mapping, or the path of a JSON file.")
        return None
    return Fields(value, origin, fields.found, at=("fsdp_config",), prefix="fsdp_")


def _check_own_checkpointing(fields: Fields, recomputes: bool) -> None:
    for key in ("gradient_checkpointing", "activation_checkpointing"):
        if not fields.take(key, flag):
            continue
        if recomputes:
            text = "recomputes a second time what activation_checkpointing in fsdp_config does, which Transformers"
            fields.error(key, f"{text} refuses. Remove one of the two.")
        else:
            text = "is the model's own and no setting of this file. Write activation_checkpointing: true in fsdp_config"
            fields.note(key, f"{text} instead, and convert again, or switch it on in your trainer.")


def _precision(fields: Fields) -> tuple[str, str]:
    bf16, fp16 = fields.take("bf16", flag), fields.take("fp16", flag)
    if bf16 and fp16:
        fields.error("fp16", "is true, and so is bf16. Keep one of them.")
    return ("bf16", "bf16") if bf16 else ("fp16", "fp16") if fp16 else ("no", "bf16")


def _note_left(fields: Fields) -> None:
    """Call what is not about sharding by name, and refuse what looks like a misspelt key of those that are."""
    others = []
    for key in fields.left():
        near = difflib.get_close_matches(key.strip().lower(), _READ, 1, _ALIKE)
        if key in _MOVED:
            fields.error(key, f"is no argument of Transformers any more. Write {_MOVED[key]} in fsdp_config.")
        elif key.lower().startswith("fsdp") or (near and abs(len(near[0]) - len(key)) < 3):
            fields.error(key, f"unknown argument. Write {near[0] if near else 'it in fsdp_config'}.")
        else:
            others.append(key)
    if others:
        fields.note(others[0], f"not about sharding, left to your trainer: {', '.join(others)}.")
