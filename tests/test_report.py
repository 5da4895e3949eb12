"""The report: the picture agrees with the trace, the page stands alone, the folder is read by content."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.step.engine import simulate
from tests.plans import disjoint_plan, sample, two_encoders
from workbench.plan.codec import plan_hash, write_plan
from workbench.plan.lower import lower
from workbench.plan.plan import Plan
from workbench.report.folder import read_folder
from workbench.report.html import report_html
from workbench.report.palette import HUES, TONES, contrast, text_on, tone
from workbench.report.plots import PlanTimes, accuracy_svg, memory_svg, ranking_svg
from workbench.report.timeline import (
    LEFT,
    RIGHT,
    WIDTH,
    nice_step,
    timeline_rows,
    timeline_svg,
)
from workbench.schedule.action import Action, Pass
from workbench.trace import Executor, Lane, MemorySample, Trace
from workbench.trace_json import write_trace

CUTS = {"vision": [2, 1], "audio": [2], "llm": [2, 2]}
PLAN = disjoint_plan(two_encoders(llm=(True,) * 4), [sample(i) for i in range(4)], CUTS)


def duration_s(action: Action) -> float:
    return {Pass.F: 0.02, Pass.B: 0.04}.get(action.kind, 0.005)


def simulated(plan: Plan) -> Trace:
    trace = simulate(lower(plan), duration_s)
    memory = tuple(MemorySample(s.rank, s.start_s, 2**20) for s in trace.spans if s.lane is Lane.COMPUTE)
    return replace(trace, memory=memory, details=(("unmeasured", "cost <of> & nothing"),))


def slower(trace: Trace, factor: float) -> Trace:
    """A stand-in for an execution: the same trace, stretched."""
    return replace(
        trace,
        executor=Executor.EXECUTED,
        spans=tuple(s._replace(start_s=s.start_s * factor, end_s=s.end_s * factor) for s in trace.spans),
        messages=tuple(
            m._replace(ready_s=m.ready_s * factor, start_s=m.start_s * factor, end_s=m.end_s * factor)
            for m in trace.messages
        ),
        details=(),
    )


def rectangles(svg: str) -> dict[str, tuple[float, float]]:
    """First line of the hover text -> (left, width), for compute spans of stages."""
    found = re.findall(
        r'<rect class="s" x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="20"[^>]*data-t="(\S+)', svg
    )
    return {action: (float(left), float(width)) for left, width, action in found}


def test_every_span_stands_where_its_times_say():
    trace = simulated(PLAN)
    scale_s = 1.25 * trace.iteration_s
    drawn = rectangles(timeline_svg(PLAN, trace, scale_s=scale_s))
    assert drawn.pop("STEP")
    pixels_per_s = (WIDTH - LEFT - RIGHT) / scale_s
    passes = [span for span in trace.spans if span.lane is Lane.COMPUTE and span.action.stage is not None]
    assert set(drawn) == {str(span.action) for span in passes}
    for span in passes:
        left, width = drawn[str(span.action)]
        assert left == pytest.approx(LEFT + span.start_s * pixels_per_s, abs=0.01)
        assert width == pytest.approx((span.end_s - span.start_s) * pixels_per_s, abs=0.01)


def test_every_span_and_message_can_be_hovered():
    trace = simulated(PLAN)
    svg = timeline_svg(PLAN, trace, scale_s=trace.iteration_s)
    assert svg.count("data-t=") == len(trace.spans) + len(trace.messages)
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
        if tag not in ("meta", "link", "img", "br"):
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
    assert page.count('class="timeline"') == 2
    assert page == report_html(read_folder(tmp_path))


def test_page_of_a_plan_that_was_never_run(tmp_path: Path):
    write_plan(PLAN, tmp_path / "plan.json")
    page = report_html(read_folder(tmp_path))
    assert "Not simulated and not executed" in page


def test_folder_is_read_by_content(tmp_path: Path):
    fill_folder(tmp_path)
    other = replace(PLAN, strategy="other")
    write_trace(replace(simulated(PLAN), plan_hash=plan_hash(other)), tmp_path / "b.sim.json")
    (tmp_path / "demo.json").write_text('{"spread": 0.1}')
    (tmp_path / "notes.txt").write_text("not looked at")
    folder = read_folder(tmp_path)
    assert [entry.plan for entry in folder.entries] == [PLAN]
    assert len(folder.entries[0].executed) == 3
    assert len(folder.left_out) == 2
    assert plan_hash(other)[:12] in folder.left_out[1]


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


def test_empty_plots_are_refused():
    with pytest.raises(ValueError, match="at least one plan"):
        accuracy_svg([PlanTimes(label="a", simulated_s=1.0)])
    with pytest.raises(ValueError, match="no trace has memory"):
        memory_svg(timeline_rows(PLAN), None, None)


def test_plots_are_reproducible():
    times = [
        PlanTimes(label="a", simulated_s=1.0, executed_s=(1.1, 1.2)),
        PlanTimes(label="b", simulated_s=2.0),
    ]
    assert ranking_svg(times) == ranking_svg(times)
    assert accuracy_svg(times) == accuracy_svg(times)
