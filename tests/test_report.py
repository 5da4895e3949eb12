"""The report: the picture agrees with the trace, the page stands alone, the folder is read by content."""

import gzip
import json
import re
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs.generate.timeline_svg import LEAST_PIXELS, LEFT, RIGHT, WIDTH, timeline_svg
from tests.report_page import PLAN, simulated, slower
from workbench.drift import YARDSTICK
from workbench.explain.critical_path import Cause
from workbench.plan.codec import plan_hash, write_plan
from workbench.report import charts
from workbench.report.assemble import script
from workbench.report.charts import Box, PlanTimes, accuracy_svg, bars_html, label_boxes
from workbench.report.critical import critical_path_of
from workbench.report.folder import read_folder
from workbench.report.html import report_html
from workbench.report.page_data import data_elements
from workbench.report.palette import HUES, TONES, contrast, text_on, tone
from workbench.report.sortable import Cell, number, sortable_table
from workbench.report.timeline import nice_step, timeline_rows
from workbench.schedule.action import Pass
from workbench.trace import Lane
from workbench.trace_json import read_trace, write_trace


def rectangles(svg: str) -> list[tuple[float, float]]:
    """(left, width) of compute spans, row after row."""
    found = re.findall(r'<rect class="s" x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="20"', svg)
    return [(float(left), float(width)) for left, width in found]


def test_every_span_stands_where_its_times_say():
    trace = simulated(PLAN)
    scale_s = 1.25 * trace.iteration_s
    pixels_per_s = (WIDTH - LEFT - RIGHT) / scale_s
    spans = [span for span in trace.spans if span.lane is Lane.COMPUTE]
    drawn = [
        (LEFT + span.start_s * pixels_per_s, max((span.end_s - span.start_s) * pixels_per_s, LEAST_PIXELS))
        for row in timeline_rows(PLAN)
        for span in spans
        if span.rank == row.rank
    ]
    wanted = [(pytest.approx(left, abs=0.01), pytest.approx(width, abs=0.01)) for left, width in drawn]
    assert rectangles(timeline_svg(PLAN, trace, scale_s=scale_s)) == wanted


def test_every_span_and_message_is_drawn():
    trace = simulated(PLAN)
    svg = timeline_svg(PLAN, trace, scale_s=trace.iteration_s)
    assert svg.count('class="s"') == len(trace.spans) + len(trace.messages)
    assert svg.count("url(#idle)") == len(PLAN.ranks)


def test_ranks_that_hold_the_same_stages_are_one_row():
    wide = replace(
        PLAN, stages=tuple(replace(s, ranks=((2 * s.id, 2 * s.id + 1),)) for s in PLAN.stages), programs=()
    )
    rows = timeline_rows(wide)
    assert [row.ranks for row in rows] == [(2 * s.id, 2 * s.id + 1) for s in PLAN.stages]
    assert [row.stages for row in rows] == [(s.id,) for s in PLAN.stages]


def test_too_short_a_scale_is_refused():
    trace = simulated(PLAN)
    with pytest.raises(ValueError, match="shorter than the trace"):
        timeline_svg(PLAN, trace, scale_s=trace.iteration_s / 2)


@given(st.floats(1e-6, 1e6), st.integers(1, 40))
def test_axis_steps_are_round_and_few(span: float, most: int):
    step = nice_step(span, most)
    assert span / step <= most * (1 + 1e-9)
    assert f"{step:e}"[0] in "125"
    assert span / step > most / 5.1  # and not too few


@pytest.mark.parametrize("hue", HUES)
@pytest.mark.parametrize("kind", list(TONES))
def test_labels_can_be_read(hue: str, kind: Pass):
    """WCAG 2.1 asks a contrast of 4.5 of small text."""
    fill = tone(hue, kind)
    assert contrast(fill, text_on(fill)) >= 4.5
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)


class Outside(HTMLParser):
    """Collects everything a browser would fetch, and open tags that never close."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "img", "br", "input"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data") and not (value or "").startswith("#"):
                self.fetched.append(f"{tag} {value}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def fill_folder(folder: Path) -> None:
    trace = simulated(PLAN)
    write_plan(PLAN, folder / "plan.json")
    write_trace(trace, folder / "a.sim.json")
    for index, factor in enumerate((1.1, 1.2, 1.15)):
        write_trace(slower(trace, factor), folder / f"a.{index}.run.json")


def test_page_stands_alone_and_says_it_all(tmp_path: Path):
    fill_folder(tmp_path)
    page = report_html(read_folder(tmp_path))
    parser = Outside()
    parser.feed(page)
    parser.close()
    assert parser.fetched == []
    assert parser.open == []
    assert "url(http" not in page
    text = " ".join(parser.text)
    assert "median of 3" in text
    assert "-13.0%" in text  # 1 / 1.15 - 1
    assert "Median absolute error 13.0%, worst 13.0%, beside a median spread of the runs of 8.7%" in text
    assert "cost <of> & nothing" in text
    assert re.findall(r'<div data-timeline="(\w+)"', page) == ["simulated", "executed"]
    assert page == report_html(read_folder(tmp_path))


@pytest.mark.parametrize(("reading_s", "is_told"), [(0.0013, True), (0.0010, False)])
def test_a_machine_that_drifted_stands_first(tmp_path: Path, reading_s: float, *, is_told: bool):
    fill_folder(tmp_path)
    for path in tmp_path.glob("a.*.json"):
        seconds = 0.001 if path.name.endswith("sim.json") else reading_s
        trace = read_trace(path)
        write_trace(replace(trace, details=(*trace.details, (YARDSTICK, repr(seconds)))), path)
    page = report_html(read_folder(tmp_path))
    first = '<p class="lead"><strong>DRIFT: the machine ran 30.0% slower than when it was calibrated'
    assert (first in page) is is_told


def test_page_of_a_plan_that_was_never_run(tmp_path: Path):
    write_plan(PLAN, tmp_path / "plan.json")
    page = report_html(read_folder(tmp_path))
    assert "Not simulated and not executed" in page


def test_folder_is_read_by_content(tmp_path: Path):
    fill_folder(tmp_path)
    other = "0" * 64
    write_trace(replace(simulated(PLAN), plan_hash=other), tmp_path / "b.sim.json")
    (tmp_path / "demo.json").write_text('{"spread": 0.1}')
    (tmp_path / "notes.txt").write_text("not looked at")
    folder = read_folder(tmp_path)
    assert [entry.plan for entry in folder.entries] == [PLAN]
    assert len(folder.entries[0].executed) == 3
    assert len(folder.left_out) == 2
    assert other[:12] in folder.left_out[1]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("plan.json", '{"format": "multimodal-workbench plan", "schema', "plan.json: not JSON"),
        ("x.json", '{"format": "multimodal-workbench plan"}', "schema version"),
        ("x.json", '{"spread": 1}', "at least one plan"),
    ],
)
def test_bad_folder_is_refused(tmp_path: Path, name: str, text: str, words: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words):
        read_folder(tmp_path)


def test_empty_plot_is_refused():
    with pytest.raises(ValueError, match="at least one plan"):
        accuracy_svg([PlanTimes(label="a", simulated_s=1.0)])


def test_bars_are_as_long_as_their_times():
    times = [
        PlanTimes(label="a <b>", simulated_s=1.0, executed_s=(1.5, 2.0, 4.0)),
        PlanTimes(label="b", simulated_s=2.0),
    ]
    html = bars_html(times)
    assert re.findall(r'class="bar (\w+)" style="width:([\d.]+)%"', html) == [
        ("simulated", "25.00"),
        ("executed", "50.00"),
        ("simulated", "50.00"),
    ]
    assert 'style="left:75.00%;width:125.00%"' in html  # the range, of the bar's own width
    assert "a &lt;b&gt;" in html


def test_points_stand_where_their_times_say():
    svg = accuracy_svg([PlanTimes(label="a", simulated_s=1.0, executed_s=(2.0,))])
    parts = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', svg)
    (x, y) = (float(value) for value in parts[0])
    assert x - charts.LEFT == pytest.approx(charts.SIDE / 1.1, abs=0.1)
    assert charts.EDGE + charts.SIDE - y == pytest.approx(charts.SIDE / 2.2, abs=0.1)


AREA = Box(0, 0, 380, 380)
PLACES = st.lists(st.tuples(st.floats(0, 380), st.floats(0, 380)), min_size=1, max_size=40)


@given(PLACES)
def test_labels_meet_neither_points_nor_each_other(points: list[tuple[float, float]]):
    texts = [str(number) for number in range(1, len(points) + 1)]
    boxes = [box for box in label_boxes(texts, points, AREA) if box is not None]
    assert len(boxes) == len(points)  # there is room for so many
    dots = [Box(x - charts.POINT, y - charts.POINT, 2 * charts.POINT, 2 * charts.POINT) for x, y in points]
    for index, box in enumerate(boxes):
        assert box.is_inside(AREA)
        assert not any(map(box.meets, boxes[:index]))
        assert not any(map(box.meets, dots))


def test_labels_that_find_no_room_are_left_out():
    assert label_boxes(["1", "2"], [(5, 5), (5, 5)], Box(0, 0, 12, 12)) == (None, None)


def test_tables_sort_by_numbers_and_show_words():
    html = sortable_table(("a", "b"), [[(Cell("1.5 ms", 0.0015), number(None))]], titles=["group"], left=1)
    assert 'data-value="0.0015">1.5 ms<' in html
    assert html.count("<button") == 2


def test_scripts_are_one_file_without_imports(tmp_path: Path):
    text = script("main")
    assert not re.search(r"^(import|export) ", text, re.MULTILINE)
    for name in re.findall(r"= module_(\w+);", text):
        assert text.index(f"const module_{name} =") < text.index(f"}} = module_{name};")


def test_a_traces_file_is_in_the_page(tmp_path: Path):
    fill_folder(tmp_path)
    page = report_html(read_folder(tmp_path))
    (packed,) = re.findall(r'id="trace-\w+-simulated">([^<]+)<', page)
    assert gzip.decompress(b64decode(packed)) == (tmp_path / "a.sim.json").read_bytes()


def test_no_name_ends_the_data_early():
    name = "x</script><!--<script>"
    parser = Outside()
    parser.feed(data_elements({"name": name}, []))
    parser.close()
    assert parser.open == []
    assert [json.loads(text) for text in parser.text] == [{"name": name}]


def test_critical_path_covers_the_step():
    trace = replace(simulated(PLAN), plan_hash=plan_hash(PLAN))
    path = critical_path_of(PLAN, trace)
    assert sum(step.seconds for step in path.steps) == pytest.approx(trace.iteration_s)
    marked = [trace.spans[index] for index in path.spans]
    for step in path.steps:
        if step.node is not None and step.action is not None and step.cause is not Cause.MESSAGE:
            assert any(span.action == step.action and span.rank == step.rank for span in marked)
    sent = {message.row: message for message in trace.messages}
    assert all(row in sent for row in path.rows)
