"""Fixtures that all tests share."""

from collections.abc import Iterator

import pytest

from runtime.pool import Pool

MAX_RANKS = 8


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """One pool of gloo workers for the whole session; forked as jobs need them."""
    with Pool(MAX_RANKS) as workers:
        yield workers
