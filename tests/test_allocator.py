"""Workers reuse the memory that they have freed."""

import platform
import resource

import pytest
import torch

from runtime.world.allocator import keep_freed_memory
from runtime.world.pool import Place, Pool

NUM_BYTES = 2**26  # more than glibc maps apart by default


ROUNDS = 16  # freed pieces a few bytes too small for the next aligned one lie apart until neighbours are free


def faults_when_warm(place: Place) -> int:
    """Page faults of making 64 MiB of ones again and again, when fewest."""
    del place
    faults = []
    for _ in range(ROUNDS):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(NUM_BYTES // 4)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_freed_memory_is_not_mapped_again() -> None:
    with Pool(1) as pool:
        (faults,) = pool.run(faults_when_warm, 1)
    assert faults < NUM_BYTES // 4096 // 100


def test_other_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not keep_freed_memory()
