"""Float64 parameters where ``all_reduce`` leaves float64 tensors as they are, as MindSpeed has it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_fsdp2.errors import ConflictError
from mindspeed_fsdp2.megatron.mindspeed.collectives import check_float64
from tests.distributed.ranks import RankPool


def check(kind: str, bypass: bool) -> str:
    model = nn.Linear(2, 2).to(getattr(torch, kind))
    original = dist.all_reduce

    def all_reduce(
        tensor: torch.Tensor, *args: Any, **named: Any
    ) -> Any:  # mindspeed/core/megatron_basic/requirements_basic.py
        return original(tensor.float() if tensor.dtype == torch.float64 else tensor, *args, **named)

    if bypass:
        dist.all_reduce = all_reduce
    try:
        check_float64(model, dist.group.WORLD, "cpu")
    except ConflictError as error:
        return str(error)
    finally:
        dist.all_reduce = original
    return ""


def test_refused_where_they_are_not_reduced(ranks2: RankPool) -> None:
    assert set(ranks2.run(check, "float64", True)) == {
        "these parameters are float64: weight, bias. Here torch.distributed.all_reduce leaves float64 tensors unreduced, as "
        "MindSpeed has it, so gradients would differ between ranks. Convert the model to float32."
    }


def test_fine_where_they_are(ranks2: RankPool) -> None:
    assert ranks2.run(check, "float64", False) == ["", ""]
    assert ranks2.run(check, "float32", True) == ["", ""]
