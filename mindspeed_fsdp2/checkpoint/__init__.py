"""Checkpoints of any wrapped model: exact to resume from, on any number of ranks, complete or absent."""

from __future__ import annotations

from .compare import LoadReport
from .folder import CheckpointInfo, list_checkpoints
from .hf_export import export_hf
from .load import Loaded, load_checkpoint
from .save import AsyncSave, save_checkpoint, save_checkpoint_async

__all__ = [
    "AsyncSave",
    "CheckpointInfo",
    "LoadReport",
    "Loaded",
    "export_hf",
    "list_checkpoints",
    "load_checkpoint",
    "save_checkpoint",
    "save_checkpoint_async",
]
