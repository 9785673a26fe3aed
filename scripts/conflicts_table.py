"""Write the tables of conflicts in README.md and README.zh.md from ``mindspeed_fsdp2.megatron.conflicts``.

    python scripts/conflicts_table.py            bring both tables up to date
    python scripts/conflicts_table.py --check    change nothing; exit 1 if a table is stale
    python scripts/conflicts_table.py --print en print one table

Needs neither Megatron nor an accelerator.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]  # so that a checkout needs no installation

from markers import between_markers  # noqa: E402

from mindspeed_fsdp2.megatron.conflicts import conflicts_table  # noqa: E402

Language = Literal["en", "zh"]
READMES: Final[dict[str, Language]] = {"README.md": "en", "README.zh.md": "zh"}
SCRIPT: Final = "scripts/conflicts_table.py"


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Update or check the READMEs under ``root``; return the exit status."""
    parser = argparse.ArgumentParser(description="Write the tables of conflicts in both READMEs.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table is stale")
    what.add_argument("--print", choices=("en", "zh"), dest="language", help="print the table of one language")
    options = parser.parse_args(argv)
    if options.language:
        print(conflicts_table(options.language), end="")
        return 0
    stale = False
    for name, language in READMES.items():
        path = root / name
        text = path.read_text(encoding="utf-8")
        try:
            wanted = between_markers(text, "conflicts", conflicts_table(language), SCRIPT)
        except ValueError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        if text == wanted:
            continue
        if options.check:
            stale = True
            print(f"{name}: the table of conflicts is stale. Run: python scripts/conflicts_table.py", file=sys.stderr)
        else:
            path.write_text(wanted, encoding="utf-8")
            print(f"{name}: updated")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
