"""The command that finds the number of GPUs that a training needs: size."""

from typing import Annotated

import typer

from workbench.cli.budgets import BudgetFlag, budget_s, stopped_text
from workbench.cli.console import print_result, warn
from workbench.cli.job_reading import read_job
from workbench.cli.judging import JudgeFlag, Strategy, planners_by
from workbench.cli.options import ExecutionFile, JobFile, Json, Profile
from workbench.cli.searching import Criterion, NoCache, cached_search, kept_results
from workbench.job.job import Job
from workbench.job.machines import cost_of
from workbench.planner.budget import starting_now
from workbench.planner.judged import JudgedBy
from workbench.report.progress import ticking
from workbench.report.size_table import answer_text, size_table, training_record
from workbench.search.drive import Watch
from workbench.search.sizing import (
    Goal,
    Training,
    answer,
    gpu_counts,
    num_steps,
    on_gpus,
    sized,
)
from workbench.strategies.registry import PLANNERS
from workbench.units import duration_s


def size_command(
    job: JobFile,
    tokens: Annotated[
        float | None,
        typer.Option(help="tokens to train, such as 1e12: all of the LLM's sequence, images included"),
    ] = None,
    samples: Annotated[
        float | None, typer.Option(help="samples to train, such as 2e6; replaces --tokens")
    ] = None,
    deadline: Annotated[str | None, typer.Option(help="time limit: 90m, 12h, 3d or 2w")] = None,
    budget_dollars: Annotated[
        float | None, typer.Option(help="money limit; needs cluster.dollars_per_gpu_hour")
    ] = None,
    gpus: Annotated[
        list[int] | None,
        typer.Option(min=1, help="numbers of GPUs to try; repeatable; default: one node, then doubling"),
    ] = None,
    strategy: Annotated[
        list[Strategy] | None,
        typer.Option(help="strategies to try; repeatable; default: all, as in `search`"),
    ] = None,
    profile: Profile = None,
    execution: ExecutionFile = None,
    judge: JudgeFlag = JudgedBy.SIMULATOR,
    budget: BudgetFlag = None,
    no_cache: NoCache = False,
    as_json: Json = False,
) -> None:
    """Find the number of GPUs, and the plan, that a training needs to meet a deadline or budget.

    The GPUs are of the job's kind, and the batch stays the same. Every number of GPUs has an equal share of
    what is left of --budget. Exit code 1 if no tried number is enough.
    """
    time = starting_now(budget_s(budget, "size"))
    deadline_s = None if deadline is None else duration_s(deadline, "--deadline")
    goal = Goal(tokens=tokens, samples=_whole(samples), deadline_s=deadline_s, budget_dollars=budget_dollars)
    base_job = read_job(job)
    _check_goal(goal, base_job)
    planners = planners_by(judge, strategy or tuple(PLANNERS))
    steps = num_steps(base_job, goal)
    results = None if no_cache else kept_results()
    cost = cost_of(base_job, profile, execution)
    counts = sorted(gpus) if gpus else list(gpu_counts(base_job))

    def train(count: int) -> Training:
        resized_job = on_gpus(base_job, count)
        share = time.part(1 / (len(counts) - counts.index(count)))
        with ticking(f"{count} GPUs", len(planners), quiet=as_json) as ticker:
            try:
                result = cached_search(
                    resized_job,
                    cost,
                    planners,
                    Criterion(),
                    Watch(progress=ticker.at, budget=share),
                    results,
                    judge,
                )
            except ValueError as error:
                return Training(gpus=count, steps=steps, record=None, refusal=str(error))
        best, *_ = candidates = result.record["candidates"]
        stopped = [each["strategy"] for each in candidates if each.get("stopped")]
        if stopped:
            warn(f"{count} GPUs: {stopped_text(stopped)}")
        return Training(
            gpus=count, steps=steps, record=best, dollars_per_gpu_hour=base_job.dollars_per_rank_hour
        )

    attempts = sized(goal, iter(counts), train)
    chosen = answer(goal, attempts)
    records = [training_record(training, goal) for training in attempts]
    record = {"job": base_job.name, "gpus": None if chosen is None else chosen.gpus, "tried": records}
    text = answer_text(chosen, goal, attempts)
    print_result(record, text, size_table(base_job.name, goal, attempts), as_json=as_json)
    if chosen is None:
        raise typer.Exit(1)


def _whole(samples: float | None) -> int | None:
    if samples is not None and not samples.is_integer():
        raise ValueError(f"size: want --samples as a whole number such as 2000000 or 2e6, got {samples:g}")
    return None if samples is None else int(samples)


def _check_goal(goal: Goal, job: Job) -> None:
    """Raise ValueError for a goal without a limit, or a budget where GPUs have no price."""
    if goal.deadline_s is None and goal.budget_dollars is None:
        raise ValueError("size: want --deadline, --budget-dollars or both")
    if goal.budget_dollars is not None and job.dollars_per_rank_hour is None:
        raise ValueError(f"size: --budget-dollars wants cluster.dollars_per_gpu_hour in job {job.name!r}")
