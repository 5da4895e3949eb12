"""What is in the peak memory of ranks."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from workbench.memory.rank_peaks import RankPeak
from workbench.plan.plan import Plan
from workbench.report.tables import mebibytes, percent, titled


def peak_table(peaks: Sequence[RankPeak]) -> Table:
    """One line per part of each rank's peak, largest first."""
    table = titled("memory at the peak", ("rank", "part", "of", "memory", "of the peak"), key="peak memory")
    table.columns[1].justify = "left"
    for peak in peaks:
        for part in peak.parts:
            share = percent(part.num_bytes / peak.num_bytes, signed=False)
            table.add_row(str(peak.rank), str(part.part), part.module, mebibytes(part.num_bytes), share)
    return table


def peak_lines(plan: Plan, peaks: Sequence[RankPeak]) -> tuple[str, ...]:
    """A line for each rank: its peak, its limit, and when it is."""
    *others, last = (_peak_text(plan, peak) for peak in peaks)
    return *others, f"{last}\n"


def _peak_text(plan: Plan, peak: RankPeak) -> str:
    moment = "at rest"
    if peak.during is not None:
        stage = plan.stage.get(peak.during.stage) if peak.during.stage is not None else None
        where = "" if stage is None else f" of {stage.module} {stage.layers[0]}..{stage.layers[1] - 1}"
        moment = f"during {peak.during}{where}"
    sharing = f" that {peak.num_sharing} ranks share" if peak.num_sharing > 1 else ""
    return (
        f"rank {peak.rank}: {mebibytes(peak.num_bytes)} of {mebibytes(peak.limit_bytes)}{sharing}, {moment}"
    )


def peak_records(peaks: Sequence[RankPeak]) -> list[dict[str, Any]]:
    """The same as data, in bytes."""
    return [
        {
            "rank": peak.rank,
            "during": None if peak.during is None else str(peak.during),
            "peak_bytes": peak.num_bytes,
            "limit_bytes": peak.limit_bytes,
            "sharing_ranks": peak.num_sharing,
            "parts": [
                {"part": part.part.value, "module": part.module or None, "bytes": part.num_bytes}
                for part in peak.parts
            ],
        }
        for peak in peaks
    ]
