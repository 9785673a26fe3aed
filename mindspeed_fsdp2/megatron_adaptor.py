"""The one-line import: ``import mindspeed_fsdp2.megatron_adaptor`` at the top of a pretrain script.

Importing patches Megatron once, by the table ``mindspeed_fsdp2.megatron.patches.PATCHES``; where MindSpeed is
installed, as soon as Megatron is imported. ``uninstall()`` gives every name back, ``install()`` patches again.
"""

from __future__ import annotations

from .megatron.entry import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]

install()
