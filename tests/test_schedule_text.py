"""Schedules print as grids and parse back; structural errors show the grid with the cell marked."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.oracles import passes_read, timed
from tests.schedule_grids import parse_programs, parse_timeline
from tests.strategies import schedule_problems
from workbench.schedule.action import Action, Pass, parse_action
from workbench.schedule.graph_aware import graph_aware_1f1b
from workbench.schedule.one_f_one_b import one_f_one_b
from workbench.schedule.text import (
    Cell,
    Slot,
    format_programs,
    format_timeline,
    marked_error,
)


def programs_of(*lines):
    return {(rank,): tuple(parse_action(a) for a in line.split()) for rank, line in enumerate(lines)}


@examples(60)
@given(schedule_problems(), st.data())
def test_programs_round_trip(problem, data):
    programs = graph_aware_1f1b(*problem)
    assert parse_programs(format_programs(programs)) == programs
    ranks = data.draw(st.sampled_from(sorted(programs)))
    mark = Cell(ranks, data.draw(st.integers(0, len(programs[ranks]))))
    marked = format_programs(programs, mark)
    assert marked.count("<--") == 1
    assert parse_programs(marked) == programs


@examples(60)
@given(schedule_problems(), st.integers(1, 3), st.integers(1, 3))
def test_timelines_round_trip(problem, forward, backward):
    nodes, groups = problem
    programs = graph_aware_1f1b(nodes, groups)
    times = timed(programs, passes_read(nodes), lambda a: forward if a.kind is Pass.F else backward)
    rows = {group: tuple(Slot(a, *times[a]) for a in actions) for group, actions in programs.items()}
    assert parse_timeline(format_timeline(rows)) == rows


def test_collective_actions_round_trip():
    programs = programs_of("0ONLOAD 0F0 0OFFLOAD 0B0 0REDUCE_GRAD STEP", "1F0 1I0 1W0 STEP")
    assert parse_programs(format_programs(programs)) == programs


def test_grid_is_readable():
    programs = {(0, 1): one_f_one_b([0, 1], 2)[0], (2,): one_f_one_b([0, 1], 2)[1]}
    assert format_programs(programs, Cell((2,), 1)) == (
        "0,1 | 0F0 0F1     0B0 0B1\n"
        "  2 | 1F0 1B0 <-- 1F1 1B1\n"
    )  # fmt: skip


def test_timeline_is_readable():
    rows = {
        (0,): (Slot(Action(0, Pass.F, 0), 0, 1), Slot(Action(0, Pass.B, 0), 3, 5)),
        (1,): (Slot(Action(1, Pass.F, 0), 1, 2), Slot(Action(1, Pass.B, 0), 2, 3)),
    }
    assert format_timeline(rows) == (
        "0 | 0F0 .   .   0B0 =\n"
        "1 | .   1F0 1B0 .   .\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 | 0F0 0X0", "line 1: bad action '0X0'"),
        ("0 | 0F0\n0 | 0B0", "line 2: row 0 stands twice"),
        ("0F0 0B0", "line 1: want `<ranks> | <actions>`"),
    ],
)
def test_bad_grids_name_the_line(text, message):
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        parse_programs(text)


def test_continuation_needs_an_action():
    with pytest.raises(ValueError, match="line 1, tick 2: '=' goes on from no action"):
        parse_timeline("0 | 0F0 . =")


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([Slot(Action(0, Pass.F, 0), 0, 2), Slot(Action(0, Pass.B, 0), 1, 3)], "0B0 starts before 0F0 ends"),
        ([Slot(Action(0, Pass.F, 0), 1, 1)], "0F0 takes no tick"),
    ],
)
def test_slots_that_a_grid_cannot_show_are_refused(slots, message):
    with pytest.raises(ValueError, match=f"{message}(.|\n)*<--"):
        format_timeline({(0,): slots})


def test_error_shows_a_window_of_a_long_schedule():
    stages = range(40)
    programs = {(stage,): actions for stage, actions in zip(stages, one_f_one_b(stages, 100), strict=True)}
    shown = str(marked_error("wrong", programs, Cell((20,), 90))).splitlines()
    assert shown[0] == "wrong (action 90 of the row)"
    assert len(shown) == 18
    assert max(map(len, shown)) < 250
    assert [line for line in shown if "<--" in line] == [
        next(line for line in shown if line.startswith("20 |"))
    ]
