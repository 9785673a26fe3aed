"""Plain Megatron, no FSDP2, through its real training loop in CPU mode: what the FSDP2 tests compare with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron.jobs import JobResult, MegatronJobs
from tests.megatron.tiny import tiny_gpt


def test_ddp_trains_and_evaluates(megatron_jobs: MegatronJobs, topics: str) -> None:
    argv = tiny_gpt(topics, eval_iters="2", eval_interval="10", log_num_zeros_in_grad=None)
    job = megatron_jobs.run(argv)
    assert len(job.losses) == 20
    assert job.losses[-1] < job.losses[0] - 0.5
    valid = [evaluated["lm loss"] for evaluated in job.ranks[0].valid_losses]
    assert len(valid) == 3  # at 10, at 20, and the final one
    assert valid[-1] == valid[-2] or valid[-1] < valid[0]
    for rank in job.ranks:
        assert (rank.losses, rank.grad_norms) == (job.losses, job.grad_norms)
        assert set(rank.local_types.values()) == {"Parameter"}
        assert rank.grads.keys() == rank.params.keys()
        assert all(torch.equal(rank.params[name], job.ranks[0].params[name]) for name in rank.params)
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in job.ranks[0].grads
    assert norm(job.ranks[0].grads) == pytest.approx(job.grad_norms[0], rel=1e-6)
    zeros = sum(int((grad == 0).sum()) for grad in job.ranks[0].grads.values())
    assert zeros == job.ranks[0].num_zeros[0] > 0  # rows of the embedding whose byte did not occur


def norm(grads: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([grad.double().norm() for grad in grads.values()]).norm())


def test_two_ranks_equal_one(megatron_jobs: MegatronJobs, topics: str) -> None:
    one = megatron_jobs.run(tiny_gpt(topics), world_size=1)  # two micro-batches
    two = megatron_jobs.run(tiny_gpt(topics), world_size=2)
    assert len(two.losses) == 20
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    assert two.grad_norms == pytest.approx(one.grad_norms, rel=1e-4)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_resume_with_dropout_is_exact(megatron_jobs: MegatronJobs, topics: str, tmp_path: Path, workers: str) -> None:
    full, resumed = stop_and_resume(megatron_jobs, topics, tmp_path, num_workers=workers)
    assert resumed.losses == full.losses[4:]
    assert resumed.grad_norms == full.grad_norms[4:]
    for name, param in full.ranks[1].params.items():
        assert torch.equal(resumed.ranks[1].params[name], param), name


def test_host_draws_from_the_default_generator_would_break_resume(
    megatron_jobs: MegatronJobs, topics: str, tmp_path: Path
) -> None:
    # The control of the test above: with torch's own DataLoader the very same resume is wrong.
    full, resumed = stop_and_resume(
        megatron_jobs, topics, tmp_path, hook="tests.megatron.test_cpu_training:own_data_loader"
    )
    assert resumed.losses != full.losses[4:]


def own_data_loader(_extra: dict[str, Any]) -> None:
    loader = torch.utils.data.DataLoader
    loader.__init__ = loader.__init__.__wrapped__


def stop_and_resume(
    jobs: MegatronJobs, topics: str, folder: Path, hook: str | None = None, **changes: str
) -> tuple[JobResult, JobResult]:
    """Train 6 iterations with dropout; and 4, stop, 2 more."""
    argv = tiny_gpt(
        topics, attention_dropout="0.1", hidden_dropout="0.1", train_iters="6", ckpt_format="torch_dist", **changes
    )
    full = jobs.run(argv, hook=hook)
    stopped = jobs.run([*argv, "--exit-interval", "4", "--save", str(folder), "--save-interval", "4"], hook=hook)
    assert stopped.losses == full.losses[:4]
    return full, jobs.run([*argv, "--load", str(folder)], hook=hook)


def test_stock_fsdp2_runs_on_a_host_mesh(megatron_jobs: MegatronJobs, topics: str) -> None:
    # Megatron's own FSDP2 asks for a mesh of CUDA devices. Also shows that the probes read DTensors.
    ddp = megatron_jobs.run(tiny_gpt(topics, train_iters="5"))
    fsdp = megatron_jobs.run(tiny_gpt(topics, train_iters="5", ckpt_format="torch_dist", use_torch_fsdp2=None))
    assert set(fsdp.ranks[0].local_types.values()) == {"DTensor"}
    assert fsdp.losses == pytest.approx(ddp.losses, rel=1e-6)
    assert fsdp.ranks[0].grads.keys() == ddp.ranks[0].grads.keys()
    for name, grad in ddp.ranks[0].grads.items():
        assert (fsdp.ranks[1].grads[name] - grad).abs().max() <= 1e-6 * grad.abs().max(), name


def test_data_set_of_topics(megatron_jobs: MegatronJobs, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "make_dataset.py"
    job = megatron_jobs.run([str(tmp_path / "topics")], script=script, world_size=1)
    said = dict(re.findall(r"(held-out.* entropy): ([\d.]+) nats a byte", job.ranks[0].stdout))
    # Python's help changes a little with every version.
    assert 3.1 < float(said["held-out byte entropy"]) < 3.4
    assert 2.2 < float(said["held-out bigram entropy"]) < 2.4
    assert float(said["held-out part's own bigram entropy"]) < float(said["held-out bigram entropy"])
    sizes = [int(size) for size in re.findall(r"(\d+) bytes", job.ranks[0].stdout)]
    assert 0.05 < sizes[1] / sum(sizes) < 0.15


def test_data_set_of_a_text_file(megatron_jobs: MegatronJobs, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "make_dataset.py"
    (tmp_path / "text").write_text("\n\n".join(f"{n:03} é" for n in range(20)), encoding="utf-8")
    job = megatron_jobs.run([str(tmp_path / "d"), "--text", str(tmp_path / "text")], script=script, world_size=1)
    assert f"{tmp_path / 'd'}-train: 18 documents, 108 bytes\n{tmp_path / 'd'}-valid: 2 documents, 12 bytes\n" in (
        job.ranks[0].stdout
    )
    tokens = torch.frombuffer(bytearray((tmp_path / "d-valid.bin").read_bytes()), dtype=torch.uint16).tolist()
    assert tokens == [*"018 é".encode(), 256, *"019 é".encode(), 256]
