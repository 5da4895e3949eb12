"""The attention bench: makespans against bounds that nothing beats, printed ratios, plots that redraw."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.bench import attention
from experiments.bench.attention import KERNELS, LAUNCHES, Cell, Launch, claims, makespan, published
from experiments.bench.attention_plots import PANELS, attention_figures
from experiments.bench.attention_plots import POLICIES as DRAWN
from experiments.bench.tokens import POLICIES
from experiments.harness.drawing import save
from experiments.harness.record import RESULTS
from sim.attention.pieces import UnitTiming

TIMING = UnitTiming(tile_s=1.0)


def test_the_optimum_of_whole_rows_and_of_rows_that_may_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four units, one row of 8 tiles and four of 1: whole, the long row decides; cut, 12 / 4 does."""
    monkeypatch.setattr(attention, "compute_units", lambda device: 4)
    rows = np.array([1.0, 1.0, 1.0, 1.0, 8.0])
    launch = Launch(1, local=False)
    assert makespan(rows, launch, TIMING, "longest_first") == (8.0, 1.0)
    assert makespan(rows, launch, TIMING, "static") == (9.0, 9 / 8)
    assert makespan(rows, launch, TIMING, "where_it_pays") == (3.0, 1.0)


def test_a_failing_cell_is_a_failing_claim() -> None:
    def cells(worst: float) -> list[Cell]:
        return [
            Cell(
                mask="EE",
                length="64k",
                launch=name,
                kernel=kernel,
                seconds=1.0,
                over_optimum=1.0,
                worst=worst,
            )
            for name in LAUNCHES
            for kernel in KERNELS
        ]

    assert sum(claims(cells(1.1)).values()) == 5  # static order loses too little
    assert sum(claims(cells(1.4)).values()) == 3


def test_printed_ratios_come_from_result_files(tmp_path: Path) -> None:
    rows = [
        {"key": "a/gain", "unit": "x", "paper": 2.0, "ours": 2.2},
        {"key": "b/gain", "unit": "x", "paper": 1.0, "ours": 0.7},
        {"key": "c/time", "unit": "ms", "paper": 1.0, "ours": 9.0},
    ]
    (tmp_path / "cornstarch_icml_table3.json").write_text(json.dumps({"rows": rows}))
    found = published(tmp_path)
    assert list(found) == ["cornstarch_icml_table3"]
    assert found["cornstarch_icml_table3"]["ratios"] == 2
    assert found["cornstarch_icml_table3"]["most"] == pytest.approx(0.3)


def test_plots_redraw_from_the_result_file(tmp_path: Path) -> None:
    record = json.loads((RESULTS / "bench_attention.json").read_text())
    assert set(DRAWN) <= set(POLICIES)
    assert set(PANELS) == set(record["activity"])
    figures = attention_figures(record)
    assert list(figures) == ["attention_evenness", "attention_launches", "attention_activity"]
    for name, grid in figures.items():
        assert all(path.stat().st_size > 10_000 for path in save(grid, tmp_path, name))
