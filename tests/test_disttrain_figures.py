"""Pure parts of DistTrain's smaller figures."""

import json
from pathlib import Path

import pytest

from experiments.disttrain.figure3 import MODEL, MODULES, SIDES_PX, configurations, forward_ms
from experiments.disttrain.figure4 import CASES, LLM_PP, MICROBATCHES, idle_fractions
from experiments.disttrain.figure17 import evidence_of, executed
from experiments.disttrain.prose import COVERED, figure_11
from experiments.disttrain.systems import PROFILE, Images, Systems, Workload
from experiments.harness.printed import printed_rows
from experiments.harness.printed_pipeline import StageTimes
from workbench.cost.execution import Execution, Launch
from workbench.cost.operator_passes import kernels_of
from workbench.cost.profile import load_profile
from workbench.units import ms

SYSTEMS = Systems(CASES["light"])
CELL = {
    "colocated_ms_p50": 2000.0,
    "colocated_ms_p99": 2500.0,
    "disaggregated_ms_p50": 0.5,
    "disaggregated_ms_p99": 1.0,
}


def test_configurations_fit_into_the_sequence():
    assert configurations() == ((1, 512), (2, 512), (4, 512), (8, 512), (1, 1024), (2, 1024))


def test_images_of_a_group_are_distributed():
    """Up to eight images take as long as one: every GPU has its own."""
    one, eight = forward_ms(1, 512), forward_ms(8, 512)
    assert one["encoder"] == pytest.approx(eight["encoder"])
    assert set(one) == set(MODULES)


def test_a_device_that_waits_for_no_host_takes_longer_for_more_pixels():
    """Four times the pixels are four times the products and more of attention, at a somewhat better rate."""
    small, large = (forward_ms(1, side_px, Launch.GRAPH) for side_px in SIDES_PX)
    for module in ("encoder", "generator"):
        assert large[module] > 3 * small[module]
    assert large["LLM stage"] == small["LLM stage"]


@pytest.mark.parametrize("side_px", SIDES_PX)
def test_the_host_bounds_short_forwards_from_below(side_px: int):
    """It launches as many kernels for a small image as for a large one: a layer takes the longer of both."""
    systems = Systems(Workload(model=MODEL, images=Images(read=1, drawn=1), side_px=side_px))
    run = Execution().on(load_profile(PROFILE))
    eager, recorded = (forward_ms(1, side_px, launch) for launch in Launch)
    for module in systems.model.modules:
        if module.name == "llm":
            continue
        kernels = sum(run.num_kernels(each) for layer in module.layers for each in kernels_of(layer))
        host_ms, gaps_ms = (ms(kernels * each_s) for each_s in (run.host_kernel_s, run.kernel_gap_s))
        assert max(host_ms, recorded[module.name]) <= eager[module.name]
        assert eager[module.name] <= host_ms + gaps_ms + recorded[module.name]


@pytest.mark.parametrize("slow", ["encoder", "llm", "generator"])
def test_whoever_is_slowest_does_not_idle_in_a_full_pipeline(slow: str):
    stages = tuple(
        StageTimes(*((2.0, 4.0) if name == slow else (1.0, 2.0))) for name in ("encoder", "llm", "generator")
    )
    idle = idle_fractions(SYSTEMS.model, stages)
    assert min(idle, key=idle.get) == slow
    assert idle[slow] < 0.2
    assert LLM_PP < MICROBATCHES


def test_equal_stages_have_no_bubbles_but_at_the_ends():
    idle = idle_fractions(SYSTEMS.model, (StageTimes(1.0, 1.0),) * 3)
    assert max(idle.values()) < 0.35


def test_figure_17_reads_what_was_executed(tmp_path: Path):
    path = tmp_path / "bench.json"
    with pytest.raises(
        ValueError, match=r"bench.json does not exist; run python -m experiments.bench.preprocess"
    ):
        executed(path)
    path.write_text(json.dumps({"executed": {"40 x 1024": CELL, "10 x 512, starved": CELL}}))
    assert list(executed(path)) == ["40 x 1024"]
    assert [claim.holds for claim in evidence_of(executed(path)).claims] == [True, True, True]


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        ({"colocated_ms_p50": 900.0}, [True, False, True]),
        ({"disaggregated_ms_p50": 11.0}, [True, True, False]),
    ],
)
def test_figure_17_can_fail(change: dict[str, float], holds: list[bool]):
    assert [claim.holds for claim in evidence_of({"bar": CELL | change}).claims] == holds


def test_nothing_executed_is_no_success(tmp_path: Path):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"predicted": {}}))
    assert not any(claim.holds for claim in evidence_of(executed(path)).claims)


def test_figure_11_puts_a_small_sample_beside_each_large_one():
    assert figure_11() == (1, 3, 2, 4)


def test_every_claim_of_the_paper_is_held_against_something():
    beginnings = tuple(beginning for of_script in COVERED.values() for beginning in of_script)
    scripts = {path.stem for path in Path("experiments/disttrain").glob("*.py")}
    for row in printed_rows("disttrain_claims"):
        assert row["claim_id"].startswith(beginnings), row["claim_id"]
    assert set(COVERED) - {"figure16"} <= scripts
