"""Fine-tune a causal language model of Transformers with FSDP2: a plain loop over ``wrap_model``.

    torchrun --nproc_per_node 2 examples/finetune_hf.py --model examples/models/llama_tiny.json --out finetune-out

``--model`` is a local Transformers directory (weights are read by the first rank only and sent to the others), or the
JSON file of a configuration, whose model starts untrained. Started again with the same ``--out``, it goes on from the
newest checkpoint as if it had never stopped. ``scripts/finetune.sh`` runs this in an environment of its own.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_scheduler

from mindspeed_fsdp2 import (
    FSDP2Config,
    FSDP2Error,
    accumulate,
    clip_grad_norm_,
    export_hf,
    list_checkpoints,
    load_checkpoint,
    load_config,
    load_full_state_dict,
    meta_init,
    save_checkpoint,
    wrap_model,
)

END_OF_TEXT = 256  # of byte tokens
HELD_OUT = 0.1
DEFAULT = {"sharding_size": "auto"}
WEIGHTS = ("model.safetensors.index.json", "model.safetensors")
SCHEDULES = ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup")
# What a run that goes on must have in common with its start: another value would be ignored or change the data.
KEPT = ("batch", "accumulate", "length", "lr", "warmup", "schedule", "weight_decay", "clip", "seed", "text")


class UsageError(Exception):
    """What the user has to change; the same on every rank."""


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a causal language model with FSDP2.")
    parser.add_argument(
        "--model", type=Path, required=True, help="Transformers directory, or a configuration's JSON file"
    )
    parser.add_argument("--config", type=Path, help="FSDP2 YAML file; default: shard over all ranks")
    parser.add_argument("--text", type=Path, help="UTF-8 text file; default: Python's help topics")
    parser.add_argument("--out", type=Path, required=True, help="checkpoints, log and the trained model")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--stop-at", type=int, help="end after this step as an interrupted run would; goes on later")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=10, help="steps")
    parser.add_argument("--schedule", default="cosine", choices=SCHEDULES, help="of the learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm; 0: no clipping")
    parser.add_argument("--eval-every", type=int, default=50, help="steps")
    parser.add_argument(
        "--patience", type=int, default=0, help="stop after this many evaluations without a better loss"
    )
    parser.add_argument("--save-every", type=int, default=50, help="steps")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints kept, beside the best")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--tensorboard", action="store_true", help="write event files into OUT/tensorboard")
    args = parser.parse_args(argv)
    for name in ("model", "config", "text"):
        path = getattr(args, name)
        if path is not None and not path.exists():
            parser.error(f"--{name}: there is no {path}.")
    if args.model.is_dir() and not any((args.model / name).exists() for name in WEIGHTS):
        parser.error(f"--model {args.model}: has no {WEIGHTS[1]}. Give a directory that save_pretrained wrote.")
    for name in ("steps", "stop_at", "batch", "accumulate", "length", "eval_every", "save_every", "keep"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: {getattr(args, name)} is not a number from 1 on.")
    for name in ("lr", "warmup", "weight_decay", "clip", "patience"):
        if not getattr(args, name) >= 0:
            parser.error(f"--{name.replace('_', '-')}: {getattr(args, name)} is not a number from 0 on.")
    if args.length < 2:
        parser.error("--length: a sequence of one token has no next token to learn.")
    if args.tensorboard and importlib.util.find_spec("tensorboard") is None:
        parser.error("--tensorboard: the package is not installed. pip install tensorboard")
    return args


# --- data -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """Sequences of token ids, each ``(sequences, length)``."""

    train: torch.Tensor
    held_out: torch.Tensor


def read_data(args: argparse.Namespace) -> Data:
    try:
        text = args.text.read_text(encoding="utf-8") if args.text else python_topics()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text {args.text}: it cannot be read as UTF-8 text ({error}).") from None
    if has_tokenizer(args.model):
        ids = AutoTokenizer.from_pretrained(args.model)(text)["input_ids"]
    else:
        ids = [*text.encode(), END_OF_TEXT]
    if len(ids) < 2 * args.length:
        raise UsageError(
            f"--text: {len(ids)} tokens make less than two sequences of {args.length}. Give more text, or a shorter "
            "--length."
        )
    sequences = torch.tensor(ids[: len(ids) // args.length * args.length]).view(-1, args.length)
    held_out = max(1, int(HELD_OUT * len(sequences)))
    return Data(sequences[:-held_out], sequences[-held_out:])


def python_topics() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def micro_batches(data: Data, step: int, args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Yield this rank's micro-batches of ``step``: a function of the step, so that a resumed run sees the same."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for micro in range(args.accumulate):
        first = ((step * args.accumulate + micro) * world + rank) * args.batch
        epochs_and_places = (divmod(first + number, len(data.train)) for number in range(args.batch))
        indices = [int(order(len(data.train), args.seed + epoch)[place]) for epoch, place in epochs_and_places]
        yield data.train[indices]


@functools.lru_cache(maxsize=2)
def order(total: int, seed: int) -> torch.Tensor:
    """Return the order of the sequences in one epoch."""
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))


# --- model ------------------------------------------------------------------------------------------------------------


def build_model(args: argparse.Namespace) -> torch.nn.Module:
    """Return the model, sharded; no rank ever holds a whole one."""
    torch.manual_seed(args.seed)
    try:
        config = AutoConfig.from_pretrained(args.model)
        dtype = "dtype" if hasattr(config, "dtype") else "torch_dtype"  # its name before Transformers 4.56
        with meta_init():
            model = AutoModelForCausalLM.from_config(config, **{dtype: torch.float32})
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"--model {args.model}: no configuration of a causal language model. {reason}") from None
    check_fits(model.config, args)
    wrap_model(model, load_config(args.config) if args.config else FSDP2Config(**DEFAULT))
    if args.model.is_dir():
        load_full_state_dict(model, next(args.model / name for name in WEIGHTS if (args.model / name).exists()))
    return model.train()


def check_fits(config: Any, args: argparse.Namespace) -> None:
    """Check what the model can read; it would fail in the middle of a forward, or not at all."""
    config = config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and args.length > longest:
        raise UsageError(f"--length: the model reads at most {longest} tokens, not {args.length}.")
    if not has_tokenizer(args.model) and config.vocab_size <= END_OF_TEXT:
        raise UsageError(
            f"--model {args.model}: without a tokenizer bytes are the tokens, and vocab_size {config.vocab_size} is "
            f"too small for them. Write {END_OF_TEXT + 1} or more."
        )


def has_tokenizer(model: Path) -> bool:
    return model.is_dir() and any(model.glob("tokenizer*"))


# --- training ---------------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """What a resumed run must know beside the step.

    Attributes:
        best: Lowest evaluation loss so far, None before the first evaluation.
        worse: Evaluations since then.
    """

    best: float | None = None
    worse: int = 0


class Trainer:
    """The loop, and what it writes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.data = args, read_data(args)
        self.model = build_model(args)
        self.device = next(self.model.parameters()).device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
        self.schedule = get_scheduler(args.schedule, self.optimizer, args.warmup, args.steps)
        self.progress, self.step = Progress(), 0
        self.settings = {name: str(getattr(args, name)) for name in KEPT if getattr(args, name) is not None}
        self.checkpoints, self.best = args.out / "checkpoints", args.out / "best"
        self.first = dist.get_rank() == 0
        torch.manual_seed(args.seed + dist.get_rank())  # dropout differs between ranks
        if list_checkpoints(self.checkpoints):
            loaded = load_checkpoint(self.checkpoints, self.model, self.optimizer, scheduler=self.schedule)
            self.step, self.progress = loaded.step, Progress(**loaded.extra["progress"])
            self._check_same(loaded.extra["settings"])
        self._forget_what_was_not_saved()
        self.board = self._board() if self.first and args.tensorboard else None

    def _check_same(self, before: dict[str, str]) -> None:
        changed = [name for name in KEPT if before.get(name) != self.settings.get(name)]
        flags = ((f"--{name.replace('_', '-')}", before.get(name)) for name in changed)
        if changed:
            raise UsageError(
                f"--out: the run in {self.args.out} can only go on as it began: "
                + ", ".join(f"{flag} {value}" if value is not None else f"without {flag}" for flag, value in flags)
                + ". Give the same, or another --out."
            )

    def _forget_what_was_not_saved(self) -> None:
        """Take what comes after the checkpoint out of the log, for it is done again, and a model of fewer steps."""
        if self.first and self.step < self.args.steps and not self.is_stale():
            shutil.rmtree(self.args.out / "model", ignore_errors=True)
        path = self.args.out / "log.jsonl"
        if self.first and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if json.loads(line)["step"] <= self.step and "final_eval_loss" not in line]
            path.write_text("".join(kept), encoding="utf-8")

    def _board(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self.args.out / "tensorboard", purge_step=self.step)

    def run(self) -> None:
        """Train, keep the best weights, and write them as a Transformers directory."""
        stop_at = min(self.args.steps, self.args.stop_at or self.args.steps)
        if self.first and self.step:
            print(f"going on after step {self.step} of {self.args.out}", file=sys.stderr)
        with tqdm(total=self.args.steps, initial=self.step, disable=not self.first) as bar:
            while self.step < stop_at and not self.is_stale():
                numbers = self.train_step()
                self.step += 1
                if self.step % self.args.eval_every == 0 or self.step == self.args.steps:
                    numbers["eval_loss"] = self.evaluate()
                    self.judge(numbers["eval_loss"])
                if self.step % self.args.save_every == 0 or self.step == self.args.steps or self.is_stale():
                    self.save(self.checkpoints, self.args.keep)
                self.log(numbers)
                bar.update()
                bar.set_postfix({name: f"{value:.4g}" for name, value in numbers.items()})
        if self.step < self.args.steps and not self.is_stale():
            return  # interrupted by --stop-at
        if list_checkpoints(self.best):
            load_checkpoint(self.best, self.model)
        self.log({"final_eval_loss": self.evaluate()})
        target = self.args.out / "model"
        if not target.exists():
            export_hf(self.model, target)

    def train_step(self) -> dict[str, float]:
        total = torch.zeros((), device=self.device)
        for micro, tokens in enumerate(micro_batches(self.data, self.step, self.args)):
            with accumulate(self.model, last=micro == self.args.accumulate - 1):
                loss = self.loss(tokens) / self.args.accumulate
                loss.backward()
            total += loss.detach()
        norm = clip_grad_norm_(self.model, self.args.clip or math.inf)
        rate = self.schedule.get_last_lr()[0]
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return {"loss": total.item() / dist.get_world_size(), "grad_norm": norm.item(), "lr": rate}

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss per token of sequences ``(batch, length)``."""
        tokens = tokens.to(self.device)
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over the held-out sequences; every rank makes as many forwards."""
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        batches = self.data.held_out.split(self.args.batch)
        world, rank = dist.get_world_size(), dist.get_rank()
        for start in range(0, len(batches), world):
            here = start + rank < len(batches)
            batch = batches[start + rank if here else 0]  # a rank without a batch still takes part in the gathering
            loss = self.loss(batch).item()
            if here:
                sums += torch.tensor([loss * len(batch), len(batch)], dtype=torch.float64)
        self.model.train()
        sums = sums.to(self.device, torch.float32 if self.device.type == "npu" else torch.float64)
        dist.all_reduce(sums)
        return float(sums[0] / sums[1])

    def judge(self, eval_loss: float) -> None:
        """Keep the weights that are the best so far."""
        if not math.isnan(eval_loss) and (self.progress.best is None or eval_loss < self.progress.best):
            self.progress = Progress(eval_loss)
            self.save(self.best, keep=1)
        else:
            self.progress.worse += 1

    def is_stale(self) -> bool:
        return 0 < self.args.patience <= self.progress.worse

    def save(self, folder: Path, keep: int) -> None:
        save_checkpoint(
            folder,
            self.model,
            self.optimizer,
            step=self.step,
            scheduler=self.schedule,
            extra={"progress": vars(self.progress).copy(), "settings": self.settings},
            keep=keep,
        )

    def log(self, numbers: dict[str, float]) -> None:
        if not self.first:
            return
        with (self.args.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": self.step, **numbers}) + "\n")
        if self.board:
            for name, value in numbers.items():
                self.board.add_scalar(name, value, self.step)


def main() -> None:
    args = options()
    if "RANK" not in os.environ:
        raise SystemExit("Start it with torchrun: torchrun --nproc_per_node 2 examples/finetune_hf.py ...")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    try:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out: {error}") from None
        Trainer(args).run()
    except (FSDP2Error, UsageError) as error:  # the same on every rank
        if dist.get_rank() == 0:
            print(error, file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
