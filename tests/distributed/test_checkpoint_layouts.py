"""Checkpoints on other numbers of ranks and with other sharding: the same values, wherever they lie."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mindspeed_fsdp2 import CheckpointError, wrap_model
from mindspeed_fsdp2.checkpoint import load_checkpoint, save_checkpoint
from tests.distributed.checkpoint_jobs import Job, Outcome, contents, run
from tests.distributed.models import build, tokens_of
from tests.distributed.ranks import RankPool

pytestmark = pytest.mark.slow

IGNORED = ("ignored_modules", ["adapter"])


@pytest.fixture(scope="module")
def pools(ranks2: RankPool, ranks4: RankPool) -> Iterator[dict[int, RankPool]]:
    """Pools of 1 to 4 ranks."""
    one, three = RankPool(1), RankPool(3)
    yield {1: one, 2: ranks2, 3: three, 4: ranks4}
    one.close()
    three.close()


@pytest.mark.parametrize("kind", ["adamw", "local"])
def test_two_to_four_to_one_to_three_ranks(pools: dict[int, RankPool], tmp_path: Path, kind: str) -> None:
    """The same batch on every rank, so training must not notice where it runs."""
    whole = pools[2].run(run, Job(kind, same_data=True), 0, 8)[0]
    directory = str(tmp_path / "ckpt")
    chain = [
        (2, ()),
        (4, (("sharding_size", 2), IGNORED)),  # HSDP, and a module that is not sharded any more
        (1, (("offload_to_cpu", True),)),
        (3, (IGNORED,)),
        (4, (("sharding_size", 1),)),
        (4, ()),
    ]
    losses: list[float] = []
    before: Outcome | None = None
    for hop, (ranks, config) in enumerate(chain):
        job = Job(kind, config, same_data=True)
        if before is not None:  # what is loaded equals what was saved, to the last bit, on every rank
            for outcome in pools[ranks].run(run, job, hop, hop, directory, None, 8 + hop):
                assert outcome.differences(before, ()) == []
                notes = outcome.loaded.report.notes
                assert len(notes) == (ranks != chain[hop - 1][0]), notes
        load = directory if hop else None
        before, *others = pools[ranks].run(run, job, hop, hop + 1, load, directory, 8 + hop if hop else 7)
        assert all(other.differences(before, ("losses",)) == [] for other in others)
        losses += before.losses
    assert losses == pytest.approx(whole.losses[: len(chain)], rel=1e-5)
    assert len(set(losses)) == len(losses) and before is not None and before.state["gate.weight"]


def _tied(directory: str, save: bool) -> tuple[list[str], bool]:
    job = Job(tied=True, same_data=True)
    model, optimizer, _ = job.build(7 if save else 8)
    if save:
        model(tokens_of(0, 0)).backward()
        optimizer.step()
        save_checkpoint(directory, model, optimizer, step=1)
    else:
        load_checkpoint(directory, model, optimizer)
    outcome = contents(model, optimizer)
    torch.save([outcome.model, outcome.state], f"{directory}-{save}-{dist.get_rank()}.pt")
    return sorted(outcome.state), model.head.weight is model.embedding.weight


def test_tied_weights(pools: dict[int, RankPool], tmp_path: Path) -> None:
    directory = str(tmp_path / "ckpt")
    names, tied = pools[2].run(_tied, directory, True)[0]
    assert tied and "embedding.weight" in names and "head.weight" not in names
    saved, saved_state = torch.load(f"{directory}-True-0.pt")
    for ranks in (4, 3):
        assert pools[ranks].run(_tied, directory, False) == [(names, True)] * ranks
        for rank in range(ranks):
            loaded, state = torch.load(f"{directory}-False-{rank}.pt")
            assert torch.equal(loaded["head.weight"], saved["embedding.weight"])
            assert loaded.keys() == saved.keys() and all(torch.equal(loaded[key], saved[key]) for key in saved)
            assert torch.equal(state["embedding.weight"]["exp_avg"], saved_state["embedding.weight"]["exp_avg"])


def _sizes(directory: str, size: Any) -> dict[str, int]:
    model = wrap_model(build(dim=256), {"sharding_size": size, "sub_modules_to_wrap": ["layers.{*}"]})
    optimizer = torch.optim.AdamW(model.parameters())
    model(tokens_of(0, 0)).backward()
    optimizer.step()
    path = save_checkpoint(f"{directory}/{size}", model, optimizer, step=1)
    return {name: os.path.getsize(path / name) for name in sorted(os.listdir(path)) if name.endswith("distcp")}


def test_copies_are_written_once_by_all_replicas_together(ranks4: RankPool, tmp_path: Path) -> None:
    values = sum(p.numel() for p in build(dim=256).parameters()) * 4 * 3
    for size in ("auto", 2, 1):
        files = ranks4.run(_sizes, str(tmp_path), size)[0]
        assert len(files) == 4
        assert values < sum(files.values()) < 1.08 * values, size
        assert max(files.values()) < 1.2 * min(files.values()), size


class Shapes(nn.Module):
    """Parameters of awkward first dimensions."""

    def __init__(self) -> None:
        super().__init__()
        for rows in (1, 2, 3, 5, 8):
            self.register_parameter(f"p{rows}", nn.Parameter(torch.randn(rows, 3)))
            self.register_parameter(f"b{rows}", nn.Parameter(torch.randn(rows)))

    def forward(self) -> torch.Tensor:
        return sum(p.sin().sum() for p in self.parameters())  # type: ignore[return-value]


def _awkward(directory: str, save: bool, seed: int) -> Any:
    torch.manual_seed(seed)
    model = wrap_model(Shapes(), {"sharding_size": "auto", "sub_modules_to_wrap": []})
    optimizer = torch.optim.Adam(model.parameters())
    if save:
        model().backward()
        optimizer.step()
        save_checkpoint(directory, model, optimizer, step=1)
    else:
        load_checkpoint(directory, model, optimizer)
    outcome = contents(model, optimizer)
    return {n: t.tolist() for n, t in outcome.model.items()}, {
        n: {k: t.tolist() for k, t in s.items()} for n, s in outcome.state.items()
    }


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4), (4, 1), (2, 3)])
def test_first_dimensions_that_do_not_divide(
    pools: dict[int, RankPool], tmp_path: Path, before: int, after: int
) -> None:
    saved = pools[before].run(_awkward, str(tmp_path), True, 1)[0]
    assert len(saved[0]) == len(saved[1]) == 10
    assert all(loaded == saved for loaded in pools[after].run(_awkward, str(tmp_path), False, 2))


def _two_groups(directory: str, apart: bool) -> str:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = dist.get_rank() // 2
    torch.manual_seed(half)
    model = wrap_model(Shapes(), {"sharding_size": "auto", "sub_modules_to_wrap": []}, process_group=halves[half])
    before = {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}
    where = f"{directory}/{half}" if apart else directory
    try:
        save_checkpoint(where, model, step=1)
    except CheckpointError as error:
        return str(error)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    load_checkpoint(where, model)
    return str(all(torch.equal(p.full_tensor(), before[n]) for n, p in model.named_parameters()))


def test_two_data_parallel_groups_need_two_directories(ranks4: RankPool, tmp_path: Path) -> None:
    assert ranks4.run(_two_groups, str(tmp_path / "a"), True) == ["True"] * 4
    assert (
        ranks4.run(_two_groups, str(tmp_path / "b"), False)
        == [
            f"{os.path.realpath(tmp_path / 'b')}: 2 data-parallel groups would save different tensors under the same names. "
            "Give each group its own directory."
        ]
        * 4
    )
    assert not (tmp_path / "b").exists()
