"""What the simulated tables of the layout paper must show: every goal, whether it holds, and why where not.

Paper:   Y. Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training",
         Tables A2 to A5, Figure 8.
Setup:   as each table's script; gains by printed step times, "on par" within 3 %.
Given:   the printed layouts.
Differs: a cause is a reading of the printed numbers or another run of ours; no goal is judged by it.
Ours:    the step model of the layout search, about 40 s on one CPU core.
Run:     python -m experiments.mimo.goals
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean
from typing import Any

from scipy.stats import kendalltau

from experiments.harness.outcome import About, Claim, Evidence
from experiments.harness.printed import PrintedRow, printed_rows
from experiments.harness.record import RESULTS
from experiments.harness.script import Parts, main, script
from experiments.mimo import figure8, tablea2, tablea3, tablea4, tablea5
from experiments.mimo.compared import (
    ON_PAR,
    SIGNS_WANTED,
    TAU_WANTED,
    Compared,
    Seconds,
    same_sign,
    step_of,
)
from experiments.mimo.models import PROFILE, assumptions, job_of, machine
from workbench.cost.model import CostModel
from workbench.planner.layout_step import LayoutSteps

PERCENT = 100.0
LAUNCHES = ("kernel_gap_s", "host_kernel_s", "host_collective_s", "host_rank_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table's rows, with what it times."""

    name: str
    rows: Sequence[Compared]
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Gains:
    """Printed gains and ours, row by row."""

    name: str
    printed: tuple[float, ...]
    ours: tuple[float, ...]

    @property
    def right(self) -> int:
        """Rows whose sign is right."""
        return sum(same_sign(a, b) for a, b in zip(self.printed, self.ours, strict=True))

    @property
    def tau(self) -> float:
        """Kendall's tau over rows."""
        return float(kendalltau(self.printed, self.ours).statistic)

    @property
    def error_points(self) -> float:
        """Mean absolute error, in points of a per cent."""
        return PERCENT * fmean(abs(a - b) for a, b in zip(self.printed, self.ours, strict=True))

    @property
    def apart_tau(self) -> tuple[float, int]:
        """Tau over pairs of rows whose printed gains differ by more than is "on par", and their number."""
        pairs = [
            (a[0] - b[0]) * (a[1] - b[1])
            for a, b in combinations(zip(self.printed, self.ours, strict=True), 2)
            if abs(a[0] - b[0]) > ON_PAR
        ]
        return sum((pair > 0) - (pair < 0) for pair in pairs) / max(1, len(pairs)), len(pairs)


def tables() -> tuple[Table, ...]:
    """Tables A2, A3 and A4."""
    scripts = (
        ("A2", tablea2, tablea2.step_s),
        ("A3", tablea3, tablea3.passes_s),
        ("A4", tablea4, tablea2.step_s),
    )
    return tuple(
        Table(
            name=name, rows=[script.compared(row) for row in printed_rows(f"mimo_table{name}")], seconds=timed
        )
        for name, script, timed in scripts
    )


def gains_of(table: Table, cost: CostModel | None = None) -> Gains:
    """Gains of all rows as assumed, or on another machine."""
    ours = []
    for row in table.rows:
        pairs = ((row.baseline, row.baseline_layout), (row.other, row.other_layout))
        before, after = (
            step_of(workload, layout, assumptions())
            if cost is None
            else LayoutSteps(job_of(workload, assumptions()), cost).step(layout)
            for workload, layout in pairs
        )
        ours.append(table.seconds(before) / table.seconds(after) - 1)
    return Gains(name=table.name, printed=tuple(row.printed_gain for row in table.rows), ours=tuple(ours))


def modes_gains(rows: Sequence[PrintedRow], modes: Sequence[tablea5.Modes]) -> Gains:
    """Table A5: C over NC."""
    printed = tuple(float(row["c_vs_nc_tokens_per_s_pct"]) / PERCENT for row in rows)
    return Gains(name="A5", printed=printed, ours=tuple(found.nc_s / found.c_s - 1 for found in modes))


def with_launches() -> CostModel:
    """The machine with the gaps and launches between kernels that fit a public table of A100 runs."""
    fitted: Mapping[str, float] = json.loads((RESULTS / "public_vtrain.json").read_text())["ours"]
    changes: dict[str, Any] = {name: fitted[f"execution/{name}"] for name in LAUNCHES}
    return CostModel(machine().profile, replace(machine().execution, **changes))


def gains_evidence(found: Sequence[Gains], causes: Mapping[str, Callable[[], str]]) -> Evidence:
    """Signs, ranks and errors of every table, and of all their rows."""
    evidence = Evidence()
    whole = Gains(
        name="all tables",
        printed=tuple(gain for each in found for gain in each.printed),
        ours=tuple(gain for each in found for gain in each.ours),
    )
    for each in (*found, whole):
        rows = len(each.printed)
        signs, ranks = each.right / rows >= SIGNS_WANTED, each.tau >= TAU_WANTED
        evidence.claim(
            f"{each.name}: signs are right in {each.right} of {rows} rows (want {SIGNS_WANTED:.0%});",
            signs,
            About.METHODS,
        )
        tau = f"{each.name}: Kendall tau {each.tau:.2f} (want {TAU_WANTED});"
        evidence.claim(tau, ranks, About.METHODS)
        key = each.name.replace(" ", "_")
        evidence.ours |= {
            f"modelled/{key}/sign_share": each.right / rows,
            f"modelled/{key}/kendall_tau": each.tau,
            f"modelled/{key}/gain_error_points": each.error_points,
        }
        evidence.notes.append(f"{each.name}: mean absolute error of the gains {each.error_points:.1f} points")
        if not (signs and ranks) and each.name in causes:
            evidence.notes.append(f"cause, {each.name}: {causes[each.name]()}")
    return evidence


def one_llm_cause(table: Table) -> str:
    """A2: what is printed for one LLM under one layout."""
    rows = [row for row in table.rows if row.baseline.llm == "120B" and row.baseline.vision_pct == 50]
    before, after = _named(rows, "3B"), _named(rows, "6B")
    ours = [table.seconds(step_of(row.other, row.other_layout, assumptions())) for row in (before, after)]
    printed = [[row.printed_s[which] for row in rows] for which in (0, 1)]
    (h_s, c_s), grown = printed, after.printed_s[1] / before.printed_s[1] - 1
    return (
        f"the 120B LLM has one layout (8/1/4/8) in all rows, yet H is printed at {min(h_s):.1f} to "
        f"{max(h_s):.1f} s and C at {min(c_s):.1f} to {max(c_s):.1f} s, neither rising with the encoder; "
        f"from the 3B to the 6B encoder C's step grows by {grown:.0%} in print, by "
        f"{ours[1] / ours[0] - 1:.1%} in ours. Computing the LLM again would add a third, but the table "
        "says that it is not. With 70B the printed C has a pipeline bubble that H has not and is faster "
        "all the same; nothing in the step model makes a layer faster at PP 2"
    )


def _named(rows: Sequence[Compared], encoder: str) -> Compared:
    return next(row for row in rows if row.baseline.encoder == encoder)


def launch_cause(table: Table) -> str:
    """A3: what gaps between kernels change."""
    found = gains_of(table, with_launches())
    return (
        "a homogeneous encoder cut 4 to 64 ways runs kernels of microseconds, and ours launches them for "
        "nothing: with the gaps and launches that fit a public table of A100 runs signs are right in "
        f"{found.right} of {len(found.ours)}, tau {found.tau:.2f}, error {found.error_points:.1f} points. "
        "Not judged: it was looked at after the first sweep, and no such numbers of an H100 are published"
    )


def close_cause(gains: Gains) -> str:
    """A4: how far gains lie apart."""
    tau, pairs = gains.apart_tau
    spread = PERCENT * (max(gains.printed) - min(gains.printed))
    return (
        f"printed gains span {spread:.0f} points and do not move one way: with more vision tokens they "
        "rise and fall again for 12B at 8K (7, 13, 10 points), rise for 6B at 16K (1, 3) and fall for "
        f"7.2B (6, 4); over the {pairs} pairs of rows that differ by more than {ON_PAR:.0%} in print tau "
        f"is {tau:.2f}"
    )


def all_cause(found: Sequence[Gains]) -> str:
    """All rows: which tables they miss in."""
    missed = [f"{each.name} {len(each.ours) - each.right}" for each in found]
    return f"rows with another sign: {', '.join(missed)}; their causes are the tables' own"


def other_claims(others: Mapping[str, tuple[Sequence[Claim], str]]) -> Iterator[Evidence]:
    """Goals that are claims of a table's own script."""
    for name, (claims, cause) in others.items():
        evidence = Evidence()
        for claim in claims:
            evidence.claim(f"{name}: {claim.text}", claim.holds, About.BOOKKEEPING)
        if not all(claim.holds for claim in claims):
            evidence.notes.append(f"cause, {name}: {cause}")
        yield evidence


CROSSOVER_CAUSE = (
    "below 6B the LLM's layout under NC is not printed; with C's own degrees both modes run the same LLM, "
    "and a small encoder beside it cannot make the printed difference of a fifth. That is in the printed "
    "C steps of Table A2, see there"
)
CONTEXT_CAUSE = "as for the signs of A3: the shorter the sequence, the more launches weigh in what is printed"
BRIDGE_CAUSE = (
    "apart, a leader sends all that its replica produces over its own 50 GB/s card, which takes its time "
    "however it is hidden: with 87.5 % of the tokens vision 3.8 GB a leader and direction, where below 1 "
    "% of the printed step would need 100 GB/s; up to a quarter of the tokens the share is below 1 %, and "
    "colocated always"
)


@script(profile=PROFILE)
def run() -> Parts:
    """Every goal."""
    a2, a3, a4 = tables()
    rows = printed_rows("mimo_tableA5")
    modes = [tablea5.modes_of(row) for row in rows]
    found = [*map(gains_of, (a2, a3, a4)), modes_gains(rows, modes)]
    causes = {
        "A2": lambda: one_llm_cause(a2),
        "A3": lambda: launch_cause(a3),
        "A4": lambda: close_cause(found[2]),
        "A5": lambda: CROSSOVER_CAUSE,
        "all tables": lambda: all_cause(found),
    }
    growing = Evidence()
    speeds = {
        f"modelled/{row.key}/speed_over_h": 1 + gain for row, gain in zip(a3.rows, found[1].ours, strict=True)
    }
    growing.ours |= speeds
    tablea3.growth(growing, list(a3.rows))
    crossing = Evidence()
    tablea5.crossover(crossing, rows, modes)
    others = {
        "context": (growing.claims, CONTEXT_CAUSE),
        "crossover": (crossing.claims, CROSSOVER_CAUSE),
        "bridge": (figure8.evidence().claims, BRIDGE_CAUSE),
    }
    return [gains_evidence(found, causes), *other_claims(others)]


if __name__ == "__main__":
    main(run)
