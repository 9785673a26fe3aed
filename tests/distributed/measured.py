"""What the rows on plain PyTorch models measured, for docs/*/correctness.md."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping


def record(family: str, row: str, ranks: int, worst: Mapping[str, float]) -> None:
    """Print the largest relative differences; append them to the file ``CORRECTNESS_ROWS`` names, if it does."""
    print(f"{family}, {row}: " + ", ".join(f"{kind} {value:.1e}" for kind, value in worst.items()))
    if path := os.environ.get("CORRECTNESS_ROWS"):
        numbers = {f"{kind}s" if kind != "loss" else "losses": value for kind, value in worst.items()}
        line = {"plain": family, "row": row, "ranks": ranks, **numbers}
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
