"""Candidates of a search: what they share, and one replica that stands for all, change no judgement."""

import pickle
from collections.abc import Iterator, Set
from dataclasses import fields, replace
from itertools import islice, pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.bench import candidates as bench
from experiments.bench.speed_cases import CASES, Case
from sim.predict import candidate_s, predict
from tests.test_schedule_golden import job_with
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.data.sample import Sample
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.memory import sizes as stage_bytes
from workbench.memory.account import memory_table
from workbench.plan.folded import Folded, judged_part
from workbench.plan.lower import lower
from workbench.plan.lru_cache import Identity, LruCache, clear_caches
from workbench.plan.plan import ModuleSettings, Plan, Precision, Recompute, Sharding
from workbench.planner.one_replica import one_replica
from workbench.planner.stage_counts import silent
from workbench.schedule.choice import ScheduleKind, usual
from workbench.strategies.registry import BY_NAME
from workbench.timing import pass_prices as pricing
from workbench.timing.accept import accept, judged
from workbench.timing.price import price

COST = CostModel(load_profile("H100"))
SMALL = replace(
    CASES[1],
    name="4 replicas",
    layout={"vision": (1, 1), "audio": (1, 1), "llm": (2, 1)},
    replicas=4,
    microbatches=3,
)


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    clear_caches()
    yield
    clear_caches()


def job_of(case: Case = SMALL) -> Job:
    """Its model, machine and batch."""
    candidates, _ = bench.many_gpus(1, case)
    return on_nodes_of(candidates[0].job, 8)


def on_nodes_of(
    job: Job, num_ranks: int, num_cards: int = 1, memory_bytes: int = 160 * 10**9, *, least: int = 16
) -> Job:
    """Its cluster as nodes of so many ranks, together `least` or more."""
    node = replace(job.cluster.nodes[0], num_ranks=num_ranks, num_cards=num_cards, memory_bytes=memory_bytes)
    return replace(job, cluster=replace(job.cluster, nodes=(node,) * -(-least // num_ranks)))


def candidate_of(job: Job) -> bench.Candidate:
    return bench.start(job, {"vision": 1, "audio": 1, "llm": 2})


def in_full(plan: Plan, cost: CostModel = COST) -> float | str:
    """Every replica lowered, nothing remembered, and the engine instead of the sweep."""
    clear_caches()
    try:
        return predict(*accept(plan), cost).iteration_s
    except ValueError as error:
        return str(error)


def in_brief(plan: Plan | Folded, cost: CostModel = COST) -> float | str:
    try:
        return candidate_s(plan, cost)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("kind", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("name", ["cornstarch", "encoders-replicated", "megatron-homogeneous"])
def test_a_strategys_plan_takes_what_predict_says(name: str, kind: str, tmp_path: Path) -> None:
    job = job_with(tmp_path, ScheduleKind(kind), replicas=2, samples=4)
    cost = CostModel(load_profile("A40"))
    plan = BY_NAME[name].planner(job, cost, silent)
    assert in_brief(plan, cost) == in_full(plan, cost)


def test_a_walk_gives_what_each_candidate_gives_alone() -> None:
    moves = (bench.with_other_cut, bench.with_other_cut, bench.with_other_microbatch)
    walk = list(islice(bench.walk(candidate_of(job_of()), moves), 12))
    fast = [bench.evaluated(each, COST) for each in walk]
    assert len(set(fast)) > 2
    clear_caches()
    assert fast == [bench.evaluated_uncached(each, COST) for each in walk]


def training_alone(job: Job, trained: Set[int]) -> Job:
    """Some layers of the LLM train and nothing else, though its blocks have the same operators."""
    modules = tuple(
        replace(
            module,
            layers=tuple(
                replace(each, trainable=module.name == "llm" and index in trained)
                for index, each in enumerate(module.layers)
            ),
        )
        for module in job.model.modules
    )
    return replace(job, model=replace(job.model, modules=modules))


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_stages_of_equal_layers_take_and_hold_what_they_do_alone(data: st.DataObject) -> None:
    """Two stages in the middle of the LLM have as many blocks each, of which some train."""
    job = job_of()
    count = len(job.model.module("llm").layers)
    width, first = data.draw(st.integers(2, 3)), data.draw(st.integers(2, count - 7))
    alike = {first, first + width}  # both begin with a block that trains, and nothing does in front of one
    trained = alike if data.draw(st.booleans()) else data.draw(st.sets(st.integers(first, first + 5)))
    own = ModuleSettings(
        module="llm",
        recompute=data.draw(st.sampled_from(Recompute)),
        sequence_parallel=data.draw(st.booleans()),
    )
    job = replace(
        training_alone(job, trained),
        replicas=1,
        layouts=(ModuleLayout(module="llm", tp=data.draw(st.sampled_from((1, 2)))),),
        schedule=usual(data.draw(st.sampled_from((ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB_H1)))),
        settings=replace(job.settings, modules=(own,)),
    )
    candidate = candidate_of(job)
    cuts = tuple(pairwise((0, first, first + width, first + 2 * width, count)))
    plan = bench.built(replace(candidate, cuts={**candidate.cuts, "llm": cuts}), COST)
    clear_caches()
    lowered = lower(plan)
    found = price(lowered, COST).durations_s, memory_table(lowered)
    clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        for module in (pricing, stage_bytes):
            patch.setattr(module, "contents", lambda plan, stage: (stage.layers, stage.tp))
        assert (price(lowered, COST).durations_s, memory_table(lowered)) == found


@pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.OPTIMIZER])
@pytest.mark.parametrize("kind", ["1f1b", "zb-h1"])
def test_one_replica_stands_for_all(kind: str, sharding: Sharding) -> None:
    job = job_of()
    some = ModuleSettings(module="llm", recompute=Recompute.FULL, recompute_layers=5)
    settings = replace(job.settings, modules=(some.sharded(sharding, instances=2),))
    job = replace(job, schedule=usual(ScheduleKind(kind)), settings=settings)
    plan, folded = bench.built(candidate_of(job), COST), bench.folded(candidate_of(job), COST)
    assert isinstance(folded, Folded)
    assert folded.whole == plan
    assert len(judged_part(plan).stages) == len(folded.judged.stages) == len(plan.stages) // 4
    seconds = in_full(plan)
    assert isinstance(seconds, float)
    assert in_brief(plan) == in_brief(folded) == seconds


def test_an_equal_replica_holds_what_all_hold() -> None:
    plan = bench.built(candidate_of(job_of()), COST)
    _, whole = accept(plan)
    _, part = judged(plan)
    assert part.static_bytes == {rank: whole.static_bytes[rank] for rank in part.static_bytes}
    assert part.acquired_bytes == {rank: list(whole.acquired_bytes[rank]) for rank in part.acquired_bytes}


def with_other_sizes(sample: Sample) -> Sample:
    first, *others = sample.segments
    first = replace(first, tokens_in=first.tokens_in // 2, tokens_out=first.tokens_out // 2)
    return replace(sample, segments=(first, *others))


def test_replicas_that_differ_are_all_judged() -> None:
    plan = bench.built(candidate_of(job_of()), COST)
    for replica in (0, 3):
        sample = plan.microbatches_of["llm", replica][1].items[0].sample
        batch = tuple(with_other_sizes(each) if each.id == sample else each for each in plan.batch)
        other = replace(plan, batch=batch)
        assert {stage.replica for stage in judged_part(other).stages} == ({0, 1} if replica == 0 else {0, 3})
        assert in_brief(other) == in_full(other)


@pytest.mark.parametrize(
    ("num_ranks", "num_cards", "judged_replicas"),
    [
        pytest.param(4, 1, 1, id="a-node-each"),
        pytest.param(8, 1, 1, id="two-inside-a-node"),
        pytest.param(2, 1, 1, id="two-nodes-each"),
        pytest.param(3, 1, 4, id="nodes-and-their-cards-shared"),
        pytest.param(6, 6, 2, id="cards-of-their-own-on-shared-nodes"),
    ],
)
def test_replicas_that_share_ports_or_lie_unlike_are_no_equals(
    num_ranks: int, num_cards: int, judged_replicas: int
) -> None:
    job = on_nodes_of(job_of(), num_ranks, num_cards)
    plan, folded = bench.built(candidate_of(job), COST), bench.folded(candidate_of(job), COST)
    assert len({stage.replica for stage in judged_part(plan).stages}) == judged_replicas
    assert in_brief(plan) == in_brief(folded) == in_full(plan)


def with_weights_in_parts(job: Job, instances: int, sharded: tuple[str, ...]) -> Plan:
    modules = tuple(
        ModuleSettings(module=name, sharding=Sharding.PARAMETERS, instances=instances) for name in sharded
    )
    return bench.built(
        candidate_of(replace(job, settings=replace(job.settings, modules=modules))),
        COST,
    )


@pytest.mark.parametrize(
    ("num_ranks", "instances", "judged_replicas"),
    [
        pytest.param(4, 1, 1, id="a-node-each"),
        pytest.param(8, 1, 1, id="two-inside-a-node"),
        pytest.param(8, 2, 1, id="an-instance-a-node"),
        pytest.param(12, 2, 4, id="instances-that-lie-unlike"),
    ],
)
@pytest.mark.parametrize("sharded", [("vision",), ("vision", "audio", "llm")])
def test_one_replica_gathers_weights_for_all(
    num_ranks: int, instances: int, judged_replicas: int, sharded: tuple[str, ...]
) -> None:
    plan = with_weights_in_parts(on_nodes_of(job_of(), num_ranks), instances, sharded)
    assert len({stage.replica for stage in judged_part(plan).stages}) == judged_replicas
    seconds = in_full(plan)
    assert isinstance(seconds, float)
    assert in_brief(plan) == seconds
    _, whole = accept(plan)
    _, part = judged(plan)
    assert part.static_bytes == {rank: whole.static_bytes[rank] for rank in part.static_bytes}
    assert part.acquired_bytes == {rank: list(whole.acquired_bytes[rank]) for rank in part.acquired_bytes}


def test_who_gathers_weights_with_an_unlike_replica_waits_for_it() -> None:
    plan = with_weights_in_parts(job_of(), 1, ("vision", "audio", "llm"))
    last = plan.batch[-1].id
    batch = tuple(with_other_sizes(each) if each.id == last else each for each in plan.batch)
    other = replace(plan, batch=batch)
    assert judged_part(other) == other
    assert in_brief(other) == in_full(other)


def test_what_does_not_fit_is_refused_in_the_same_words() -> None:
    candidate = candidate_of(on_nodes_of(job_of(), 8, memory_bytes=10 * 10**9))
    plan = bench.built(candidate, COST)
    reason = in_full(plan)
    assert isinstance(reason, str)
    assert "does not fit" in reason
    assert in_brief(plan) == in_brief(bench.folded(candidate, COST)) == reason


def test_optimizer_instances_that_do_not_divide_all_ranks_are_refused_in_the_same_words() -> None:
    job = job_of()
    modules = (ModuleSettings(module="llm", sharding=Sharding.OPTIMIZER, instances=3),)
    job = replace(job, settings=replace(job.settings, modules=modules))
    with pytest.raises(ValueError, match="must divide the 4 ranks") as in_whole:
        bench.built(candidate_of(job), COST)
    with pytest.raises(ValueError, match=str(in_whole.value)):
        candidate_s(bench.folded(candidate_of(job), COST), COST)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(
            {"layouts": (ModuleLayout(module="llm", dp=2),)}, "their own dp or rank_offset", id="own-degrees"
        ),
        pytest.param({"microbatch_samples": 5}, "is not a multiple of 5 x 4", id="samples-left-over"),
    ],
)
def test_jobs_without_equal_replicas_have_no_one_replica(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        one_replica(replace(job_of(), **change))  # type: ignore[arg-type]


def test_unequal_batches_are_not_folded() -> None:
    job = job_of()
    with pytest.raises(ValueError, match="samples of its 4 replicas differ"):
        one_replica(replace(job, batch=(with_other_sizes(job.batch[0]), *job.batch[1:])))
    alone = one_replica(job)
    plan = bench.built(replace(candidate_of(job), job=alone.job), COST)
    folded = alone.folded(plan)
    with pytest.raises(ValueError, match="want equal batches"):
        replace(folded, batches=(plan.batch, tuple(map(with_other_sizes, plan.batch))))
    with pytest.raises(ValueError, match="5 replicas of 4 ranks: cluster 'bench' has 16"):
        replace(folded, batches=(plan.batch,) * 5)


def test_a_plan_travels_to_another_process_without_what_was_derived_of_it() -> None:
    plan = bench.built(candidate_of(job_of()), COST)
    seconds = candidate_s(plan, COST)
    there, judge = pickle.loads(pickle.dumps((plan, candidate_s)))
    assert set(vars(there)) == {each.name for each in fields(Plan)} < set(vars(plan))
    assert there == plan
    assert judge(there, COST) == seconds


def test_frames_differ_in_all_that_rows_follow_from() -> None:
    """Plans one of another by a change that moves no layer: what one was asked is no answer for the other."""
    plan = bench.built(candidate_of(job_of()), COST)
    rng = Random(0)
    for other in (
        replace(plan, batch=tuple(map(with_other_sizes, plan.batch))),
        replace(plan, settings=replace(plan.settings, precision=Precision.FLOAT32)),
    ):
        clear_caches()
        alone = lower(replace(other)).transfers
        clear_caches()
        lower(replace(plan))
        assert lower(replace(other)).transfers == alone
    cut = bench.built(bench.with_other_cut(candidate_of(job_of()), rng), COST)
    assert cut.stages != plan.stages
    assert lower(cut).transfers == lower(plan).transfers
    assert memory_table(lower(cut)).static_bytes != memory_table(lower(plan)).static_bytes


def test_who_updates_which_weights_is_no_matter_of_rows() -> None:
    ways = [(Sharding.NONE, 1), *((Sharding.OPTIMIZER, num) for num in (1, 2, 4)), (Sharding.PARAMETERS, 1)]
    job = job_of()
    plans = [
        bench.built(candidate_of(replace(job, settings=replace(job.settings, modules=(own,)))), COST)
        for own in (ModuleSettings(module="llm", sharding=how, instances=num) for how, num in ways)
    ]
    assert [lower(plan).transfers is lower(plans[0]).transfers for plan in plans] == [True] * 4 + [False]
    in_a_row = [in_brief(plan) for plan in plans]
    assert in_a_row == list(map(in_full, plans))
    assert len(set(in_a_row)) > 2


def test_remembers_the_last_used_up_to_its_size() -> None:
    asked: list[str] = []

    def length(text: str) -> int:
        asked.append(text)
        return len(text)

    lengths = LruCache[int](6, lambda number: number)
    for text in ("aaa", "bb", "aaa", "cc", "bb", "ddddddd", "ddddddd"):
        assert lengths.get_or(text, lambda text=text: length(text)) == len(text)  # type: ignore[misc]
    assert asked == ["aaa", "bb", "cc", "bb", "ddddddd", "ddddddd"]
    assert lengths.get("aaa") is None
    assert lengths.get("bb") == 2


def test_a_refusal_is_not_remembered() -> None:
    known: LruCache[None] = LruCache(3)

    def refuse() -> None:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            known.get_or("key", refuse)
    assert Identity("a") != Identity("b")
    one = [1]
    assert Identity(one) == Identity(one) != Identity([1])


def test_a_key_by_identity_travels_with_its_object() -> None:
    """A lowered plan has such keys, and goes to the processes that run it."""
    for one in ((1, 2), ModuleSettings(module="llm"), [1], {}):
        travelled, key = pickle.loads(pickle.dumps((one, Identity(one))))
        assert key == Identity(travelled)
        assert len({key, Identity(one), Identity(travelled)}) == 2


def test_the_bench_compares_both_ways() -> None:
    found = bench.rates(*bench.many_gpus(6, SMALL), num_before=3)
    assert found.is_equal
    assert found.num_candidates == 6
    assert found.ratio == pytest.approx(found.per_cpu_s / found.before_per_cpu_s)
