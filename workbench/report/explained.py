"""What `explain` and `diff` print: tables for people, one object for machines."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from workbench.explain.changes import Changes, Judged, Tried
from workbench.explain.difference import Difference, SecondsOf
from workbench.explain.explanation import Account, Explanation
from workbench.explain.sensitivity import Sensitivity
from workbench.report.figure import Figure
from workbench.report.records import simulated_record
from workbench.report.tables import listed, mebibytes, milliseconds, percent, titled

LEAST = 5e-5  # of a step: what is less is not shown
MOST_SHOWN = 12  # rows of a table of causes


def account_tables(account: Account, step_s: float) -> tuple[Table, ...]:
    """The critical path and the idle time, by cause; what is less than a rounding error is left out."""
    path = titled(f"critical path, {account.num_steps} steps", ("", "of", "time", "of the step"))
    for cause in account.path:
        if cause.seconds >= LEAST * step_s:
            path.add_row(cause.cause, cause.where, *_share(cause.seconds, step_s))
    idle_s = sum(each.seconds for each in account.idle)
    title = f"idle time of the mean rank, {milliseconds(idle_s)} of {milliseconds(step_s)}"
    idle = titled(title, ("", "of", "time", "of the step"))
    for each in account.idle:
        if each.seconds >= LEAST * step_s:
            where = each.where if each.place is None else f"{each.where}, stage {each.place}"
            idle.add_row(each.cause, where, *_share(each.seconds, step_s))
    return path, idle


def _share(seconds: float, step_s: float) -> tuple[Figure, Figure]:
    return milliseconds(seconds), percent(seconds / step_s, signed=False)


def changes_tables(changes: Changes, most: int) -> tuple[Table | str, ...]:
    """The changes that help most, those that would if they fitted, and what became of the others."""
    nearest = "no tried change makes the step shorter; the closest are"
    title = "changes that help most" if changes.helping else nearest
    best = (changes.helping or changes.slower)[:most]
    shown: list[Table | str] = [_changes_table(title, best, changes.base)]
    if faster := [each for each, of in _judged(changes.misfits) if of.step_s < changes.base.step_s]:
        shown.append(_changes_table("shorter, but do not fit in memory", faster[:most], changes.base))
    shown.append(_tried_text(changes))
    return tuple(shown)


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
    told = [
        f"{changes.num_simulated} simulated ({len(changes.slower)} do not help, "
        f"{len(changes.misfits)} do not fit in memory)",
        f"{changes.num_same} give the same plan",
        f"{len(changes.refused)} have no plan",
    ]
    left = f"; {changes.num_left} more skipped for lack of time, see --budget" if changes.num_left else ""
    total = changes.num_simulated + changes.num_same + len(changes.refused)
    return f"{total} changes tried: {', '.join(told)}{left}"


def sensitivity_table(found: Sequence[Sensitivity], step_s: float) -> Table:
    """What the step is sensitive to, the widest first."""
    table = titled("sensitivity of the step time, one input at a time", ("", "10 % less", "10 % more"))
    refused = []
    for each in found:
        if each.refusal:
            refused.append(f"{each.about}: {each.refusal}")
        else:
            ends = (percent(end_s / step_s - 1, signed=True) for end_s in (each.less_s, each.more_s))
            table.add_row(each.about, *ends)
    table.caption, table.caption_justify = "\n".join(refused) or None, "left"
    return table


def explanation_record(found: Explanation, most: int) -> dict[str, Any]:
    """All of an explanation for machines: seconds, bytes, and reasons of refusals."""
    account = found.account
    return {
        "step": simulated_record(found.plan, found.trace),
        "critical_path": [each._asdict() for each in account.path],
        "idle": [each._asdict() for each in account.idle],
        "changes": None if found.changes is None else changes_record(found.changes, most),
        "note": found.refusal,
        "sensitivity": [
            {"about": each.about, "less_s": each.less_s, "more_s": each.more_s}
            if not each.refusal
            else {"about": each.about, "refusal": each.refusal}
            for each in found.sensitivities
        ],
    }


def changes_record(changes: Changes, most: int) -> dict[str, Any]:
    """What became of all changes; the `most` that help most stand first, under `best`."""
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
    of = tried.judged
    assert of is not None, "refused changes have no figures"
    return {
        "change": tried.change.about,
        "kind": tried.change.kind.value,
        "iteration_s": of.step_s,
        "change_fraction": of.step_s / base.step_s - 1,
        "peak_bytes": of.peak_bytes,
        "change_bytes": of.peak_bytes - base.peak_bytes,
        "fits": not of.misfit,
    }


def difference_tables(found: Difference, names: tuple[str, str]) -> tuple[Table | str, ...]:
    """What differs between two plans, and where the seconds come from."""
    if not found.differs:
        return ("The plans do not differ.",)
    differs = titled("differences", ("", "of", *names))
    for each in found.differs:
        differs.add_row(each.part, each.about, each.first, each.second)
    return (
        differs,
        _seconds_table("critical path", found.along_path, found, names),
        _seconds_table("mean rank", found.of_ranks, found, names),
    )


def _seconds_table(title: str, rows: Sequence[SecondsOf], found: Difference, names: tuple[str, str]) -> Table:
    """Causes by their change; those beyond the first are one row, so that the changes add up."""
    table = titled(f"where the time comes from: {title}", ("", "of", *names, "change"))
    least_s = LEAST * max(found.first_s, found.second_s)
    shown = [row for row in rows if abs(row.change_s) >= least_s][:MOST_SHOWN]
    rest = [row for row in rows if row not in shown]
    if rest:
        ends = (sum(row.first_s for row in rest), sum(row.second_s for row in rest))
        shown.append(SecondsOf("all other causes", "", *ends))
    for row in (*shown, SecondsOf("step", "", found.first_s, found.second_s)):
        change = _signed(milliseconds, row.change_s)
        table.add_row(row.cause, row.where, milliseconds(row.first_s), milliseconds(row.second_s), change)
    return table


def difference_record(found: Difference) -> dict[str, Any]:
    """The same for machines."""

    def rows(seconds_of: Sequence[SecondsOf]) -> list[dict[str, Any]]:
        return [row._asdict() | {"change_s": row.change_s} for row in seconds_of]

    return {
        "differs": [each._asdict() for each in found.differs],
        "first_s": found.first_s,
        "second_s": found.second_s,
        "change_s": found.second_s - found.first_s,
        "critical_path": rows(found.along_path),
        "mean_rank": rows(found.of_ranks),
    }
