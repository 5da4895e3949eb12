"""Searches on fewer ranks than a job has."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from sim.predict import IterationJudge
from tests.test_search_goodput import job, judge, priced
from tests.test_strategies import CLUSTER, cost
from workbench.cost.hardware import uniform
from workbench.elastic.batch_distribution import distribute
from workbench.job.job import load_job
from workbench.memory.checkpoint_bytes import checkpoint_bytes
from workbench.plan.check import check
from workbench.plan.plan import Microbatch, Plan
from workbench.schedule.choice import Schedule
from workbench.search.joint import drive
from workbench.search.joint.bounds import lower_bound_s
from workbench.search.joint.drive import joint_search
from workbench.search.joint.fewer_ranks import fewer_ranks
from workbench.search.joint.log import log_lines, replayed
from workbench.search.joint.result import SearchResult
from workbench.search.joint.terms import Scope, Stop
from workbench.search.objectives.fewer_nodes import num_pipelines, with_pipelines
from workbench.search.objectives.objective import Objective
from workbench.strategies import fsdp
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept

FEW = ("cornstarch", "megatron-homogeneous", "megatron-colocated")  # fsdp takes fewer ranks by itself
GAIN = 2  # over every start on all ranks, at least
SCOPE = Scope(planners={name: PLANNERS[name] for name in FEW})


def open_job():
    """On three nodes of two ranks, each of which has a price."""
    return replace(priced(), layouts=(), replicas=1)


def failing():
    """On four nodes of one rank, two of which hold the model and one does not; of one sample."""
    free = replace(job(1), layouts=(), replicas=1, microbatch_samples=1)
    memory = int(0.9 * checkpoint_bytes(free.model, free.settings))
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


def made(name: str, replicas: int) -> Plan:
    """On eight nodes of two ranks, of eight microbatches.

    fsdp is held to all ranks: by itself it takes fewer, which is faster with layers so small.
    """
    on = job(replicas)
    cluster = replace(on.cluster, nodes=on.cluster.nodes[:1] * 8)
    batch = (*on.batch, *(replace(sample, id=len(on.batch) + sample.id) for sample in on.batch))
    on = replace(on, cluster=cluster, batch=batch)
    if name == "fsdp":
        return fsdp.fastest_of_size(on, cost())[1]
    return PLANNERS[name](on, cost(), lambda *_: None)


def counts(plan: Plan) -> list[int]:
    """Of the LLM's microbatches, by pipeline."""
    held = Counter(each.replica for each in plan.microbatches if each.module == plan.model.llm.name)
    return [held[replica] for replica in range(num_pipelines(plan))]


@pytest.mark.parametrize("name", ["cornstarch", "entrain", "megatron-homogeneous", "fsdp"])
def test_each_pipeline_left_has_as_many_as_elastic_training_gives_it(name: str) -> None:
    """What equal pipelines get there; and no sample goes from one to another that did not before."""
    plan = made(name, 4)
    whole = num_pipelines(plan)
    assert whole >= 4
    for kept in range(2, whole):
        fewer = with_pipelines(plan, kept, Schedule(), cost())
        accept(fewer)
        found = counts(fewer)
        assert sorted(found) == sorted(distribute([1.0] * kept, sum(counts(plan))))
        where: dict[int, set[int]] = {}
        for each in fewer.microbatches:
            for item in each.items:
                where.setdefault(item.sample, set()).add(each.replica)
        assert {len(replicas) for replicas in where.values()} == {1}


@pytest.mark.parametrize("name", ["cornstarch", "megatron-heterogeneous"])
def test_a_half_of_the_pipelines_has_what_the_strategy_gives_so_many(name: str) -> None:
    """Which deals samples in turn."""
    expected = made(name, 2)
    assert num_pipelines(expected) == 2
    assert with_pipelines(made(name, 4), 2, Schedule(), cost()).microbatches == expected.microbatches


def wider(plan: Plan) -> Plan:
    """Each pipeline has one microbatch of vision, which feeds all of its LLM's."""
    held = plan.microbatches_of
    joined = [
        Microbatch(module="vision", replica=r, index=0, rows=sum((m.rows for m in held["vision", r]), ()))
        for r in range(num_pipelines(plan))
    ]
    others = (each for each in plan.microbatches if each.module != "vision")
    return replace(plan, microbatches=(*joined, *others), programs=())


def crossed(plan: Plan) -> Plan:
    """Pipelines encode the images of their neighbours."""
    whole = num_pipelines(plan)
    turned = [
        replace(each, replica=(each.replica + 1) % whole) if each.module == "vision" else each
        for each in plan.microbatches
    ]
    return replace(plan, microbatches=tuple(turned), programs=())


@pytest.mark.parametrize("changed", [wider, crossed])
def test_what_samples_hold_together_stays_together(changed) -> None:
    """Both microbatches of the LLM that one of vision feeds; whole pipelines where these feed each other."""
    draft = changed(made("cornstarch", 4))
    fewer = with_pipelines(draft, 3, Schedule(), cost())
    accept(fewer)
    llm = draft.model.llm.name
    before = {each.items: each.replica for each in draft.microbatches if each.module == llm}
    after = [(before[each.items], each.replica) for each in fewer.microbatches if each.module == llm]
    assert Counter(after) == {(0, 0): 2, (1, 1): 2, (2, 2): 2, (3, 0): 2}
