"""One job: the joint search and the best single strategy, on the same devices and with the same time."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments.search.best_single import OutOfTime, OwnBest, best_of, own_searches, stopper
from experiments.search.jobs import SuiteJob, opened
from sim.judge import executors_of
from sim.predict import IterationJudge, candidate_s, predict, prices_of
from workbench.cost.model import CostModel
from workbench.data.sample import Sample
from workbench.explain.critical_path import CAUSES, COMPUTE, Cause
from workbench.explain.explanation import parts_of_all
from workbench.explain.idle import idle_by_cause, idle_time
from workbench.job.job import Job
from workbench.plan.codec import plan_hash
from workbench.plan.plan import Plan
from workbench.planner.judged import judged
from workbench.planner.strategy_spec import Planner
from workbench.search.joint.ablation import ablated
from workbench.search.joint.bounds import lower_bound_s
from workbench.search.joint.drive import joint_search, searched_starts
from workbench.search.joint.evaluate import Judge
from workbench.search.joint.objective_bounds import bound_for
from workbench.search.joint.own_spaces import OWN_SPACES
from workbench.search.joint.question import Question
from workbench.search.joint.result import SearchResult
from workbench.search.joint.terms import Scope, Stop
from workbench.search.objectives.objective import Objective
from workbench.search.objectives.options import ObjectiveOptions, judge_for
from workbench.search.objectives.plan_judge import PlanJudge
from workbench.strategies.registry import BY_NAME, PLANNERS, PRICED
from workbench.timing.accept import accept
from workbench.trace import Lane

KERNELS = "kernels"
PAPERS = ("Cornstarch", "DistTrain", "Entrain", "Karnati et al.")  # as `OwnSpace.where` begins


def judge_of(
    job: Job,
    cost: CostModel,
    objective: Objective,
    options: ObjectiveOptions,
    batches: Sequence[Sequence[Sample]],
) -> Judge:
    """The judge of an objective, for all searches of a job.

    Planning of further batches is timed in CPU seconds, which other load does not affect.

    Raises:
        ValueError: as `judge_for`.
    """
    if objective is Objective.ITERATION and not batches:
        return IterationJudge(cost)
    executors = replace(executors_of(cost), clock=time.process_time)
    return judge_for(objective, options, job, cost, batches=batches, seed=0, executors=executors)


def causes_of(plan: Plan, cost: CostModel) -> dict[str, float]:
    """Cause -> share of the step, largest first, adding up to 1.

    A rank computes, and its passes are kernels, stragglers among token shards, collectives inside layers and
    launches; or it idles, for a cause of `IdleCause`. Ranks without a stage count.

    Args:
        plan: with the batch that it was made for.

    Raises:
        ValueError: the plan is refused.

    Complexity: one run of the engine and a few prices.
    """
    lowered, memory = accept(plan)
    trace = predict(lowered, memory, cost)
    parts = parts_of_all(lowered, cost, prices_of).passes
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in trace.spans:
        if span.lane is not Lane.COMPUTE:
            continue
        took_s, cause = span.end_s - span.start_s, CAUSES[span.action.kind]
        if cause not in COMPUTE or span.action not in parts:
            seconds[cause] += took_s
            continue
        parts_of_action = parts[span.action]
        seconds[KERNELS] += parts_of_action.kernels * took_s
        seconds[Cause.STRAGGLER] += parts_of_action.straggler * took_s
        seconds[Cause.INSIDE] += parts_of_action.collectives * took_s
        seconds[Cause.LAUNCH] += parts_of_action.launch * took_s
    ranks = plan.cluster.num_ranks
    shares = {str(cause): value / ranks / trace.iteration_s for cause, value in seconds.items()}
    for idle in idle_by_cause(plan, idle_time(lowered, trace)):
        shares[str(idle.cause)] = shares.get(str(idle.cause), 0.0) + idle.seconds / trace.iteration_s
    return dict(
        sorted(
            ((cause, share) for cause, share in shares.items() if share),
            key=lambda value: -value[1],
        )
    )


UNITS = {
    Objective.ITERATION: "s a step",
    Objective.DOLLARS: "dollars a sample",
    Objective.GOODPUT: "s a sample that counts",
}
ROUNDING = 1 + 1e-9
MOST_CAUSES = 4


def prepared(suite_job: SuiteJob) -> tuple[Job, CostModel, Judge]:
    """The job with open layouts, its cost model, and the common judge."""
    job = opened(suite_job.make())
    cost = suite_job.cost(job)
    return (
        job,
        cost,
        judge_of(job, cost, suite_job.objective, suite_job.objective_options, suite_job.batches()),
    )


def planners_of(job: Job) -> Mapping[str, Planner]:
    """All registered planners; those that need prices only where every rank has one."""
    return PLANNERS | (PRICED if job.has_prices else {})


def compared(
    suite_job: SuiteJob, *, budget_s: float, seed: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """The record of one job; `joint_s` and `best_single_s` are in the unit of its objective."""
    job, cost, judge = prepared(suite_job)
    own_results: dict[str, OwnBest] = {}
    planners = planners_of(job)
    for result in own_searches(
        job, cost, judge, planners, budget_s=budget_s, seed=seed, clock=time.process_time
    ):
        own_results[result.strategy] = result
        progress(f"{suite_job.name}: {result.strategy} {_shown(result.value)}")
    best = best_of(own_results)
    assert best.value is not None, "the best one has a plan"
    assert best.plan is not None, "the best one has a plan"
    joint = _joint(job, cost, judge, budget_s, seed)
    progress(f"{suite_job.name}: joint {joint.value:.6g}, best single {best.strategy} {best.value:.6g}")
    return {
        **_joint_record(joint),
        "best_single_s": best.value,
        "best_single": best.strategy,
        "objective": suite_job.objective.value,
        "gain": best.value / joint.value,
        "unit": UNITS[suite_job.objective],
        "source": suite_job.source,
        "differs": suite_job.differs,
        "gpus": job.cluster.num_ranks if job.max_ranks is None else job.max_ranks,
        "best_single_plan": plan_hash(best.plan),
        "best_single_causes": causes_of(best.plan, cost),
        "joint_causes": causes_of(joint.plan, cost),
        "strategies": {name: _own_record(result) for name, result in own_results.items()},
    }


def joint_alone(
    suite_job: SuiteJob, *, budget_s: float, seed: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """The record of the joint search alone in the given time."""
    job, cost, judge = prepared(suite_job)
    joint = _joint(job, cost, judge, budget_s, seed)
    progress(f"{suite_job.name}: joint {joint.value:.6g} in {budget_s:g} s")
    return _joint_record(joint)


def _joint(job: Job, cost: CostModel, judge: Judge, budget_s: float, seed: int) -> SearchResult:
    stop = Stop(seconds=budget_s, clock=time.process_time)
    lower = bound_for(judge) if isinstance(judge, PlanJudge) else lower_bound_s
    return joint_search(job, cost, judge, stop=stop, scope=Scope(seed=seed, lower=lower))


def _joint_record(joint: SearchResult) -> dict[str, Any]:
    return {
        "joint_s": joint.value,
        "lower_bound": joint.lower_bound,
        "gap": joint.gap,
        "candidates": joint.candidates,
        "seconds": joint.seconds,
        "joint_from": joint.best_from,
        "joint_plan": plan_hash(joint.plan),
        "joint_ranks": len(joint.plan.ranks),
        "best_start": joint.best_start.name,
        "best_start_s": joint.best_start.value,
    }


def overall(jobs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Summary over all jobs."""
    gains = [row["best_single_s"] / row["joint_s"] for row in jobs.values()]
    papers = [_best_of_papers(row["strategies"]) / row["joint_s"] for row in jobs.values()]
    most = [row["best_single_s"] / row["lower_bound"] for row in jobs.values()]
    return {
        "never_worse": all(row["joint_s"] <= row["best_single_s"] * ROUNDING for row in jobs.values()),
        "geomean_gain": statistics.geometric_mean(gains),
        "geomean_gain_over_papers": statistics.geometric_mean(papers),
        "most_geomean_gain": statistics.geometric_mean(most),  # of any plans, by their lower bounds
    }


def _best_of_papers(strategies: Mapping[str, Mapping[str, Any]]) -> float:
    """The best value of the strategies that the papers propose or compare with: without FSDP and ours."""
    return min(
        own["value"]
        for own in strategies.values()
        if own["value"] is not None and own["where"].startswith(PAPERS)
    )


def lines(jobs: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    """The table that the command prints."""
    table = ["job                   joint  best single   gain  strategy                     gap  candidates"]
    for name, row in jobs.items():
        table.append(
            f"{name:16} {row['joint_s']:10.5g} {row['best_single_s']:12.5g} {row['gain']:6.3f}  "
            f"{row['best_single']:24} {row['gap']:7.1%} {row['candidates']:11}"
        )
    return table


def causes_lines(jobs: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    """Causes of the mean rank's step under the best single strategy's plan and the joint search's."""
    table = ["where the mean rank's step goes, best single | joint:"]
    for name, row in jobs.items():
        if "joint_causes" in row:
            sides = (_largest(row[side]) for side in ("best_single_causes", "joint_causes"))
            table.append(f"{name:16} {' | '.join(sides)}")
    return table if len(table) > 1 else []


def _largest(causes: Mapping[str, float]) -> str:
    most = sorted(causes.items(), key=lambda cause_and_share: -cause_and_share[1])[:MOST_CAUSES]
    return ", ".join(f"{cause} {share:.0%}" for cause, share in most)


def longer_lines(
    longer: Mapping[str, Mapping[str, Any]], jobs: Mapping[str, Mapping[str, Any]]
) -> Sequence[str]:
    """One line per job: the joint search with more time, and its gain where the best strategy is known."""
    table = ["with a longer joint search:"]
    for name, row in longer.items():
        gain = f"{jobs[name]['best_single_s'] / row['joint_s']:6.3f}" if name in jobs else "-"
        table.append(
            f"{name:16} {row['joint_s']:10.5g} {gain:>6} {row['candidates']:11} {row['seconds']:6.1f} s"
        )
    return table


def _own_record(result: OwnBest) -> dict[str, Any]:
    record: dict[str, Any] = {
        "value": result.value,
        "unsearched": result.unsearched,
        "tried": result.tried,
        "planned": result.planned,
        "seconds": round(result.seconds, 2),
        "searches": OWN_SPACES[result.strategy].degrees.value,
        "where": OWN_SPACES[result.strategy].where,
    }
    return record if result.value is not None else record | {"refusal": result.refusal}


def _shown(value: float | None) -> str:
    return "no plan" if value is None else f"{value:.6g}"


ALL = "all"


def ablation_of(suite_job: SuiteJob, *, budget_s: float, progress: Callable[[str], None]) -> dict[str, Any]:
    """Gains of the joint search over its best start in the given time.

    One question is searched with the start's answers to the others; then all are searched. A question
    without alternatives on a job shows 1.
    """
    job, cost, judge = prepared(suite_job)
    stop = Stop(seconds=budget_s, clock=time.process_time)
    starts = searched_starts(job, cost, judge, stop=stop)
    value, name = min((start.value, start.name) for start in starts if start.value is not None)
    progress(f"{suite_job.name}: from {name}, {value:.6g}")
    gains: dict[str, float] = {}
    for gain in ablated(job, cost, judge, name, scope=Scope(starts=starts), stop=stop):
        what = gain.open[0].value if len(gain.open) == 1 else ALL
        gains[what] = gain.factor
        progress(f"{suite_job.name}: {what} {gain.factor:.4f}")
    return {"start": name, "start_value": value, "gains": gains}


def ablation_lines(jobs: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    """The table that the command prints."""
    heads = [*(question.value for question in Question), ALL]
    table = ["gain by one question alone".ljust(28) + "".join(f"{head:>10}" for head in heads)]
    for name, row in jobs.items():
        table.append(f"{name:28}" + "".join(f"{row['gains'][head]:10.3f}" for head in heads))
    return table


AWARE, UNAWARE = "cornstarch", "cornstarch-frozen-unaware"


def aware_of(suite_job: SuiteJob, *, limit_s: float, progress: Callable[[str], None]) -> dict[str, Any]:
    """Seconds of a step of both strategies' plans, each by its own shortlist; None where it has no plan.

    Args:
        limit_s: CPU seconds of either; one that takes longer has no plan.
    """
    job, cost, _ = prepared(suite_job)
    record: dict[str, Any] = {}
    for name in (AWARE, UNAWARE):
        try:
            stop_in_time = stopper(time.process_time() + limit_s, time.process_time)
            record[name] = candidate_s(judged(BY_NAME[name], candidate_s)(job, cost, stop_in_time), cost)
        except ValueError as error:
            record |= {name: None, f"{name} refusal": str(error)}
        except OutOfTime:
            record |= {name: None, f"{name} refusal": f"out of time after {limit_s:g} CPU s"}
        progress(f"{suite_job.name}: {name} judged {record[name]}")
    return record


def is_never_slower(jobs: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the aware planner loses on no job."""
    return all(
        row[UNAWARE] is None or (row[AWARE] is not None and row[AWARE] <= row[UNAWARE] * ROUNDING)
        for row in jobs.values()
    )


def aware_lines(jobs: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    """One line per job."""
    return [
        f"{name}: {AWARE} {row[AWARE]} s, {UNAWARE} {row[UNAWARE]} s, both judged by the simulator"
        for name, row in jobs.items()
    ]
