"""The plan of the next batch: the same places, new items, programs and token shards that fit."""

import os
import pickle
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.next_plan import Planner, planned
from tests.examples import examples
from tests.plans import cluster, disjoint_plan, sample, two_encoders
from tests.test_context_parallel_step import BATCHES, plan_of, with_owners
from workbench.balance.tokens.policies import contiguous
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.data.sample import Sample, Segment
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.plan.build import with_programs
from workbench.plan.codec import plan_hash
from workbench.plan.following import next_plan
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.token_shards import token_shards
from workbench.schedule.action import Pass
from workbench.strategies import cornstarch, encoders_colocated, encoders_replicated
from workbench.timing.accept import accept

CUTS = {"vision": (2, 1), "audio": (2,), "llm": (2, 2)}


def batch_of(*sizes: tuple[int, int], first: int = 0) -> tuple[Sample, ...]:
    return tuple(
        sample(first + index, images=images, sounds=sounds) for index, (images, sounds) in enumerate(sizes)
    )


SIZES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=4, max_size=4)


@given(SIZES, SIZES, st.sampled_from([1, 2]))
@examples(60)
def test_it_is_the_plan_that_would_have_been_made(
    first: list[tuple[int, int]], following: list[tuple[int, int]], replicas: int
) -> None:
    cuts = CUTS if replicas == 1 else {"vision": (3,), "audio": (2,), "llm": (4,)}
    batches = [batch_of(*first), batch_of(*following, first=7)]
    plans = [disjoint_plan(two_encoders(), batch, cuts, replicas=replicas) for batch in batches]
    assert next_plan(plans[0], batches[1]) == plans[1]
    assert next_plan(plans[1], batches[0]) == plans[0]


@pytest.mark.parametrize("strategy", [cornstarch, encoders_colocated, encoders_replicated])
def test_strategies_plan_the_next_batch_alike(strategy: object) -> None:
    """With the stages that the strategy gave the first one."""
    layouts = tuple(ModuleLayout(module=name, pp=1) for name in ("vision", "audio"))
    job = Job(
        name="next",
        model=two_encoders(),
        cluster=cluster(8),
        batch=batch_of((1, 1), (2, 0), (0, 1), (1, 2)),
        microbatch_samples=2,
        layouts=(*layouts, ModuleLayout(module="llm", pp=2)),
        profile="A40",
    )
    cost = CostModel(load_profile("A40"))
    first = strategy.plan(job, cost)  # type: ignore[attr-defined]
    following = replace(job, batch=batch_of((2, 2), (1, 0), (3, 1), (1, 1), first=4))
    own = strategy.plan(following, cost)  # type: ignore[attr-defined]
    assert next_plan(first, following.batch) == replace(own, stages=first.stages)


def test_tokens_are_split_by_the_new_masks() -> None:
    plan = with_owners(plan_of("everything", "ee"), "lpt")
    batch = BATCHES["ep"]
    found = next_plan(plan, batch, block_tokens=2)
    assert {shard.module for shard in found.token_shards} == {"llm"}
    assert found.token_shards != plan.token_shards
    other = next_plan(plan, batch, policy=contiguous, block_tokens=2)
    assert other.token_shards == token_shards(found, "llm", contiguous, block_tokens=2)
    assert not next_plan(plan_of("everything", "ee"), batch).token_shards  # they stay with zigzag


def test_programs_stay_where_they_fit() -> None:
    plan = disjoint_plan(two_encoders(), batch_of((1, 1), (1, 1)), CUTS)
    assert next_plan(plan, batch_of((2, 1), (3, 2), first=5)).programs is plan.programs


def eager(plan: Plan) -> Plan:
    """All forwards, then all backwards, as GPipe has them."""
    programs = tuple(
        replace(p, actions=tuple(sorted(p.actions, key=lambda a: [*Pass].index(a.kind) != 0)))
        for p in plan.programs
    )
    return replace(plan, programs=programs)


def test_what_cannot_follow_is_refused_by_name() -> None:
    plan = disjoint_plan(two_encoders(), batch_of((1, 1), (1, 1)), CUTS)
    with pytest.raises(ValueError, match="places for 2 samples, got 1"):
        next_plan(plan, batch_of((1, 1)))
    assert next_plan(eager(plan), batch_of((1, 1), (0, 1))).programs != eager(plan).programs  # GPipe's, anew
    odd = replace(plan, programs=tuple(replace(p, actions=p.actions[::-1]) for p in plan.programs))
    with pytest.raises(ValueError, match="no schedule gives them"):
        next_plan(odd, batch_of((1, 1), (0, 1)))
    assert next_plan(eager(plan), batch_of((2, 1), (1, 1))).programs == eager(plan).programs
    rows = tuple(
        Microbatch(module="vision", replica=0, index=index, rows=((m.items[0],),))
        for index, m in enumerate(reversed(plan.microbatches_of["vision", 0]))
    )
    rest = tuple(m for m in plan.microbatches if m.module != "vision")
    regrouped = with_programs(replace(plan, microbatches=(*rows, *rest), programs=()))
    with pytest.raises(ValueError, match="'vision' in the plan of strategy 'test' do not hold"):
        next_plan(regrouped, batch_of((1, 1), (1, 1)))


def test_a_process_answers_in_order_and_says_what_it_refuses() -> None:
    plan = with_owners(plan_of("everything", "ee"), "lpt")
    planner = Planner(plan, rule=partial(next_plan, block_tokens=2))
    try:
        for batch in (BATCHES["ep"], BATCHES["causal"], BATCHES["ep"]):
            planner.ask(batch)
        ours = accept(next_plan(plan, BATCHES["ep"], block_tokens=2))[0]
        first, refused, again = (planned(planner.fetch(60.0)) for _ in range(3))
    finally:
        planner.close()
    assert first.lowered == again.lowered == ours
    assert first.lowered is not None
    assert plan_hash(first.lowered.plan) == plan_hash(ours.plan)
    assert first.start_s <= first.end_s <= refused.start_s
    assert refused.lowered is None
    assert refused.refusal == "next batch: the plan has places for 2 samples, got 3"


def test_a_planner_does_not_import_from_the_folder_that_the_user_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the commit before, a user's own module of a name that is imported ended it."""
    (tmp_path / "pickle.py").write_text("raise ImportError('the user's')")
    monkeypatch.chdir(tmp_path)
    plan = plan_of("everything", "ee")
    planner = Planner(plan)
    try:
        os.kill(planner._process.pid, signal.SIGINT)  # nor does Ctrl-C end it while it starts
        planner.ask(plan.batch)
        assert planned(planner.fetch(60.0)).lowered is not None
    finally:
        planner.close()


def test_waiting_for_a_planner_is_bounded() -> None:
    planner = Planner(plan_of("everything", "ee"))
    with pytest.raises(ValueError, match=r"no plan within 0\.01 s"):
        planner.fetch(0.01)
    planner.close()
    with pytest.raises(ValueError, match="planner of the next batch ended"):
        planner.fetch(1.0)


def test_a_planner_takes_a_plan_longer_than_a_pipe() -> None:
    segments = (Segment("text", 0, 3, 3),)
    batch = tuple(Sample(index, segments) for index in range(900))
    plan = disjoint_plan(two_encoders(), batch, {"vision": (3,), "audio": (2,), "llm": (4,)})
    assert len(pickle.dumps(plan)) > 2**16
    planner = Planner(plan)
    planner.ask(batch)
    assert planned(planner.fetch(60.0)).lowered is not None
    planner.close()
