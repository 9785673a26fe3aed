"""MindSpeed's FSDP2 feature stands aside for as long as Megatron is patched by this package."""

from __future__ import annotations

import functools
import logging
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ..arguments import add_arguments
from ..patcher import Installation, Patch, install
from .arrival import Arrival
from .records import Withdrawn

logger = logging.getLogger("mindspeed_fsdp2")

_FEATURES = "mindspeed.features_manager"
_FEATURE = f"{_FEATURES}.distributed.torch_fully_sharded_data_parallel:TorchFullyShardedDataParallelFeature"
_PATCHES = "mindspeed.patch_utils"
_MANAGER = f"{_PATCHES}:MindSpeedPatchesManager"
_SAID = (
    "MindSpeed's own FSDP2 feature (--use-torch-fsdp2) stands aside: mindspeed_fsdp2 shards the model and keeps its "
    "checkpoints. MindSpeed's other features stay as they are."
)


class BesideMindSpeed:
    """Keeps MindSpeed's FSDP2 feature aside, whichever of the two is imported first, also through ``repatch``.

    Args:
        aside: Returns a context within which no name of Megatron is patched by this package. MindSpeed takes what it
            finds under a name for the original, and gives back only what it finds unchanged.
    """

    def __init__(self, aside: Callable[[], AbstractContextManager[None]]) -> None:
        self._aside = aside
        self._arrival: Arrival | None = None
        self._installation: Installation | None = None
        self._withdrawn = Withdrawn()
        self._skipped: Callable[[], None] | None = None
        self._said = False

    def begin(self) -> None:
        """Let the feature stand aside now, or as soon as MindSpeed is imported (**in place**).

        Call it before Megatron is patched: what MindSpeed bound must not be wrapped.

        Raises:
            PatchError: This MindSpeed lacks a name that is needed; nothing is changed then.
        """
        if _FEATURES in sys.modules:
            self._enter()
        else:
            self._arrival = Arrival(_FEATURES, self._enter)

    def end(self) -> None:
        """Give MindSpeed's state back (**in place**). Call it after Megatron's names are given back.

        Raises:
            PatchError: Somebody rebound one of MindSpeed's names since; nothing is restored then.
        """
        if self._arrival is not None:
            self._arrival.stop()
            self._arrival = None
        if self._installation is None:
            return
        self._installation.uninstall()
        self._installation = None
        self._withdrawn.give_back()
        skipped, self._skipped = self._skipped, None
        if skipped is not None:
            try:
                skipped()
            except ImportError as error:  # without this package MindSpeed's own import would have ended with it
                logger.warning("MindSpeed's FSDP2 feature cannot come back: %s", error)
        if any(not record.is_applied for record in _records()):
            sys.modules[_PATCHES].MindSpeedPatchesManager.apply_patches()

    def rows(self) -> tuple[Patch, ...]:
        """Return the table: what is rebound of MindSpeed itself."""
        return (
            Patch(
                name="mindspeed-flag",
                targets=(f"{_FEATURE}.register_args",),
                make=_wrap_register_args,
                why="It registers --fsdp2-config-path once more, which argparse refuses.",
                remove_when="MindSpeed leaves a flag alone that is there.",
            ),
            Patch(
                name="mindspeed-feature",
                targets=(f"{_FEATURE}.register_patches",),
                make=self._wrap_register_patches,
                why="It replaces get_model, load_checkpoint and others by copies, and from core 0.14 on cannot be "
                "imported.",
                remove_when="MindSpeed takes this package for its feature.",
            ),
            Patch(
                name="mindspeed-apply",
                targets=(f"{_MANAGER}.apply_patches",),
                make=self._wrap_apply_patches,
                why="It binds MindSpeed's functions over ours, in repatch() and wherever a library adds patches.",
                remove_when="Never: order decides who wraps whom.",
            ),
            Patch(
                name="mindspeed-remove",
                targets=(f"{_MANAGER}.remove_patches",),
                make=self._wrap_remove_patches,
                why="It restores only names that nobody has wrapped.",
                remove_when="Never.",
            ),
        )

    def _enter(self) -> None:
        self._installation = install(self.rows())
        self._withdraw()

    def _withdraw(self) -> None:
        if self._withdrawn.take(_records()):
            self._say()

    def _say(self) -> None:
        if not self._said and os.environ.get("RANK", "0") == "0":  # no process group exists yet
            logger.warning("%s", _SAID)
        self._said = True

    def _wrap_register_patches(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def register_patches(feature: Any, patch_manager: Any, args: Any) -> None:
            self._skipped = functools.partial(original, feature, patch_manager, args)
            self._say()

        return register_patches

    def _wrap_apply_patches(self, original: Any) -> Any:
        apply = original.__func__

        @functools.wraps(apply)
        def apply_patches() -> None:
            if all(record.is_applied for record in _records()):
                return
            with self._aside():
                self._withdraw()
                apply()

        return staticmethod(apply_patches)

    def _wrap_remove_patches(self, original: Any) -> Any:
        remove = original.__func__

        @functools.wraps(remove)
        def remove_patches() -> None:
            with self._aside():
                remove()
                self._withdrawn.forget()
                self._skipped = None

        return staticmethod(remove_patches)


def _records() -> list[Any]:
    return list(sys.modules[_PATCHES].MindSpeedPatchesManager.patches_info.values())


def _wrap_register_args(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def register_args(feature: Any, parser: ArgumentParser) -> None:
        add_arguments(parser)

    return register_args
