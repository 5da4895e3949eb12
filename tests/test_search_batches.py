"""Objectives over several batches: equal batches change nothing, figures are those of known values."""

import pickle
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.judge import executors_of
from sim.predict import predict, step_s
from tests.test_next_batches import batch_of, job_of
from tests.test_strategies import cost
from workbench.data.sample import Sample
from workbench.job.job import Job, load_job
from workbench.job.step_batches import step_batches
from workbench.plan.plan import Plan
from workbench.report.search_tables import search_record, search_table
from workbench.schedule.choice import ScheduleKind, usual
from workbench.search.drive import search, with_ranks, with_schedules
from workbench.search.joint.bounds import no_bound
from workbench.search.joint.drive import joint_search
from workbench.search.joint.terms import Scope, Stop
from workbench.search.objectives.objective import Objective
from workbench.search.objectives.options import ObjectiveOptions, judge_for
from workbench.search.objectives.plan_judge import PlanJudge
from workbench.search.objectives.step_times import (
    Over,
    OverBatches,
    OwnBatch,
    Planning,
    StepTimes,
    quantile,
    standard_error,
    summary,
)
from workbench.strategies.next_step import next_step
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept

NAMES = ("cornstarch", "entrain", "disttrain-reordered")


def seconds(lowered):
    return step_s(lowered, cost())


def made(name: str) -> Plan:
    return PLANNERS[name](job_of(0), cost(), lambda *_: None)


def over_batches(
    batches: Sequence[Sequence[Sample]],
    over: Over = Over.MEAN,
    planning: Planning = Planning.HIDDEN,
    planning_s: float = 0.0,
) -> OverBatches:
    """Its clock says that planning takes so long, whatever it takes."""
    ticks = count()

    def clock() -> float:
        return next(ticks) * planning_s

    def replan(plan, batch, schedule):
        return next_step(plan, batch, job_of(0), cost(), schedule)

    return OverBatches(
        batches=batches, replan=replan, seconds=seconds, over=over, planning=planning, clock=clock
    )


def judge_of(job: Job, batches, objective: Objective = Objective.ITERATION, **said) -> PlanJudge:
    asked = ObjectiveOptions(batches=len(batches) or None, **said)
    return judge_for(objective, asked, job, cost(), batches=batches, seed=0, executors=executors_of(cost()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("over", Over)
def test_equal_batches_are_one_batch(name: str, over: Over) -> None:
    plan = made(name)
    times = over_batches([plan.batch] * 3, over)(plan)
    assert times.step_s == OwnBatch(seconds)(plan).step_s
    assert times.standard_error_s == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_each_batch_is_simulated_as_it_is_planned_on_these_stages(name: str) -> None:
    plan, batches = made(name), [batch_of(seed) for seed in (1, 2, 3)]
    times = over_batches(batches)(plan)
    plans = [next_step(plan, batch, job_of(0), cost()) for batch in batches]
    assert list(times.batches_s) == [seconds(accept(each)[0]) for each in plans]
    assert times.step_s == statistics.fmean(times.batches_s)
    assert over_batches(batches, Over.WORST)(plan).step_s == max(times.batches_s)


def test_planning_is_hidden_as_far_as_steps_last_or_charged() -> None:
    plan, batches = made("cornstarch"), [batch_of(seed) for seed in (1, 2, 3)]
    bare = sorted(over_batches(batches)(plan).batches_s)
    between = (bare[0] + bare[1]) / 2
    hidden = over_batches(batches, planning_s=between)(plan)
    assert sorted(hidden.batches_s) == pytest.approx([between, *bare[1:]])
    assert hidden.late == 1
    charged = over_batches(batches, planning=Planning.CHARGED, planning_s=between)(plan)
    assert charged.mean_s == pytest.approx(statistics.fmean(bare) + between)
    assert (charged.late, charged.planning_s) == (0, pytest.approx(between))


def test_a_batch_without_a_plan_is_named() -> None:
    plan = made("cornstarch")
    with pytest.raises(
        ValueError, match="batch 2 of 2: next batch: the plan has places for 8 samples, got 7"
    ):
        over_batches([plan.batch, plan.batch[1:]])(plan)


def test_quantiles_of_known_values() -> None:
    assert quantile(list(range(101)), 0.95) == 95.0
    assert quantile([7.0], 0.95) == 7.0
    assert summary([1.0, 2.0, 6.0], Over.MEAN) == 3.0
    assert standard_error([1.0, 2.0, 6.0]) == pytest.approx(np.std([1, 2, 6], ddof=1) / 3**0.5)
    assert standard_error([1.0]) is None


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0, 1))
def test_quantiles_are_those_of_numpy(values: list[float], share: float) -> None:
    assert quantile(values, share) == pytest.approx(np.quantile(values, share), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("planning", Planning)
def test_a_search_says_what_it_was_judged_by(planning: Planning) -> None:
    job, batches = job_of(0), [batch_of(seed) for seed in (1, 2)]
    judge = judge_of(job, batches, planning=planning, over=Over.WORST)
    planners = {name: PLANNERS[name] for name in NAMES}
    found = search(job, cost(), planners, lambda plan: predict(*accept(plan), cost()), judge=judge)
    values = [each.judged.value for each in found]
    assert values == sorted(values)
    record = search_record("varying", found, judge.asked)
    assert {name: record[name] for name in ("objective", "batches", "over", "planning", "seed")} == {
        "objective": "iteration",
        "batches": 2,
        "over": "worst",
        "planning": planning.value,
        "seed": 0,
    }
    best, *others = record["candidates"]
    assert best["behind"] == {"mean_s": 0.0, "standard_error_s": 0.0}
    for each in others:
        differences = np.subtract(each["batches_s"], best["batches_s"])
        assert each["behind"]["mean_s"] == pytest.approx(differences.mean())
    title = str(search_table(record).title)
    assert f"worst of 2 batches, planning {planning}, seed 0" in title


def test_throughput_counts_ranks() -> None:
    plan, job = made("cornstarch"), job_of(0)
    own_s = OwnBatch(seconds)(plan).step_s
    value = judge_of(job, (), Objective.THROUGHPUT).value(plan)
    assert value == pytest.approx(own_s * len(plan.ranks) / len(plan.batch))


def test_planners_of_other_schedules_and_ranks_are_judged_under_their_schedule() -> None:
    tried = with_ranks(with_schedules({"entrain": PLANNERS["entrain"]}, [usual(ScheduleKind.GPIPE)]), [3, 6])
    assert list(tried) == ["entrain gpipe on 3", "entrain gpipe on 6"]
    job = replace(job_of(0, replicas=1), microbatch_samples=1)
    judge = judge_of(job, [job.batch])
    found = search(job, cost(), tried, lambda plan: predict(*accept(plan), cost()), judge=judge)
    assert {len(each.plan.ranks) for each in found} == {3, 6}
    for each in found:
        again = next_step(each.plan, job.batch, job, cost(), usual(ScheduleKind.GPIPE))
        assert again == each.plan


def test_a_judge_goes_to_other_processes() -> None:
    judge = judge_of(job_of(0), [batch_of(1)])
    again, plan = pickle.loads(pickle.dumps(judge)), made("cornstarch")
    assert again.judged(plan).times.batches_s != ()
    assert again.timeline(plan).iteration_s == judge.timeline(plan).iteration_s


@pytest.mark.parametrize(
    ("said", "objective", "message"),
    [
        ({"batches": 0}, Objective.ITERATION, "--batches must be >= 1, got 0"),
        ({"over": Over.P95}, Objective.ITERATION, "--over p95 needs several batches; want --batches"),
        ({"planning": Planning.CHARGED}, Objective.ITERATION, "--planning charged needs several"),
        ({"deadline": "3h"}, Objective.ITERATION, "--deadline is for --objective dollars, got iteration"),
        ({"deadline": "3h"}, Objective.TRAINING, "want one of --steps and --tokens"),
        ({"steps": 3, "tokens": 1e9}, Objective.TRAINING, "want one of --steps and --tokens"),
        ({"steps": 3, "deadline": "soon"}, Objective.TRAINING, "--deadline: want a duration > 0 such as 60s"),
        ({}, Objective.GOODPUT, "want one of --mtbf, --leaves-per-node-hour and --failures"),
        (
            {"mtbf": "6h", "leaves_per_node_hour": 0.1},
            Objective.GOODPUT,
            "want one of --mtbf, --leaves-per-node-hour and --failures",
        ),
        ({"leaves_per_node_hour": 0.0}, Objective.GOODPUT, "want a rate > 0, got 0.0; nearest: 0.01"),
        ({"mtbf": "6h"}, Objective.THROUGHPUT, "--mtbf is for --objective goodput, got throughput"),
        ({"restart": "5s"}, Objective.ITERATION, "--restart is for --objective goodput, got iteration"),
        ({"storage_gb_per_s": 2.0}, Objective.ITERATION, "--storage-gb-per-s is for --objective goodput"),
        ({"failures": Path("t.csv"), "repair": "2h"}, Objective.GOODPUT, "--repair is for --mtbf"),
    ],
)
def test_what_contradicts_itself_is_refused(said, objective, message) -> None:
    with pytest.raises(ValueError, match=message):
        judge_for(
            objective,
            ObjectiveOptions(**said),
            job_of(0),
            cost(),
            batches=(),
            seed=0,
            executors=executors_of(cost()),
        )


EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny.yaml"


def test_batches_are_drawn_from_the_job_files_data(tmp_path: Path) -> None:
    job = load_job(EXAMPLE)
    batches = step_batches(EXAMPLE, job, 4, seed=1)
    assert batches == step_batches(EXAMPLE, job, 4, seed=1)
    assert batches[:2] == step_batches(EXAMPLE, job, 2, seed=1)
    assert batches != step_batches(EXAMPLE, job, 4, seed=2)
    assert len({*batches, job.batch}) == 5
    assert {len(batch) for batch in batches} == {len(job.batch)}
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(f'{{"text_tokens": {each + 5}}}' for each in range(20)))
    drawn = step_batches(EXAMPLE, job, 3, sizes=str(rows))
    for batch in drawn:
        lengths = [sample.num_tokens for sample in batch]
        assert len(set(lengths)) == len(job.batch)
        assert set(lengths) <= set(range(5, 25))
    with pytest.raises(ValueError, match="batches: want >= 1, got 0"):
        step_batches(EXAMPLE, job, 0)


def test_fixed_samples_are_equal_in_all_batches(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    start = text.index("batch:")
    end = text.index("\n\n", start)
    path = tmp_path / "fixed.yaml"
    path.write_text(f"{text[:start]}batch: {{samples: 4, fixed: {{text_tokens: 9}}}}{text[end:]}")
    job = load_job(path)
    assert step_batches(path, job, 2) == (job.batch, job.batch)


def test_steps_of_one_batch_have_no_error() -> None:
    times = StepTimes(step_s=1.0, batches_s=(1.0,))
    assert (times.mean_s, times.standard_error_s) == (1.0, None)


def test_a_joint_search_makes_any_objective_small() -> None:
    """Never worse than its starts, by a judge over batches; nothing bounds it from below."""
    job, batches = replace(job_of(0, replicas=1), max_ranks=3), [batch_of(1)]
    judge = judge_of(job, batches, planning=Planning.HIDDEN)
    times = replace(judge.times, clock=lambda: 0.0)
    scope = Scope(planners={"cornstarch": PLANNERS["cornstarch"]}, lower=no_bound)
    found = joint_search(job, cost(), replace(judge, times=times), stop=Stop(candidates=3), scope=scope)
    assert found.value <= min(each.value for each in found.starts if each.value is not None)
    assert (found.lower_bound, found.gap) == (0.0, 1.0)
    again = replace(judge, times=times).judged(found.plan)
    assert again.value == found.value == again.times.step_s
