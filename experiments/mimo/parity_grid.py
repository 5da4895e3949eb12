"""Every pair of layouts that fits eight ranks trains as one process does.

Setup:   tp 1, 2, 4 x dp 1..4 x pp 1, 2 x cp 1, 2 for each module; a tiny SigLIP and a tiny Llama, all
         trained; with two encoders a tiny Whisper too. Modules apart under graph-aware 1F1B, and on the
         same ranks in three phases. One AdamW step in float64 on gloo processes.
Ours:    loss, gradients and weights after the step against one process on the whole batch. The grid of one
         encoder is run in full. Of two encoders, enough triples are run to include every pair of layouts of
         two modules for which some triple fits.
Differs: of the 48 layouts of the product, 21 have more than eight ranks, fit nowhere and are not counted.
Run:     python -m experiments.mimo.parity_grid [--json] [--limit-s N] [--fresh]

Outcomes are stored as each run ends, by plan hash, so an interrupted command resumes, and a plan that changed
is run again. `--fresh` deletes them.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heapreplace
from itertools import combinations, product
from typing import Any

from experiments.harness.command import Found, bench
from experiments.harness.record import RESULTS
from experiments.mimo.kept_runs import Kept
from experiments.mimo.parity_grid_runs import NUM_RANKS, Layout, gap_of, plan_of
from runtime.world.failure import WorldFailed
from runtime.world.pool import Pool
from workbench.plan.codec import plan_hash
from workbench.planner.rank_spans import Placement

BOUND = 1e-10
KEPT = Kept(RESULTS / "mimo_parity_grid_outcomes.jsonl", key="plan", done="gap")
SUMMARY = RESULTS / "mimo_parity_grid.json"
ONE_ENCODER = ("vision", "llm")
TWO_ENCODERS = ("vision", "audio", "llm")


@dataclass(frozen=True, slots=True)
class Point:
    """Layouts of the modules in the order of their names, on separate or the same ranks."""

    modules: tuple[str, ...]
    layouts: tuple[Layout, ...]
    placement: Placement

    def __str__(self) -> str:
        return f"{self.placement}: " + ", ".join(
            f"{name} {layout}" for name, layout in zip(self.modules, self.layouts, strict=True)
        )


def layouts() -> tuple[Layout, ...]:
    """Layouts of the product of degrees that fit on the ranks alone."""
    degrees = product((1, 2, 4), (1, 2, 3, 4), (1, 2), (1, 2))
    return tuple(
        layout for layout in (Layout(*degree) for degree in degrees) if layout.num_ranks <= NUM_RANKS
    )


def fits(point_layouts: Sequence[Layout], placement: Placement) -> bool:
    """Whether layouts fit: apart, all together on the ranks; on the same ranks, with equal numbers."""
    sizes = [layout.num_ranks for layout in point_layouts]
    return len(set(sizes)) == 1 if placement is Placement.SHARED else sum(sizes) <= NUM_RANKS


def one_encoder() -> tuple[Point, ...]:
    """All fitting pairs of layouts of an encoder and the LLM."""
    return tuple(point for placement in Placement for point in _fitting(ONE_ENCODER, placement))


@cache
def _fitting(modules: tuple[str, ...], placement: Placement) -> tuple[Point, ...]:
    combinations = product(layouts(), repeat=len(modules))
    return tuple(
        Point(modules, combination, placement) for combination in combinations if fits(combination, placement)
    )


def two_encoders() -> tuple[Point, ...]:
    """A pairwise cover of the fitting triples, on separate and shared ranks."""
    return tuple(
        point for placement in Placement for point in pairwise_cover(_fitting(TWO_ENCODERS, placement))
    )


def pairwise_cover(points: Sequence[Point]) -> tuple[Point, ...]:
    """A subset of points that contains every pair of layouts of two modules that occurs in any of them.

    Greedy: always the first point that adds most pairs. A point's gain never grows, so its last gain bounds
    its present one, and few are counted again.

    Complexity: at most O(points x chosen x pairs of modules).
    """
    missing = {pair for point in points for pair in _pairs(point)}
    bounds = [(-sum(1 for _ in _pairs(point)), index) for index, point in enumerate(points)]
    heapify(bounds)
    cover: list[Point] = []
    while missing:
        bound, index = bounds[0]
        added = sum(pair in missing for pair in _pairs(points[index]))
        if -added == bound:
            cover.append(points[index])
            missing.difference_update(_pairs(points[index]))
            added = 0
        heapreplace(bounds, (-added, index))
    return tuple(cover)


def _pairs(point: Point) -> Iterator[tuple[int, int, Layout, Layout]]:
    for i, j in combinations(range(len(point.layouts)), 2):
        yield i, j, point.layouts[i], point.layouts[j]


def outcome(point: Point, pool: Pool, known_outcomes: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The outcome of a point: refused with the reason, or executed with its gap; known ones are reused."""
    try:
        plan = plan_of(dict(zip(point.modules, point.layouts, strict=True)), point.placement)
    except ValueError as error:
        return {"point": str(point), "refused": " ".join(str(error).split())}
    known_outcome = known_outcomes.get(plan_hash(plan))
    if known_outcome is not None and "gap" in known_outcome:
        return known_outcome
    record: dict[str, Any] = {"point": str(point), "plan": plan_hash(plan), "num_ranks": len(plan.ranks)}
    try:
        gap = gap_of(plan, pool)
    except WorldFailed as error:
        return record | {"failed": " ".join(str(error).split())[:300]}
    return record | {"gap": gap.worst, "loss": gap.loss, "gradient": gap.gradient, "weight": gap.weight}


def summary(points: Sequence[Point], outcomes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts, the largest gap, and every point with a wrong outcome."""
    gaps = [outcome_of_point["gap"] for outcome_of_point in outcomes if "gap" in outcome_of_point]
    return {
        "enumerated": len(points),
        "executed": len(gaps),
        "refused": dict(
            Counter(
                outcome_of_point["refused"] for outcome_of_point in outcomes if "refused" in outcome_of_point
            )
        ),
        "not_reached": len(points) - len(outcomes),
        "failed": [outcome_of_point for outcome_of_point in outcomes if "failed" in outcome_of_point],
        "beyond_bound": [
            outcome_of_point for outcome_of_point in outcomes if outcome_of_point.get("gap", 0.0) > BOUND
        ],
        "worst_gap": max(gaps, default=0.0),
    }


def holds(result: dict[str, Any]) -> bool:
    """Whether all points equal one process, or were refused with a reason."""
    return not (result["not_reached"] or result["failed"] or result["beyond_bound"])


@bench(limit_s="stop after this, to resume later", fresh="run everything again")
def run(*, limit_s: float = 3600.0, fresh: bool = False) -> Found:
    if fresh:
        KEPT.path.unlink(missing_ok=True)
    grids = {"one_encoder": one_encoder(), "two_encoders": two_encoders()}
    result: dict[str, Any] = {"bound": BOUND}
    end_s = time.monotonic() + limit_s
    is_whole = True
    for name, points in grids.items():
        part = summary(points, KEPT.play(points, outcome, end_s - time.monotonic()))
        result[name] = part
        is_whole &= holds(part)
        print(
            f"{name}: {part['enumerated']} enumerated, {part['executed']} executed, "
            f"{sum(part['refused'].values())} refused, {part['not_reached']} not reached, "
            f"{len(part['failed'])} failed, {len(part['beyond_bound'])} beyond {BOUND}; "
            f"worst gap {part['worst_gap']:.1e}"
        )
        for reason, count in part["refused"].items():
            print(f"  refused {count}: {reason}")
    result["holds"] = is_whole
    claims = {f"every layout that fits trains as one process, within {BOUND}": is_whole}
    return Found(result, claims, out=SUMMARY)
