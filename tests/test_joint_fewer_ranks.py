"""Searches that start on fewer ranks: where these are paid for, or a spare node saves waiting."""

from dataclasses import replace
from functools import cache

import pytest

from sim.predict import IterationJudge
from tests.test_search_goodput import job, judge, priced
from tests.test_strategies import CLUSTER, cost
from workbench.cost.hardware import uniform
from workbench.job.job import load_job
from workbench.plan.check import check
from workbench.search.joint import drive
from workbench.search.joint.bounds import lower_bound_s
from workbench.search.joint.drive import joint_search
from workbench.search.joint.fewer_ranks import fewer_ranks
from workbench.search.joint.log import log_lines, replayed
from workbench.search.joint.result import SearchResult
from workbench.search.joint.terms import Scope, Stop
from workbench.search.objectives.goodput import checkpoint_bytes
from workbench.search.objectives.objective import Objective
from workbench.strategies.registry import PLANNERS

FEW = ("cornstarch", "megatron-homogeneous", "megatron-colocated")  # fsdp takes fewer ranks by itself
GAIN = 2  # over every start on all ranks, at least
SCOPE = Scope(planners={name: PLANNERS[name] for name in FEW})


def open_job():
    """On three nodes of two ranks, each of which has a price."""
    return replace(priced(), layouts=(), replicas=1)


def failing():
    """On four nodes of one rank, two of which hold the model and one does not; of one sample."""
    free = replace(job(1), layouts=(), replicas=1, microbatch_samples=1)
    memory = int(0.9 * checkpoint_bytes(free)[1])
    node = replace(CLUSTER.nodes[0], num_ranks=1, memory_bytes=memory)
    cluster = uniform("singles", node, num_nodes=4, intra=CLUSTER.intra, inter=CLUSTER.inter)
    return replace(free, cluster=cluster, batch=free.batch[:1])


def judged(objective: Objective):
    """A job with its judge."""
    if objective is Objective.GOODPUT:
        return failing(), judge(objective, failing(), mtbf="1h", repair="2h")
    said = {"steps": 1000} if objective is Objective.TRAINING else {}
    return open_job(), judge(objective, open_job(), **said)


@cache
def found(objective: Objective) -> SearchResult:
    wanted, value_of = judged(objective)
    return joint_search(wanted, cost(), value_of, stop=Stop(candidates=20), scope=SCOPE)


@pytest.mark.parametrize(
    "objective", [Objective.THROUGHPUT, Objective.DOLLARS, Objective.TRAINING, Objective.GOODPUT]
)
def test_starts_on_fewer_ranks_win_where_these_are_better(objective, monkeypatch):
    """One rank sends nothing; and where a loss stops all, two nodes of four go on with the others."""
    wanted, value_of = judged(objective)
    best = found(objective)
    ranks = {part.name: len(part.ranks) for part in fewer_ranks(wanted, cost(), value_of)}
    valued = {each.name: each.value for each in best.starts if each.value is not None}
    on_fewer = {name for name in valued if name.split(" ", 1)[-1] in ranks}
    assert on_fewer
    assert min(valued.values()) == min(valued[name] for name in on_fewer)
    assert min(valued[name] for name in valued.keys() - on_fewer) > GAIN * best.value
    for each in best.starts:
        if each.name in on_fewer:
            check(each.plan)
            assert each.plan.cluster == wanted.cluster
            assert len(each.plan.ranks) <= ranks[each.name.split(" ", 1)[-1]]
    assert len(best.plan.ranks) < wanted.cluster.num_ranks
    monkeypatch.setattr(drive, "fewer_ranks", lambda *_: ())
    without = joint_search(wanted, cost(), value_of, stop=Stop(candidates=20), scope=SCOPE)
    assert best.value < without.value


def test_spare_nodes_are_told():
    _, value_of = judged(Objective.GOODPUT)
    figures = value_of.judged(found(Objective.GOODPUT).plan).figures
    assert figures["spare_nodes"] == 2


def test_a_search_from_fewer_ranks_is_the_same_again_and_replayed():
    wanted, value_of = judged(Objective.DOLLARS)
    best = found(Objective.DOLLARS)
    two = joint_search(wanted, cost(), value_of, stop=Stop(candidates=20), scope=SCOPE, workers=2)
    assert (two.log, two.value, two.plan) == (best.log, best.value, best.plan)
    plan, value = replayed(wanted, cost(), value_of, SCOPE.planners, log_lines(wanted, SCOPE, best))
    assert (plan, value) == (replace(best.plan, strategy=plan.strategy), best.value)


def test_nothing_but_steps_counts_no_ranks():
    assert fewer_ranks(open_job(), cost(), IterationJudge(cost())) == ()
    assert fewer_ranks(open_job(), cost(), judge(Objective.ITERATION, open_job())) == ()


def test_a_deadline_leaves_out_what_is_too_slow_for_sure():
    wanted = open_job()
    one_s, two_s = (lower_bound_s(replace(wanted, max_ranks=count), cost(), None) for count in (1, 2))
    assert two_s < 0.9 * one_s
    cases = ((1.01 * one_s, ["on 1", "on 2"]), (0.99 * one_s, ["on 2"]), (0.99 * two_s, []))
    for step_s, names in cases:
        limited = judge(Objective.TRAINING, wanted, steps=10**9, deadline=f"{step_s * 10**9}s")
        assert [part.name for part in fewer_ranks(wanted, cost(), limited)] == names


def test_the_state_has_to_fit():
    wanted = replace(failing(), dollars_per_rank_hour=3.6)
    assert [p.name for p in fewer_ranks(wanted, cost(), judge(Objective.DOLLARS, wanted))] == ["on 2"]


def test_some_ranks_of_every_pool_are_a_job_of_their_own(request):
    wanted = load_job(request.config.rootpath / "examples" / "pools.yaml")
    parts = fewer_ranks(wanted, cost(), judge(Objective.DOLLARS, wanted))
    assert [len(part.ranks) for part in parts] == sorted(len(part.ranks) for part in parts)
    for part in parts:
        assert part.job.cluster.num_ranks == len(part.ranks)
        for rank, place in enumerate(part.ranks):
            assert part.job.cluster.device_of((rank,)) == wanted.cluster.device_of((place,))
            assert part.job.dollars_per_hour((rank,)) == wanted.dollars_per_hour((place,))
    faster = next(part for part in parts if part.name == "on 4 faster")
    plan = PLANNERS["megatron-colocated"](faster.job, cost(), lambda *_: None)
    moved = faster.moved(plan)
    check(moved)
    assert moved.ranks == (16, 17, 18, 19)
    assert moved.cluster == wanted.cluster
