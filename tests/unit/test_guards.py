"""Optimizers on an accelerator, where torch updates parameters in lists by default."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_fsdp2 import guards


class Sharded(nn.Parameter):
    """Stands for a DTensor: that of a device needs the device."""


WARNING = (
    "optimizer: a parameter group holds both sharded and whole parameters, which PyTorch cannot update together: "
    "foreach=False is set for it. Give the parameters of ignored modules a group of their own."
)


@pytest.mark.parametrize(
    ("kinds", "device", "options", "foreach"),
    [
        ([Sharded, nn.Parameter], "meta", {}, False),
        ([Sharded, nn.Parameter], "meta", {"foreach": True}, True),  # the user's word; torch raises
        ([Sharded, nn.Parameter], "cpu", {}, None),
        ([Sharded, Sharded], "meta", {}, None),
        ([nn.Parameter, nn.Parameter], "meta", {}, None),
    ],
)
def test_sharded_and_whole_parameters_in_one_group(
    kinds: list[Any],
    device: str,
    options: dict[str, Any],
    foreach: bool | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(guards, "DTensor", Sharded)
    params = [kind(torch.empty(2, device=device)) for kind in kinds]
    optimizer = torch.optim.AdamW(
        [{"params": params}, {"params": [nn.Parameter(torch.empty(1, device=device))]}], **options
    )
    guards._update_one_by_one(optimizer)
    assert [group["foreach"] for group in optimizer.param_groups] == [foreach, options.get("foreach")]
    assert [record.getMessage() for record in caplog.records] == ([WARNING] if foreach is False else [])
