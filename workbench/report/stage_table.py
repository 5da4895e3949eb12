"""A plan's stages as people read them: those that replicas have alike in one row."""

from collections.abc import Sequence
from itertools import pairwise

from rich.table import Table

from workbench.plan.plan import Plan
from workbench.plan.stage import Stage
from workbench.report.tables import STAGE_HEADERS, rank_runs, stage_cells, titled

MOST_RUNS = 4  # of stages, replicas or ranks that a cell lists


def folded_plan_table(plan: Plan) -> Table:
    """One line per stage, where equal ones of several replicas share a line."""
    table = titled(f"{plan.model.name}, strategy {plan.strategy}", STAGE_HEADERS, key="stages")
    for stages in _alike(plan).values():
        _, module, _, layers, _, *others = stage_cells(plan, stages[0])
        ids = numbers_text([stage.id for stage in stages])
        replicas = numbers_text([stage.replica for stage in stages])
        ranks = numbers_text(list({rank for stage in stages for rank in stage.flat_ranks}))
        table.add_row(ids, module, replicas, layers, ranks, *others)
    return table


def _alike(plan: Plan) -> dict[tuple[str, ...], list[Stage]]:
    """Stages with the same cells but for their numbers and ranks, in the order of the first of each."""
    alike: dict[tuple[str, ...], list[Stage]] = {}
    for stage in plan.stages:
        _, module, _, layers, _, *others = stage_cells(plan, stage)
        alike.setdefault((module, layers, *others), []).append(stage)
    return alike


def numbers_text(numbers: Sequence[int]) -> str:
    """`0-3, 8`; with more than `MOST_RUNS` runs `0-21 by 3` if they are equally far apart, else
    `8 of 0-30`.
    """
    runs = rank_runs(numbers)
    if runs.count(",") < MOST_RUNS:
        return runs
    ascending = sorted(numbers)
    steps = {after - before for before, after in pairwise(ascending)}
    span = f"{ascending[0]}-{ascending[-1]}"
    return f"{span} by {steps.pop()}" if len(steps) == 1 else f"{len(ascending)} of {span}"
