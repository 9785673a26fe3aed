"""What the installed torch can do, told by names. Tests of what older versions cannot do assert that they refuse."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule

GOES_ON = hasattr(FSDPModule, "reset_iter_state")  # after an exception in a forward or backward
CANNOT_GO_ON = (
    "a forward or backward ended with an exception, after which FSDP2 cannot go on before torch 2.13. Start the run "
    "again from its last checkpoint."
)
