# ruff: noqa: E402 - the order of imports is what this script is about
"""Train ``examples/pretrain_gpt.py`` beside MindSpeed; ``BESIDE`` says which of the two patches Megatron first.

With "plugin" the job runner has imported the plugin before this script; with "mindspeed" it comes after MindSpeed; with
"nothing" MindSpeed trains alone.
"""

import os
import runpy
import sys

from tests.megatron.jobs import EXAMPLE
from tests.megatron.mindspeed_host import add_mindspeed

order = os.environ["BESIDE"]
add_mindspeed()
import mindspeed.megatron_adaptor  # noqa: F401

if order == "mindspeed":
    del sys.modules["mindspeed_fsdp2.megatron_adaptor"]  # without the plugin the job runner puts an empty one there,
    import mindspeed_fsdp2.megatron_adaptor  # noqa: F401
    from mindspeed_fsdp2.megatron import startup

    startup.cpu_mode_wanted = lambda backend: False  # and switches CPU mode on itself
sys.path[0] = str(EXAMPLE.parent)
runpy.run_path(str(EXAMPLE), run_name="__main__")
