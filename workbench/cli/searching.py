"""How commands search: once for the same question, with what was found kept in the user's cache."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.console import warn
from workbench.cost.model import CostModel
from workbench.explain.warnings import waste_of
from workbench.job.job import Job
from workbench.plan.codec import dumps
from workbench.planner.judged import JudgedBy
from workbench.planner.strategy_spec import Planner
from workbench.report.search_tables import search_record
from workbench.search.drive import Objective, search
from workbench.search.kept_results import Kept, KeptResults, result_key
from workbench.timing.accept import accept

NoCache = Annotated[bool, typer.Option("--no-cache", help="search again, and keep nothing")]


def kept_results() -> KeptResults:
    """In the folder for such files: `$XDG_CACHE_HOME/multimodal-workbench`, by default in `~/.cache`."""
    home = os.environ.get("XDG_CACHE_HOME")
    folder = Path(home) if home else Path.home() / ".cache"
    return KeptResults(folder / "multimodal-workbench" / "search", warn)


def searched(
    job: Job,
    cost: CostModel,
    planners: Mapping[str, Planner],
    objective: Objective,
    progress: Callable[[int, int, str], None],
    results: KeptResults | None,
    judge: JudgedBy,
) -> Kept:
    """What a search finds, or found before.

    Args:
        results: where it is looked up and kept; None: nowhere.
        judge: whom the planners' plans were held against.

    Raises:
        ValueError: no strategy has a plan; where memory is what lacks, that stands first.
    """
    from sim.predict import predict_within

    key = result_key(job, cost, (*planners, judge), objective)
    known = None if results is None else results.get(key)
    if known is not None:
        sys.stderr.write(
            "workbench: found before, for the same job, machines and code; --no-cache searches again\n"
        )
        return known
    found = search(job, cost, planners, lambda plan: predict_within(*accept(plan), cost), progress, objective)
    best = found[0].plan
    if best is None:
        raise ValueError(_none_text(job.name, [candidate.refusal for candidate in found]))
    plans = [candidate.plan for candidate in found if candidate.plan is not None]
    warnings = [line for plan in plans for line in waste_of(plan, job)]
    kept = Kept(record={**search_record(job.name, found), "warnings": warnings}, best_plan=dumps(best))
    if results is not None:
        results.put(key, kept)
    return kept


def _none_text(job: str, refusals: Sequence[str]) -> str:
    """Why there is no plan: that none fits, where that is what is wrong."""
    too_large = [refusal for refusal in refusals if "does not fit" in refusal]
    first = "does not fit: " if too_large else ""
    return f"{first}no strategy has a plan for job {job!r}; {(too_large or refusals)[0]}"
