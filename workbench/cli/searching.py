"""How commands search: once for the same question, with what was found kept in the user's cache."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from workbench.bounded_file import read_bounded
from workbench.cli.console import warn
from workbench.cost.model import CostModel
from workbench.explain.warnings import unlike_layouts, waste_of
from workbench.job.job import Job
from workbench.job.sample_sizes import Tiling
from workbench.job.step_batches import Batches, step_batches
from workbench.plan.codec import dumps
from workbench.planner.judged import JudgedBy
from workbench.planner.strategy_spec import Planner
from workbench.report.search_tables import search_record
from workbench.search.drive import search
from workbench.search.kept_results import Kept, KeptResults, result_key
from workbench.search.objectives.objective import Objective
from workbench.search.objectives.options import ObjectiveOptions, judge_for
from workbench.search.objectives.plan_judge import PlanJudge
from workbench.timing.accept import accept
from workbench.whole_file import check_writable


class Drawn(NamedTuple):
    """Where batches come from: the job file's data, or others."""

    seed: int
    sizes: str | None
    tiling: Tiling

    def batches(self, path: Path, job: Job, num: int) -> Batches:
        """So many, the same for the same seed."""
        return step_batches(path, job, num, seed=self.seed, sizes=self.sizes, tiling=self.tiling)


class Judging(NamedTuple):
    """An objective, its judge, and all that decides it; no judge: the step on the job's own batch."""

    objective: Objective = Objective.ITERATION
    judge: PlanJudge | None = None
    decided: str = ""


def judging(
    objective: Objective, said: ObjectiveOptions, path: Path, job: Job, cost: CostModel, drawn: Drawn
) -> Judging:
    """What a search's flags ask for.

    Raises:
        ValueError: flags that contradict each other, or data or traces that are refused.
    """
    from sim.judge import executors_of

    said.check(objective)
    if said.batches is None and objective is Objective.ITERATION:
        return Judging()
    batches = drawn.batches(path, job, said.batches) if said.batches is not None else ()
    judge = judge_for(
        objective, said, job, cost, batches=batches, seed=drawn.seed, executors=executors_of(cost)
    )
    content = "" if said.failures is None else read_bounded(said.failures)
    return Judging(objective, judge, repr((said, batches, drawn.seed, content)))


NoCache = Annotated[bool, typer.Option("--no-cache", help="do not read or write cached results")]


def kept_results() -> KeptResults:
    """In the folder for such files: `$XDG_CACHE_HOME/multimodal-workbench`, by default in `~/.cache`."""
    home = os.environ.get("XDG_CACHE_HOME")
    folder = Path(home) if home else Path.home() / ".cache"
    return KeptResults(folder / "multimodal-workbench" / "search", warn)


def check_drawable(path: Path) -> None:
    """Raise ValueError unless a picture can be drawn there."""
    from workbench.report.pareto_plot import check_picture

    check_picture(path)
    check_writable(path)


def draw(record: Mapping[str, Any], path: Path) -> str:
    """The plans of a search's record as a picture; says so."""
    from workbench.report.pareto_plot import draw_search

    draw_search(record, path)
    return f"plans drawn in {path}"


def searched(
    job: Job,
    cost: CostModel,
    planners: Mapping[str, Planner],
    judging: Judging,
    progress: Callable[[int, int, str], None],
    results: KeptResults | None,
    judge: JudgedBy,
) -> Kept:
    """What a search finds, or found before.

    Args:
        results: where it is looked up and kept; None: nowhere.
        judging: what is best.
        judge: whom the planners' plans were held against.

    Raises:
        ValueError: no strategy has a plan, where memory is what lacks, that stands first; or none meets a
            limit, with the nearest one.
    """
    from sim.predict import predict_within

    objective = judging.objective
    key = result_key(job, cost, (*planners, judge), f"{objective} {judging.decided}")
    known = None if results is None else results.get(key)
    if known is not None:
        sys.stderr.write(
            "workbench: cached result of the same job, machines and code; --no-cache searches again\n"
        )
        return known
    found = search(
        job,
        cost,
        planners,
        lambda plan: predict_within(*accept(plan), cost),
        progress,
        objective,
        judging.judge,
    )
    best = found[0].plan
    if best is None:
        raise ValueError(_none_text(job.name, [candidate.refusal for candidate in found]))
    if found[0].judged is not None and found[0].judged.misses:
        raise ValueError(
            f"no plan of job {job.name!r} meets the limit; nearest: {found[0].strategy}: "
            f"{found[0].judged.misses}"
        )
    plans = [candidate.plan for candidate in found if candidate.plan is not None]
    warnings = [*unlike_layouts(best, job), *(line for plan in plans for line in waste_of(plan, job))]
    asked = {"objective": objective.value} if judging.judge is None else judging.judge.asked
    kept = Kept(record={**search_record(job.name, found, asked), "warnings": warnings}, best_plan=dumps(best))
    if results is not None:
        results.put(key, kept)
    return kept


def _none_text(job: str, refusals: Sequence[str]) -> str:
    """Why there is no plan: that none fits, where that is what is wrong."""
    too_large = [refusal for refusal in refusals if "does not fit" in refusal]
    first = "does not fit: " if too_large else ""
    return f"{first}no strategy has a plan for job {job!r}; {(too_large or refusals)[0]}"
