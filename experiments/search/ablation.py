"""What each question contributes: the joint search with one of them free, one of them fixed, or none."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.search.compared import planners_of, prepared
from experiments.search.jobs import SuiteJob
from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.planner.stage_counts import silent
from workbench.planner.strategy_spec import Planner
from workbench.search.joint.drive import joint_search
from workbench.search.joint.evaluate import Judge
from workbench.search.joint.question import Question
from workbench.search.joint.terms import Scope, Stop

ALL = "all"


def ablation_of(
    suite_job: SuiteJob, *, budget_s: float, seed: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Gains over the best plan that any strategy has of the job as it is, from that plan on.

    `alone`: one question searched, the others as that strategy answers them; `without`: the reverse.
    A job on which a question has no answer to change shows 1.
    """
    job, cost, judge = prepared(suite_job)
    name, value = _best_start(job, cost, judge, planners_of(job))
    progress(f"{suite_job.name}: from {name}, {value:.6g}")

    def gain(free: Sequence[Question]) -> float:
        fixed = {question: name for question in Question if question not in free}
        planners = {name: planners_of(job)[name]}
        scope = Scope(seed=seed, fixed=fixed, planners=planners)
        found = joint_search(job, cost, judge, stop=Stop(seconds=budget_s), scope=scope)
        progress(f"{suite_job.name}: {', '.join(free)} {value / found.value:.4f}")
        return value / found.value

    others = {question: [other for other in Question if other is not question] for question in Question}
    return {
        "start": name,
        "start_value": value,
        "alone": {question.value: gain([question]) for question in Question},
        "without": {question.value: gain(free) for question, free in others.items()},
        ALL: gain(list(Question)),
    }


def lines(jobs: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    """The table that the command prints."""
    heads = [question.value for question in Question]
    found = ["gain by one question alone".ljust(28) + "".join(f"{head:>10}" for head in (*heads, ALL))]
    for name, row in jobs.items():
        cells = [*(row["alone"][head] for head in heads), row[ALL]]
        found.append(f"{name:28}" + "".join(f"{cell:10.3f}" for cell in cells))
    return found


def _best_start(
    job: Job, cost: CostModel, judge: Judge, planners: Mapping[str, Planner]
) -> tuple[str, float]:
    best: tuple[float, str] | None = None
    refusal = ""
    for name, planner in planners.items():
        try:
            value = judge.value(planner(job, cost, silent))
        except ValueError as error:
            refusal = refusal or str(error)
            continue
        if best is None or value < best[0]:
            best = value, name
    if best is None:
        raise ValueError(f"job {job.name!r}: no strategy has a plan; the first: {refusal}")
    return best[1], best[0]
