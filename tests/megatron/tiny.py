"""A GPT that trains 20 iterations in a second: the flags that most Megatron tests start from."""

from __future__ import annotations

FLAGS = {
    "--num-layers": "2",
    "--hidden-size": "64",
    "--num-attention-heads": "4",
    "--seq-length": "64",
    "--max-position-embeddings": "64",
    "--position-embedding-type": "rope",
    "--normalization": "RMSNorm",
    "--swiglu": None,
    "--disable-bias-linear": None,
    "--untie-embeddings-and-output-weights": None,
    "--make-vocab-size-divisible-by": "1",
    "--micro-batch-size": "4",
    "--global-batch-size": "8",
    "--train-iters": "20",
    "--lr": "1e-3",
    "--attention-dropout": "0",
    "--hidden-dropout": "0",
    "--eval-iters": "0",
    "--eval-interval": "1000",
    "--log-interval": "1",
    "--num-workers": "0",
    "--distributed-backend": "gloo",
    "--transformer-impl": "local",
    # What the local layers do without Transformer Engine and Apex.
    "--no-rope-fusion": None,
    "--no-masked-softmax-fusion": None,
    "--no-persist-layer-norm": None,
    "--no-gradient-accumulation-fusion": None,
}


def tiny_gpt(data: str, *extra: str, **changes: str | None) -> list[str]:
    """Return the flags of a run.

    Args:
        data: Prefix of a data set of ``examples/make_dataset.py``.
        extra: Flags to append as they are.
        changes: Values to change or add, ``train_iters="8"`` for ``--train-iters 8``; None for a flag without value.
    """
    flags = FLAGS | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    flags |= {"--train-data-path": f"{data}-train", "--valid-data-path": f"{data}-valid"}
    return [part for pair in flags.items() for part in pair if part is not None] + list(extra)
