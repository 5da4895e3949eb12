"""How coverage of published runs is counted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.public.all import Scored
from experiments.public.coverage import LEVEL, PricedRow, coverage, median_width, priced_rows, stretch
from experiments.public.published import published
from workbench.timing.interval import Doubt, interval


def rows(sizes: list[float]) -> list[PricedRow]:
    return [PricedRow("a", size, 0.2, "measured") for size in sizes]


@given(st.lists(st.floats(0.01, 10, allow_nan=False), min_size=5, max_size=60))
def test_stretched_intervals_hold_as_many_as_they_say(sizes: list[float]):
    found = coverage(rows(sizes), stretch(rows(sizes)) * (1 + 1e-12))
    assert found + 1 / len(sizes) >= LEVEL
    assert coverage(rows(sizes), 1e-3) == 0.0


def test_width_is_of_the_whole_interval():
    assert median_width(rows([1.0])) == pytest.approx(np.exp(0.1) - np.exp(-0.1))


def test_a_row_at_the_end_of_its_interval_is_one_half_width_off():
    row = next(each for each in published() if each.target == "measured_s")
    found = interval(row.measured, (Doubt("x", 0.1),))
    off_s = row.measured * row.measured / found.low_s
    scored = Scored(row=row, iteration_s=off_s, low_s=found.low_s, high_s=found.high_s)
    (alone,) = priced_rows([scored])
    assert alone.half_widths == pytest.approx(1.0)
    assert alone.log_width == pytest.approx(2 * 0.1 * 1.2816)
    assert scored.is_inside


def test_blanks_of_a_page_are_unsaid_whatever_fills_them():
    found = [row for row in published() if "recompute" in row.unsaid]
    assert found
    assert any(row.cells.get("recompute") for row in found)
