#!/usr/bin/env bash
# Fine-tune a Transformers model with FSDP2 on this machine, from nothing: install, train on two ranks, export.
#   bash scripts/finetune.sh                            a small Llama from scratch on Python's own help texts
#   bash scripts/finetune.sh --model DIR --text FILE    a local Transformers directory on a text of yours
#   bash scripts/finetune.sh --steps 1000 --lr 1e-4     arguments of examples/finetune_hf.py (--help lists them)
#   RANKS=8 bash scripts/finetune.sh ...                another number of ranks (default: 2)
# Started again it goes on from the newest checkpoint in --out (default: finetune-out); the result is in OUT/model.
set -euo pipefail
cd "$(dirname "$0")/.."
ranks="${RANKS:-2}" model=(--model examples/models/llama_tiny.json) out=(--out finetune-out)
for argument in "$@"; do
    case "$argument" in
        -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0" ;;
        --model | --model=*) model=() ;;
        --out | --out=*) out=() ;;
    esac
done
[[ "$ranks" =~ ^[1-9][0-9]*$ ]] || { echo "finetune: RANKS: '$ranks' is not a number of ranks." >&2; exit 2; }
. scripts/venv.sh
make_venv "$PWD/.venv" hf
export OMP_NUM_THREADS=1 PYTHONWARNINGS="${PYTHONWARNINGS:-ignore}"
exec "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$ranks" examples/finetune_hf.py \
    ${model[@]+"${model[@]}"} ${out[@]+"${out[@]}"} "$@"
