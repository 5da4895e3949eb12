"""The critical path of a trace on the page: its spans and messages, and a table of causes."""

from dataclasses import dataclass
from typing import Any

from workbench.explain.critical_path import PathStep, critical_path, seconds_by_cause
from workbench.float_sum import float_sum
from workbench.plan.lower import lower
from workbench.plan.plan import Plan
from workbench.report.sortable import Cell, number, sortable_table
from workbench.report.tables import milliseconds, percent
from workbench.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """The page's view of a critical path.

    Args:
        steps: of the path, earliest first.
        spans: indices in the trace of the spans on it, on all their ranks.
        rows: of the messages on it.
    """

    steps: tuple[PathStep, ...]
    spans: tuple[int, ...]
    rows: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """Ranks and seconds of the steps with a rank, and what to highlight."""
        steps = [[step.rank, step.start_s, step.end_s] for step in self.steps if step.rank is not None]
        return {"spans": self.spans, "rows": self.rows, "steps": steps}


def critical_path_of(plan: Plan, trace: Trace) -> CriticalPath:
    """The critical path of a trace of a plan; ValueError as `explain.critical_path`."""
    lowered = lower(plan)
    steps = critical_path(lowered, trace)
    tasks = [s for s in steps if s.node is not None and s.node < lowered.tasks.num_tasks]
    actions = {step.action for step in tasks if step.action is not None and step.action.stage is not None}
    single_rank_actions = {(step.rank, step.action) for step in tasks if step.action is not None}
    return CriticalPath(
        steps=steps,
        spans=tuple(
            index
            for index, span in enumerate(trace.spans)
            if span.action in actions or (span.rank, span.action) in single_rank_actions
        ),
        rows=tuple(
            step.node - lowered.tasks.num_tasks
            for step in steps
            if step.node is not None and step.node >= lowered.tasks.num_tasks
        ),
    )


def causes_html(path: CriticalPath) -> str:
    """A table of the path's causes, most time first."""
    seconds_of = seconds_by_cause(path.steps)
    total_s = float_sum(seconds_of.values())
    rows = [
        (
            Cell(f"{cause.value}{f', {where}' if where else ''}"),
            number(seconds, milliseconds),
            number(seconds / total_s, lambda share: percent(share, signed=False)),
        )
        for (cause, where), seconds in seconds_of.items()
    ]
    return sortable_table(("on the critical path", "time", "share"), [rows], left=1)
