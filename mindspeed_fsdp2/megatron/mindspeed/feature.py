"""FSDP2 as one of MindSpeed's features, for the list in ``mindspeed/features_manager/__init__.py``.

    from mindspeed_fsdp2.megatron.mindspeed.feature import FSDP2Feature
    features_list.append(FSDP2Feature())

Put it where ``TorchFullyShardedDataParallelFeature()`` stands, or after it: that one then stands aside. Importing this
module imports MindSpeed; nothing else of this package does.
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from mindspeed.features_manager.feature import MindSpeedFeature

from ...errors import ConflictError
from ..arguments import CONFIG_FLAG, add_arguments
from ..entry import install, installed

_FLAG = "use-torch-fsdp2"


class FSDP2Feature(MindSpeedFeature):  # type: ignore[misc]
    """Does for ``--use-torch-fsdp2`` what ``import mindspeed_fsdp2.megatron_adaptor`` does.

    It is applied where MindSpeed applies others of its level: with the flag, unless ``--optimization-level`` is lower.
    """

    def __init__(self) -> None:
        """Take MindSpeed's name and level for FSDP2."""
        super().__init__(feature_name=_FLAG, optimization_level=2)

    def register_args(self, parser: ArgumentParser) -> None:
        """Add the flags that are not there yet, **in place**."""
        add_arguments(parser)

    def validate_args(self, args: Any) -> None:
        """Check what the other phases cannot.

        Args:
            args: Megatron's arguments, or a transformer config, which MindSpeed hands them to as well.

        Raises:
            ConflictError: The file would not be read.
        """
        wanted, path = getattr(args, "use_torch_fsdp2", False), getattr(args, "fsdp2_config_path", None)
        if path and not wanted:
            raise ConflictError(f"{CONFIG_FLAG}: it is read with --{_FLAG} only. Add --{_FLAG}, or remove it.")
        if wanted and not installed():
            level = getattr(args, "optimization_level", None)
            raise ConflictError(
                f"--{_FLAG}: MindSpeed has not applied it, so Megatron's own FSDP2 would run and {CONFIG_FLAG} be "
                f"ignored; --optimization-level is {level}. Write --optimization-level 2, or import "
                "mindspeed_fsdp2.megatron_adaptor in the script."
            )

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        """Patch Megatron, **in place**: by this package's own table, whose rows MindSpeed's manager cannot hold.

        Args:
            patch_manager: MindSpeed's; it needs to know nothing of them.
            args: The arguments that MindSpeed reads early.

        Raises:
            PatchError: A name does not exist in this Megatron; nothing is changed then.
        """
        install()
