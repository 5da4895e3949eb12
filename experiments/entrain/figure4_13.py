"""Figure 4.13: one step of every system as a timeline.

Paper:   I. Jang, dissertation, section 4.7.2, Figure 4.13, SynthChartNet and Llama 3 3B; nothing is printed.
Setup:   one replica of 16 A40s, tp 2, 128 samples in 32 microbatches; see `experiments.entrain.traced`.
Differs: sizes are ours, and the fifth timeline is `entrain-graded`. A row is a block of
         two ranks; it idles while its first rank computes nothing.
Ours:    simulated, drawn; about 30 s.
"""

import statistics

from experiments.entrain.traced import OURS, PLANNERS, Traced, traced
from experiments.entrain.workload import TP
from experiments.harness.figure import Box, timelines
from experiments.harness.outcome import Evidence
from experiments.harness.script import script
from workbench.float_sum import float_sum
from workbench.metrics import peak_bytes
from workbench.schedule.action import COMPUTE, Pass
from workbench.trace import Lane
from workbench.units import GB

DATASET, LLM = "SynthChartNet", "Llama3-3b"


def boxes(simulated: Traced) -> list[Box]:
    """Boxes for the passes of the first rank of every block."""
    module_of = {stage.id: stage.module for stage in simulated.plan.stages}
    return [
        Box(
            span.rank // TP,
            module_of[span.action.stage],
            span.action.kind is Pass.F,
            span.start_s,
            span.end_s,
        )
        for span in simulated.trace.spans
        if span.lane is Lane.COMPUTE
        and span.rank % TP == 0
        and span.action.kind in COMPUTE
        and span.action.stage is not None
    ]


def idle_fractions(all_boxes: list[Box]) -> list[float]:
    """Idle fraction of every block until the last pass ends."""
    last_s = max(box.end for box in all_boxes)
    rows = sorted({box.row for box in all_boxes})
    return [
        1 - float_sum(box.end - box.start for box in all_boxes if box.row == row) / last_s for row in rows
    ]


@script(profile="A40")
def run() -> Evidence:
    """Idle time by system, and the drawing."""
    evidence = Evidence()
    simulated = {system: traced(DATASET, LLM, system) for system in (*PLANNERS, *OURS)}
    panels = {system: boxes(one_run) for system, one_run in simulated.items()}
    peak_gb = {system: max(peak_bytes(one_run.trace).values()) / GB for system, one_run in simulated.items()}
    idle = {system: statistics.fmean(idle_fractions(panel_boxes)) for system, panel_boxes in panels.items()}
    ends = {system: max(box.end for box in panel_boxes) for system, panel_boxes in panels.items()}
    for system in panels:
        evidence.ours |= {
            f"modelled/{system}/idle": idle[system],
            f"modelled/{system}/step_s": ends[system],
            f"modelled/{system}/peak_gb": peak_gb[system],
        }
        evidence.notes.append(
            f"{system}: {ends[system]:.3f} s, idle {idle[system]:.1%}, peak {peak_gb[system]:.1f} GB"
        )
    for other in ("1f1b", "disttrain"):
        evidence.claim(
            f"Entrain idles less than {other} ({idle['entrain']:.1%}, {idle[other]:.1%});",
            idle["entrain"] < idle[other],
        )
    evidence.figures["entrain_figure4_13"] = timelines(panels, "s")
    return evidence
