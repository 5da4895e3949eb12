"""The kernels compile for a GPU that need not be there: tensor cores, pipelined loads, memory that fits.

Bounds on the compiler's figures are kept for each version of Triton; `UPDATE_GOLDEN=1` stores those of
the installed one.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.bench import kernel_compile
from experiments.bench.kernel_compile import INSTALLED, compile_with, figures
from experiments.bench.sass import loops, tile_loops

BOUNDS = Path(__file__).parent / "golden" / "kernel_bounds.json"
HOPPER_SHARED_BYTES = 227 * 1024  # of one block
BOUNDED = ("registers", "spilled_bytes", "shared_bytes", "instructions_full", "instructions_partial")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    """Width 128, bf16, with window and segments: the widest predicate."""
    return compile_with(INSTALLED, ["--head-dims", "128", "--masks", "WINDOW"])


def test_products_and_copies_are_hoppers_and_fit(made: dict[str, Any]):
    walking = {name: kernel for name, kernel in made["kernels"].items() if kernel["instructions_full"]}
    assert len(walking) == 5
    for name, kernel in walking.items():
        assert kernel["shared_bytes"] <= HOPPER_SHARED_BYTES, name
        assert kernel["wgmma"] > 0, name
        assert kernel["mma"] == 0, name
        assert kernel["async_copies"] > 0, name


def test_figures_stay_within_the_bounds_of_this_triton(made: dict[str, Any]):
    bounds = json.loads(BOUNDS.read_text())
    version = made["versions"]["triton"]
    ours = {
        name: {key: kernel[key] for key in BOUNDED if kernel[key] is not None}
        for name, kernel in made["kernels"].items()
    }
    if os.environ.get("UPDATE_GOLDEN") == "1":
        BOUNDS.write_text(json.dumps(bounds | {version: ours}, indent=1) + "\n")
        return
    if version not in bounds:
        pytest.fail(
            f"no bounds for Triton {version}: store them with UPDATE_GOLDEN=1 and review {BOUNDS.name}"
        )
    assert ours.keys() == bounds[version].keys()
    above = [
        f"{name}: {key} {value} > {bounds[version][name][key]}"
        for name, values in ours.items()
        for key, value in values.items()
        if value > bounds[version][name][key]
    ]
    assert above == []


SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   DEPBAR.LE SB0, 0x2 ;
.L_x_1:
        /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR8], R88, gsb0 ;
        /*0040*/               @P0 BRA `(.L_x_2) ;
        /*0050*/               @P1 BRA `(.L_x_0) ;
.L_x_2:
        /*0060*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR8], R88, gsb0 ;
        /*0070*/                   DEPBAR.LE SB0, 0x1 ;
        /*0080*/                   FADD R1, R2, R3 ;
        /*0090*/                   FADD R1, R2, R3 ;
        /*00a0*/                   FADD R1, R2, R3 ;
        /*00b0*/                   DEPBAR.LE SB0, 0xa ;
        /*00c0*/              @!P1 BRA `(.L_x_2) ;
.L_x_3:
        /*00d0*/                   EXIT ;
.L_x_4:
        /*00e0*/              @!P0 BRA `(.L_x_4) ;
        /*00f0*/                   BRA `(.L_x_1) ;
.L_x_5:
        /*0100*/                   BRA `(.L_x_5);
"""


def test_loops_run_from_a_label_to_the_branch_back():
    assert [len(loop.body) for loop in loops(SASS)] == [5, 7, 1, 1], (
        "what comes back from behind the end is no loop"
    )
    full, partial = tile_loops(SASS) or pytest.fail("no loops")
    assert (len(full.body), full.groups_in_flight) == (5, 2)
    assert (len(partial.body), partial.groups_in_flight) == (7, 1)
    assert tile_loops("        /*0000*/                   EXIT ;") is None
    with pytest.raises(ValueError, match=r"want 2 \(full and partial tiles\), got 4"):
        tile_loops(SASS + SASS.replace("L_x_", "L_x_1"))


def test_a_triton_that_cannot_be_had_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(kernel_compile, "FOLDERS", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert kernel_compile.run.main(["--triton", "3.6.0"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: triton 3.6.0: pip cannot install it: ")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_figures_are_the_worst_of_their_kernels():
    def kernel(**changed: int) -> dict[str, int]:
        plain = {"instructions_full": 400, "instructions_partial": 600, "tile_keys": 64}
        return plain | {"async_wait": 2, "spilled_bytes": 0} | changed

    found = figures(
        {
            "forward 128 plain": kernel(),
            "forward 128 window": kernel(async_wait=1, spilled_bytes=8),
            "forward 64 plain": kernel(spilled_bytes=100),
            "forward 128 ragged": kernel(spilled_bytes=100),
            "fused 128 plain": kernel(spilled_bytes=92),
            "fused 128 window": kernel(spilled_bytes=44),
        }
    )
    assert found == {
        "forward_instructions_per_128_keys": 800,
        "forward_partial_instructions_per_64_keys": 600,
        "forward_async_wait": 1,
        "forward_spilled_bytes": 8,
        "backward_spilled_bytes": 92,
    }
