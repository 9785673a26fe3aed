# Sourced by the other scripts: makes a virtual environment with a Python that megatron-core's wheels accept.
#   make_venv FOLDER EXTRAS     creates FOLDER if needed and installs this project with EXTRAS; sets PYTHON
# megatron-core from 0.17 on (the wheels that contain megatron.training) needs Python 3.12 or newer.

project_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

_is_new_enough() {
    "$1" -c 'import sys, venv, ensurepip; raise SystemExit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in "${PYTHON_FOR_VENV:-}" python3.12 python3.13 python3 python; do
        [ -n "$candidate" ] && candidate="$(command -v "$candidate" 2>/dev/null)" && _is_new_enough "$candidate" &&
            { echo "$candidate"; return 0; }
    done
    for candidate in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13*/bin/python; do
        [ -x "$candidate" ] && _is_new_enough "$candidate" && { echo "$candidate"; return 0; }
    done
    if command -v uv >/dev/null 2>&1; then
        uv python install 3.12 >&2 && candidate="$(uv python find 3.12)" && _is_new_enough "$candidate" &&
            { echo "$candidate"; return 0; }
    fi
    echo "No Python 3.12 or 3.13 found (looked on PATH, in pyenv's versions and asked uv)." >&2
    echo "Install one, or name it: PYTHON_FOR_VENV=/path/to/python3.12 bash $0" >&2
    return 1
}

make_venv() {
    local folder="$1" extras="$2" python wanted stamp
    stamp="$folder/.installed-for"
    wanted="$extras $(cksum < "$project_root/pyproject.toml")"
    PYTHON="$folder/bin/python"
    if [ ! -x "$PYTHON" ] || ! _is_new_enough "$PYTHON"; then
        python="$(find_python)" || return 1
        echo "Making $folder with $("$python" --version) ..."
        "$python" -m venv --clear "$folder" || return 1
    fi
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "Installing mindspeed_fsdp2[$extras] (PyTorch is the large part: several GB on machines without a CPU-only index) ..."
        "$PYTHON" -m pip install --quiet --disable-pip-version-check -e "$project_root[$extras]" || return 1
        echo "$wanted" > "$stamp"
    fi
}
