"""The cells of the compatibility table: one Megatron, driven through its own pretrain script, against its own DDP.

A *source* is a Megatron: a Megatron-LM checkout with its ``pretrain_gpt.py``, or the installed megatron-core wheel with
``examples/pretrain_gpt.py``. Each cell runs a few jobs and ends in a verdict; see :class:`Verdict`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.megatron.comparison import BF16, BITWISE, FP32, Tolerance, check_end, check_start, compare, too_large
from tests.megatron.jobs import EXAMPLE, JobFailure, JobResult, MegatronJobs
from tests.megatron.saving import differences
from tests.megatron.tags_core import CORE_CELLS, NOT_THERE, CoreRuns
from tests.megatron.tiny import FLAGS

INSTALLED = "installed"
HOOK = "tests.megatron.saving_specs:prepare"
STEPS, SAVED_AT = 6, 3
TIMEOUT_S = 120.0
OURS = os.sep + "mindspeed_fsdp2" + os.sep

LAYERS = "decoder.layers.{*}"
ZERO3: Mapping[str, Any] = {
    "sharding_size": "auto",
    "sub_modules_to_wrap": ["embedding", LAYERS, ["decoder.final_layernorm", "output_layer"]],
}
HSDP: Mapping[str, Any] = {**ZERO3, "sharding_size": 2}
RECOMPUTE: Mapping[str, Any] = {**ZERO3, "recompute_modules": [LAYERS]}

Flags = Mapping[str, str | None]
SGD: Flags = {"--optimizer": "sgd", "--lr": "0.3", "--clip-grad": "0"}
DROPOUT: Flags = {"--attention-dropout": "0.1", "--hidden-dropout": "0.1"}
TOKENS: Flags = {"--calculate-per-token-loss": None, "--global-batch-size": "16", **SGD}
BF16_FLAGS: Flags = {"--bf16": None}
META: Flags = {"--init-model-with-meta-device": None}


class Verdict(NamedTuple):
    """How a cell ended.

    Attributes:
        kind: ``pass``; ``refused`` by a message of this package; ``upstream cannot`` where plain Megatron fails as
            well; ``WRONG`` for anything else.
        message: Why, empty for a pass.
    """

    kind: str
    message: str = ""


class Refused(Exception):
    """Every rank ended with a message of this package."""


class UpstreamCannot(Exception):
    """Plain Megatron fails at what a cell compares with."""


@dataclass(frozen=True)
class Source:
    """One Megatron.

    Attributes:
        name: Name of the checkout's folder, or ``installed``.
        folder: The checkout; None for what is installed.
    """

    name: str
    folder: Path | None

    @property
    def script(self) -> Path:
        """The pretrain script: a checkout's own, unmodified one."""
        return EXAMPLE if self.folder is None else self.folder / "pretrain_gpt.py"

    @cached_property
    def _looked_up(self) -> tuple[str, str]:
        code = (
            "from megatron.core.package_info import __version__ as version; print('VERSION', version, flush=True)\n"
            "import megatron.training.training\n"
        )
        paths = [str(self.folder)] if self.folder else []
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])},
            capture_output=True,
            text=True,
        )
        version = re.search(r"^VERSION (\S+)", run.stdout, re.MULTILINE)
        return version[1] if version else "", "" if run.returncode == 0 else last_line(run.stderr)

    @property
    def version(self) -> str:
        """The tag of a checkout, or the version of the wheel."""
        return self._looked_up[0] if self.folder is None else self.name.removeprefix("core_v")

    @property
    def fault(self) -> str:
        """Why it cannot be imported under this Python, empty if it can."""
        return self._looked_up[1]

    @property
    def core_only(self) -> bool:
        """Whether it has no ``megatron.training``, as wheels below 0.17."""
        return bool(self._looked_up[0]) and "No module named 'megatron.training'" in self.fault


def sources(value: str) -> list[Source]:
    """Return the Megatrons that ``value`` names: ``installed``, a folder with one checkout a subfolder, or both."""
    found = []
    for part in filter(None, value.split(os.pathsep)):
        if part == INSTALLED:
            found.append(Source(INSTALLED, None))
        else:
            tags = [each for each in sorted(Path(part).iterdir()) if (each / "megatron" / "training").is_dir()]
            found += [Source(tag.name, tag) for tag in tags]
    return found


@dataclass
class Runs:
    """Runs the jobs of one source; a job that several cells share runs once.

    Attributes:
        jobs: The runner, which imports this source.
        source: The Megatron.
        data: Prefix of the data set.
        folder: Where checkpoints and YAML files go.
    """

    jobs: MegatronJobs
    source: Source
    data: str
    folder: Path
    _kept: dict[tuple[Any, ...], JobResult | Exception] = field(default_factory=dict)

    def ddp(self, flags: Flags | None = None, ranks: int = 2, tensor: int = 1, script: Path | None = None) -> JobResult:
        """Return a whole run with Megatron's DDP.

        Raises:
            UpstreamCannot: It fails.
        """
        try:
            return self._run(flags or {}, None, ranks, tensor, script)
        except JobFailure as failure:
            if OURS in last_frame(failure):
                raise
            raise UpstreamCannot(f"plain DDP: {reason(failure)}") from failure

    def fsdp2(
        self,
        flags: Flags | None = None,
        settings: Mapping[str, Any] = ZERO3,
        ranks: int = 2,
        tensor: int = 1,
        script: Path | None = None,
    ) -> JobResult:
        """Return a run with FSDP2.

        Raises:
            Refused: By this package.
            JobFailure: It fails otherwise.
        """
        return self._run(flags or {}, settings, ranks, tensor, script)

    def saved(self, ckpt_format: str, flags: Flags | None = None, **setup: Any) -> Flags:
        """Run to the save, and return the flags that resume from there.

        Raises:
            UpstreamCannot: Saving in this format fails with DDP, too.
        """
        flags, name = flags or {}, "-".join((ckpt_format, *(flag.strip("-") for flag in flags or {}), *setup))
        folder = self.folder / name
        save = {"--save": str(folder), "--save-interval": str(SAVED_AT), "--exit-interval": str(SAVED_AT)}
        form = {"--ckpt-format": ckpt_format}
        try:
            self.fsdp2({**flags, **form, **save}, **setup)
        except (JobFailure, Refused):
            if ckpt_format == "torch_dist":
                self.ddp({**flags, **form, **save, "--save": str(self.folder / "ddp")})
            raise
        return {**flags, **form, "--load": str(folder)}

    def _run(
        self, flags: Flags, settings: Mapping[str, Any] | None, ranks: int, tensor: int, script: Path | None
    ) -> JobResult:
        key = (tuple(flags.items()), yaml.safe_dump(dict(settings or {})), ranks, tensor, script)
        if key not in self._kept:
            try:
                self._kept[key] = self._started(flags, settings, ranks, tensor, script)
            except (JobFailure, Refused) as error:
                self._kept[key] = error
        found = self._kept[key]
        if isinstance(found, Exception):
            raise found
        return found

    def _started(
        self, flags: Flags, settings: Mapping[str, Any] | None, ranks: int, tensor: int, script: Path | None
    ) -> JobResult:
        size = {
            "--train-iters": str(STEPS),
            "--global-batch-size": "8",
            "--micro-batch-size": str(8 * tensor // ranks),
            "--make-vocab-size-divisible-by": str(tensor),
            "--tensor-model-parallel-size": str(tensor),
            "--train-data-path": f"{self.data}-train",
            "--valid-data-path": f"{self.data}-valid",
            "--tokenizer-type": "NullTokenizer",
            "--vocab-size": "257",
        }
        argv = [part for pair in {**FLAGS, **size, **flags}.items() for part in pair if part is not None]
        sharded = settings is not None
        if settings is not None:
            config = self.folder / f"cfg{len(self._kept)}.yaml"
            config.write_text(yaml.safe_dump(dict(settings)))
            argv += ["--use-torch-fsdp2", "--fsdp2-config-path", str(config)]
        result = self.jobs.run(
            argv,
            world_size=ranks,
            plugin=sharded,
            # Megatron asks for one connection where DDP meets tensor parallelism, and refuses it with FSDP2.
            env={"CUDA_DEVICE_MAX_CONNECTIONS": "8" if sharded else "1"},
            script=script or self.source.script,
            hook=HOOK,
            timeout=TIMEOUT_S,
            check=False,
        )
        failed = [rank for rank in result.ranks if rank.exitcode]
        if not failed:
            return result
        refusals = [rank for rank in failed if "mindspeed_fsdp2" in last_line(rank.stderr, whole=True)]
        if sharded and len(refusals) == len(result.ranks):
            raise Refused(last_line(refusals[0].stderr, whole=True).partition("mindspeed_fsdp2: ")[2])
        raise JobFailure(result.describe())


# --- cells ------------------------------------------------------------------------------------------------------------


def _equal(
    run: JobResult, reference: JobResult, tolerance: Tolerance = FP32, tensor: int = 1, whole: tuple[str, ...] = ()
) -> list[str]:
    found = too_large(compare(run, reference), tolerance) + check_start(run, reference)
    return found + check_end(run, whole, tensor)


def adamw(runs: Runs) -> list[str]:
    """Trains as DDP does, in fp32 with AdamW."""
    return _equal(runs.fsdp2(), runs.ddp())


def sgd(runs: Runs) -> list[str]:
    """The same with SGD and clipping off, which Adam and clipping would hide a wrong factor from."""
    return _equal(runs.fsdp2(SGD), runs.ddp(SGD), BITWISE)


def _resumed(runs: Runs, ckpt_format: str, flags: Flags = DROPOUT, **setup: Any) -> list[str]:
    whole = runs.fsdp2(flags, **setup)
    resumed = runs.fsdp2(runs.saved(ckpt_format, flags, **setup), **setup)
    return differences(resumed, whole, STEPS - SAVED_AT)


def torch_dist_resume(runs: Runs) -> list[str]:
    """Resumes exactly from torch_dist, dropout on."""
    return _resumed(runs, "torch_dist")


def torch_dcp_resume(runs: Runs) -> list[str]:
    """Resumes exactly from torch_dcp, dropout on."""
    return _resumed(runs, "torch_dcp")


def _grown(runs: Runs, ckpt_format: str) -> list[str]:
    whole, grown = runs.fsdp2(), runs.fsdp2(runs.saved(ckpt_format), ranks=4)
    found = []
    for what, mine, theirs, allowed in (
        ("losses", grown.losses, whole.losses[SAVED_AT:], FP32.losses),
        ("norms", grown.grad_norms, whole.grad_norms[SAVED_AT:], FP32.norms),
    ):
        if len(mine) != len(theirs) or any(abs(a - b) > allowed * abs(b) for a, b in zip(mine, theirs)):
            found.append(f"{what} {mine} instead of {theirs}")
    return found


def torch_dist_2_to_4(runs: Runs) -> list[str]:
    """A torch_dist checkpoint of 2 ranks goes on with 4."""
    return _grown(runs, "torch_dist")


def torch_dcp_2_to_4(runs: Runs) -> list[str]:
    """A torch_dcp checkpoint of 2 ranks goes on with 4."""
    return _grown(runs, "torch_dcp")


def hsdp(runs: Runs) -> list[str]:
    """Two replicas of two shards train as DDP does."""
    return _equal(runs.fsdp2(SGD, HSDP, ranks=4), runs.ddp(SGD, ranks=4), FP32)


def tensor_parallel(runs: Runs) -> list[str]:
    """TP 2 times FSDP 2 trains as DDP does."""
    return _equal(runs.fsdp2(ranks=4, tensor=2), runs.ddp(ranks=4, tensor=2), tensor=2)


def tensor_parallel_resume(runs: Runs) -> list[str]:
    """TP 2 times FSDP 2 resumes exactly from torch_dist, dropout on."""
    return _resumed(runs, "torch_dist", ranks=4, tensor=2)


def meta_init(runs: Runs) -> list[str]:
    """A model built on the meta device trains as DDP does."""
    return _equal(runs.fsdp2(META), runs.ddp())


def per_token_loss(runs: Runs) -> list[str]:
    """The per-token loss over two micro-batches, SGD and clipping off."""
    return _equal(runs.fsdp2(TOKENS), runs.ddp(TOKENS), FP32)


def recompute_dropout(runs: Runs) -> list[str]:
    """Recomputed layers with dropout train as DDP does without recomputation."""
    return _equal(runs.fsdp2(DROPOUT, RECOMPUTE), runs.ddp(DROPOUT))


def bf16(runs: Runs) -> list[str]:
    """--bf16 trains as DDP with it does, and resumes exactly from both formats."""
    found = _equal(runs.fsdp2(BF16_FLAGS), runs.ddp(BF16_FLAGS), BF16)
    for ckpt_format in ("torch_dist", "torch_dcp"):
        found += _resumed(runs, ckpt_format, BF16_FLAGS)
    return found


def async_save(runs: Runs) -> list[str]:
    """A torch_dcp checkpoint saved in the background resumes exactly."""
    flags = {"--async-save": None, "--use-persistent-ckpt-worker": None}
    whole = runs.fsdp2(DROPOUT)
    resumed = runs.fsdp2({**DROPOUT, **runs.saved("torch_dcp", {**DROPOUT, **flags})})
    return differences(resumed, whole, STEPS - SAVED_AT)


def example(runs: Runs) -> list[str]:
    """The script of this repository's examples trains as DDP does."""
    return _equal(runs.fsdp2(SGD, script=EXAMPLE), runs.ddp(SGD, script=EXAMPLE), BITWISE)


CELLS: dict[str, Callable[[Runs], list[str]]] = {
    "trains = DDP (AdamW)": adamw,
    "trains = DDP (SGD, clip 0)": sgd,
    "torch_dist resume": torch_dist_resume,
    "torch_dcp resume": torch_dcp_resume,
    "torch_dist 2 -> 4 ranks": torch_dist_2_to_4,
    "torch_dcp 2 -> 4 ranks": torch_dcp_2_to_4,
    "HSDP, 4 ranks": hsdp,
    "TP 2": tensor_parallel,
    "TP 2, torch_dist resume": tensor_parallel_resume,
    "meta init": meta_init,
    "per-token loss": per_token_loss,
    "recompute + dropout": recompute_dropout,
    "--bf16, resume": bf16,
    "torch_dcp --async-save": async_save,
    "examples/pretrain_gpt.py": example,
}

# What may stand in a cell instead of a pass: pieces of messages.
ALLOWED: dict[str, tuple[str, ...]] = {
    # Megatron itself has no background save of torch_dcp there.
    "torch_dcp --async-save": ("Megatron 0.17 or newer",),
}


def judge(cell: str, runs: Runs | CoreRuns) -> Verdict:
    """Run the cell of that name and return its verdict."""
    try:
        if isinstance(runs, CoreRuns):
            if cell not in CORE_CELLS:
                return Verdict("upstream cannot", NOT_THERE)
            found = CORE_CELLS[cell](runs)
        elif runs.source.fault:
            return Verdict("upstream cannot", f"import: {runs.source.fault}")
        else:
            found = CELLS[cell](runs)
    except Refused as refusal:
        return Verdict("refused", str(refusal))
    except UpstreamCannot as fault:
        return Verdict("upstream cannot", str(fault))
    except JobFailure as failure:
        return Verdict("WRONG", str(failure))
    return Verdict("WRONG", "\n".join(found)) if found else Verdict("pass")


def reason(failure: JobFailure) -> str:
    """Return the last line of the first traceback in a failed job's description."""
    lines = re.findall(
        r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b.*)$", str(failure), re.M
    )
    return lines[0] if lines else str(failure).strip().splitlines()[-1]


def last_frame(failure: JobFailure) -> str:
    """Return where the first traceback in a failed job's description ends."""
    first = str(failure).partition("[rank 1] exit code")[0]
    return (re.findall(r'File "(.*)", line \d+', first) or [""])[-1]


def last_line(text: str, whole: bool = False) -> str:
    """Return the last line of ``text`` that says something; ``whole`` returns from this package's last message on."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    if whole:
        starts = [number for number, line in enumerate(lines) if "mindspeed_fsdp2: " in line]
        traced = [number for number, line in enumerate(lines) if "Traceback" in line]
        if not starts or (traced and traced[-1] > starts[-1]):
            return ""
        return " ".join(lines[starts[-1] :])
    return lines[-1] if lines else ""
