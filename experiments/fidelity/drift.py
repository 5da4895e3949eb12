"""Deliberate drift of the machine: another process takes half a core once calibration is over.

Setup:   the demo's plans, calibrated on this machine as it is; while they run, a process beside them works
         for half of every 20 ms, on any core.
Ours:    drift is reported, and predictions multiplied by it come within a tenth of the executed times.
Run:     python -m experiments.fidelity.drift [--json] [--burn SHARE] [--out FOLDER]
"""

from collections.abc import Iterator
from pathlib import Path

from experiments.demo import DemoResult, run_demo
from experiments.fidelity.burner import burner_of
from experiments.harness.command import Found, bench
from workbench.drift import MOST_DRIFT, drift_warning
from workbench.report.progress import ticking
from workbench.report.tables import noise_warning, percent

HALF = 0.5
MOST_CORRECTED = 0.10


def goals(result: DemoResult) -> dict[str, bool]:
    """The goals of the runs beside a burner."""
    drift, corrected = result.drift, result.median_abs_error_corrected
    return {
        f"drift beyond {MOST_DRIFT:.0%} is named": drift_warning(drift) is not None,
        f"median |error| corrected <= {MOST_CORRECTED:.0%}": corrected is not None
        and corrected <= MOST_CORRECTED,
    }


def lines(result: DemoResult) -> Iterator[str]:
    """Format the figures, problems of the machine first."""
    warning = drift_warning(result.drift)
    if warning is not None:
        yield warning
    yield from noise_warning(result.noise)
    yield f"{'plan':44s} {'executed':>10s} {'error':>7s} {'drift':>7s} {'corrected':>9s} {'spread':>7s}"
    for row in result.plans:
        drift, corrected = (percent(value, signed=True) for value in (row.drift, row.error_corrected))
        yield (
            f"{row.plan:44s} {row.executed_s * 1e3:7.1f} ms {row.error:+7.1%} {drift:>7s} {corrected:>9s} "
            f"{row.spread:7.1%}"
        )
    yield (
        f"median |error| {result.median_abs_error:.1%}, "
        f"corrected {percent(result.median_abs_error_corrected, signed=False)}; "
        f"calibrated again {result.recalibrated} times"
    )


@bench(burn="share of a core that the other process takes", out="folder for profile and steps")
def run(burn: float = HALF, out: Path = Path("out/drift")) -> Found:
    burner = burner_of(burn)
    with ticking("drift", None, quiet=False) as ticker:
        result = run_demo(out, ticker.at, beside=burner)
    claims = goals(result)
    print("\n".join(lines(result)))
    return Found(result.as_json() | {"goals": claims}, claims)
