"""Graded microbatches in an order of their own on shared ranks: never slower, and trained the same."""

from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.world.pool import Pool
from tests.examples import examples
from tests.test_data_strategies import COST, skewed_batch, skewed_job
from tests.test_parity import assert_same
from tests.tiny_valm import tiny_valm
from workbench.balance.microbatches import unit_order
from workbench.balance.microbatches.pipeline_time import eager_starts, first_stage_starts
from workbench.balance.microbatches.unit_order import order_units, unimproved_order
from workbench.cost.hardware import Link
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.model_graph import connect
from workbench.model.trainable import Trainable
from workbench.plan.lower import lower
from workbench.schedule.action import Action, Pass, parse_action
from workbench.schedule.eager import with_eager_forwards
from workbench.schedule.one_f_one_b import gpipe, one_f_one_b
from workbench.strategies import entrain, entrain_graded
from workbench.timing.critical_path import critical_path_s
from workbench.timing.price import price


def played(programs: list[list[Action]], forward: np.ndarray, backward: np.ndarray) -> list[float]:
    """Ends of the first stage's backwards, by playing the programs out action by action."""
    ends: dict[tuple[Pass, int, int], float] = {}
    free = [0.0] * len(programs)
    todo = [list(program) for program in programs]
    while any(todo):
        before = sum(map(len, todo))
        for s, actions in enumerate(todo):
            while actions:
                kind, m = actions[0].kind, actions[0].microbatch
                if kind is Pass.F:
                    needs = [(Pass.F, s - 1, m)] if s else []
                else:
                    needs = [(Pass.B, s + 1, m)] if s + 1 < len(todo) else [(Pass.F, s, m)]
                if any(need not in ends for need in needs):
                    break
                took = (forward if kind is Pass.F else backward)[m, s]
                free[s] = ends[kind, s, m] = max([free[s], *(ends[need] for need in needs)]) + took
                actions.pop(0)
        assert sum(map(len, todo)) < before, "nothing can run"
    return [ends[Pass.B, 0, m] for m in range(len(forward))]


@settings(deadline=None)
@given(st.integers(1, 7), st.integers(1, 4), st.integers(0, 3), st.integers(0, 50))
def test_eager_recurrence_equals_an_execution_of_the_hurried_programs(
    num: int, stages: int, lead: int, seed: int
):
    rng = np.random.default_rng(seed)
    forward, backward = rng.random((num, stages)), rng.random((num, stages))
    ahead = int(rng.integers(0, stages + 1))  # the first so many stages hurry
    programs = [
        list(with_eager_forwards(program, {s: {}} if s < ahead else {}, lead))
        for s, program in enumerate(one_f_one_b(range(stages), num))
    ]
    warmups = np.arange(stages, 0, -1) + np.array([lead if s < ahead else 0 for s in range(stages)])
    found = eager_starts(forward, backward, np.arange(num), warmups)
    assert found[1].tolist() == played(programs, forward, backward)


def test_a_forward_takes_the_place_of_the_one_so_many_before_it():
    (program, _) = one_f_one_b(range(2), 4)
    shown = [
        " ".join(map(str, with_eager_forwards(program, {0: followers}, lead)))
        for followers, lead in (({}, 0), ({}, 1), ({}, 9), ({1: 0}, 1))
    ]
    assert shown == [
        "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3",
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        " ".join(map(str, gpipe(range(2), 4)[0])),
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",  # 0F1 follows 0F0, so both count as one
    ]
    with pytest.raises(ValueError, match="lead >= 0, got -1"):
        with_eager_forwards((parse_action("0F0"),), {0: {}}, -1)


def units_and_times(num: int, stages: int, seed: int):
    rng = np.random.default_rng(seed)
    forward = rng.lognormal(0, 0.7, (num, stages))
    cuts = [0, *sorted(rng.choice(range(1, num), min(3, num - 1), replace=False).tolist()), num]
    units = [tuple(range(*pair)) for pair in pairwise(cuts)]
    return forward, 2 * forward, units


@examples(40)
@given(st.integers(2, 8), st.integers(1, 4), st.integers(0, 2), st.integers(0, 99))
def test_units_are_never_slower_than_given_and_near_the_best(num: int, stages: int, lead: int, seed: int):
    forward, backward, units = units_and_times(num, stages, seed)
    leads = [lead] * (stages // 2) + [0] * (stages - stages // 2)
    warmups = np.arange(stages, 0, -1) + leads

    def time_s(order) -> float:
        members = np.array([member for unit in order for member in units[unit]])
        return float(eager_starts(forward, backward, members, warmups)[1, -1])

    found = order_units(forward, backward, units, leads)
    assert sorted(found.units) == list(range(len(units)))
    assert found.iteration_s == time_s(found.units)
    best_s = min(map(time_s, permutations(range(len(units)))))
    assert best_s <= found.iteration_s <= min(time_s(range(len(units))), 1.05 * best_s)


@pytest.mark.parametrize("most", [1, 10**5, 10**8])
def test_many_units_end_at_a_limit_and_are_never_slower_than_given(most: int, monkeypatch):
    forward = np.random.default_rng(0).lognormal(0, 0.7, (48, 4))
    units = [(index,) for index in range(48)]
    unlimited = order_units(forward, 2 * forward, units)
    monkeypatch.setattr(unit_order, "MOST_PASSES", most)
    limited = order_units(forward, 2 * forward, units)
    assert sorted(limited.units) == list(range(48))
    given_s = unimproved_order(forward, 2 * forward, units).iteration_s
    assert unlimited.iteration_s <= limited.iteration_s <= given_s
    assert (limited == unlimited) == (most == 10**8)


def test_without_leads_the_recurrence_is_that_of_1f1b():
    forward, backward, _ = units_and_times(6, 3, 0)
    order = np.array([3, 1, 0, 2, 5, 4])
    plain = first_stage_starts(forward, backward, order)
    assert plain.tolist() == eager_starts(forward, backward, order, np.array([3, 2, 1])).tolist()


@pytest.mark.parametrize(
    ("units", "leads", "words"),
    [
        ([[0], [0, 1]], [], "each of 2 microbatches once"),
        ([[0, 1], []], [], "none be empty"),
        ([[0], [1]], [0, 1, 1], "never rise"),
        ([[0], [1]], [1], "want 3 leads"),
    ],
)
def test_bad_units_and_leads_are_named(units, leads, words: str):
    with pytest.raises(ValueError, match=words):
        order_units(np.ones((2, 3)), np.ones((2, 3)), units, leads)


def estimate_s(plan) -> float:
    lowered = lower(plan)
    return critical_path_s(lowered, price(lowered, COST).duration_s)


@pytest.mark.parametrize("replicas", [1, 2])
def test_it_is_never_slower_than_entrain_and_trains_the_same(replicas: int, pool: Pool):
    job = skewed_job(replicas=replicas)
    plan = entrain_graded.plan(job, COST)
    assert estimate_s(plan) <= estimate_s(entrain.plan(job, COST))
    assert plan.strategy == "entrain-graded"
    assert_same(plan, pool)


def shared_job(replicas: int = 1) -> Job:
    """One encoder in front of the LLM, all stage counts open; messages take no time."""
    model = tiny_valm(vision=Trainable.ALL, llm=Trainable.ALL)
    job = skewed_job(replicas=replicas)
    wire = Link(name="instant", bytes_per_s=1e18, latency_s=0.0)
    return replace(
        job,
        model=connect("tiny-vlm", (model.module("vision"), model.module("llm"))),
        batch=tuple(
            replace(sample, segments=tuple(s for s in sample.segments if s.modality != "audio"))
            for sample in skewed_batch()
        ),
        layouts=(),
        cluster=replace(job.cluster, intra=wire, inter=wire),
        max_ranks=2 * replicas,
    )


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_rank_with_the_end_of_the_encoder_and_the_start_of_the_llm_trains_the_same(
    replicas: int, pool: Pool
):
    job = shared_job(replicas)
    plan = entrain_graded.plan(job, COST)
    modules_of = [{s.module for s in plan.stages if rank in s.flat_ranks} for rank in plan.ranks]
    assert sum(len(modules) > 1 for modules in modules_of) == replicas
    assert estimate_s(plan) < estimate_s(entrain.plan(job, COST))
    assert_same(plan, pool)


def test_given_stage_counts_are_kept():
    job = replace(shared_job(), layouts=(ModuleLayout(module="vision", pp=1),))
    plan = entrain_graded.plan(job, COST)
    assert len(plan.chain["vision", 0]) == 1
    assert not {r for s in plan.chain["vision", 0] for r in s.flat_ranks} & {
        r for s in plan.chain["llm", 0] for r in s.flat_ranks
    }


def test_leads_that_do_not_fit_in_memory_are_passed_over():
    job = skewed_job()
    nodes = tuple(replace(node, memory_bytes=1) for node in job.cluster.nodes)
    tight = replace(job, cluster=replace(job.cluster, nodes=nodes))
    plan = entrain_graded.plan(tight, COST)
    assert plan == replace(entrain.plan(tight, COST), strategy="entrain-graded")
