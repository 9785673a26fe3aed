"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import RankPool


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    """Two gloo ranks."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    """Four gloo ranks."""
    pool = RankPool(4)
    yield pool
    pool.close()
