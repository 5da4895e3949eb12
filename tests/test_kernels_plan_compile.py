"""What plans a mask compiles for a GPU that need not be there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_what_plans_a_mask_compiles_for_hopper(tmp_path: Path):
    """Every kernel, with 32 and 64 bit words, with and without window and segments."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_plan", "90"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(made) == 10
    assert len({kernel["kernel"] for kernel in made}) == 6
    assert all(kernel["shared_bytes"] <= 1024 for kernel in made)
