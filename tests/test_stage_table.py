"""The table of a plan's stages as people read it."""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.table import Table

from tests.plans import disjoint_plan, sample, two_encoders
from tests.test_memory import CUTS
from tests.test_strategies import cost, job
from workbench.cli.console import MOST_STAGES, first_rows
from workbench.job.other_layouts import with_layouts
from workbench.plan.codec import plan_hash
from workbench.report.folder import Entry, Folder
from workbench.report.html import report_html
from workbench.report.stage_table import folded_plan_table, folded_programs, numbers_text
from workbench.strategies.registry import PLANNERS


def cells(table: Table) -> list[tuple[str, ...]]:
    return list(zip(*(map(str, column.cells) for column in table.columns), strict=True))


def test_stages_that_replicas_have_alike_share_a_row_and_others_do_not() -> None:
    plan = PLANNERS["cornstarch"](with_layouts(job(), (), replicas=2), cost(), lambda *_: None)
    rows = [row for row in cells(folded_plan_table(plan)) if row[1] == "llm"]
    assert {row[2] for row in rows} == {"0-1"}
    assert len(rows) == len(plan.chain["llm", 0])
    first = next(each for each in plan.microbatches if each.module == "llm")
    uneven = replace(plan, microbatches=tuple(each for each in plan.microbatches if each != first))
    apart = [row for row in cells(folded_plan_table(uneven)) if row[1] == "llm"]
    assert {row[2] for row in apart} == {"0", "1"}
    assert len(apart) == 2 * len(rows)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        (range(64), "0-63"),
        ((0, 3), "0, 3"),
        (range(0, 24, 3), "0-21 by 3"),
        ((9, 0, 2, 5, 7), "5 of 0-9"),
        ((0, 1, 4, 5, 8, 9, 12, 13), "0-1, 4-5, 8-9, 12-13"),
        ((4,), "4"),
    ],
)
def test_numbers_are_runs_steps_or_a_count(numbers: range, text: str) -> None:
    assert numbers_text(list(numbers)) == text


def test_a_table_of_more_rows_is_cut() -> None:
    table = Table("stage")
    for number in range(MOST_STAGES + 3):
        table.add_row(str(number))
    cut = first_rows(table)
    assert cut.row_count == MOST_STAGES
    assert cut.caption == "3 more rows; --format csv prints all"


def test_layers_gathered_for_themselves_share_a_row_where_they_are_equal() -> None:
    """All stages are there, each once; units that differ in anything but the layer stand apart."""
    plan = PLANNERS["fsdp"](with_layouts(job(), ()), cost(), lambda *_: None)
    rows = cells(folded_plan_table(plan))
    for module in plan.model.modules:
        spans = [tuple(map(int, row[3].split(".."))) for row in rows if row[1] == module.name]
        assert [layer for first, last in spans for layer in range(first, last + 1)] == list(
            range(len(module.layers))
        )
        assert len(spans) < len(module.layers)
    entry = Entry(path=Path("plan.json"), plan=plan, plan_hash=plan_hash(plan), simulated=None, executed=())
    page = report_html(Folder(entries=(entry,), left_out=()))
    assert page.split("<h3>Stages</h3>")[1].split("</table>")[0].count("<tr>") == 1 + len(rows)
    whole = replace(plan, settings=replace(plan.settings, modules=()))
    assert len(cells(folded_plan_table(whole))) == sum(len(module.layers) for module in plan.model.modules)


def test_programs_that_replicas_have_alike_are_one_and_others_are_not() -> None:
    plan = disjoint_plan(two_encoders(), [sample(i) for i in range(6)], CUTS, replicas=2)
    folded = folded_programs(plan)
    assert 2 * len(folded) == len(plan.programs)
    assert sorted(rank for program in folded for rank in program.ranks) == sorted(plan.ranks)
    first, *others = plan.programs
    uneven = replace(plan, programs=(replace(first, actions=first.actions[::-1]), *others))
    assert len(folded_programs(uneven)) == len(folded) + 1
