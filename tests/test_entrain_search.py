"""Entrain's search over degrees: its formula by hand, its order, and what it refuses."""

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.test_data_strategies import skewed_job
from workbench.balance.stages.partition import partition
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.frozen import FrozenRule
from workbench.plan.plan import Plan
from workbench.planner.assembly import draft_plan
from workbench.planner.layer_cost import layer_costs
from workbench.planner.stage_counts import PlannerStopped, silent
from workbench.strategies import entrain_search

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
