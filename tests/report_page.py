"""A folder with a plan and its traces, its page, and a browser that looks at it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.step.engine import simulate
from tests.plans import disjoint_plan, sample, two_encoders
from workbench.plan.lower import lower
from workbench.plan.plan import Plan
from workbench.schedule.action import Action, Pass
from workbench.trace import Executor, Lane, MemorySample, Trace

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CUTS = {"vision": [2, 1], "audio": [2], "llm": [2, 2]}
PLAN = disjoint_plan(two_encoders(llm=(True,) * 4), [sample(i) for i in range(4)], CUTS)


def duration_s(action: Action) -> float:
    return {Pass.F: 0.02, Pass.B: 0.04}.get(action.kind, 0.005)


def simulated(plan: Plan) -> Trace:
    """With memory that grows from span to span, so that every sample is another number."""
    trace = simulate(lower(plan), duration_s)
    compute = [span for span in trace.spans if span.lane is Lane.COMPUTE]
    memory = tuple(
        MemorySample(span.rank, span.start_s, 2**20 * (1 + index)) for index, span in enumerate(compute)
    )
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


TEXT_COLOURS = """() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const hex = ([r, g, b]) => "#" + [r, g, b].map(v => Math.round(v).toString(16).padStart(2, "0")).join("");
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = rgb(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.99) return colour;
    }
    return rgb(getComputedStyle(document.body).backgroundColor);
  };
  const found = [];
  for (const element of document.querySelectorAll("main *, #theme")) {
    const isText = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!isText || !element.checkVisibility() || element.closest(".bar, svg")) continue;
    found.push([element.tagName, hex(rgb(getComputedStyle(element).color)), hex(behind(element))]);
  }
  return found;
}"""


@dataclass
class Looking:
    """A page in the browser, and what must not happen in it: errors, and requests that leave it."""

    page: "Page"
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def canvas(self, key: str = "simulated") -> Any:
        """The picture of a trace, or with `memory` of the memory."""
        part = "[data-memory]" if key == "memory" else f'[data-timeline="{key}"]'
        return self.page.locator(f"details[open] {part} canvas").first

    def said(self, selector: str) -> str:
        """The text there, once the page has drawn what it was asked for."""
        self.settle()
        return self.page.locator(selector).first.inner_text()

    def settle(self) -> None:
        """Two frames: what was asked for before the first is drawn by the second."""
        self.page.evaluate(
            "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def point(self, x: float, y: float, key: str = "simulated") -> None:
        """Move the pointer to a place of a picture."""
        canvas = self.canvas(key)
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        self.page.mouse.move(box["x"] + x, box["y"] + y)

    def window_ms(self) -> tuple[float, float]:
        """What the timelines show."""
        first, last = self.said("details[open] .window").removesuffix(" ms").split(" ms to ")
        return float(first.replace(",", "")), float(last.replace(",", ""))

    def text_colours(self) -> set[tuple[str, str, str]]:
        """(element's name, colour, background) of all text that is shown, but for that of charts."""
        return {tuple(each) for each in self.page.evaluate(TEXT_COLOURS)}

    def texts_after(self, act: "Callable[[Page], None]") -> list[str]:
        """What all pictures write when they are drawn again behind an action."""
        self.page.evaluate(
            """() => {
              window.drawn = [];
              const { fillText } = CanvasRenderingContext2D.prototype;
              CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
                window.drawn.push(text);
                return fillText.call(this, text, ...rest);
              };
            }"""
        )
        act(self.page)
        self.settle()
        return self.page.evaluate("window.drawn")

    def pixels(self, colour: str, key: str = "simulated", within: int = 0) -> int:
        """How many pixels of a picture have that colour, or each channel of it within so much."""
        self.settle()
        return self.canvas(key).evaluate(
            """(canvas, [colour, within]) => {
              const copy = new OffscreenCanvas(canvas.width, canvas.height);
              const context = copy.getContext("2d", { willReadFrequently: true });
              context.drawImage(canvas, 0, 0);
              const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
              const want = [1, 3, 5].map(at => parseInt(colour.slice(at, at + 2), 16));
              let count = 0;
              for (let at = 0; at < data.length; at += 4) {
                const isNear = want.every((value, place) => Math.abs(data[at + place] - value) <= within);
                if (isNear && data[at + 3] === 255) count += 1;
              }
              return count;
            }""",
            [colour, within],
        )


def look(browser: "Browser", file: Path, link: str = "", **context: Any) -> Looking:
    """A fresh page of that file, as a new visitor sees it, once it is drawn."""
    page = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | context).new_page()
    page.set_default_timeout(60_000)  # only what hangs takes longer
    seen = Looking(page)
    page.on("console", lambda message: seen.errors.append(message.text) if message.type != "log" else None)
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on("request", lambda request: seen.requests.append(request.url))
    page.goto(f"{file.as_uri()}{link}")
    page.wait_for_selector("html[data-ready]", state="attached")
    seen.settle()
    return seen
