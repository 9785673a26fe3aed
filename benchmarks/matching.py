"""Matching and planning against one walk over ``named_modules()``, side by side in one run.

    python benchmarks/matching.py [MODULES]

Prints CPU seconds (best of five) and the ratio; the aim is about five at 50 000 modules.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from mindspeed_fsdp2 import FSDP2Config, build_plan


def model_of(modules: int) -> nn.Module:
    """Return layers of 100 experts each, about ``modules`` modules in all, with tiny real parameters."""

    def layer() -> nn.Module:
        experts = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(100))
        return nn.Sequential(nn.Linear(1, 1), nn.ModuleDict({"experts": experts}), nn.LayerNorm(1))

    root = nn.Module()
    root.layers = nn.ModuleList(layer() for _ in range(max(1, modules // 105)))
    root.norm = nn.LayerNorm(1)
    return root


def best(action: Callable[[], object], times: int = 5) -> float:
    """Return the shortest of several runs, in seconds of CPU time."""
    seconds = []
    for _ in range(times):
        start = time.process_time()
        action()
        seconds.append(time.process_time() - start)
    return min(seconds)


def main() -> None:
    model = model_of(int(sys.argv[1]) if len(sys.argv) > 1 else 50_000)
    count = sum(1 for _ in model.modules())
    walk = best(lambda: list(model.named_modules()))
    print(f"torch {torch.__version__}, {count} modules, one walk {walk:.3f} s")
    for name, units in {
        "layers": ["layers.{*}"],
        "experts": ["layers.{*}", "layers.{*}.1.experts.{0-99}"],
        "classes": ["Linear"],
    }.items():
        config = FSDP2Config(sharding_size="auto", sub_modules_to_wrap=units)
        planned = len(build_plan(config, model, data_parallel_size=8).units)
        seconds = best(lambda config=config: build_plan(config, model, data_parallel_size=8))  # type: ignore[misc]
        print(f"  {name:<8} {planned:>6} units  {seconds:.3f} s  {seconds / walk:.1f} walks")


if __name__ == "__main__":
    main()
