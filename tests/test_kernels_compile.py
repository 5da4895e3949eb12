"""The kernels compile for a GPU that need not be there: tensor cores, pipelined loads, memory that fits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOPPER_SHARED_BYTES = 227 * 1024  # of one block


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_compiles_for_hopper_within_shared_memory(tmp_path: Path):
    """Width 128, bf16, with window and segments: the widest predicate."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels", "90", "128", "FORWARD", "FUSED"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(made) == 2
    for kernel in made:
        assert kernel["shared_bytes"] <= HOPPER_SHARED_BYTES, kernel
        assert kernel["wgmma"] > 0, kernel
        assert kernel["async_copies"] > 0, kernel
