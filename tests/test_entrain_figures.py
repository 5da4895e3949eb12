"""Experiments on Entrain's tables and figures."""

import os
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from experiments.disttrain import figure5, figure16
from experiments.entrain import (
    algorithm3,
    executed,
    figure4_5,
    figure4_6,
    figure4_12,
    figure4_13,
    figure4_15,
    series,
    table4_3,
)
from experiments.entrain.figures4_9_11 import deferred, samples, variants
from experiments.entrain.intervals import bootstrap, ratio_of_medians
from experiments.entrain.replica import Replica
from experiments.entrain.stage_work import layer_quadratics, shared_cuts
from experiments.entrain.workload import batch_of
from experiments.harness.figure import Box
from tests.schedule_grids import parse_timeline
from tests.test_data_strategies import skewed_job
from workbench.balance.stages.partition import partition
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile, load_profile
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.frozen import FrozenRule
from workbench.plan.plan import Plan
from workbench.planner.assembly import draft_plan
from workbench.planner.layer_cost import layer_costs
from workbench.planner.stage_counts import PlannerStopped, silent
from workbench.strategies import entrain_search

LLM = "Llama3-3b"


def test_every_pair_of_model_and_data_set_is_printed():
    cells = series.printed_stages()
    assert len(cells) == 2 * 4 * 3
    assert cells["SynthChartNet", "Llama3-1b", "entrain"] == (5, 3)
    assert cells["CocoQA", "Llama3-3b", "entrain"] == (3, 5)
    assert all(sum(cell) == 8 for key, cell in cells.items() if key[2] != "dip")


def test_idle_is_what_the_passes_leave_of_the_step():
    drawn = [
        Box(0, "vision", True, 0.0, 1.0),
        Box(0, "vision", False, 3.0, 4.0),
        Box(1, "llm", True, 1.0, 2.0),
    ]
    assert figure4_13.idle_fractions(drawn) == [0.5, 0.75]


def test_reordering_even_work_changes_nothing():
    groups = [[1.0, 1.0, 1.0]] * 2
    plain = figure16.step_s(groups, 2, reorders=False)
    assert plain == figure16.step_s(groups, 2, reorders=True) == pytest.approx(3 + 4 - 1)


def test_image_work_is_relative_to_the_mean():
    work = figure16.image_work(300, 3)
    assert np.mean(work) == pytest.approx(1, rel=0.15)
    assert min(work) >= 0


def test_subsequences_fill_a_sample():
    found = figure5.distributions()
    assert min(found["text tokens of a subsequence"]) >= 1
    assert max(found["image tokens of a subsequence"]) <= 64 * 64


def test_a_split_far_from_the_ratio_is_slower():
    found = figure4_15.steps_s("CocoQA", LLM, num_batches=1)
    assert len(found) == 7
    assert found[4, 4] < min(found[1, 7], found[7, 1])


def test_shared_cuts_hold_all_layers_and_share_one_block():
    samples = batch_of("LLaVA-150k", 32, 1)
    encoder, llm = shared_cuts(LLM, samples, 8, 8)
    for module, cuts in (("vision", encoder), ("llm", llm)):
        assert cuts[0][0] == 0
        assert cuts[-1][1] == len(layer_quadratics(LLM, module))
        assert all(a[1] == b[0] for a, b in pairwise(cuts))
    replica = Replica(llm=LLM, samples=samples, stages=(3, 5))
    pipeline = replica.pipeline(encoder, llm, is_shared=True)
    assert len(pipeline.groups) == 8 == len(encoder) + len(llm) - 1
    assert pipeline.groups[len(encoder) - 1] == (len(encoder) - 1, len(encoder))


def test_idle_shares_are_what_work_leaves_of_the_ranks_time() -> None:
    found = figure4_6.idle_shares("CocoQA", num_batches=2)
    assert all(len(shares) == 2 and 0 < min(shares) <= max(shares) < 1 for shares in found.values())
    replica = figure4_6.drawn("CocoQA", 1)
    assert replica.num_microbatches == figure4_6.MICROBATCHES
    assert sum(replica.stages) == figure4_6.STAGES
    alone_s = sum(work.samples_s()[0] for work in (replica.encoder_work(), replica.llm_work()))
    assert figure4_6.busy_s(replica) > alone_s
    assert figure4_6.IDLE_OF_EVEN_WORK == 3 / 19
    assert figure4_6.ideal_idle("disttrain", replica) == 3 / 19
    assert 0 <= figure4_6.ideal_idle("optimus", replica) < figure4_6.ideal_idle("dip", replica) < 3 / 19


def test_printed_means_lie_outside_what_the_printed_allocations_allow():
    assert figure4_5.allocated("C_3").excludes(2.43)
    assert figure4_5.allocated("4_2").excludes(1.27)
    assert not figure4_5.allocated("C_3").excludes(9 / 7)


def test_an_interval_holds_the_mean_and_narrows_with_more_values():
    few, many = bootstrap([1.0, 1.2] * 5), bootstrap([1.0, 1.2] * 200)
    for found in (few, many):
        assert found.mean == pytest.approx(1.1)
        assert found.low < found.mean < found.high
    assert many.high - many.low < few.high - few.low
    assert bootstrap([2.0, 2.0]) == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match=">= 2 values, got 1"):
        bootstrap([1.0])


def test_one_slow_round_does_not_move_a_ratio_of_medians():
    own = [1.0, 1.01, 0.99, 1.0, 1.0] * 6
    slow = [2.0 * seconds for seconds in own[:-1]] + [50.0]
    found = ratio_of_medians([slow, slow], own)
    assert found == pytest.approx((2.0, 2.0, 2.0), rel=0.02)
    noisy = [0.5, 1.5] * 15  # a mean of ratios would say 1.33
    assert ratio_of_medians([noisy], noisy).mean == 1.0
    with pytest.raises(ValueError, match="same >= 2 rounds"):
        ratio_of_medians([[1.0, 2.0]], [1.0])


def test_executed_plans_do_the_same_work_in_other_orders():
    every = executed.cases(ideal_profile(), executed.UNMEASURED)
    samples = [
        sorted(item.sample for m in case.plan.microbatches_of["llm", 0] for item in m.items) for case in every
    ]
    assert samples == [list(range(executed.NUM_SAMPLES))] * (executed.ORDERS + len(executed.PLANNERS))
    by_name = {case.name: case.plan for case in every}
    assert by_name.pop("entrain-in-turn").microbatches == by_name["entrain"].microbatches
    assert len({plan.microbatches for plan in by_name.values()}) == len(by_name)


def test_ratios_are_of_medians_against_the_mean_of_the_orders():
    predicted: list[Any] = [
        SimpleNamespace(
            case=SimpleNamespace(name=name), plan_hash=name, simulated=SimpleNamespace(iteration_s=seconds)
        )
        for name, seconds in (("random 1", 3.0), ("random 2", 5.0), ("entrain", 2.0))
    ]
    rounds = {"random 1": [3.0, 30.0], "random 2": [5.0, 50.0], "entrain": [2.0, 20.0]}
    result = executed.summary(predicted, rounds)
    row = result["plans"]["entrain"]
    assert row["predicted_speedup"] == row["executed_speedup"] == 2.0
    assert result["entrain_is_faster"]
    slower = executed.summary(predicted, rounds | {"entrain": [4.0, 40.0]})
    assert not slower["entrain_is_faster"]
    assert any("FAILS" in line for line in executed.lines(slower))


def figures(seconds: list[float], spread_s: float) -> dict[str, list[float]]:
    return {
        "seconds": seconds,
        "vision_std_s": [spread_s] * len(seconds),
        "llm_std_s": [spread_s] * len(seconds),
    }


def test_speedups_pair_the_batches_that_both_have_seen():
    methods = {"entrain": figures([2.0, 4.0], 1.0), "slow": figures([4.0, 8.0, 100.0], 3.0)}
    over = figure4_12.speedups(methods, "entrain")
    assert over == {"slow": (2.0, 2.0, 2.0)}


def test_the_largest_reduction_is_taken_over_all_cells():
    even, uneven = figures([1.0, 1.0], 1.0), figures([1.0, 1.0], 4.0)
    every = {"llm": {"a": {"entrain": even, "disttrain": uneven}, "b": {"entrain": even, "disttrain": even}}}
    assert table4_3.largest_reduction(every) == 4.0
    assert table4_3.printed()["vision", "disttrain", "SynthChartNet"] == 208.07


def test_worse_configurations_are_simulated_too():
    every: list[Any] = list(range(20))
    assert algorithm3.spread(every, 6) == (0, 1, 2, 3, 8, 14)
    assert algorithm3.spread(every[:4], 8) == (0, 1, 2, 3)


def test_a_series_that_is_not_there_names_its_command(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(series, "RESULTS", tmp_path)
    with pytest.raises(ValueError, match=r"experiments\.entrain\.series --llm"):
        series.kept_series()


GOLDEN = Path(__file__).parent / "golden"
VARIANTS = dict(variants())


def path_of(name: str) -> Path:
    return GOLDEN / f"entrain_{name.replace(',', '').replace(' ', '_')}.txt"


@pytest.mark.parametrize("name", VARIANTS)
def test_timeline_is_the_reviewed_one(name: str):
    path, ours = path_of(name), VARIANTS[name].text()
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(ours)
    assert ours == path.read_text(), f"{path.name} differs; UPDATE_GOLDEN=1 writes it anew"


@pytest.mark.parametrize("name", VARIANTS)
def test_every_timeline_does_all_the_work(name: str):
    """18 units in the encoder at two ticks and 36 halves on each LLM stage, thrice with backwards."""
    slots = parse_timeline(path_of(name).read_text())
    busy = Counter({ranks: sum(s.end_tick - s.start_tick for s in of) for ranks, of in slots.items()})
    assert set(busy.values()) == {3 * 36}


def test_loads_are_those_that_the_printed_table_implies():
    microbatches, encoder, llm = samples()
    loads = [sum(llm[s] for s in held) for held in microbatches]
    assert loads == [3, 4, 8, 6, 6, 9]
    assert [sum(encoder[s] for s in held) for held in microbatches] == [3] * 6
    printed = {(3, 1): 11, (3, 2): 12, (3, 5): 14, (4, 1): 9, (4, 2): 10, (4, 5): 12}
    printed |= {(6, 1): 12, (6, 2): 13, (6, 5): 15}
    assert {pair: loads[pair[0] - 1] + loads[pair[1] - 1] for pair in printed} == printed
    assert [sum(llm[s] for s in held) for held in deferred().llm] == [6] * 6


COST = CostModel(load_profile("A40"))


def open_job() -> Job:
    return replace(skewed_job("everything"), layouts=())


def test_the_formula_is_every_stage_once_and_the_slowest_for_each_further_microbatch():
    job = open_job()
    draft = draft_plan(job, "test")
    for found in entrain_search.configurations(job, COST):
        stages_s = []
        for layout in found.layouts:
            layers_s = [each.total_s for each in layer_costs(job, draft, layout, COST, FrozenRule.EXACT)]
            stages_s += [sum(layers_s[a:b]) for a, b in partition(tuple(layers_s), layout.pp or 1)]
        further = len(job.batch) // (found.replicas * job.microbatch_samples) - 1
        formula_s = sum(stages_s) + further * max(stages_s) + found.reshard_s
        assert found.formula_s == pytest.approx(formula_s, rel=1e-9)


def test_configurations_come_fastest_first_and_keep_to_the_ranks():
    job = open_job()
    found = entrain_search.configurations(job, COST)
    assert len(found) == len({(each.replicas, each.layouts) for each in found})
    assert all(a.formula_s <= b.formula_s for a, b in pairwise(found))
    for each in found:
        ranks = sum(layout.tp * (layout.pp or 1) for layout in each.layouts)
        assert each.replicas * ranks <= job.cluster.num_ranks
        assert len(job.batch) % (each.replicas * job.microbatch_samples) == 0


def test_different_degrees_at_an_edge_cost_resharding_and_equal_ones_nothing():
    for each in entrain_search.configurations(open_job(), COST):
        degrees = {layout.module: layout.tp for layout in each.layouts}
        differs = any(degrees[encoder] != degrees["llm"] for encoder in ("vision", "audio"))
        assert (each.reshard_s > 0) == differs


def test_the_plan_is_the_first_that_fits():
    job = open_job()
    plan: Plan = entrain_search.plan(job, COST)
    best = entrain_search.configurations(job, COST)[0]
    assert plan.strategy == "entrain-search"
    assert {m: len(plan.chain[m, 0]) for m in ("vision", "audio", "llm")} == {
        layout.module: layout.pp for layout in best.layouts
    }


def test_given_stage_counts_are_kept():
    job = replace(open_job(), layouts=(ModuleLayout(module="llm", pp=2),))
    found = entrain_search.configurations(job, COST)
    assert {each.layouts[-1].pp for each in found} == {2}


def test_no_configuration_is_named():
    with pytest.raises(ValueError, match="no configuration of 2 ranks for 12 samples"):
        entrain_search.configurations(replace(open_job(), max_ranks=2), COST)
    nodes = tuple(replace(node, memory_bytes=1) for node in open_job().cluster.nodes)
    tight = replace(open_job(), cluster=replace(open_job().cluster, nodes=nodes))
    with pytest.raises(ValueError, match=r"no configuration of \d+ fits"):
        entrain_search.plan(tight, COST)


def test_a_search_that_is_stopped_among_its_second_plans_has_the_first():
    tried: list[int] = []

    def stopping(done: int, total: int, best_s: float) -> None:
        if tried and done < tried[-1]:  # the second ranking begins
            raise PlannerStopped
        tried.append(done)

    found = entrain_search.shortlist(open_job(), COST, stopping, 2)
    assert found == entrain_search.shortlist(open_job(), COST, silent, 2)[:2]
    assert len(found) == 2
