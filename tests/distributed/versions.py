"""What the installed torch can do, told by names. Tests of what older versions cannot do assert that they refuse."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state

GOES_ON = hasattr(FSDPModule, "reset_iter_state")  # after an exception in a forward or backward
CANNOT_GO_ON = (
    "a forward or backward ended with an exception, after which FSDP2 cannot go on before torch 2.13. Start the run "
    "again from its last checkpoint."
)

SEES_DATACLASSES = hasattr(_fsdp_state, "_apply_to_tensors")  # in the outputs of units
CONTAINERS = "a tensor, or tensors in a tuple, list, dict" + (
    ", dataclass or named tuple" if SEES_DATACLASSES else " or named tuple (a newer torch sees them in dataclasses too)"
)

RESHARDS_IN_RECOMPUTATION = not hasattr(_fsdp_param_group, "is_bw")  # nested units, which are then gathered once more
