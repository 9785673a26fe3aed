#!/usr/bin/env bash
# Style, types, docstrings and the direction of imports.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
make_venv "$PWD/.venv" megatron,dev
"$PYTHON" -m ruff check mindspeed_fsdp2 tests examples benchmarks scripts
"$PYTHON" -m ruff format --check mindspeed_fsdp2 tests examples benchmarks scripts
"$PYTHON" -m mypy
"$PYTHON" scripts/conflicts_table.py --check
exec "$PYTHON" -m pytest -q tests/unit/test_architecture.py
