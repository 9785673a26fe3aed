"""The rows of PATCHES about checkpoints."""

from __future__ import annotations

from typing import Final

from ..patcher import Patch, resolves
from .load_seams import LoadSeams, wrap_fp8_repair
from .save_seams import SaveSeams
from .tracker import wrap_open, wrap_storage

_saves = SaveSeams()
_loads = LoadSeams()

SAVING: Final[tuple[Patch, ...]] = (
    Patch(
        name="save",
        targets=("megatron.training.checkpointing:save_checkpoint", "megatron.training.training:save_checkpoint"),
        make=_saves.wrap_save_checkpoint,
        also_aliases=True,
        why="A directory that rank 0 cannot write would leave the others waiting; what dead saves left is cleared.",
        remove_when="Megatron agrees on errors of a save over ranks.",
    ),
    Patch(
        name="state-to-save",
        targets=("megatron.training.checkpointing:generate_state_dict",),
        make=_saves.wrap_generate_state_dict,
        why="Megatron keys the optimizer state of torch_dcp by position, and only one rank's random states are saved.",
        remove_when="It is keyed by parameter name.",
    ),
    Patch(
        name="dcp-save",
        targets=("torch.distributed.checkpoint:save",),
        make=_saves.wrap_dcp_save,
        why="The one call in save_checkpoint that writes torch_dcp: Megatron's would leave half a folder when killed.",
        remove_when="save_checkpoint writes through a function of Megatron's.",
    ),
    Patch(
        name="async-strategy",
        targets=("megatron.core.dist_checkpointing.strategies.torch:get_async_strategy",),
        make=_saves.wrap_async_strategy,
        also_aliases=True,
        why="Megatron's own strategies fail on torch_dcp, and would publish what is half written.",
        remove_when="They save torch_dcp of FSDP2, complete or not at all.",
        required=False,
    ),
    Patch(
        name="dist-save",
        targets=("megatron.core.dist_checkpointing:save",),
        make=_saves.wrap_dist_save,
        why="Megatron writes torch_dist in place: killed, it leaves half a folder that --ckpt-step takes.",
        remove_when="Megatron publishes checkpoints by renaming.",
    ),
    Patch(
        name="tracker",
        targets=("megatron.training.checkpointing:maybe_msc",),
        make=wrap_storage,
        why="The tracker file is emptied before it is written: killed in between, no checkpoint is found again.",
        remove_when="Megatron replaces the tracker in one step.",
        required=False,
    ),
    Patch(
        name="tracker-open",
        targets=("megatron.training.checkpointing:open_file", "megatron.training.checkpointing:open"),
        make=wrap_open,
        creates=True,
        why="The same in versions without maybe_msc, up to 0.18.",
        remove_when="0.18 is no longer supported.",
        applies=lambda: not resolves("megatron.training.checkpointing:maybe_msc"),
    ),
    Patch(
        name="load",
        targets=("megatron.training.checkpointing:load_checkpoint", "megatron.training.training:load_checkpoint"),
        make=_loads.wrap_load_checkpoint,
        also_aliases=True,
        why="Megatron loads optimizer state that the flags rule out, drops step counts, and leaves weights out.",
        remove_when="Megatron resumes FSDP2 runs exactly.",
    ),
    Patch(
        name="chosen-checkpoint",
        targets=("megatron.training.checkpointing:_get_checkpoint_format",),
        make=_loads.wrap_checkpoint_format,
        why="Half a checkpoint, or one of another format, would fail on some key later, or not at all.",
        remove_when="Never.",
    ),
    Patch(
        name="fp8-repair",
        targets=("megatron.training.checkpointing:fix_fp8_params_lose_precision_when_loading_dist_ckpt",),
        make=wrap_fp8_repair,
        why="0.12 loads torch_dist only where Transformer Engine is installed.",
        remove_when="0.13 is no longer supported.",
        required=False,
    ),
    Patch(
        name="legacy-values",
        targets=("megatron.training.checkpointing:_to_dtensor",),
        make=_loads.wrap_to_dtensor,
        why="For a legacy checkpoint it puts a whole copy of the model on every device.",
        remove_when="It distributes values in the layout of the model's parameters.",
        required=False,
    ),
    Patch(
        name="dcp-load",
        targets=("torch.distributed.checkpoint:load_state_dict",),
        make=_loads.wrap_dcp_load_state_dict,
        why="The one call in load_checkpoint that reads torch_dcp.",
        remove_when="load_checkpoint reads through a function of Megatron's.",
    ),
    Patch(
        name="dcp-arguments",
        targets=("torch.distributed.checkpoint:load",),
        make=_loads.wrap_dcp_load,
        why="The call that reads the arguments of a torch_dcp checkpoint, as pickles.",
        remove_when="As dcp-load.",
    ),
)
