"""DistTrain's experiments."""

import json
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest

from experiments.disttrain.figure3 import MODEL, MODULES, SIDES_PX, configurations, forward_ms
from experiments.disttrain.figure4 import CASES, LLM_PP, MICROBATCHES, idle_fractions
from experiments.disttrain.figure17 import evidence_of, executed
from experiments.disttrain.figure22 import (
    BOUNDS,
    EACH_WAY,
    NOMINAL,
    PLAUSIBLE,
    TP_SIZES,
    Bench,
    block,
    llms,
)
from experiments.disttrain.gains import Experiment
from experiments.disttrain.prose import COVERED, figure_11
from experiments.disttrain.simulated import Candidate, add_model, candidates, job_of
from experiments.disttrain.systems import (
    FABRIC_BYTES_PER_S,
    MODELS,
    PROFILE,
    SEQUENCE,
    STEPCCL,
    TOKENS,
    Calls,
    Images,
    Systems,
    Trained,
    Workload,
    plausible_images,
)
from experiments.harness.outcome import Evidence
from experiments.harness.printed import claim_value, printed_rows
from experiments.harness.printed_pipeline import StageTimes
from workbench.balance.orchestration.exact import best_of_every_pace, orchestrate
from workbench.balance.orchestration.task import Degrees, Orchestration
from workbench.cost.execution import Execution, Launch
from workbench.cost.model import CostModel
from workbench.cost.operator_passes import kernels_of
from workbench.cost.profile import load_profile
from workbench.model.layer import Matmul
from workbench.strategies.disttrain import task_of
from workbench.units import ms

SMALL = Workload(model="MLLM-9B", images=Images(read=4, drawn=2))


def test_monolithic_is_the_closed_form():
    systems = Systems(SMALL)
    encoder, llm, generator = systems._parts
    cost = systems._monolithic_cost
    result = systems.monolithic(48, 10, 1)
    stages_s = [
        encoder.passes_s(cost, 1, 1).total_s,  # 4 images on 8 GPUs: one each
        llm.sample_s(cost, 8),
        generator.passes_s(cost, 1, 1).total_s,
    ]
    rounds = ceil(10 / 2)  # two replicas of three stages of 8
    gradients = llm.num_parameters / 8 * 1 / 2 + (encoder.num_parameters + generator.num_parameters) * 15 / 16
    expected_s = sum(stages_s) + (rounds - 1) * max(stages_s) + 4 * gradients / FABRIC_BYTES_PER_S
    assert result.iteration_s == pytest.approx(expected_s)
    assert result.samples_per_s == pytest.approx(10 / expected_s)
    assert result.num_gpus == 48


def test_a_replica_must_fit():
    with pytest.raises(ValueError, match="want at least 96 GPUs for one replica, got 88"):
        Systems(SMALL).monolithic(88, 10, 10)


@pytest.mark.parametrize("trained", Trained)
def test_flop_is_of_what_runs(trained: Trained):
    parts = Systems(Workload(model="MLLM-9B", images=SMALL.images, trained=trained))._parts
    whole = Systems(SMALL)._parts
    for part, every in zip(parts, whole, strict=True):
        passes = 1 + part.needs.input_grad + part.needs.weight_grad
        assert part.sample_flop == pytest.approx(every.sample_flop * passes / 3)
        assert (part.reduction_bytes > 0) == part.needs.weight_grad


def test_flop_of_a_language_model_is_six_times_its_weights_and_attention():
    _, llm, _ = Systems(SMALL)._parts
    matmul = 6 * (llm.num_parameters - 32000 * 4096) * TOKENS  # the table of tokens is looked up
    attention = 3 * 4 * 4096 * 32 * TOKENS * (TOKENS + 1) / 2
    assert llm.sample_flop == pytest.approx(matmul + attention, rel=0.002)


@pytest.mark.parametrize("num_gpus", [96, 160])
def test_no_rival_is_faster(num_gpus: int):
    """Neither what DistMM* may choose nor fewer GPUs can beat the best of all choices."""
    systems = Systems(SMALL)
    best = systems.disttrain(num_gpus, 128)
    assert best.iteration_s <= systems.by_flop(num_gpus, 128).iteration_s * (1 + 1e-9)
    assert best.iteration_s <= systems.disttrain(num_gpus - 8, 128).iteration_s * (1 + 1e-9)
    assert best.num_gpus <= num_gpus
    assert 0 < best.mfu < 1


@pytest.mark.parametrize("model", MODELS)
def test_images_fit_into_a_sample(model: str):
    for images in plausible_images(model).values():
        pixels = images.read_px or Workload(model=model, images=images).pixels
        assert images.read * (pixels // 16) ** 2 <= TOKENS


def test_fewer_gpus_are_taken_for_a_little_time():
    systems = Systems(SMALL)
    best, frugal = systems.disttrain(96, 128), systems.frugal(96, 128, 0.05)
    assert frugal.num_gpus < best.num_gpus
    assert best.iteration_s < frugal.iteration_s <= 1.05 * best.iteration_s
    assert systems.disttrain(frugal.num_gpus - 1, 128).iteration_s > 1.05 * best.iteration_s


def test_overlapped_collectives_and_cut_activations_are_faster():
    """By what DistTrain has and Megatron-LM has not; the generator has no tensor parallelism to gain by."""
    serial, cut, together = (
        Systems(SMALL, execution=execution, monolithic=execution)
        for execution in (Execution(), SEQUENCE, STEPCCL)
    )
    seconds = [[stage.total_s for stage in each.monolithic_stages(1)] for each in (serial, cut, together)]
    assert seconds[0][1] > seconds[1][1] > seconds[2][1]
    assert seconds[0][2] == seconds[1][2] == seconds[2][2]
    assert Systems(SMALL).monolithic_stages(1) == cut.monolithic_stages(1)


def test_what_is_not_printed_is_named():
    with pytest.raises(ValueError, match="nothing is printed of megatron and MLLM-9B"):
        Experiment(name="overall", budget=8).printed("megatron", "MLLM-9B")
    with pytest.raises(ValueError, match="no claim 'dt_x' in disttrain_claims"):
        claim_value("dt_x")


def test_images_together_take_less_than_one_by_one():
    """As much work in fewer and larger kernels."""
    each = replace(SMALL, images=replace(SMALL.images, calls=Calls.EACH))
    together, apart = (Systems(workload)._parts for workload in (SMALL, each))
    cost = Systems(SMALL)._cost
    for one, other in zip(together, apart, strict=True):
        assert one.sample_flop == other.sample_flop
        faster = one.sample_s(cost, 1) < other.sample_s(cost, 1)
        assert faster == (one.name != "llm")


BENCH = Bench()


def test_settings_are_fixed_and_begin_with_the_nominal_one():
    assert PLAUSIBLE[0] == NOMINAL
    assert len(set(PLAUSIBLE)) == len(PLAUSIBLE) == 4 * 2 * 2
    assert EACH_WAY.bytes_per_s == 2 * NOMINAL.link.bytes_per_s


@pytest.mark.parametrize("llm", ["Llama3-7B", "Llama3-13B", "Llama3-70B"])
def test_blocks_have_the_weights_of_table_2(llm: str):
    assert llm in llms()
    sizes = {
        op.name: op.in_features * op.out_features for op in block(llm).operators if isinstance(op, Matmul)
    }
    assert len(sizes) == 4  # q, k and v together; gate and up together
    printed = {"Llama3-7B": 202e6, "Llama3-13B": 317e6, "Llama3-70B": 856e6}
    assert sum(sizes.values()) == pytest.approx(printed[llm], rel=0.01)


@pytest.mark.parametrize("tp", TP_SIZES)
def test_without_its_own_costs_the_overlap_gains_more(tp: int):
    for llm in llms():
        modelled, no_remap, whole, both = (BENCH.bounded_gain(llm, tp, bound) for bound in BOUNDS)
        assert modelled == pytest.approx(BENCH.gain(llm, tp, NOMINAL), rel=1e-9)
        assert modelled < min(no_remap, whole) <= max(no_remap, whole) < both


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


def candidate(pp: int, printed_s: float, whole_s: float, simulated_s: float | None) -> Candidate:
    found = Orchestration(degrees=(Degrees(tp=1, dp=1, pp=pp),), warmup_s=0.0, steady_s=1.0, reduction_s=0.0)
    return Candidate(orchestration=found, printed_s=printed_s, whole_s=whole_s, simulated_s=simulated_s)


def test_regret_is_over_what_fits():
    evidence = Evidence()
    add_model(
        evidence,
        "m",
        (candidate(1, 1.0, 3.0, None), candidate(2, 2.0, 3.0, 4.0), candidate(3, 3.0, 2.0, 2.5)),
    )
    ours = evidence.ours
    assert [claim.holds for claim in evidence.claims] == [False]  # the printed formula's choice does not fit
    assert (ours["modelled/m/candidates"], ours["modelled/m/that fit"]) == (3, 2)
    assert ours["modelled/m/printed/regret"] == pytest.approx(4.0 / 2.5 - 1)
    assert ours["modelled/m/whole layers/regret"] == 0.0
    assert ours["modelled/m/printed/tau"] == -1.0
    assert ours["modelled/m/whole layers/mean_error"] == pytest.approx((3 / 4 + 2 / 2.5) / 2 - 1)


def test_a_small_cluster_is_simulated():
    cost = CostModel(load_profile("A100-80GB"))
    job = job_of("MLLM-9B", nodes=2, batch=4)
    task = task_of(job, cost)
    by_pace = best_of_every_pace(task)
    assert by_pace[0] == orchestrate(task)
    assert len({each.degrees[1].dp for each in by_pace}) == len(by_pace)
    found = candidates(job, cost)
    assert any(each.simulated_s is not None for each in found)
    for each in found:
        assert each.printed_s <= each.whole_s
        assert each.simulated_s is None or each.simulated_s > 0.5 * each.printed_s
