"""Speed of failure simulation: counting between changes of nodes, compared with one event per iteration.

Setup:   BERT-Large on up to 30 nodes for a week; a node leaves every 10 minutes or every 6 hours on average
         and comes back after half an hour; a warning of 30 s. Every system of the Oobleck chapter.
Ours:    `sim.failures.simulate` and `rivals.failures_stepwise` on the same system and trace, alternating in
         one run; the fastest of several, in CPU seconds of one thread. Seconds by kind, samples and
         recoveries of both must agree to a billionth.
Run:     python -m experiments.bench.failures [--json]
"""

import math
import time
from dataclasses import asdict, dataclass
from functools import partial

from experiments.bench.rivals.failures_stepwise import play_failures
from experiments.harness.command import Found, bench, print_rows, timed
from experiments.oobleck.runs import BUILDERS
from experiments.oobleck.systems import MOST_NODES
from sim.failures.run import FailureRun
from sim.failures.simulate import simulate_failures
from workbench.elastic.availability import Availability, Rates, random_trace, warned

MODEL, DAYS, REPEATS, SEED = "BERT-Large", 7.0, 3, 0
HOURS_BETWEEN_LEAVES = {"10m": 1 / 6, "6h": 6.0}
JOINS_PER_MISSING_H, NOTICE_S = 2.0, 30.0
REL_TOL = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRow:
    """CPU seconds of one simulation of one system on one trace, both ways."""

    system: str
    interval: str
    num_events: int
    num_iterations: int
    num_stretches: int
    counted_s: float
    stepwise_s: float
    simulated_h: float
    agrees: bool

    @property
    def ratio(self) -> float:
        return self.stepwise_s / self.counted_s

    @property
    def simulated_h_per_s(self) -> float:
        return self.simulated_h / self.counted_s


def trace_of(interval: str) -> Availability:
    """A week of nodes leaving and joining."""
    leaves = 1 / (HOURS_BETWEEN_LEAVES[interval] * MOST_NODES)
    rates = Rates(leaves_per_node_h=leaves, joins_per_missing_h=JOINS_PER_MISSING_H)
    return warned(random_trace(MOST_NODES, rates, DAYS * 86400, SEED), NOTICE_S)


def agree(counted: FailureRun, stepwise: FailureRun) -> bool:
    """Whether both simulations agree to a billionth of the window."""
    seconds = zip(counted.spent_s, stepwise.spent_s, strict=True)
    return (
        counted.num_recoveries == stepwise.num_recoveries
        and math.isclose(counted.samples, stepwise.samples, rel_tol=REL_TOL)
        and all(abs(one_s - other_s) <= REL_TOL * counted.window_s for (_, one_s), (_, other_s) in seconds)
    )


def measure(name: str, interval: str) -> FailureRow:
    """Time both simulations, alternating."""
    system, trace = BUILDERS[name](MODEL), trace_of(interval)
    seconds: dict[str, list[float]] = {"counted": [], "stepwise": []}
    runs: dict[str, FailureRun] = {}
    for _ in range(REPEATS):
        for way, simulate in (("counted", simulate_failures), ("stepwise", play_failures)):
            lasted_s, runs[way] = timed(partial(simulate, system, trace, DAYS * 86400), time.process_time)
            seconds[way].append(lasted_s)
    ours = runs["counted"]
    return FailureRow(
        system=name,
        interval=interval,
        num_events=len(trace.events) - MOST_NODES,
        num_iterations=sum(stretch.num_iterations for stretch in ours.stretches),
        num_stretches=len(ours.stretches),
        counted_s=min(seconds["counted"]),
        stepwise_s=min(seconds["stepwise"]),
        simulated_h=DAYS * 24,
        agrees=agree(ours, runs["stepwise"]),
    )


def as_json(rows: list[FailureRow]) -> dict[str, object]:
    """Return the rows, the range of the ratio, and simulated hours per second of the slowest."""
    return {
        "rows": [
            asdict(row) | {"ratio": row.ratio, "simulated_h_per_s": row.simulated_h_per_s} for row in rows
        ],
        "least_ratio": min(row.ratio for row in rows),
        "most_ratio": max(row.ratio for row in rows),
        "least_simulated_h_per_s": min(row.simulated_h_per_s for row in rows),
        "all_agree": all(row.agrees for row in rows),
    }


@bench()
def run() -> Found:
    rows = print_rows(
        "a node leaves every  system          events  iterations  counted  step by step  ratio  hours/s",
        (measure(name, interval) for interval in HOURS_BETWEEN_LEAVES for name in BUILDERS),
        lambda row: (
            f"{row.interval:>19}  {row.system:14} {row.num_events:7} {row.num_iterations:11} "
            f"{row.counted_s * 1e3:5.1f} ms {row.stepwise_s * 1e3:10.1f} ms {row.ratio:6.1f} "
            f"{row.simulated_h_per_s:8.0f}"
        ),
    )
    claims = {"both agree to a billionth everywhere": all(row.agrees for row in rows)}
    return Found(as_json(rows), claims)
