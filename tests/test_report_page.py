"""The report's page in a real browser: what pictures show, what gestures and links do, what never happens."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from sim.predict import predict_within
from tests.browser import REQUIRED, ROOT, NoBrowserError, started
from tests.command_line import accept, answered
from tests.report_page import PLAN, Looking, look, simulated, slower
from tests.waiting import eventually
from workbench.job.job_file import read_spec
from workbench.metrics import peak_bytes
from workbench.plan.codec import plan_hash, write_plan
from workbench.report.folder import read_folder
from workbench.report.html import report_html
from workbench.report.page_data import fills
from workbench.report.palette import contrast
from workbench.report.tables import milliseconds
from workbench.report.what_if import what_if
from workbench.timing.accept import accept as accepted
from workbench.trace_json import write_trace

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PLAN_ID = plan_hash(PLAN)[:12]
END_MS = 1e3 * 1.15 * simulated(PLAN).iteration_s  # of the median of the executed ones
NUM_SPANS = 2 * len(simulated(PLAN).spans)  # in both timelines
JOB = ROOT / "examples" / "tiny.yaml"
PROFILE = ROOT / "examples" / "elastic-cpu.json"


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    try:
        with started() as found:
            yield found
    except NoBrowserError as error:
        if os.environ.get(REQUIRED):
            pytest.fail(f"{REQUIRED} is set: {error}")
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a plan that was simulated once and executed three times."""
    folder = tmp_path_factory.mktemp("report")
    trace = simulated(PLAN)
    write_plan(PLAN, folder / "plan.json")
    write_trace(trace, folder / "a.sim.json")
    for index, factor in enumerate((1.1, 1.2, 1.15)):
        write_trace(slower(trace, factor), folder / f"a.{index}.run.json")
    (folder / "report.html").write_text(report_html(read_folder(folder)))
    return folder / "report.html"


@pytest.fixture(scope="module")
def neighbours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job's folder with the page of its neighbours, all by the commands."""
    folder = tmp_path_factory.mktemp("what_if")
    spec = yaml.safe_load(JOB.read_text()) | {"profile": str(PROFILE)}
    (folder / "job.yaml").write_text(yaml.safe_dump(spec))
    accept("plan", folder / "job.yaml", "-o", folder / "plan.json")
    accept("simulate", folder / "plan.json", "--profile", PROFILE, "--trace", folder / "a.sim.json")
    ticks = iter(range(100))  # a clock that is asked before every neighbour and while each is planned
    found = what_if(
        read_spec(folder / "job.yaml"),
        "cornstarch",
        lambda plan, cost: predict_within(*accepted(plan), cost),
        folder=folder,
        seconds=30,
        spent_s=lambda: next(ticks),
    )
    (folder / "report.html").write_text(report_html(read_folder(folder), what_if=found))
    return folder / "report.html"


@pytest.fixture
def seen(browser: "Browser", report: Path) -> Iterator[Looking]:
    """A visitor of the page, who sees no error and whose browser asks nobody for anything."""
    looking = look(browser, report)
    yield looking
    assert looking.errors == []
    assert looking.requests == [report.as_uri()]
    looking.page.context.close()


def test_the_page_shows_the_whole_step_at_first(seen: Looking):
    assert seen.window_ms() == pytest.approx((0, END_MS), rel=1e-4)
    assert seen.said(".shown") == f"{NUM_SPANS} spans in {len(PLAN.ranks)} rows"
    for colours in fills(PLAN).values():
        for colour, _ in colours.values():
            assert seen.pixels(colour) > 0


def test_spans_are_drawn_where_their_times_say(seen: Looking):
    """The colour changes where a pass begins and ends: looked for in the picture, beside the axis."""
    span = max(simulated(PLAN).spans, key=lambda span: span.end_s - span.start_s)
    found = seen.canvas().evaluate(
        """(canvas, [share, row]) => {
          const left = 116, right = 62, width = canvas.width - left - right;
          const x = Math.round(left + share * width), y = 24 + row * 39 + 3;
          return [...canvas.getContext("2d").getImageData(x, y, 1, 1).data].slice(0, 3);
        }""",
        [1e3 * (0.9 * span.start_s + 0.1 * span.end_s) / END_MS, list(PLAN.ranks).index(span.rank)],
    )
    module = PLAN.stage[span.action.stage].module
    assert "#" + "".join(f"{value:02X}" for value in found) == fills(PLAN)[module][span.action.kind.value][0]


def test_buttons_wheel_and_keys_zoom_and_pan(seen: Looking):
    page, whole = seen.page, seen.window_ms()
    page.click("details[open] .zoom-in")
    first, last = seen.window_ms()
    assert last - first == pytest.approx(0.6 * END_MS, rel=1e-3)
    page.click("details[open] .fit")
    assert seen.window_ms() == whole
    page.evaluate("document.activeElement.blur()")
    seen.point(500, 40)
    page.mouse.wheel(0, 30)
    page.wait_for_timeout(100)
    assert seen.window_ms() == whole  # the page scrolls: nobody asked for the picture
    seen.point(500, 40)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)

    def is_closer() -> bool:
        begin, end = seen.window_ms()
        return end - begin < 0.9 * END_MS

    assert eventually(is_closer)
    page.keyboard.up("Control")
    first, last = seen.window_ms()
    seen.canvas().locator("..").focus()
    page.keyboard.press("ArrowRight")
    later = seen.window_ms()
    assert later[0] > first
    assert later[1] - later[0] == pytest.approx(last - first, rel=1e-3)
    page.keyboard.press("+")
    closer = seen.window_ms()
    assert closer[1] - closer[0] == pytest.approx(0.7 * (last - first), rel=1e-3)
    page.keyboard.press("0")
    assert seen.window_ms() == whole


def test_dragging_pans_and_the_time_below_the_pointer_stays(seen: Looking):
    page = seen.page
    page.click("details[open] .zoom-in")
    page.click("details[open] .zoom-in")
    before = seen.window_ms()
    box = seen.canvas().bounding_box()
    page.mouse.move(box["x"] + 600, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 60, steps=4)
    page.mouse.up()
    after = seen.window_ms()
    moved = 100 / (box["width"] - 116 - 62) * (before[1] - before[0])
    assert after[0] - before[0] == pytest.approx(moved, rel=0.1)
    assert after[1] - after[0] == pytest.approx(before[1] - before[0], rel=1e-4)


def test_two_fingers_zoom(browser: "Browser", report: Path):
    seen = look(browser, report, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    seen.canvas().scroll_into_view_if_needed()
    box = seen.canvas().bounding_box()
    touches = seen.page.context.new_cdp_session(seen.page)

    def touch(kind: str, *xs: float) -> None:
        points = [{"x": box["x"] + x, "y": box["y"] + 50, "id": index} for index, x in enumerate(xs)]
        touches.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", 150, 200)
    touch("touchMove", 140, 210)
    touch("touchMove", 100, 250)
    touch("touchEnd")
    first, last = seen.window_ms()
    assert last - first == pytest.approx(END_MS / 3, rel=0.1)  # 50 pixels became 150
    seen.page.context.close()


def test_filters_hide_rows_and_spans(seen: Looking):
    page = seen.page
    colours = fills(PLAN)
    page.uncheck('details[open] [data-module="vision"]')
    assert seen.pixels(colours["vision"]["F"][0]) == 0
    assert seen.pixels(colours["llm"]["F"][0]) > 0
    rows = len(PLAN.ranks) - sum(stage.module == "vision" for stage in PLAN.stages)
    assert seen.said(".shown").endswith(f"in {rows} rows")
    page.check('details[open] [data-module="vision"]')
    page.uncheck('details[open] [data-kind="F"]')
    assert seen.pixels(colours["llm"]["F"][0]) == 0
    forwards = sum(span.action.kind.value == "F" for span in simulated(PLAN).spans)
    assert seen.said(".shown").startswith(f"{NUM_SPANS - 2 * forwards} spans")
    page.fill("details[open] .ranks", "0-1, 4")
    assert seen.said(".shown").endswith("in 3 rows")
    page.fill("details[open] .ranks", "0-")
    assert "e.g. 0-3, 8" in page.locator("details[open] .ranks").evaluate("input => input.validationMessage")


def test_headers_sort_tables_both_ways(seen: Looking):
    table = seen.page.locator("details[open] table", has_text="executed (median)")
    column = "row => [...row.querySelectorAll('tr:not(.group)')].map(tr => Number(tr.cells[2].dataset.value))"
    header = table.locator("th button", has_text="simulated")
    for order, is_reversed in (("ascending", False), ("descending", True)):
        header.click()
        assert table.locator(f"th[aria-sort={order}]").count() == 1
        for body in table.locator("tbody").all():
            values = body.evaluate(column)
            assert values == sorted(values, reverse=is_reversed)
    assert table.locator("tbody").first.locator("tr").first.get_attribute("class") == "group"


def test_a_link_restores_what_was_looked_at(browser: "Browser", report: Path, seen: Looking):
    page = seen.page
    page.click("details[open] .zoom-in")
    page.uncheck('details[open] [data-kind="B"]')
    page.uncheck('details[open] [data-module="audio"]')
    page.fill("details[open] .ranks", "0-5")
    page.click("details[open] .path")
    seen.canvas().locator("..").focus()
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    chosen = seen.said("details[open] .selected")
    assert "on rank 0" in chosen
    link = page.evaluate("location.hash")
    assert "from=" in link
    other = look(browser, report, link)
    assert other.window_ms() == seen.window_ms()
    assert other.said(".shown") == seen.said(".shown")
    assert other.said("details[open] .selected") == chosen
    for selector in ("[data-kind=B]", "[data-module=audio]"):
        assert not other.page.locator(f"details[open] {selector}").is_checked()
    assert other.page.locator("details[open] .path").get_attribute("aria-pressed") == "true"
    assert other.page.locator("details[open] .ranks").input_value() == "0-5"
    assert other.page.evaluate("location.hash") == link
    assert other.errors == []
    other.page.context.close()


@pytest.mark.parametrize(
    "link", ["#plan=nothing", f"#plan={PLAN_ID}&from=x&to=1e999&span=simulated+99999&ranks=q"]
)
def test_a_damaged_link_shows_the_page(browser: "Browser", report: Path, link: str):
    seen = look(browser, report, link)
    assert seen.window_ms() == pytest.approx((0, END_MS), rel=1e-4)
    assert seen.errors == []
    seen.page.context.close()


def test_the_critical_path_stands_out(seen: Looking):
    accent = "#A4133C"
    assert seen.pixels(accent) == 0
    light = fills(PLAN)["llm"]["F"][0]
    before = seen.pixels(light)
    seen.page.click("details[open] .path")
    assert seen.pixels(accent) > 50
    assert 0 < seen.pixels(light) < before  # the others are dimmed


def test_memory_follows_the_cursor_of_the_timelines(seen: Looking):
    ink = "#1F2933"
    assert seen.pixels(ink, "memory", within=30) == 0
    seen.point(300, 40)
    assert seen.pixels(ink, "memory", within=30) > 5  # what is held there, in words
    assert seen.pixels("#A4133C", "memory") > 20  # the line
    assert "took" in seen.said("#tip")
    seen.page.mouse.move(5, 5)
    assert seen.pixels(ink, "memory", within=30) == 0


def test_every_rank_has_its_peak_beside_its_curve(seen: Looking):
    drawn = seen.texts_after(lambda page: page.click("details[open] .zoom-in"))
    shown = {float(text.removesuffix(" MiB")) for text in drawn if text.endswith(" MiB")}
    assert {num_bytes / 2**20 for num_bytes in peak_bytes(simulated(PLAN)).values()} <= shown


def test_keys_alone_reach_everything(seen: Looking):
    page = seen.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
        if "fit" in reached and "panel" in reached:
            break
    assert {"theme", "zoom-in", "fit", "path", "ranks", "panel"} <= reached
    page.keyboard.press("Shift+ArrowRight")
    first = seen.said("details[open] .selected")
    page.keyboard.press("Shift+ArrowDown")
    below = seen.said("details[open] .selected")
    assert "on rank 0" in first
    assert "on rank 1" in below
    page.keyboard.press("Enter")
    start, end = seen.window_ms()
    took = float(re.search(r"took ([\d.]+) ms", below)[1])
    assert end - start == pytest.approx(1.4 * took, rel=1e-3)
    page.keyboard.press("Escape")
    assert seen.said("details[open] .selected") == "Click a span to keep it here."


def test_perfetto_gets_the_very_file(browser: "Browser", report: Path, seen: Looking):
    """A stand-in answers for ui.perfetto.dev, as its documentation says."""
    stand_in = """<script>
      addEventListener("message", event => {
        if (event.data === "PING") event.source.postMessage("PONG", "*");
        else window.got = [event.data.perfetto.title, new TextDecoder().decode(event.data.perfetto.buffer)];
      });</script>"""
    seen.page.context.route(
        "https://ui.perfetto.dev/**", lambda route: route.fulfill(body=stand_in, content_type="text/html")
    )
    with seen.page.expect_popup() as opened:
        seen.page.click('details[open] [data-perfetto="simulated"]')
    opened.value.wait_for_function("() => window.got")
    title, text = opened.value.evaluate("window.got")
    assert title == f"plan.{PLAN_ID}.simulated.json"
    assert text == (report.parent / "a.sim.json").read_text()
    assert seen.said(".handed") == "Opened in Perfetto."


def test_traces_can_be_downloaded(report: Path, seen: Looking):
    with seen.page.expect_download() as saved:
        seen.page.click('details[open] [data-download="executed"]')
    assert Path(saved.value.path()).read_bytes() == (report.parent / "a.2.run.json").read_bytes()
    seen.requests[:] = [url for url in seen.requests if not url.startswith("blob:")]


def test_sliders_show_what_the_commands_say(browser: "Browser", neighbours: Path, tmp_path: Path):
    seen = look(browser, neighbours)
    first = seen.said("#what-if .outcome .card b")
    base = answered("simulate", neighbours.parent / "plan.json", "--profile", PROFILE)
    assert first == milliseconds(base["iteration_s"])
    seen.page.locator('[data-axis="1"] input').focus()
    seen.page.keyboard.press("ArrowRight")
    shown, words = seen.said("#what-if .outcome .card b"), seen.said("#what-if .words")
    assert words == "In the job file:\nbatch.samples: 16"
    spec = yaml.safe_load((neighbours.parent / "job.yaml").read_text())
    spec["batch"]["samples"] = 16
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
    accept("plan", tmp_path / "job.yaml", "-o", tmp_path / "plan.json")
    other = answered("simulate", tmp_path / "plan.json", "--profile", PROFILE)
    assert shown == milliseconds(other["iteration_s"]) != first
    assert seen.errors == []
    seen.page.context.close()


@pytest.mark.parametrize("width", [320, 390])
def test_nothing_leaves_a_phone(browser: "Browser", neighbours: Path, report: Path, width: int):
    for file in (neighbours, report):
        seen = look(browser, file, viewport={"width": width, "height": 700}, is_mobile=True, has_touch=True)
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        for bar in seen.page.locator(".bars b").all():
            box = bar.bounding_box()
            assert box["x"] + box["width"] <= width
        seen.page.context.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read_in_both_themes(browser: "Browser", neighbours: Path, theme: str):
    """WCAG 2.1 asks a contrast of 4.5 of small text."""
    seen = look(browser, neighbours, color_scheme=theme)
    seen.page.evaluate("document.querySelectorAll('details').forEach(each => (each.open = true))")
    found = seen.text_colours()
    assert len(found) > 5
    assert [each for each in found if contrast(each[1], each[2]) < 4.5] == []
    seen.page.context.close()


def test_the_theme_can_be_chosen(seen: Looking):
    background = "getComputedStyle(document.body).backgroundColor"
    light = seen.page.evaluate(background)
    seen.page.click("#theme")
    assert seen.page.evaluate(background) == light
    seen.page.click("#theme")
    assert seen.said("#theme") == "Theme: dark"
    assert seen.page.evaluate(background) != light


def test_paper_gets_a_still_picture(seen: Looking):
    seen.page.emulate_media(media="print")
    seen.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    for hidden in (".toolbar", "#theme", ".strip button"):
        assert not seen.page.locator(hidden).first.is_visible()
    assert seen.canvas().evaluate("canvas => canvas.width") == 3000
    assert seen.pixels(fills(PLAN)["llm"]["F"][0]) > 0
    seen.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert seen.canvas().evaluate("canvas => canvas.width") < 1500
    assert seen.page.pdf(format="A4").startswith(b"%PDF")
