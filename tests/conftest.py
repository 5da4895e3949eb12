"""Fixtures that all tests share."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# Kernels run under Triton's interpreter where there is no GPU; read when anything first imports triton.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from runtime.world.pool import Pool

MAX_RANKS = 8

# A run of the tests says the same twice; HYPOTHESIS_PROFILE=explore looks for new cases, and for longer.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """One pool of gloo workers for the whole session; forked as jobs need them."""
    with Pool(MAX_RANKS) as workers:
        yield workers
