"""Declarations of experiments: printed tables by their cells, scripts by their modules, drawings as data."""

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib import pyplot as plt
from matplotlib import rc_context

from experiments.harness import printed, record
from experiments.harness.command import Found, bench, want_at_least
from experiments.harness.drawing import STYLE, drawn, save
from experiments.harness.figure import (
    BLUE,
    Band,
    Bars,
    Box,
    Grid,
    Line,
    Lines,
    Series,
    Spreads,
    Timeline,
    cumulative,
    timelines,
    wrapped,
)
from experiments.harness.outcome import Evidence, Verdict, outcome_of
from experiments.harness.script import draws_itself, script, scripts
from experiments.harness.table import Cell, Table
from experiments.plots import comparison

LINE = Line(x=(1, 2), y=(1, 4), colour=BLUE, label="ours")
PANELS = (
    Lines(x="tokens", y="seconds, s", lines=[LINE], bands=[Band(x=(1, 2), low=(0, 1), high=(2, 5))]),
    Lines(y="share", names=("a", "b"), lines=[LINE], log="y"),
    Bars(y="times", names=("a", "b"), series=[Series(values=(1, 2), colour=BLUE, label="ours")], level=1),
    Spreads(y="idle share", values={"a": (1, 2, 3), "b": (2, 3, 4)}),
    Timeline(x="s", y="block", boxes=(Box(0, "llm", True, 0.0, 1.0), Box(1, "llm", False, 1.0, 3.0))),
)


@pytest.fixture
def two_rows(tmp_path, monkeypatch):
    (tmp_path / "small.csv").write_text("model,time_ms,note\na,100,\nb,,lost\nc,7.5,\n")
    monkeypatch.setattr(printed, "REFERENCE", tmp_path)


def small(compute, rel_tol=0.1, **more):
    cells = {"time": Cell(column="time_ms", unit="ms", rel_tol=rel_tol)}
    return Table(
        csv="small",
        where="Table 1",
        key=lambda row: f"modelled/{row['model']}/",
        cells=cells,
        compute=compute,
        **more,
    )


@pytest.mark.usefixtures("two_rows")
def test_a_table_holds_every_filled_cell_against_ours():
    asked = []

    def compute(row):
        asked.append(row["model"])
        return {"time": [105.0]}

    rows = outcome_of("p/t", [small(compute).evidence()]).rows
    assert [row.number.key for row in rows] == ["modelled/a/time", "modelled/c/time"]
    assert [row.verdict for row in rows] == [Verdict.OK, Verdict.OFF]
    assert asked == ["a", "c"]


@pytest.mark.usefixtures("two_rows")
def test_several_values_are_a_range_over_what_is_unstated():
    (row,) = outcome_of(
        "p/t",
        [
            small(
                lambda _: {"time": [200.0, 90.0]}, unstated="batch", holds=lambda row: row["model"] == "a"
            ).evidence()
        ],
    ).rows
    assert row.ours == 200.0
    assert (row.unstated.what, row.unstated.low, row.unstated.high) == ("batch", 90.0, 200.0)
    with pytest.raises(ValueError, match="must name what"):
        small(lambda _: {"time": [200.0, 90.0]}).evidence()


@pytest.mark.usefixtures("two_rows")
def test_a_tolerance_may_depend_on_the_printed_digits():
    found = small(lambda _: {"time": [100.0]}, rel_tol=lambda cell: 0.5 if "." in cell else 0.0).evidence()
    assert [number.rel_tol for number in found.paper] == [0.0, 0.5]


def test_a_script_is_called_as_its_module():
    found = script(profile="A40")(lambda: [Evidence(notes=["one"])])
    assert found.name.split("/")[-1] == "test_experiments_harness"
    assert found.about == __doc__
    outcome = found()
    assert (outcome.script, outcome.notes, outcome.profile) == (found.name, ("one",), "A40")


def benches():
    paths = (path for path in record.FOLDER.glob("*/*.py") if path.parent.name != "harness")
    declared = (path for path in paths if "\n@bench(" in path.read_text(encoding="utf-8"))
    return sorted(f"{path.parent.name}/{path.stem}" for path in declared)


@pytest.mark.parametrize("name", [*scripts(), *benches()])
def test_a_declaration_ends_its_module(name):
    """Where it is the program it is run there and then: what stands behind it would not be known yet."""
    source = (record.FOLDER / f"{name}.py").read_text(encoding="utf-8")
    match ast.parse(source).body[-1]:
        case ast.FunctionDef(name="run") | ast.Assign(targets=[ast.Name(id="run")]):
            return
    pytest.fail(f"{name} ends otherwise")


def test_a_script_is_run_where_it_is_the_program():
    command = [sys.executable, "-m", "experiments.cornstarch_v1.table1", "--help"]
    done = subprocess.run(command, cwd=record.FOLDER.parent, capture_output=True, text=True, check=True)
    assert "layers, width and parameters of the nine models" in done.stdout


def test_every_script_on_disk_is_declared_once_and_scripts_that_draw_are_known():
    found = scripts()
    assert len(found) == len(set(found)) >= 78
    assert draws_itself("entrain/figure4_5")
    assert not draws_itself("disttrain/figures13_14")
    assert not draws_itself("no/such")


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: type(panel).__name__)
def test_a_drawing_is_a_png_and_a_pdf_with_the_same_bytes_each_time(panel, tmp_path):
    grid = Grid(rows=[[panel, None]], title="title")
    first = [path.read_bytes() for path in save(grid, tmp_path / "a", "one")]
    again = save(grid, tmp_path / "b", "one")
    assert [path.name for path in again] == ["one.png", "one.pdf"]
    assert [path.read_bytes() for path in again] == first
    assert first[0].startswith(b"\x89PNG")
    assert first[1].startswith(b"%PDF")


def test_one_legend_stands_below_all_panels_and_names_each_label_once():
    figure = drawn(Grid(rows=[[PANELS[0], PANELS[2]]]))
    figure.canvas.draw()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["ours"]
    renderer = figure.canvas.get_renderer()
    top = legend.get_window_extent(renderer).y1
    assert all(axes.get_legend() is None for axes in figure.axes)
    assert all(axes.get_window_extent(renderer).y0 >= top for axes in figure.axes)
    plt.close(figure)


def test_long_titles_and_many_labels_stay_inside_the_figure():
    lines = [replace(LINE, label=f"a label that is long, {index}") for index in range(7)]
    words = " ".join(["words"] * 20)
    with rc_context(dict(STYLE)):
        figure = drawn(Grid(rows=[[Lines(title=words, x="s", y="s", lines=lines)]], title=words))
        figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    legend, title, above = *figure.legends, figure.axes[0].title, *figure.texts
    extents = [part.get_window_extent(renderer) for part in (legend, title, above)]
    assert len(legend.get_texts()) == 7
    for extent in extents:
        assert 0 <= extent.x0 < extent.x1 <= figure.bbox.width
        assert 0 <= extent.y0 < extent.y1 <= figure.bbox.height
    assert extents[0].y1 < extents[1].y0 < extents[1].y1 < extents[2].y0
    plt.close(figure)


@pytest.mark.parametrize("most", [1.3, 4.0, 9.9, 1e3])
def test_a_logarithmic_axis_has_several_numbers_that_can_be_read(most):
    figure = drawn(Grid(rows=[[Lines(y="s", lines=[LINE], log="y", y_limits=(1.0, most))]]))
    figure.canvas.draw()
    axis = figure.axes[0].yaxis
    inside = [tick.label1.get_text() for tick in axis.get_major_ticks() if 1.0 <= tick.get_loc() <= most]
    assert len(inside) >= 3
    assert len(set(inside)) == len(inside)
    assert not any(label.get_text() for label in axis.get_ticklabels(minor=True))
    plt.close(figure)


def test_stacked_bars_stand_on_each_other():
    parts = [Series(values=(1.0, 2.0), colour=BLUE), Series(values=(3.0, 4.0), colour=BLUE)]
    figure = drawn(Grid(rows=[[Bars(y="share", names=("a", "b"), series=parts, stacked=True)]]))
    tops = [patch.get_y() + patch.get_height() for patch in figure.axes[0].patches]
    assert tops == [1.0, 2.0, 4.0, 6.0]
    plt.close(figure)


def test_panels_fill_rows():
    assert [len(row) for row in wrapped(PANELS, 2)] == [2, 2, 2]
    assert wrapped(PANELS, 2)[-1][-1] is None


def test_cumulative_shares_end_at_one():
    line = cumulative([3.0, 1.0, 2.0], BLUE)
    assert (line.x, line.y) == ([1.0, 2.0, 3.0], [1 / 3, 2 / 3, 1.0])


def test_timelines_share_a_scale_and_tell_their_ends():
    grid = timelines({"one": PANELS[4].boxes}, "s")
    assert grid.rows[0][0].title == "one: 3 s"
    assert grid.shares_x == "all"


def test_a_comparison_has_a_panel_for_every_unit():
    rows = [
        {
            "key": f"printed/{unit}",
            "unit": unit,
            "paper": 1.0,
            "ours": 2.0,
            "verdict": "OFF",
            "unstated": None,
        }
        for unit in ("ms", "GB", "ms")
    ]
    panels = comparison({"script": "p/t", "rows": rows}).rows[0]
    assert [panel.x for panel in panels] == ["paper, ms", "paper, GB"]
    assert comparison({"script": "p/t", "rows": []}) is None


def test_every_colour_of_a_ratio_stands_in_the_legend():
    cases = {"a": "ok", "b": "OFF", "c": "ok"}
    rows = [
        {
            "key": f"modelled/{name}/gain",
            "unit": "x",
            "paper": 1.0,
            "ours": 2.0,
            "verdict": verdict,
            "unstated": None,
        }
        for name, verdict in cases.items()
    ]
    grid = comparison({"script": "p/t", "rows": rows})
    assert grid.title == "p/t: 2 ok, 1 OFF"
    figure = drawn(grid)
    (legend,) = figure.legends
    colours = {
        text.get_text(): handle.get_facecolor()
        for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)
    }
    assert set(colours) == {"our ratio: ok", "our ratio: OFF", "paper's ratio"}
    ours = figure.axes[0].patches[len(rows) :]
    for bar, verdict in zip(ours, cases.values(), strict=True):
        assert bar.get_facecolor() == colours[f"our ratio: {verdict}"]
    plt.close(figure)


@bench(rounds="of every way")
def counted(
    *,
    rounds: int = 2,
    limit_s: float = 1.5,
    fresh: bool = False,
    only: tuple[str, ...] = ("a",),
    out: Path | None = None,
) -> Found:
    want_at_least(1, rounds=rounds)
    record = {"rounds": rounds, "limit_s": limit_s, "fresh": fresh, "only": list(only)}
    return Found(record, {"few": rounds < 5}, out=out)


def test_parameters_of_a_bench_are_its_flags(capsys, tmp_path):
    assert counted.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "rounds": 2,
        "limit_s": 1.5,
        "fresh": False,
        "only": ["a"],
    }
    out = tmp_path / "record.json"
    flags = ["--rounds", "5", "--limit-s", "2", "--fresh", "--only", "b", "c", "--out", str(out)]
    assert counted.main(flags) == 1
    assert capsys.readouterr().out == "claim: few: FAILS\n"
    assert json.loads(out.read_text()) == {"rounds": 5, "limit_s": 2.0, "fresh": True, "only": ["b", "c"]}


def test_a_bench_says_bad_input_in_one_line(capsys):
    assert counted.main(["--rounds", "0"]) == 2
    assert capsys.readouterr().err == "error: --rounds: want 1 or more, got 0\n"
    with pytest.raises(SystemExit, match="2"):
        counted.main(["--rounds", "many"])
    with pytest.raises(SystemExit, match="0"):
        counted.main(["--help"])
    assert "of every way" in capsys.readouterr().out
