"""Output of `explain` and `diff`: tables for people, one object for machines."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from workbench.explain.changes import Changes, Judged, Tried
from workbench.explain.difference import Difference, SecondsOf
from workbench.explain.explanation import Account, Explanation
from workbench.explain.idle import IdleCause, IdleSeconds
from workbench.explain.sensitivity import Sensitivity
from workbench.float_sum import float_sum
from workbench.report.figure import Figure
from workbench.report.records import simulated_record
from workbench.report.tables import listed, mebibytes, milliseconds, percent, titled

LEAST = 5e-5  # fraction of a step, below which nothing is shown
LEAST_SAVED = 0.01  # fraction of the peak that a change without effect on the step must save to be shown
MOST_SHOWN = 12  # rows of a table of causes
_OF_LAYERS = {  # where each layer is gathered for itself, there is no pipeline
    IdleCause.FILL: "waits before the first pass",
    IdleCause.DRAIN: "waits after the last pass",
    IdleCause.STAGE: "waits for a layer",
}


def account_tables(account: Account, step_s: float) -> tuple[Table, ...]:
    """The critical path and the idle time by cause, without what is below a rounding error.

    Waits for single layers are summed by module, and idle causes beyond the first in one row.
    """
    path = titled(
        f"critical path, {account.num_steps} steps", ("", "of", "time", "of the step"), key="critical path"
    )
    for cause in account.path:
        if cause.seconds >= LEAST * step_s:
            path.add_row(cause.cause, cause.where, *_share(cause.seconds, step_s))
    idle_s = float_sum(wait.seconds for wait in account.idle)
    unused = any(wait.cause == IdleCause.UNUSED for wait in account.idle)
    ranks = "mean rank, those without work included" if unused else "mean rank"
    title = f"idle time of the {ranks}, {milliseconds(idle_s)} of {milliseconds(step_s)}"
    idle = titled(title, ("", "of", "time", "of the step"), key="idle time")
    shown = [wait for wait in _waits(account.idle) if wait[2] >= LEAST * step_s][:MOST_SHOWN]
    for name, where, seconds in shown:
        idle.add_row(name, where, *_share(seconds, step_s))
    rest_s = idle_s - float_sum(seconds for *_, seconds in shown)
    if rest_s >= LEAST * step_s:
        idle.add_row("all other causes", "", *_share(rest_s, step_s))
    return path, idle


def _waits(idle: Sequence[IdleSeconds]) -> list[tuple[str, str, float]]:
    """Cause, place and seconds of every row, most first; the layers of a module are one row."""
    seconds_by_row: dict[tuple[str, str], float] = {}
    for wait in idle:
        cause = _OF_LAYERS.get(wait.cause, wait.cause) if wait.is_layer else wait.cause
        has_stage = wait.place is not None and not wait.is_layer
        row = str(cause), f"{wait.where}, stage {wait.place}" if has_stage else wait.where
        seconds_by_row[row] = seconds_by_row.get(row, 0.0) + wait.seconds
    rows = [(cause, where, seconds) for (cause, where), seconds in seconds_by_row.items()]
    return sorted(rows, key=lambda row: -row[2])


def _share(seconds: float, step_s: float) -> tuple[Figure, Figure]:
    return milliseconds(seconds), percent(seconds / step_s, signed=False)


def changes_tables(changes: Changes, most: int) -> tuple[Table | str, ...]:
    """The changes that help most, those that would if they fitted, and a summary of the others."""
    nearest = "no tried change makes the step shorter; the closest are"
    title = "changes that help most" if changes.helping else nearest
    best = (changes.helping or _differing(changes.slower, changes.base))[:most]
    parts: list[Table | str] = [_changes_table(title, best, changes.base)] if best else []
    faster = [tried for tried, judged in _judged(changes.misfits) if judged.step_s < changes.base.step_s]
    if faster:
        parts.append(_changes_table("shorter, but do not fit in memory", faster[:most], changes.base))
    parts.append(_tried_text(changes))
    return tuple(parts)


def _differing(tried: Sequence[Tried], base: Judged) -> list[Tried]:
    """Changes without those after which step and memory are as before, or which save next to no memory."""

    def differs(judged: Judged) -> bool:
        is_slower = abs(judged.step_s / base.step_s - 1) >= LEAST
        return is_slower or judged.peak_bytes < (1 - LEAST_SAVED) * base.peak_bytes

    return [each for each, judged in _judged(tried) if differs(judged)]


def _judged(tried: Sequence[Tried]) -> list[tuple[Tried, Judged]]:
    return [(each, each.judged) for each in tried if each.judged is not None]


def _changes_table(title: str, tried: Sequence[Tried], base: Judged) -> Table:
    return listed(
        title,
        _judged(tried),
        ("", lambda row: row[0].change.about),
        ("step", lambda row: milliseconds(row[1].step_s)),
        ("change", lambda row: percent(row[1].step_s / base.step_s - 1, signed=True)),
        ("memory", lambda row: mebibytes(row[1].peak_bytes)),
        ("more memory", lambda row: _signed(mebibytes, row[1].peak_bytes - base.peak_bytes)),
    )


def _signed(shown: Callable[[float], Figure], change: float) -> Figure:
    figure = shown(abs(change))
    return Figure(f"{'-' if change < 0 else '+'}{figure}", dict.fromkeys(figure.values, change))


def _tried_text(changes: Changes) -> str:
    counts = [
        f"{changes.num_simulated} simulated ({len(changes.slower)} do not help, "
        f"{len(changes.misfits)} do not fit in memory)",
        f"{changes.num_same} give the same plan",
        f"{len(changes.refused)} have no plan",
    ]
    left = f"; {changes.num_left} more skipped for lack of time, see --budget" if changes.num_left else ""
    total = changes.num_simulated + changes.num_same + len(changes.refused)
    return f"{total} changes tried: {', '.join(counts)}{left}"


def sensitivity_table(sensitivities: Sequence[Sensitivity], step_s: float) -> Table:
    """Sensitivities of the step, the widest first."""
    table = titled("sensitivity of the step time, one input at a time", ("", "10 % less", "10 % more"))
    refused = []
    for sensitivity in sensitivities:
        if sensitivity.refusal:
            refused.append(f"{sensitivity.about}: {sensitivity.refusal}")
        else:
            ends = (
                percent(end_s / step_s - 1, signed=True) for end_s in (sensitivity.less_s, sensitivity.more_s)
            )
            table.add_row(sensitivity.about, *ends)
    table.caption, table.caption_justify = "\n".join(refused) or None, "left"
    return table


def explanation_record(explanation: Explanation, most: int) -> dict[str, Any]:
    """An explanation for machines: seconds, bytes, and reasons of refusals."""
    account = explanation.account
    return {
        "step": simulated_record(explanation.plan, explanation.trace),
        "critical_path": [each._asdict() for each in account.path],
        "idle": [each._asdict() for each in account.idle],
        "changes": None if explanation.changes is None else changes_record(explanation.changes, most),
        "note": explanation.refusal,
        "sensitivity": [
            {"about": each.about, "less_s": each.less_s, "more_s": each.more_s}
            if not each.refusal
            else {"about": each.about, "refusal": each.refusal}
            for each in explanation.sensitivities
        ],
    }


def changes_record(changes: Changes, most: int) -> dict[str, Any]:
    """All changes by outcome; the `most` that help most come first, under `best`."""
    return {
        "best": [_tried_record(each, changes.base) for each in changes.helping[:most]],
        "helping": [_tried_record(each, changes.base) for each in changes.helping],
        "slower": [_tried_record(each, changes.base) for each in changes.slower],
        "misfits": [_tried_record(each, changes.base) for each in changes.misfits],
        "refused": [{"change": each.change.about, "refusal": each.refusal} for each in changes.refused],
        "num_same": changes.num_same,
        "num_left": changes.num_left,
    }


def _tried_record(tried: Tried, base: Judged) -> dict[str, Any]:
    judged = tried.judged
    assert judged is not None, "refused changes have no figures"
    return {
        "change": tried.change.about,
        "kind": tried.change.kind.value,
        "iteration_s": judged.step_s,
        "change_fraction": judged.step_s / base.step_s - 1,
        "peak_bytes": judged.peak_bytes,
        "change_bytes": judged.peak_bytes - base.peak_bytes,
        "fits": not judged.misfit,
    }


def difference_tables(difference: Difference, names: tuple[str, str]) -> tuple[Table | str, ...]:
    """Differences between two plans, and the sources of the difference in seconds."""
    if not difference.differs:
        return ("The plans do not differ.",)
    differs = titled("differences", ("", "of", *names))
    for part in difference.differs:
        differs.add_row(part.part, part.about, part.first, part.second)
    return (
        differs,
        _seconds_table("critical path", difference.along_path, difference, names),
        _seconds_table("mean rank", difference.of_ranks, difference, names),
    )


def _seconds_table(
    title: str, rows: Sequence[SecondsOf], difference: Difference, names: tuple[str, str]
) -> Table:
    """Causes by their change; those beyond the first are summed in one row, so that the changes add up."""
    table = titled(f"where the time comes from: {title}", ("", "of", *names, "change"))
    least_s = LEAST * max(difference.first_s, difference.second_s)
    shown = [row for row in rows if abs(row.change_s) >= least_s][:MOST_SHOWN]
    rest = [row for row in rows if row not in shown]
    if rest:
        ends = (float_sum(row.first_s for row in rest), float_sum(row.second_s for row in rest))
        shown.append(SecondsOf("all other causes", "", *ends))
    for row in (*shown, SecondsOf("step", "", difference.first_s, difference.second_s)):
        change = _signed(milliseconds, row.change_s)
        table.add_row(row.cause, row.where, milliseconds(row.first_s), milliseconds(row.second_s), change)
    return table


def difference_record(difference: Difference) -> dict[str, Any]:
    """A difference for machines."""

    def rows(seconds_of: Sequence[SecondsOf]) -> list[dict[str, Any]]:
        return [row._asdict() | {"change_s": row.change_s} for row in seconds_of]

    return {
        "differs": [part._asdict() for part in difference.differs],
        "first_s": difference.first_s,
        "second_s": difference.second_s,
        "change_s": difference.second_s - difference.first_s,
        "critical_path": rows(difference.along_path),
        "mean_rank": rows(difference.of_ranks),
    }
