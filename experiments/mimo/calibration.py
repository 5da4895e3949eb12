"""Two numbers of the machine, fitted on the layout paper's homogeneous step times alone.

Paper:   Karnati et al., column H of Tables A2 to A4.
Setup:   the printed layouts as plans, simulated; `protocol.toml` lists the values tried and the rule of
         choice.
Given:   53 printed homogeneous times; no time of another layout, no gain.
Differs: one rate for all collectives and one time for all launches; on a real machine both depend on sizes.
Ours:    25 machines, each with the plans balanced for it, about a minute on one CPU core.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from math import exp, log
from statistics import fmean

from experiments.harness.outcome import Evidence
from experiments.harness.script import script
from experiments.mimo.models import PROFILE, assumptions, at_rates, protocol
from experiments.mimo.rows import Compared, Timed, tables
from experiments.mimo.simulated import lowered_of, passes_s, prices_of
from sim.predict import iteration_s

Rates = tuple[float, float]  # collective_rate, host_kernel_s


def ratios_of(row: Compared, candidates: Sequence[Rates]) -> dict[Rates, float]:
    """Our homogeneous time over the printed one, by candidate machine."""
    ratios = {}
    for rates in candidates:
        cost = at_rates(*rates)
        lowered = lowered_of(row.baseline, row.baseline_layout, assumptions(), cost)
        prices = prices_of(lowered, cost, assumptions())
        seconds = (
            passes_s(lowered, prices) if row.timed is Timed.FORWARD_BACKWARD else iteration_s(lowered, prices)
        )
        ratios[rates] = seconds / row.printed_s[0]
    return ratios


def best_of(ratios: Sequence[Mapping[Rates, float]]) -> Rates:
    """The machine with the smallest mean absolute log ratio; the first among equals."""
    return min(ratios[0], key=lambda rates: fmean(abs(log(row_ratios[rates])) for row_ratios in ratios))


@script(profile=PROFILE)
def run() -> Evidence:
    """Evidence: the fitted numbers, their errors, and the fit to each table alone."""
    fixed = protocol()["calibration"]
    candidates = list(product(fixed["collective_rate"], fixed["host_kernel_s"]))
    by_table = {
        name: [ratios_of(row, candidates) for row in rows]
        for name, rows in tables().items()
        if name in fixed["rows"]
    }
    ratios = [row_ratios for table_ratios in by_table.values() for row_ratios in table_ratios]
    best, evidence = best_of(ratios), Evidence()
    evidence.ours |= {
        "fitted/collective_rate": best[0],
        "fitted/host_kernel_s": best[1],
        "fitted/rows": len(ratios),
        "fitted/mean_error": exp(fmean(abs(log(row_ratios[best])) for row_ratios in ratios)) - 1,
    }
    for name, table_ratios in by_table.items():
        evidence.ours[f"fitted/{name}/ours_over_printed"] = fmean(
            row_ratios[best] for row_ratios in table_ratios
        )
        rate, launch_s = best_of(table_ratios)
        evidence.notes.append(
            f"{name} alone would choose collectives at {rate:g} and {launch_s * 1e6:g} us a launch"
        )
    for rates in candidates:
        error = exp(fmean(abs(log(row_ratios[rates])) for row_ratios in ratios)) - 1
        evidence.notes.append(f"collectives at {rates[0]:g}, {rates[1] * 1e6:g} us a launch: {error:.1%} off")
    return evidence
