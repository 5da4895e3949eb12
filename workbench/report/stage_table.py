"""A plan's stages and programs as people read them: what replicas or layers have alike in one row."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import pairwise

from rich.table import Table

from workbench.plan.plan import Plan, Program
from workbench.plan.stage import Stage
from workbench.report.tables import STAGE_HEADERS, rank_runs, stage_cells, titled

MOST_RUNS = 4  # of stages, replicas or ranks that a cell lists


def folded_plan_table(plan: Plan) -> Table:
    """The rows of `folded_stages` for the terminal."""
    table = titled(f"{plan.model.name}, {plan.made_by}", STAGE_HEADERS, key="stages")
    for row in folded_stages(plan):
        table.add_row(*row)
    return table


def folded_stages(plan: Plan) -> Sequence[tuple[str, ...]]:
    """One row per stage, in the order of `STAGE_HEADERS`; equal ones of several replicas share a row, as do
    equal units one after another.

    Units are layers that are gathered for themselves; weights are then those of each.
    """
    rows = []
    for units in _runs(plan, list(_alike(plan).values())):
        first, last = units[0][0], units[-1][0]
        _, module, _, _, _, grid, weights, trainable, microbatches = stage_cells(plan, first)
        replicas = numbers_text([stage.replica for stage in units[0]])
        ranks = numbers_text(list({rank for stage in units[0] for rank in stage.flat_ranks}))
        layers = f"{first.layers[0]}..{last.layers[1] - 1}"
        if len(units) > 1:
            weights, trainable = (
                each if each == "0" else f"{len(units)} x {each}" for each in (weights, trainable)
            )
        rows.append((_ids(units), module, replicas, layers, ranks, grid, weights, trainable, microbatches))
    return rows


def _ids(units: Sequence[Sequence[Stage]]) -> str:
    """Numbers of the stages of a row; of several units those of the first and last replica."""
    if len(units) == 1:
        return numbers_text([stage.id for stage in units[0]])
    runs = [rank_runs([unit[index].id for unit in units]) for index in (0, -1)]
    return " ... ".join(dict.fromkeys(runs))


def _runs(plan: Plan, groups: Sequence[list[Stage]]) -> list[list[list[Stage]]]:
    """Groups of stages in runs: units of one module, one after another, that differ in the layer alone."""
    runs: list[list[list[Stage]]] = []
    for group in groups:
        if runs and _continues(plan, runs[-1][-1], group):
            runs[-1].append(group)
        else:
            runs.append([group])
    return runs


def _continues(plan: Plan, before: Sequence[Stage], group: Sequence[Stage]) -> bool:
    first, second = before[0], group[0]
    return (
        plan.settings.of(second.module).shards_parameters
        and first.layers[1] == second.layers[0]
        and second.layers[1] - second.layers[0] == first.layers[1] - first.layers[0]
        and [(s.module, s.replica, s.ranks) for s in before]
        == [(s.module, s.replica, s.ranks) for s in group]
        and stage_cells(plan, first)[5:] == stage_cells(plan, second)[5:]
    )


def folded_programs(plan: Plan) -> list[Program]:
    """Programs, where those that are equal but for the numbers of stages are one, with the first's actions.

    Complexity: O(actions).
    """
    position_of = {
        stage.id: (stage.module, index) for chain in plan.chain.values() for index, stage in enumerate(chain)
    }
    alike: dict[Hashable, list[Program]] = {}
    for program in plan.programs:
        key = tuple(
            (None if action.stage is None else position_of[action.stage], action.kind, action.microbatch)
            for action in program.actions
        )
        alike.setdefault(key, []).append(program)
    return [
        replace(programs[0], ranks=tuple(rank for program in programs for rank in program.ranks))
        for programs in alike.values()
    ]


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
