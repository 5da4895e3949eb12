"""The papers' timelines, as text to review, and what the papers say about them.

`UPDATE_GOLDEN=1 python -m pytest tests/test_schedule_golden.py` writes the files anew.
"""

import os
from pathlib import Path

import pytest

from tests import figures
from tests.figures import FIGURES
from tests.schedule_grids import parse_timeline
from workbench.balance.stages.partition import partition
from workbench.schedule.action import Action, Pass

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", FIGURES)
def test_timeline_is_the_reviewed_one(name):
    path, ours = GOLDEN / f"{name}.txt", FIGURES[name]().text()
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(ours)
    assert ours == path.read_text(), f"{path.name} differs; UPDATE_GOLDEN=1 writes it anew"


@pytest.mark.parametrize("name", FIGURES)
def test_golden_files_hold_every_pass_for_its_ticks(name):
    figure = FIGURES[name]()
    slots = [slot for row in parse_timeline((GOLDEN / f"{name}.txt").read_text()).values() for slot in row]
    assert {slot.action: slot.end_tick - slot.start_tick for slot in slots} == {
        action: figure.ticks(action) for action in figure.times()
    }
    assert max(slot.end_tick for slot in slots) == figure.length


def test_v1_figure2a_eight_microbatches_take_eleven_sevenths_of_four():
    four, eight = figures.v1_figure2a(4).length, figures.v1_figure2a(8).length
    assert eight * 7 == four * 11
    assert round(eight / four, 2) == 1.57
    assert four == (4 + 4 - 1) * (1 + 2)


def test_v1_figure2_order_of_the_three():
    """Same work and ranks: replicated is the slowest, the ideal the fastest."""
    ideal, colocated = figures.v1_figure2c().length, figures.v1_figure2b().length
    replicated = figures.v1_figure2a(8).length * (2 + 2 + 1)  # vision and audio whole, a quarter of the LLM
    assert ideal < colocated < replicated
    assert ideal == (8 + 3 - 1) * (2 + 4)  # a chain of three: encoders in parallel count once


def test_v1_figure2a_copies_as_stages_are_not_eleven_sevenths():
    """What a plan with early copies gives instead: only the first rank's encoders go back."""
    four, eight = figures.v1_figure2a_copies(4).length, figures.v1_figure2a_copies(8).length
    assert (four, eight) == (36, 72)


def test_v1_figure6b_llm_waits_for_both_encoders_and_they_for_it():
    times = figures.v1_figure6b().times()
    for index in range(6):
        starts = {(s, k): times[Action(s, k, index)][0] for s in range(3) for k in (Pass.F, Pass.B)}
        ends = {(s, k): times[Action(s, k, index)][1] for s in range(3) for k in (Pass.F, Pass.B)}
        assert starts[2, Pass.F] >= max(ends[0, Pass.F], ends[1, Pass.F])
        assert min(starts[0, Pass.B], starts[1, Pass.B]) >= ends[2, Pass.B]
        assert starts[0, Pass.F] == starts[1, Pass.F]
        assert starts[0, Pass.B] == starts[1, Pass.B]


def test_v1_figure6c_has_the_time_of_its_longest_chain():
    assert figures.v1_figure6c().length == (6 + 5 - 1) * (1 + 2)


def test_v1_figure7_partitions_come_from_the_costs():
    """24 layers of one forward tick; frozen: the encoder's 12 have no backward, the LLM's 12 one forward."""
    by_forward = partition([1.0] * 24, 6)
    assert by_forward == tuple((4 * k, 4 * k + 4) for k in range(6))
    by_both = partition([1.0] * 12 + [2.0] * 12, 6)
    assert by_both == ((0, 6), (6, 12), (12, 15), (15, 18), (18, 21), (21, 24))
    for figure, cuts in ((figures.v1_figure7("b"), by_forward), (figures.v1_figure7("c"), by_both)):
        assert [box.forward for box in figure.boxes] == [end - first for first, end in cuts]


def test_v1_figure7_awareness_pays():
    unaware, aware = figures.v1_figure7("b"), figures.v1_figure7("c")
    assert {box.forward + box.backward for box in aware.boxes} == {6}
    assert {box.forward + box.backward for box in unaware.boxes} == {4, 8}
    work = [sum(box.forward + box.backward for box in figure.boxes) for figure in (unaware, aware)]
    assert work[0] == work[1]
    assert aware.length < unaware.length < figures.v1_figure7("a").length


def test_icml_figure1c_freezing_breaks_the_balance():
    """All trained, the stages differ by 4 %; frozen, three of them wait for nobody and the first idles."""
    trained, frozen = (figures.icml_figure1c_iteration_ms(status) for status in ("trainable", "frozen"))
    ideal = {status: 64 * sum(map(sum, figures.FIGURE1B_MS[status])) / 4 for status in figures.FIGURE1B_MS}
    assert trained / ideal["trainable"] == pytest.approx(1.057, abs=0.001)
    assert frozen / ideal["frozen"] == pytest.approx(1.249, abs=0.001)
