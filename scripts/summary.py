"""Print a short summary of a quickstart run: plan, losses, validation against the bigram entropy, speed, checkpoint."""

from __future__ import annotations

import re
import sys
from pathlib import Path

GLOBAL_BATCH, SEQUENCE = 32, 128  # of scripts/quickstart.sh


def plan_of(log: str) -> str:
    """Return the plan's table as it was printed."""
    lines = log[log.index("FSDP2 plan") :].splitlines()
    end = next((n for n, line in enumerate(lines) if n and not line.startswith("  ")), len(lines))
    return "\n".join(lines[:end])


def main() -> int:
    """Read ``FOLDER/train.log`` and ``FOLDER/data.log``; exit 1 if the run did not reach its end."""
    folder = Path(sys.argv[1])
    log = (folder / "train.log").read_text(encoding="utf-8", errors="replace")
    steps = re.findall(
        r"iteration\s+(\d+)/\s*\d+ .*?elapsed time per iteration \(ms\): ([\d.]+) .*?lm loss: ([\d.E+-]+)", log
    )
    valid = re.findall(r"validation loss at iteration \d+ on validation set \| lm loss value: ([\d.E+-]+)", log)
    entropy = re.search(r"held-out bigram entropy: ([\d.]+)", (folder / "data.log").read_text(encoding="utf-8"))
    tracker = folder / "checkpoint" / "latest_checkpointed_iteration.txt"
    if not steps or not valid or entropy is None or not tracker.exists():
        print(f"The run did not reach its end; see {folder / 'train.log'}.", file=sys.stderr)
        return 1
    bigram, reached = float(entropy[1]), float(valid[-1])
    print(plan_of(log))
    print("\ntraining loss (nats a byte)")
    for iteration, _, loss in steps[:: max(1, len(steps) // 6)]:
        print(f"  step {iteration:>5}  {float(loss):.4f}")
    times = sorted(float(ms) for _, ms, _ in steps[1:] or steps)
    speed = GLOBAL_BATCH * SEQUENCE / (times[len(times) // 2] / 1000)
    verdict = "below" if reached < bigram else "NOT below"
    print(f"\nvalidation loss  {reached:.4f} nats a byte, {verdict} the held-out bigram entropy {bigram:.4f}")
    print(f"speed            {speed:,.0f} tokens/s on two CPU ranks")
    print(f"checkpoint       {folder / 'checkpoint'} (step {tracker.read_text().strip()}, torch_dcp)")
    print("                 to go on: the same command, --load on that folder, more --train-iters and")
    print("                 --override-opt_param-scheduler, since the schedule gets longer")
    return 0


if __name__ == "__main__":
    sys.exit(main())
