"""Runs that save and load, for the tests of Megatron's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.megatron.jobs import JobResult, MegatronJobs
from tests.megatron.tiny import tiny_gpt

HOOK = "tests.megatron.saving_specs:prepare"
BATCH = 12  # samples of a step, for 1, 2, 3 and 4 ranks
Flags = Mapping[str, str | None]


@dataclass
class Runs:
    """Runs jobs that share a data set and a folder.

    Attributes:
        jobs: The runner.
        data: Prefix of the data set.
        folder: Where checkpoints and YAML files go.
    """

    jobs: MegatronJobs
    data: str
    folder: Path
    _configs: dict[str, Path] = field(default_factory=dict)

    def fsdp2(
        self,
        *extra: str,
        flags: Flags | None = None,
        settings: Mapping[str, Any] | None = None,
        ranks: int = 2,
        ckpt_format: str = "torch_dcp",
        saving: str = "",
        env: Mapping[str, str] | None = None,
        check: bool = True,
        drop: Sequence[str] = (),
    ) -> JobResult:
        """Run with FSDP2.

        Args:
            extra: Further flags as typed.
            flags: Changes to the tiny GPT's.
            settings: The YAML.
            ranks: Number of ranks.
            ckpt_format: Megatron's.
            saving: Changes of ``saving_specs``.
            env: Variables.
            check: Whether a failing rank is an error.
            drop: Flags of the tiny GPT to leave out, with their value.
        """
        argv = self._argv(flags, ranks)
        for flag in drop:
            place = argv.index(flag)
            del argv[place : place + (1 if argv[place + 1].startswith("--") else 2)]
        argv += ["--use-torch-fsdp2", "--fsdp2-config-path", self._config(settings)]
        argv += ["--ckpt-format", ckpt_format, *extra]
        return self._run(argv, ranks, True, saving, env, check)

    def ddp(self, *extra: str, flags: Flags | None = None, ranks: int = 2, ckpt_format: str = "torch") -> JobResult:
        """Run with Megatron's DDP and without the plugin."""
        argv = [*self._argv(flags, ranks), "--ckpt-format", ckpt_format, *extra]
        return self._run(argv, ranks, False, "", None, True)

    def stock(self, *extra: str, flags: Flags | None = None, ranks: int = 2) -> JobResult:
        """Run with Megatron's own FSDP2 and without the plugin."""
        argv = [*self._argv(flags, ranks), "--use-torch-fsdp2", "--ckpt-format", "torch_dcp", *extra]
        return self._run(argv, ranks, False, "", {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, True)

    def _argv(self, flags: Flags | None, ranks: int) -> list[str]:
        size = {"train_iters": "10", "global_batch_size": str(BATCH), "micro_batch_size": str(BATCH // ranks)}
        return tiny_gpt(self.data, **{**size, **(flags or {})})

    def _run(
        self, argv: Sequence[str], ranks: int, plugin: bool, saving: str, env: Mapping[str, str] | None, check: bool
    ) -> JobResult:
        variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "8" if plugin else "1", "SAVING": saving, **(env or {})}
        return self.jobs.run(argv, world_size=ranks, plugin=plugin, env=variables, hook=HOOK, check=check, timeout=90)

    def _config(self, settings: Mapping[str, Any] | None) -> str:
        text = yaml.safe_dump(dict(settings or {"sharding_size": "auto"}))
        if text not in self._configs:
            self._configs[text] = self.folder / f"cfg{len(self._configs)}.yaml"
            self._configs[text].write_text(text)
        return str(self._configs[text])


def differences(one: JobResult, other: JobResult, steps: int) -> list[str]:
    """Return what is not equal bit for bit in the last ``steps`` steps and at the end of two runs."""
    found = []
    if one.losses[-steps:] != other.losses[-steps:] or len(other.losses) < steps:
        found.append(f"losses {one.losses[-steps:]} and {other.losses[-steps:]}")
    if one.grad_norms[-steps:] != other.grad_norms[-steps:]:
        found.append(f"norms {one.grad_norms[-steps:]} and {other.grad_norms[-steps:]}")
    for mine, others in zip(one.ranks, other.ranks):
        found += unequal(f"rank {mine.rank}: params", mine.params, others.params)
        for what in ("optimizer_end", "buffers"):
            found += unequal(f"rank {mine.rank}: {what}", mine.extra[what], others.extra[what])
        if mine.extra["flops"] != others.extra["flops"]:
            found.append(f"rank {mine.rank}: flops {mine.extra['flops']} and {others.extra['flops']}")
    return found


def unequal(what: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names whose values are not equal bit for bit, or that only one of the two has."""
    found = [f"{what}: {name} in one only" for name in one.keys() ^ other.keys()]
    for name in one.keys() & other.keys():
        same = torch.equal(one[name], other[name]) if isinstance(one[name], torch.Tensor) else one[name] == other[name]
        if not same:
            found.append(f"{what}: {name} differs")
    return found
