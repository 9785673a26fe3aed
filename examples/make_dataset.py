"""Turn text into a byte-level Megatron data set: ``PREFIX-train.{bin,idx}`` and ``PREFIX-valid.{bin,idx}``.

    python examples/make_dataset.py PREFIX [--text FILE]

Every UTF-8 byte is a token, token 256 ends a document. Without ``--text`` the documents are the help topics that every
Python carries (``pydoc_data.topics``, half a megabyte of English); with it they are the file's parts between form feeds
(``\\f``), or where there is none its paragraphs. The last 10 % are held out, cut at the nearest document border.

What it prints tells how good a trained model is. A model that knows only how often each byte occurs, or each pair of
bytes, reaches on the held-out part the *cross-entropy* of counts made on the training part (in nats per token, end
tokens included). For ``pydoc_data.topics`` that is about 3.2 for bytes and 2.3 for pairs. The conditional entropy of
the held-out part's *own* pair counts is printed as well: lower, because it has seen what it is asked for.
"""

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

END_OF_DOCUMENT = 256
VOCABULARY = 257
HELD_OUT = 0.1
SMOOTHING = 0.1  # added to every pair's count, so that a pair never seen in training is not impossible


def python_topics() -> list[bytes]:
    """Return Python's help topics in their own order."""
    from pydoc_data.topics import topics

    return [text.encode() for text in topics.values()]


def text_file(path: Path) -> list[bytes]:
    """Return the documents of a UTF-8 text file."""
    text = path.read_text(encoding="utf-8")
    separator = "\f" if "\f" in text else "\n\n"
    return [part.encode() for part in text.split(separator) if part.strip()]


def cut(documents: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Return the training and the held-out documents; neither is empty."""
    ends = numpy.cumsum([len(document) for document in documents])
    border = int(numpy.argmin(numpy.abs(ends[:-1] - (1 - HELD_OUT) * ends[-1]))) + 1
    return list(documents[:border]), list(documents[border:])


def tokens(documents: Sequence[bytes]) -> list[int]:
    """Return the tokens of the documents, one after the other."""
    return [token for document in documents for token in (*document, END_OF_DOCUMENT)]


def write(prefix: str, documents: Sequence[bytes]) -> None:
    """Write ``prefix.bin`` and ``prefix.idx``."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for document in documents:
        builder.add_item(torch.tensor(tokens([document])))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def byte_entropy(train: Sequence[int], held_out: Sequence[int]) -> float:
    """Return the nats per held-out token of a model that knows the training part's token counts."""
    counts = Counter(train)
    total = len(train) + SMOOTHING * VOCABULARY
    return -sum(math.log((counts[token] + SMOOTHING) / total) for token in held_out) / len(held_out)


def pair_entropy(train: Sequence[int], held_out: Sequence[int], smoothing: float = SMOOTHING) -> float:
    """Return the nats per held-out token of a model that knows the training part's counts of token pairs."""
    pairs, firsts = Counter(pairwise(train)), Counter(train[:-1])
    nats = 0.0
    for (first, second), times in Counter(pairwise(held_out)).items():
        chance = (pairs[first, second] + smoothing) / (firsts[first] + smoothing * VOCABULARY)
        nats -= times * math.log(chance)
    return nats / (len(held_out) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a byte-level Megatron data set.")
    parser.add_argument("prefix", type=Path, help="where the files go, e.g. data/topics")
    parser.add_argument("--text", type=Path, help="UTF-8 text file; default: Python's help topics")
    options = parser.parse_args()
    documents = text_file(options.text) if options.text else python_topics()
    if len(documents) < 2:
        parser.error(f"--text {options.text}: has {len(documents)} documents. Separate at least two by an empty line.")
    options.prefix.parent.mkdir(parents=True, exist_ok=True)
    parts = dict(zip(("train", "valid"), cut(documents)))
    for part, texts in parts.items():
        write(f"{options.prefix}-{part}", texts)
        print(f"{options.prefix}-{part}: {len(texts)} documents, {sum(map(len, texts))} bytes")
    train, held_out = tokens(parts["train"]), tokens(parts["valid"])
    print(f"held-out byte entropy: {byte_entropy(train, held_out):.4f} nats a byte")
    print(f"held-out bigram entropy: {pair_entropy(train, held_out):.4f} nats a byte")
    print(f"held-out part's own bigram entropy: {pair_entropy(held_out, held_out, smoothing=0.0):.4f} nats a byte")


if __name__ == "__main__":
    main()
