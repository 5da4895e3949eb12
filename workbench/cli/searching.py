"""Search shared by commands: results are cached in the user's cache folder and reused for equal inputs."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from workbench.bounded_file import read_bounded
from workbench.cli.budgets import stopped_text
from workbench.cli.console import warn
from workbench.cost.model import CostModel
from workbench.explain.uneven_ranks import uneven_ranks
from workbench.explain.warnings import unlike_layouts, waste_of
from workbench.job.first_rows import SizesRead
from workbench.job.job import Job
from workbench.job.step_batches import Batches, step_batches
from workbench.plan.codec import dumps
from workbench.planner.judged import JudgedBy
from workbench.planner.strategy_spec import Planner
from workbench.report.search_tables import search_record
from workbench.search.drive import Candidate, Override, Watch, search
from workbench.search.kept_results import Kept, KeptResults, result_key
from workbench.search.objectives.objective import Objective
from workbench.search.objectives.options import ObjectiveOptions, judge_for
from workbench.search.objectives.plan_judge import PlanJudge
from workbench.timing.accept import accept
from workbench.units import wanted_memory_bytes
from workbench.whole_file import check_writable

MOST_PLANS = 512  # that are kept: those of some twenty searches


class BatchSource(NamedTuple):
    """Source of batches: data of the job file, or sizes of samples given by flags."""

    seed: int
    read: SizesRead | None

    def batches(self, path: Path, job: Job, num: int) -> Batches:
        """Draw `num` batches; equal seeds give equal batches."""
        if self.read is None:
            return step_batches(path, job, num, seed=self.seed)
        source, tiling, pack = self.read
        return step_batches(path, job, num, seed=self.seed, sizes=source, tiling=tiling, pack_tokens=pack)


class Criterion(NamedTuple):
    """What plans are ranked by.

    Args:
        objective: the quantity to optimise.
        judge: evaluates plans; None: seconds of a step on the job's own batch.
        cache_key: text of all inputs of the judge, part of the key of a cached result.
    """

    objective: Objective = Objective.ITERATION
    judge: PlanJudge | None = None
    cache_key: str = ""


def criterion_of(
    objective: Objective,
    options: ObjectiveOptions,
    path: Path,
    job: Job,
    cost: CostModel,
    source: BatchSource,
) -> Criterion:
    """The criterion that the flags of a search describe.

    Raises:
        ValueError: contradictory flags, or invalid data or traces.
    """
    from sim.judge import executors_of

    options.check(objective)
    if options.batches is None and objective is Objective.ITERATION:
        return Criterion()
    batches = source.batches(path, job, options.batches) if options.batches is not None else ()
    judge = judge_for(
        objective, options, job, cost, batches=batches, seed=source.seed, executors=executors_of(cost)
    )
    failure_trace = "" if options.failures is None else read_bounded(options.failures)
    return Criterion(objective, judge, repr((options, batches, source.seed, failure_trace)))


NoCache = Annotated[bool, typer.Option("--no-cache", help="do not read or write cached results")]


def kept_results() -> KeptResults:
    """The cache of search results, in `$XDG_CACHE_HOME/multimodal-workbench`, by default below `~/.cache`."""
    return KeptResults(_cache_folder() / "search", warn)


def kept_plans() -> KeptResults:
    """The cache of single strategies' plans, beside that of `kept_results`."""
    return KeptResults(_cache_folder() / "plans", warn, MOST_PLANS)


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "multimodal-workbench"


def check_drawable(path: Path) -> None:
    """Raise ValueError unless a plot can be written to this file."""
    from workbench.report.pareto_plot import check_picture

    check_picture(path)
    check_writable(path)


def draw(record: Mapping[str, Any], path: Path) -> str:
    """Write a plot of the plans in a search's record; return a line that names the file."""
    from workbench.report.pareto_plot import draw_search

    draw_search(record, path)
    return f"plans drawn in {path}"


def cached_search(
    job: Job,
    cost: CostModel,
    planners: Mapping[str, Planner],
    criterion: Criterion,
    watch: Watch,
    results: KeptResults | None,
    judge: JudgedBy,
) -> Kept:
    """The result of a search, from the cache if it is there.

    Where a strategy was stopped by the budget, the result is not kept.

    Args:
        criterion: what plans are ranked by.
        results: cache to read and to write; None: no cache.
        judge: what chose among the best plans of each strategy.

    Raises:
        ValueError: no strategy has a plan, and the message starts with "does not fit" if one lacks memory; or
            no plan meets a limit, and the message names the nearest one.
    """
    if results is None:
        return _searched(job, cost, planners, criterion, watch)
    key = result_key(job, cost, (*planners, judge), f"{criterion.objective} {criterion.cache_key}")
    cached = results.get(key)
    if cached is not None:
        sys.stderr.write(
            "workbench: cached result of the same job, machines and code; --no-cache searches again\n"
        )
        return cached
    result = _searched(job, cost, planners, criterion, watch)
    if not any(candidate.get("stopped") for candidate in result.record["candidates"]):
        results.put(key, result)
    return result


def _searched(
    job: Job,
    cost: CostModel,
    planners: Mapping[str, Planner],
    criterion: Criterion,
    watch: Watch,
) -> Kept:
    from sim.predict import predict_within

    candidates = search(
        job,
        cost,
        planners,
        lambda plan: predict_within(*accept(plan), cost),
        watch,
        criterion.objective,
        criterion.judge,
    )
    first = candidates[0]
    if first.plan is None:
        raise ValueError(_none_text(job.name, candidates))
    if first.judged is not None and first.judged.misses:
        raise ValueError(
            f"no plan of job {job.name!r} meets the limit; nearest: {first.strategy}: {first.judged.misses}"
        )
    of_plans = (
        line
        for candidate in candidates
        if candidate.plan is not None
        for line in waste_of(candidate.plan, _planned(job, planners[candidate.strategy]))
    )
    warnings = list(
        dict.fromkeys(
            (
                *_stopped(candidates),
                *unlike_layouts(first.plan, job),
                *of_plans,
                *_uneven(candidates, job, cost),
            )
        )
    )
    description = (
        {"objective": criterion.objective.value} if criterion.judge is None else criterion.judge.asked
    )
    record = search_record(job.name, candidates, description)
    return Kept(record={**record, "warnings": warnings}, best_plan=dumps(first.plan))


def _stopped(candidates: Sequence[Candidate]) -> Iterator[str]:
    """The line that names strategies which the budget stopped, if there are any."""
    names = [each.strategy for each in candidates if each.is_stopped and each.plan is not None]
    if names:
        yield stopped_text(names)


def _uneven(candidates: Sequence[Candidate], job: Job, cost: CostModel) -> Iterator[str]:
    """The hint about the best plan whose samples could be grouped more evenly, if there is one."""
    best_s = min(candidate.trace.iteration_s for candidate in candidates if candidate.trace is not None)
    hints = (
        uneven_ranks(candidate.plan, candidate.trace, job, cost, best_s=best_s)
        for candidate in candidates
        if candidate.plan is not None and candidate.trace is not None
    )
    yield from islice(filter(None, hints), 1)


def _planned(job: Job, planner: Planner) -> Job:
    """The job as a planner of a search plans it: with the ranks or the schedule that it was asked to try."""
    return planner.job(job) if isinstance(planner, Override) else job


def _none_text(job: str, candidates: Sequence[Candidate]) -> str:
    """Error text for a job without a plan: the refusal that lacks least memory, or else the first one."""
    none = f"no strategy has a plan for job {job!r}"
    wanted = [(wanted_memory_bytes(each.refusal), each) for each in candidates]
    sized = [(num_bytes, each) for num_bytes, each in wanted if num_bytes is not None]
    if sized:
        nearest = min(sized, key=itemgetter(0))[1]
        return f"does not fit: {none}; nearest: {nearest.strategy}: {nearest.refusal}"
    too_large = [each for each in candidates if "does not fit" in each.refusal]
    first = "does not fit: " if too_large else ""
    return f"{first}{none}; {(too_large or candidates)[0].refusal}"
