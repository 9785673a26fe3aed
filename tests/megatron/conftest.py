"""Fixtures of the tests that train real Megatron models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.megatron.jobs import ROOT, MegatronJobs


@pytest.fixture(scope="session")
def megatron_jobs() -> Iterator[MegatronJobs]:
    """Runs Megatron jobs on forked ranks."""
    jobs = MegatronJobs()
    yield jobs
    jobs.close()


@pytest.fixture(scope="session")
def topics(megatron_jobs: MegatronJobs, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of the data set of Python's help topics."""
    prefix = tmp_path_factory.mktemp("data") / "topics"
    megatron_jobs.run([str(prefix)], script=Path(ROOT, "examples", "make_dataset.py"), world_size=1)
    return str(prefix)
