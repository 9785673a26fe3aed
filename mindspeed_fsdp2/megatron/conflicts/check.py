"""What does not go together with ``--use-torch-fsdp2``: found all at once, before Megatron's own assertions.

One row per conflict, in tables by theme; a row leaves when its feature arrives (:attr:`Conflict.until`).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Final

from ...config import FSDP2Config
from ...errors import ConflictError
from .checkpoint import CHECKPOINT
from .notices import NOTICES
from .precision import PRECISION
from .row import Conflict, Language, Situation
from .setup import SETUP, YAML_ARGUMENTS
from .sharding import SHARDING
from .training import TRAINING

CONFLICTS: Final[tuple[Conflict, ...]] = (*SETUP, *SHARDING, *PRECISION, *TRAINING, *CHECKPOINT)


def find_conflicts(args: Namespace, config: FSDP2Config | None, environ: Mapping[str, str]) -> list[str]:
    """Return one line per conflict: what was typed, why it cannot work, what to write.

    Args:
        args: Megatron's arguments as parsed, before its ``validate_args`` changes them.
        config: The loaded YAML, or None where there is none.
        environ: The environment variables.
    """
    situation = Situation(args, config, environ)
    return [line for row in CONFLICTS if (line := row.message(situation)) is not None]


def check_conflicts(args: Namespace, config: FSDP2Config | None, environ: Mapping[str, str]) -> None:
    """Refuse arguments that do not go together; see :func:`find_conflicts` for the parameters.

    Raises:
        ConflictError: With all conflicts, one line each.
    """
    lines = find_conflicts(args, config, environ)
    if lines:
        raise ConflictError("\n".join(lines))


def check_yaml_arguments(yaml_path: str, args: object, argv: Sequence[str]) -> None:
    """Refuse ``--yaml-cfg`` for a run with FSDP2; Megatron does not call ``validate_args`` there, nor our checks in it.

    Args:
        yaml_path: The file that ``--yaml-cfg`` names.
        args: What Megatron read from it.
        argv: The command line, which Megatron has parsed and thrown away.

    Raises:
        ConflictError: FSDP2 is asked for, in the file or on the command line.
    """
    asked = bool(getattr(args, "use_torch_fsdp2", False)) or "--use-torch-fsdp2" in argv
    line = YAML_ARGUMENTS.message(Situation(Namespace(use_torch_fsdp2=asked, yaml_cfg=yaml_path), None, {}))
    if line is not None:
        raise ConflictError(line)


def notices(args: Namespace, config: FSDP2Config | None) -> list[str]:
    """Return one line per flag that FSDP2 ignores, for a single warning each on rank 0."""
    situation = Situation(args, config, {})
    return [line for row in NOTICES if (line := row.message(situation)) is not None]


def conflicts_table(language: Language) -> str:
    """Return all rows as a Markdown table for the README of that language."""
    error, for_now, warning, head = {
        "en": ("error", "error, for now", "warning", ("What", "Effect", "Why", "What to write")),
        "zh": ("报错", "暂时报错", "警告", ("内容", "结果", "原因", "应该怎么写")),
    }[language]
    rows = [(row, for_now if row.until else error) for row in CONFLICTS] + [(row, warning) for row in NOTICES]
    cells = [(row.documented(language), effect, row.why.in_(language), row.write.in_(language)) for row, effect in rows]
    lines = [" | ".join(text.replace("|", "\\|") for text in line) for line in (head, ("---",) * len(head), *cells)]
    return "".join(f"| {line} |\n" for line in lines)
