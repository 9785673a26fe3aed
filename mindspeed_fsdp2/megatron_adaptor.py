"""The one-line import: ``import mindspeed_fsdp2.megatron_adaptor`` at the top of a pretrain script.

Importing patches Megatron once (the table is ``mindspeed_fsdp2.megatron.patches.PATCHES``); ``uninstall()`` gives every
name back, ``install()`` patches again.
"""

from __future__ import annotations

from .megatron.patches import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]

install()
