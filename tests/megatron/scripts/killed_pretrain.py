"""The example, with one rank that ends itself by SIGKILL at the moment ``KILL_AT`` of its second save."""

import mindspeed_fsdp2.megatron_adaptor  # noqa: F401  isort: skip

import os
import runpy
from pathlib import Path

from tests.megatron.saving_specs import kill_at

kill_at(os.environ["KILL_AT"])
runpy.run_path(str(Path(__file__).parents[3] / "examples" / "pretrain_gpt.py"), run_name="__main__")
