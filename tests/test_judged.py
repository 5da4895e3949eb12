"""Strategies' best few plans held against the simulator, and against judges of our own."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.predict import candidate_s
from tests.test_strategies import cost, job
from tests.tiny_valm import tiny_batch
from workbench.cost.model import CostModel
from workbench.job.device_pools import Aim
from workbench.job.job import Job, load_job
from workbench.job.machines import cost_of
from workbench.model.trainable import Trainable
from workbench.plan.codec import plan_hash
from workbench.plan.plan import Plan
from workbench.planner.judged import MOST_JUDGED, judged
from workbench.planner.stage_counts import silent
from workbench.schedule.choice import ScheduleKind, usual
from workbench.strategies.registry import BY_NAME, STRATEGIES

ROOT = Path(__file__).parents[1]
COUNTED = ("cornstarch", "encoders-colocated", "encoders-replicated", "megatron-heterogeneous", "entrain")
counts_of_items = st.lists(st.integers(0, 2), min_size=4, max_size=4)


def open_job(max_ranks: int = 5, **told) -> Job:
    """Stage counts left to the strategies."""
    return replace(job(**told), layouts=(), max_ranks=max_ranks)


def chosen(name: str, of: Job) -> Plan:
    return judged(BY_NAME[name], candidate_s)(of, cost(), silent)


def published(name: str, of: Job) -> Plan:
    return BY_NAME[name].planner(of, cost(), silent)


@settings(max_examples=8, deadline=None)
@given(
    images=counts_of_items,
    clips=counts_of_items,
    max_ranks=st.integers(3, 5),
    frozen=st.tuples(*[st.sampled_from(Trainable)] * 2, st.sampled_from([Trainable.ALL, Trainable.NONE])),
    kind=st.sampled_from([ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB_H1, ScheduleKind.GPIPE]),
)
def test_cornstarch_is_never_slower_than_frozen_unaware(*, images, clips, max_ranks, frozen, kind):
    vision, audio, llm = frozen
    told = {"batch": tiny_batch(images, clips), "vision": vision, "audio": audio, "llm": llm}
    wanted = replace(open_job(max_ranks, **told), schedule=usual(kind))
    aware = candidate_s(chosen("cornstarch", wanted), cost())
    for unaware in (chosen, published):
        assert aware <= candidate_s(unaware("cornstarch-frozen-unaware", wanted), cost())
    assert aware <= candidate_s(published("cornstarch", wanted), cost())


def test_it_takes_stages_cut_by_forward_time_where_they_are_faster():
    """Processes share cores there, which the longest path of a plan does not know: 1.1 % are lost."""
    wanted = load_job(ROOT / "examples" / "frozen-encoder" / "job.yaml")
    machine = cost_of(wanted, None, None)
    own, unaware = (
        BY_NAME[name].planner(wanted, machine, silent) for name in ("cornstarch", "cornstarch-frozen-unaware")
    )
    assert candidate_s(unaware, machine) < 0.99 * candidate_s(own, machine)
    found = judged(BY_NAME["cornstarch"], candidate_s)(wanted, machine, silent)
    assert plan_hash(found) == plan_hash(unaware)
    assert found.strategy == "cornstarch"


@pytest.mark.parametrize("spec", STRATEGIES, ids=lambda spec: spec.name)
def test_a_shortlist_starts_with_the_strategys_own_plan(spec):
    wanted = replace(open_job(), batch=tiny_batch([1] * 4, [1] * 4))
    try:
        own = spec.planner(wanted, cost(), silent)
    except ValueError as error:
        with pytest.raises(ValueError, match="^" + str(error)[:20]):
            spec.shortlist(wanted, cost(), silent, MOST_JUDGED)
        return
    found = spec.shortlist(wanted, cost(), silent, MOST_JUDGED)
    assert found[0] == own
    assert len(found) <= 2 * MOST_JUDGED
    assert {plan.strategy for plan in found} == {spec.name}


@pytest.mark.parametrize("name", COUNTED)
def test_a_shortlist_grows_at_its_end(name):
    few, many = (BY_NAME[name].shortlist(open_job(5), cost(), silent, most) for most in (2, 4))
    assert set(map(plan_hash, few)) <= set(map(plan_hash, many))
    assert len(set(map(plan_hash, many))) == len(many) > 2


class Asked:
    """A judge that gives seconds by the order in which it is asked, and remembers the plans."""

    def __init__(self, *answers: float | None) -> None:
        self.answers, self.plans = answers, []

    def __call__(self, plan: Plan, cost: CostModel) -> float:
        self.plans.append(plan)
        answer = self.answers[min(len(self.plans), len(self.answers)) - 1]
        if answer is None:
            raise ValueError(f"refusal {len(self.plans)}")
        return answer


def test_the_judge_has_the_last_word_and_ties_are_the_strategys():
    plan_by = partial(judged, BY_NAME["cornstarch"])
    second = Asked(2.0, 1.0, 3.0)
    assert plan_by(second)(open_job(), cost(), silent) is second.plans[1]
    equal = Asked(1.0)
    assert plan_by(equal)(open_job(), cost(), silent) is equal.plans[0]
    assert 2 < len(equal.plans) <= 2 * MOST_JUDGED
    refused = Asked(None, 2.0)
    assert plan_by(refused)(open_job(), cost(), silent) is refused.plans[1]
    with pytest.raises(ValueError, match="refusal 1"):
        plan_by(Asked(None))(open_job(), cost(), silent)


def test_dollars_are_what_is_judged_where_they_are_the_aim():
    paid = replace(open_job(), aim=Aim.DOLLARS, dollars_per_rank_hour=2.0)
    asked = Asked(1.0)
    found = judged(BY_NAME["cornstarch"], asked)(paid, cost(), silent)
    assert len(found.ranks) == min(len(plan.ranks) for plan in asked.plans)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ((), r"got tuple \(\); nearest: \(plan,\)"),
        (None, r"got NoneType \(\)"),
        ((None,), r"got tuple \(NoneType\)"),
    ],
)
def test_what_is_no_shortlist_is_told_by_the_strategys_name(returned, words: str):
    mine = replace(BY_NAME["cornstarch"], name="mine", shortlist=lambda *_: returned)
    with pytest.raises(TypeError, match=f"strategy 'mine': want a tuple of at least one Plan .*{words}"):
        judged(mine, candidate_s)(job(), cost(), silent)


def test_a_plan_alone_is_no_shortlist():
    plan = published("cornstarch", job())
    mine = replace(BY_NAME["cornstarch"], name="mine", shortlist=lambda *_: plan)
    with pytest.raises(TypeError, match=r"got Plan \(\); nearest: \(plan,\)"):
        judged(mine, candidate_s)(job(), cost(), silent)
