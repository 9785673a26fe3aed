"""Fixtures of the tests that train real Megatron models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.megatron.jobs import MegatronJobs


@pytest.fixture(scope="session")
def megatron_jobs() -> Iterator[MegatronJobs]:
    """Runs Megatron jobs on forked ranks."""
    jobs = MegatronJobs()
    yield jobs
    jobs.close()
