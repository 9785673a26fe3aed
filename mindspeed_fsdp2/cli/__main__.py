"""``python -m mindspeed_fsdp2.cli``, and so ``torchrun -m mindspeed_fsdp2.cli``: the ``mindspeed-fsdp2`` command."""

from __future__ import annotations

import sys

from . import main

sys.exit(main())
