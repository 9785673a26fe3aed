"""Whether a torch_dcp checkpoint fits this run's model and optimizer, and what to do where it does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ...checkpoint.compare import Comparison
from ...checkpoint.optimizer_load import compare_optimizer
from ...checkpoint.optimizer_state import names_of
from ...errors import CheckpointError
from .named_optimizer import NamedOptimizer

_WEIGHTS_ALONE = "--no-load-optim (keeps the iteration) or --finetune loads the weights alone"


def check_fit(found: Comparison, where: str, partial: bool, cast: bool) -> None:
    """Raise unless the model's tensors may be loaded.

    Args:
        found: How the model and the checkpoint differ.
        where: Begins the message.
        partial: Whether what does not fit may be left out.
        cast: Whether values may be converted to other dtypes.

    Raises:
        CheckpointError: Lists every difference that was not allowed.
    """
    for names in (found.missing, found.unexpected):
        extra = [name for name in names if name.endswith("_extra_state")]
        names[:] = [name for name in names if name not in extra]
        if extra:  # versions of Transformer Engine differ in it
            found.notes.append(f"extra state in one only, left as it is: {_shown(extra)}")
    report = found.report()
    kinds = {"missing in the checkpoint": report.missing, "only in the checkpoint": report.unexpected}
    kinds |= {"other shape": report.reshaped}
    lines = [] if partial else [f"{kind}: {_shown(names)}" for kind, names in kinds.items() if names]
    lines += [] if partial else found.problems
    if report.converted and not cast:
        lines.append(f"other dtype: {_shown(report.converted)}")
    if lines or not found.fitting:
        listed = "\n  ".join(lines or ["no tensor of it fits"])
        raise CheckpointError(
            f"{where}: the checkpoint does not fit the model:\n  {listed}\nBuild the model with the flags it was saved "
            "with; --use-checkpoint-args takes them from the checkpoint. --finetune --dist-ckpt-strictness log_all "
            "loads what fits."
        )


def compare_optimizers(
    named: NamedOptimizer,
    params: Mapping[str, nn.Parameter],
    document: Mapping[str, Any],
    model: Comparison,
    where: str,
    bf16: bool,
    partial: bool,
) -> set[str]:
    """Return the fqns of the parameters whose optimizer state is loaded.

    Args:
        named: The optimizer.
        params: fqn -> what it steps on.
        document: The checkpoint's.
        model: How the model differs.
        where: Begins messages.
        bf16: Whether this run has ``--bf16``.
        partial: Whether what does not fit may be left out.

    Raises:
        CheckpointError: The state does not fit. Lists every difference.
    """
    saved = document["optimizer"]
    if saved is None:
        raise CheckpointError(
            f"{where}: it holds no optimizer state: it was saved with --no-save-optim. {_WEIGHTS_ALONE}."
        )
    if document["bf16"] != bf16:
        this, that = ("with", "without") if bf16 else ("without", "with")
        raise CheckpointError(
            f"{where}: it was saved {that} --bf16 and this run is {this} it; the training would go on in another "
            f"precision. {'Remove' if bf16 else 'Add'} --bf16; {_WEIGHTS_ALONE}."
        )
    held = {fqn for group in saved["groups"] for fqn in group["params"]}
    own: set[str] = set()
    lines: list[str] = []
    for single in named.singles:
        own |= set(names_of(single.optimizer, params).values())
        _missing, _unexpected, problems = compare_optimizer(single.optimizer, saved, params)
        lines += problems
    differences = [f"trained here, not when it was saved: {_shown(sorted(own - held))}"] if own - held else []
    differences += [f"trained when it was saved, not here: {_shown(sorted(held - own))}"] if held - own else []
    if partial:
        model.notes += differences
    else:
        lines += differences
    if lines:
        listed = "\n  ".join(lines)
        raise CheckpointError(
            f"{where}: the optimizer state does not fit:\n  {listed}\nTrain the same parameters in the same groups; "
            f"{_WEIGHTS_ALONE}."
        )
    return held & own & model.fitting


def _shown(names: list[str] | tuple[str, ...], count: int = 20) -> str:
    more = f", and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
