#!/usr/bin/env bash
# Build an environment per supported combination of Python, PyTorch and Megatron, and write docs/*/compatibility.md.
#   bash scripts/test_matrix.sh                 every combination, then the tables
#   bash scripts/test_matrix.sh --list          show them
#   bash scripts/test_matrix.sh -k py3.11       some of them (nox selects), without the tables; -- ARGS go to pytest
#   MEGATRON_LM_TAGS=FOLDER ...                 also the Megatron-LM checkouts in FOLDER: core_v0.12.3, core_v0.16.1, ...
# Needs Python 3.11, 3.12 and 3.13 (on PATH or in pyenv), about 30 GB of disk and an hour or two; it is run by hand.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
for folder in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[0-9]*/bin; do
    [ -d "$folder" ] && PATH="$PATH:$folder"
done
if [ ! -x .venv-nox/bin/nox ]; then
    python="$(find_python)"
    "$python" -m venv .venv-nox
    .venv-nox/bin/python -m pip install --quiet --disable-pip-version-check nox
fi
.venv-nox/bin/nox -f scripts/noxfile.py --envdir "$PWD/.venv-matrix" "$@"
[ $# -gt 0 ] || exec .venv-nox/bin/python scripts/compatibility_table.py
