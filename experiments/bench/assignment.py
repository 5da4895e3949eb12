"""Time of one hierarchical assignment of a global batch, and the balance of the resulting microbatches.

Paper:   Entrain (dissertation) section 4.5, Algorithm 4; it prints no planning time.
Setup:   4 replicas, 4 samples a microbatch on average (its section 4.7.1); encoder and LLM seconds of a
         sample are independent and lognormal; median and 95th percentile over repeats on new draws.
Ours:    `workbench.balance.microbatches.assignment`, with the printed matching and with the even one.
         `residual` is the LLM work of the heaviest microbatch over the mean, before and after deferral.
Goal:    below 1 % of a step of 1 s at 512 samples.
Run:     python -m experiments.bench.assignment [--json]
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

from experiments.harness.command import Found, bench, print_rows, timed
from workbench.balance.microbatches.assignment import MicrobatchAssignment, hierarchical_assignment
from workbench.balance.microbatches.bottleneck_match import Matching, bottleneck_match, even_match
from workbench.float_sum import float_sum

SIZES = (512, 2048, 8192)
REPEATS = {512: 40, 2048: 20, 8192: 7}
NUM_REPLICAS = 4
SAMPLES_PER_MICROBATCH = 4
GOAL_MS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentRow:
    """Times of an assignment for one batch size, and the heaviest over the mean LLM work of microbatches."""

    num_samples: int
    printed_ms_p50: float
    printed_ms_p95: float
    even_ms_p50: float
    residual_without: float
    residual_printed: float
    residual_even: float
    deviation_printed: float
    deviation_even: float


def measure(num_samples: int) -> AssignmentRow:
    """Time both matchings on the same random batches, alternating."""
    times_ms: dict[Matching, list[float]] = {bottleneck_match: [], even_match: []}
    residual: dict[str, list[float]] = {"without": [], "printed": [], "even": []}
    deviation: dict[str, list[float]] = {"printed": [], "even": []}
    for seed in range(REPEATS[num_samples]):
        encoder_s, llm_s = draw(num_samples, seed)
        for name, match in (("printed", bottleneck_match), ("even", even_match)):
            seconds, replicas = timed(partial(assign, encoder_s, llm_s, match))
            times_ms[match].append(seconds * 1e3)
            residual[name] += [_residual(replica.llm, llm_s) for replica in replicas]
            deviation[name] += [_deviation(replica.llm, llm_s) for replica in replicas]
        residual["without"] += [_residual(replica.encoder, llm_s) for replica in replicas]
    printed = sorted(times_ms[bottleneck_match])
    return AssignmentRow(
        num_samples=num_samples,
        printed_ms_p50=statistics.median(printed),
        printed_ms_p95=printed[round(0.95 * (len(printed) - 1))],
        even_ms_p50=statistics.median(times_ms[even_match]),
        residual_without=statistics.mean(residual["without"]),
        residual_printed=statistics.mean(residual["printed"]),
        residual_even=statistics.mean(residual["even"]),
        deviation_printed=statistics.mean(deviation["printed"]),
        deviation_even=statistics.mean(deviation["even"]),
    )


def draw(num_samples: int, seed: int) -> tuple[list[float], list[float]]:
    """Random encoder and LLM seconds of every sample."""
    rng = random.Random(seed)
    encoder_s = [rng.lognormvariate(0.0, 0.8) * 0.02 for _ in range(num_samples)]
    return encoder_s, [rng.lognormvariate(0.0, 0.8) * 0.04 for _ in range(num_samples)]


def assign(
    encoder_s: Sequence[float], llm_s: Sequence[float], match: Matching
) -> tuple[MicrobatchAssignment, ...]:
    """Assign the samples to replicas: the timed operation."""
    return hierarchical_assignment(
        encoder_s,
        llm_s,
        num_replicas=NUM_REPLICAS,
        num_microbatches=len(llm_s) // NUM_REPLICAS // SAMPLES_PER_MICROBATCH,
        match=match,
    )


def _loads(microbatches: Sequence[Sequence[int]], work_s: Sequence[float]) -> list[float]:
    return [float_sum(work_s[sample] for sample in members) for members in microbatches]


def _residual(microbatches: Sequence[Sequence[int]], work_s: Sequence[float]) -> float:
    loads_s = _loads(microbatches, work_s)
    return max(loads_s) / statistics.mean(loads_s)


def _deviation(microbatches: Sequence[Sequence[int]], work_s: Sequence[float]) -> float:
    loads_s = _loads(microbatches, work_s)
    return statistics.pstdev(loads_s) / statistics.mean(loads_s)


@bench()
def run() -> Found:
    """Print the table, or JSON as the last line."""
    assign(*draw(64, 0), bottleneck_match)  # loads scipy
    rows = print_rows(
        "samples  printed p50    p95   even p50   heaviest / mean: without  printed  even   std / mean",
        map(measure, SIZES),
        lambda row: (
            f"{row.num_samples:7d} {row.printed_ms_p50:9.2f} ms {row.printed_ms_p95:6.2f} "
            f"{row.even_ms_p50:8.2f} ms {row.residual_without:23.3f} {row.residual_printed:8.3f} "
            f"{row.residual_even:5.3f}   {row.deviation_printed:.3f} -> {row.deviation_even:.3f}"
        ),
    )
    keys = {f"assign_{row.num_samples}_ms": row.printed_ms_p50 for row in rows}
    claims = {f"below {GOAL_MS:.0f} ms at 512 samples": rows[0].printed_ms_p50 < GOAL_MS}
    return Found(keys | {"rows": [asdict(row) for row in rows]}, claims)
