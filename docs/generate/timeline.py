"""The README's picture: one job under three strategies, simulated, over one scale of time."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory

from docs.generate.commands import printed
from docs.generate.results import ROOT
from docs.generate.timeline_svg import WIDTH, timeline_svg
from workbench.plan.codec import read_plan
from workbench.plan.plan import Plan
from workbench.report.palette import module_hues, tone
from workbench.report.tables import milliseconds
from workbench.schedule.action import Pass
from workbench.trace import Trace
from workbench.trace_json import read_trace

JOB, PROFILE = ROOT / "examples" / "tiny.yaml", ROOT / "examples" / "elastic-cpu.json"
SHOWN = ("cornstarch", "encoders-colocated", "entrain-graded")

TITLE_HEIGHT, GAP, LEGEND_HEIGHT, LEFT = 26, 12, 30, 8  # pixels

STYLE = """text { font-family: system-ui, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }
.title { font-size: 14px; font-weight: 600; fill: #1F2933; } .name, .tick, .share, .legend { font-size:
11px; fill: #52606D; } .label { font-size: 9.5px; text-anchor: middle; } .grid { stroke: #E4E7EB;
stroke-width: 1; } .s { stroke: #FFFFFF; stroke-width: 0.5; }"""
IDLE = """<defs>
<pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="6" height="6" fill="#FBFCFD"/><rect width="1.2" height="6" fill="#D9DEE4"/></pattern></defs>"""


def timelines_svg() -> str:
    """The picture as one SVG file."""
    with TemporaryDirectory() as folder:
        runs = [(name, *_simulated(name, Path(folder))) for name in SHOWN]
    scale_s = max(trace.iteration_s for _, _, trace in runs)
    parts, y = [], GAP
    for name, plan, trace in runs:
        inner = timeline_svg(plan, trace, scale_s=scale_s)
        text = f"--strategy {name}: {milliseconds(trace.iteration_s)}, {len(plan.ranks)} ranks"
        parts.append(f'<text class="title" x="{LEFT}" y="{y + TITLE_HEIGHT - 10}">{text}</text>')
        parts.append(f'<g transform="translate(0 {y + TITLE_HEIGHT})">{inner}</g>')
        y += TITLE_HEIGHT + _height(inner) + GAP
    parts.append(_legend(runs[0][1], y))
    height = y + LEGEND_HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}">'
        f'<style>{STYLE}</style>{IDLE}<rect width="{WIDTH}" height="{height}" fill="#FFFFFF"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _simulated(strategy: str, folder: Path) -> tuple[Plan, Trace]:
    """A plan of the job and its simulated step, by the commands that users type."""
    plan, trace = folder / f"{strategy}.json", folder / f"{strategy}.sim.json"
    profile = ("--profile", str(PROFILE))
    printed("plan", str(JOB), "--strategy", strategy, "-o", str(plan), *profile)
    printed("simulate", str(plan), "--trace", str(trace), *profile)
    return read_plan(plan), read_trace(trace)


def _height(svg: str) -> int:
    found = re.search(r'height="(\d+)', svg)
    assert found is not None
    return int(found[1])


def _legend(plan: Plan, y: int) -> str:
    """Which colour is which module; forwards are light, backwards full."""
    parts, x = [], LEFT
    for module, hue in module_hues([m.name for m in plan.model.modules]).items():
        for kind in (Pass.F, Pass.B):
            parts.append(f'<rect x="{x}" y="{y}" width="14" height="12" fill="{tone(hue, kind)}"/>')
            x += 15
        parts.append(f'<text class="legend" x="{x + 4}" y="{y + 10}">{module}, forward and backward</text>')
        x += 190
    parts.append(f'<rect x="{x}" y="{y}" width="14" height="12" fill="url(#idle)" stroke="#D9DEE4"/>')
    parts.append(f'<text class="legend" x="{x + 19}" y="{y + 10}">idle</text>')
    return "".join(parts)
