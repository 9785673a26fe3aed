#!/usr/bin/env bash
# Install what the tests need into .venv and run them.
#   bash scripts/test.sh            core tier
#   bash scripts/test.sh --all      core tier and everything marked slow
#   bash scripts/test.sh [--all] ARGS...   more arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
make_venv "$PWD/.venv" megatron,dev
tier=(-m "not slow")
if [ "${1:-}" = "--all" ]; then tier=(); shift; fi
export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
exec "$PYTHON" -m pytest "${tier[@]}" "$@"
