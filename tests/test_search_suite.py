"""The suite of the joint search: jobs have plans, baselines search what they say, records are complete."""

import json
import math
import random
from dataclasses import replace
from itertools import islice

import pytest

from experiments.bench.speed_cases import CASES
from experiments.search import compared, joint, speeds
from experiments.search.best_single import best_of, own_searches
from experiments.search.compared import planners_of, prepared
from experiments.search.executed import _between
from experiments.search.jobs import JOBS, opened
from experiments.search.listed_space import key_of
from experiments.search.regret import ListedJudge, listed, searched
from experiments.search.spaces import spaces
from experiments.search.speeds import job_of
from sim.predict import IterationJudge
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile
from workbench.plan.plan import KeyExchange
from workbench.planner.layout_choice import Mode
from workbench.planner.stage_counts import silent
from workbench.planner.strategy_spec import Chooser
from workbench.schedule.choice import Schedule
from workbench.search.joint import seeds as seeds_of_layouts
from workbench.search.joint.choice import TokenRule, choice_of
from workbench.search.joint.drive import joint_search
from workbench.search.joint.evaluate import Request, evaluate
from workbench.search.joint.move import Space
from workbench.search.joint.own_spaces import OWN_SPACES, Draws
from workbench.search.joint.question import Question
from workbench.search.joint.seeds import seeds
from workbench.search.objectives.step_times import PassedOverError
from workbench.strategies import disttrain, megatron_homogeneous
from workbench.strategies.registry import BY_NAME

QUICK = (disttrain.plan, megatron_homogeneous.plan)
KEYS = {
    "joint_s",
    "best_single_s",
    "best_single",
    "objective",
    "lower_bound",
    "gap",
    "candidates",
    "seconds",
}


def small_space():
    """Audio and language model on three ranks and a few orders: listed in a moment."""
    space = spaces()[1]
    job = replace(space.job, batch=space.job.batch[:2])
    return replace(
        space,
        job=job,
        shapes={"audio": ((1, 1, 1),), "llm": ((1, 1, 1), (1, 1, 2), (1, 2, 1))},
        microbatches=(1,),
        schedules=(Schedule(),),
        rules=(TokenRule.ZIGZAG, TokenRule.EXCHANGED),
        ways=(KeyExchange.ALL_GATHER,),
    )


def first_plan(job, cost):
    """Of the first strategy that has one; the last one's refusal where none has."""
    for planner in QUICK[:-1]:
        try:
            return planner(job, cost, silent)
        except ValueError:  # a module that it does not take
            continue
    return QUICK[-1](job, cost, silent)


@pytest.mark.parametrize("name", JOBS)
def test_every_job_has_a_plan_on_its_devices(name):
    suite_job = JOBS[name]
    job = opened(suite_job.make())
    cost = suite_job.cost(job)
    plan = first_plan(job, cost)
    assert all(rank < job.cluster.num_ranks for rank in plan.ranks)
    assert not job.layouts


def test_all_batches_of_varying_data_differ_and_are_as_large():
    suite_job = JOBS["varying"]
    batches = suite_job.batches()
    assert len(set(batches)) == len(batches) >= 4
    assert {len(batch) for batch in batches} == {len(suite_job.make().batch)}


@pytest.mark.parametrize("strategy", BY_NAME)
def test_draws_keep_to_the_space_of_every_registered_strategy(strategy):
    job = opened(JOBS["llava-1.5-7b"].make())
    space = OWN_SPACES[strategy]
    degrees = space.degrees
    draws, rng = Draws(job, replace(space, has_cp=False)), random.Random(0)
    for _ in range(20):
        drawn = draws.fresh(rng)
        assert len(job.batch) % (drawn.microbatch_samples * drawn.replicas) == 0
        assert drawn.schedule in space.schedules
        assert all(layout.cp == 1 for layout in drawn.layouts)
        assert bool(drawn.layouts) is (degrees is not Chooser.ITSELF)
        if degrees is Chooser.ALIKE:
            assert len({layout.tp for layout in drawn.layouts}) == 1


def test_a_model_whose_layouts_no_step_model_knows_is_seeded_with_grids_that_all_modules_share():
    """A strategy's own search found 3.861 s on this job where layouts moved from other plans did not."""
    job, cost, judge = prepared(JOBS["disttrain"])
    base = choice_of(job, disttrain.plan(job, cost, silent), cost)
    first = islice(seeds(job, cost, frozenset(Question)), 6)
    found = [evaluate(Space(job, cost, {}), judge, Request(base, moves)).value for moves in first]
    assert min(value for value in found if value is not None) < 3.7
    held = list(seeds(job, cost, {Question.LAYOUT}))
    assert held
    assert all(move.question is Question.LAYOUT and move.samples is None for (move,) in held)
    assert not list(seeds(job, cost, set(Question) - {Question.LAYOUT}))


def test_a_strategys_own_search_is_no_worse_than_its_plan_and_the_same_for_a_seed():
    job, cost, judge = prepared(JOBS["megatron"])
    planners = {"megatron-homogeneous": planners_of(job)["megatron-homogeneous"]}

    def run():
        ticks = iter(range(10_000))  # a clock that counts, so that time ends after so many jobs
        found = own_searches(
            job, cost, judge, planners, budget_s=200, seed=3, clock=lambda: float(next(ticks))
        )
        return {each.strategy: each for each in found}

    first, again = run(), run()
    best = best_of(first)
    assert best.value is not None
    assert best.unsearched is not None
    assert best.value <= best.unsearched
    assert best.tried > 1
    assert best.plan is not None
    assert judge.value(best.plan) == best.value
    assert first == again


def test_a_space_lists_every_combination_once_and_the_search_stays_inside():
    space = small_space()
    choices, whole = list(space.choices()), listed(space)
    two_orders = 2
    cuts_in_two = 3
    rules = 2
    assert len(choices) == two_orders * (1 + cuts_in_two + rules)
    assert 0 < len(whole.values) <= len(choices)
    found = searched(space, whole, candidates=20, seed=0)
    assert key_of(found.plan) in whole.values
    assert found.value >= whole.optimum
    judge = ListedJudge(space.job, whole, IterationJudge(space.cost))
    stranger = next(space.plans(choices))
    with pytest.raises(ValueError, match="outside the space"):
        judge.value(replace(stranger, batch=stranger.batch[::-1]))


def test_a_jobs_record_has_all_keys(monkeypatch):
    few = {name: BY_NAME[name].planner for name in ("disttrain", "cornstarch", "cornstarch-frozen-unaware")}
    monkeypatch.setattr(compared, "planners_of", lambda job: few)
    suite_job = replace(JOBS["llava-1.5-7b"], make=lambda: small_space().job)
    record = compared.compared(suite_job, budget_s=0.2, seed=0, progress=lambda what: None)
    assert record.keys() >= KEYS
    assert record["joint_s"] <= record["best_start_s"]
    whole = compared.overall({"one": record})
    assert whole.keys() == {"never_worse", "geomean_gain", "geomean_gain_over_papers", "most_geomean_gain"}
    assert whole["geomean_gain"] <= whole["most_geomean_gain"]
    assert math.isclose(whole["geomean_gain"], record["best_single_s"] / record["joint_s"])
    assert len(compared.lines({"one": record})) == 2


def test_the_papers_strategies_are_held_apart_from_others_and_from_those_without_a_plan():
    strategies = {
        "fsdp": {"value": 2.0, "where": "Zhao et al. 2023, section 3.2.1"},
        "entrain-graded": {"value": 2.2, "where": "ours, after Entrain"},
        "entrain": {"value": 3.0, "where": "Entrain, sections 4.5 and 4.6"},
        "disttrain": {"value": 4.0, "where": "DistTrain, section 4"},
        "dip": {"value": None, "where": "Entrain, sections 4.2 and 4.7.2"},
    }
    row = {"joint_s": 1.5, "best_single_s": 2.0, "lower_bound": 1.0, "strategies": strategies}
    assert compared.overall({"a": row})["geomean_gain_over_papers"] == 2.0


def test_every_strategy_is_of_a_paper_ours_or_of_fsdp():
    """By the first words of its source: a new one is in the papers' gain, or left out on purpose."""
    known = (*compared.PAPERS, "ours, ", "Zhao et al. 2023, ")
    assert [name for name, space in OWN_SPACES.items() if not space.where.startswith(known)] == []


def test_a_rate_is_timed_after_a_search_that_compiles(monkeypatch):
    asked = []

    def searched(job, cost, judge, *, stop, scope, progress):
        asked.append((scope.seed, stop.candidates))
        return joint_search(job, cost, judge, stop=stop, scope=scope, progress=progress)

    monkeypatch.setattr(speeds, "joint_search", searched)
    assert speeds.rate_of(CASES[1], 8, seed=3)["candidates"] == 8
    assert asked == [(4, 2), (3, 8)]


def test_an_aware_planner_that_loses_or_has_no_plan_is_seen():
    won = {compared.AWARE: 1.0, compared.UNAWARE: 1.1}
    assert compared.is_never_slower({"a": won, "b": {compared.AWARE: None, compared.UNAWARE: None}})
    assert not compared.is_never_slower({"a": won, "b": {compared.AWARE: 1.0, compared.UNAWARE: 0.9}})
    assert not compared.is_never_slower({"a": {compared.AWARE: None, compared.UNAWARE: 0.9}})
    assert len(compared.aware_lines({"a": won})) == 1


def test_two_plans_between_stand_at_thirds():
    plans = {value: f"plan of {value}" for value in (1.0, 1.1, 1.9, 1.4, 1.6, 2.0, 2.5)}
    assert _between(list(plans.items()), 1.0, 2.0) == [plans[1.4], plans[1.6]]
    assert _between([(2.0, "worst")], 1.0, 2.0) == []


def test_parts_of_a_record_are_kept_and_another_budget_is_refused(monkeypatch):
    strategies = {"dip": {"value": 2.0, "where": "Entrain, section 4.2"}}
    row = {"joint_s": 1.0, "best_single_s": 2.0, "lower_bound": 0.5, "strategies": strategies}
    monkeypatch.setitem(joint.PARTS, "jobs", lambda asked, progress: {"jobs": {"b": row}})
    asked = joint.Options(names=("b",), budget_s=2.0, seed=1, processes=1)
    before = {
        "budget_s": 2.0,
        "seed": 1,
        "jobs": {"a": row | {"joint_s": 4.0}},
        "made": {"jobs": {"a": "then"}},
    }
    record = joint.gathered(("jobs",), asked, before, print)
    assert record["jobs"].keys() == record["made"]["jobs"].keys() == {"a", "b"}
    assert record["made"]["jobs"]["a"] == "then"
    assert (record["never_worse"], record["geomean_gain"], record["most_geomean_gain"]) == (False, 1.0, 4.0)
    with pytest.raises(ValueError, match="holds budget 3 s and seed 1, want 2 s and 1"):
        joint.gathered((), asked, {"budget_s": 3.0, "seed": 1}, print)


@pytest.mark.parametrize(("case", "apart"), [(CASES[1], {Mode.APART}), (CASES[2], set())])
def test_layouts_of_islands_are_asked_for_where_these_have_few_sizes(monkeypatch, case, apart):
    """On 24 and on 1,296 ranks; there the listing of all sizes of two islands took minutes."""
    asked: set[Mode] = set()
    monkeypatch.setattr(seeds_of_layouts, "likely_layouts", lambda *given: (asked.add(given[2]), ())[1])
    list(seeds(job_of(case), CostModel(ideal_profile()), set(Question)))
    assert asked == {Mode.HOMOGENEOUS, Mode.COLOCATED} | apart


def test_rows_of_this_commit_are_not_made_anew(monkeypatch):
    asked = joint.Options(names=("a", "b", "c"), budget_s=2.0, seed=1, processes=2)
    made = {"made": {"aware": {"a": {"commit": "here"}, "b": {"commit": "there"}}}}
    monkeypatch.setattr(joint, "commit", lambda: "here")
    assert [some.names for some in joint.rows("aware", asked, made)] == [["b", "c"]]
    assert [some.names for some in joint.rows("speed", asked, made)] == [["speed"]]
    of_spaces = [len(some.names) for some in joint.rows("regret", asked, made)]
    assert (sum(of_spaces), max(of_spaces)) == (len(spaces()), 2)
    one = replace(asked, spaces=(spaces()[0].name,))
    assert [some.names for some in joint.rows("regret", one, made)] == [list(one.spaces)]
    monkeypatch.setattr(joint, "commit", lambda: "here-dirty")
    assert [list(some.names) for some in joint.rows("aware", asked, made)] == [["a", "b"], ["c"]]


def test_a_plan_whose_steps_alone_are_too_long_is_passed_over():
    job, cost, judge = prepared(JOBS["failures"])
    plan = BY_NAME["megatron-colocated"].planner(job, cost, silent)
    times = judge.times(plan, None)
    least = judge.measure.least(plan, judge.measure.on_nodes(plan, times, None))
    value = judge.value(plan)
    assert least < value
    step_s = times.step_s / len(plan.batch)
    with pytest.raises(PassedOverError):
        judge.within(plan, min(least, step_s))
    assert judge.within(plan, max(least, step_s) * 1.001).value == value


def test_spaces_that_are_no_longer_listed_leave_the_record():
    name = spaces()[0].name
    kept = joint.current({"spaces": {name: {"regret": 0.01}, "a space of old": {"regret": 0.5}}})
    assert kept == {"spaces": {name: {"regret": 0.01}}, "regret_vs_exhaustive": 0.01}


def test_what_was_made_is_kept_though_no_file_is_named(tmp_path, monkeypatch):
    """The suite takes an hour: its rows must not end with the command that made them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["joint", "--part", "speed", "--budget", "2", "--seed", "3"])
    monkeypatch.setitem(joint.PARTS, "speed", lambda asked, progress: {"candidates_per_s_24": 7.0})
    assert joint.main() == 0
    kept = json.loads((tmp_path / "out/search/joint-2s-seed-3.json").read_text())
    assert kept["candidates_per_s_24"] == 7.0
    assert kept["made"]["speed"].keys() == {"speed"}
