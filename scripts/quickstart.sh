#!/usr/bin/env bash
# The main job on this machine, from nothing: install, make data, train a small GPT with FSDP2 on two ranks, evaluate,
# save a checkpoint, print a summary.
#   bash scripts/quickstart.sh                    train on Python's own help texts (half a megabyte of English)
#   bash scripts/quickstart.sh --text FILE        train on a UTF-8 text file of yours
#   bash scripts/quickstart.sh --config CFG.yaml  another FSDP2 configuration (default: configs/gpt_quickstart.yaml)
#   bash scripts/quickstart.sh --out FOLDER       where data, log and checkpoint go (default: quickstart-out)
#   bash scripts/quickstart.sh --iters N          training steps (default: 300)
# Needs no accelerator. About two minutes of training on two cores; the first run also installs PyTorch.
set -euo pipefail
cd "$(dirname "$0")/.."

text="" config="configs/gpt_quickstart.yaml" out="quickstart-out" iters=300
usage() { sed -n '2,10s/^# \{0,1\}//p' "$0"; }
while [ $# -gt 0 ]; do
    case "$1" in
        --text | --config | --out | --iters)
            [ $# -ge 2 ] || { echo "quickstart: $1 needs a value." >&2; exit 2; }
            case "$1" in --text) text="$2" ;; --config) config="$2" ;; --out) out="$2" ;; --iters) iters="$2" ;; esac
            shift 2 ;;
        -h | --help) usage; exit 0 ;;
        *) echo "quickstart: unknown argument '$1'." >&2; usage >&2; exit 2 ;;
    esac
done
[[ "$iters" =~ ^[1-9][0-9]*$ ]] || { echo "quickstart: --iters: '$iters' is not a number of steps." >&2; exit 2; }
if [ -n "$text" ] && [ ! -f "$text" ]; then echo "quickstart: --text: there is no file '$text'." >&2; exit 2; fi

. scripts/venv.sh
make_venv "$PWD/.venv" megatron
"$(dirname "$PYTHON")/mindspeed-fsdp2" check "$config" > /dev/null

export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" PYTHONWARNINGS="${PYTHONWARNINGS:-ignore}"
mkdir -p "$out"
rm -rf "$out/checkpoint"
echo "Making the data set ..."
"$PYTHON" examples/make_dataset.py "$out/data/bytes" ${text:+--text "$text"} > "$out/data.log" 2> "$out/data.err" || { cat "$out/data.err" >&2; exit 1; }
cat "$out/data.log"

echo "Training on two ranks; the log is $out/train.log ..."
if ! "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node 2 examples/pretrain_gpt.py \
    --use-torch-fsdp2 --fsdp2-config-path "$config" --distributed-backend gloo \
    --num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 \
    --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear \
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 \
    --transformer-impl local --no-rope-fusion --no-masked-softmax-fusion --no-persist-layer-norm \
    --no-gradient-accumulation-fusion --no-create-attention-mask-in-dataloader \
    --make-vocab-size-divisible-by 1 --train-data-path "$out/data/bytes-train" --valid-data-path "$out/data/bytes-valid" \
    --micro-batch-size 16 --global-batch-size 32 --train-iters "$iters" --lr 3e-3 --min-lr 1e-4 \
    --lr-decay-style cosine --lr-warmup-fraction 0.05 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 \
    --init-method-std 0.02 --eval-iters 12 --eval-interval 1000000 --log-interval 25 --num-workers 0 \
    --log-throughput --save "$out/checkpoint" --save-interval "$iters" --ckpt-format torch_dcp \
    > "$out/train.log" 2>&1; then
    echo "Training failed. The end of $out/train.log:" >&2
    grep -a '^mindspeed_fsdp2:' "$out/train.log" >&2 || tail -n 30 "$out/train.log" >&2
    exit 1
fi
exec "$PYTHON" scripts/summary.py "$out"
