"""Rows of the papers' frozen-aware against frozen-unaware tables, and the pipelines that they imply.

Cutting a module differently moves no work: printed times of a stage tell how many stages there are.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from experiments.harness.printed import PrintedRow, is_true, printed_rows
from experiments.harness.printed_pipeline import StageTimes


@dataclass(frozen=True, slots=True)
class ImpliedStages:
    """Stage counts in the order of the times, and max / min - 1 of count x time."""

    counts: tuple[int, ...]
    spread: float


def implied_stages(
    stage_times: Sequence[float], *, max_stages: int, max_spread: float
) -> ImpliedStages | None:
    """The first of `all_implied_stages`: the smallest counts; None where no counts fit."""
    return next(all_implied_stages(stage_times, max_stages=max_stages, max_spread=max_spread), None)


def all_implied_stages(
    stage_times: Sequence[float], *, max_stages: int, max_spread: float
) -> Iterator[ImpliedStages]:
    """Stage counts, the smallest first, under which all rows give the module the same total time.

    A module cut into k equal stages has stages of total / k, so with k_i stages of t_i each,
    k_i t_i is the same in every row that runs the same module on the same input and grid.
    Only ratios are known: larger counts are multiples of the smallest.

    Args:
        stage_times: [N] time of one stage in each row, any unit, > 0.
        max_stages: no count exceeds it.
        max_spread: what rounding to whole layers may do to the totals.

    Complexity: O(max_stages x N^2).
    """
    if not stage_times or min(stage_times) <= 0 or max_stages < 1:
        raise ValueError(f"want stage times > 0 and max_stages >= 1, got {stage_times} and {max_stages}")
    for anchor in range(1, max_stages + 1):
        found = _around(stage_times, anchor * max(stage_times), max_spread)
        if found is not None and max(found.counts) <= max_stages:
            yield found


def _around(stage_times: Sequence[float], total: float, max_spread: float) -> ImpliedStages | None:
    """Counts of least spread whose totals are at most `max_spread` apart, the slowest row's being `total`."""
    lowest_totals = sorted(
        {
            count * time
            for time in stage_times
            for count in range(math.ceil(total / (1 + max_spread) / time), math.floor(total / time) + 1)
        }
        | {total}
    )
    best: ImpliedStages | None = None
    for lowest in lowest_totals:
        counts = tuple(math.ceil(lowest / time * (1 - 1e-12)) for time in stage_times)
        totals = [count * time for count, time in zip(counts, stage_times, strict=True)]
        spread = max(totals) / min(totals) - 1
        if spread <= max_spread and (best is None or spread < best.spread):
            best = ImpliedStages(counts, spread)
    return best


LLM_SPREAD = 0.02  # backward of equal layers: the printed totals agree this closely
ENCODER_SPREAD = 0.15  # encoder stages also hold the embedding or the projector
TIE = 0.02  # two digits of a printed throughput carry that much doubt


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages of the encoder and of the LLM, and the tensor-parallel degree of each stage."""

    encoder_stages: int
    llm_stages: int
    tp: int

    @property
    def num_stages(self) -> int:
        return self.encoder_stages + self.llm_stages

    @property
    def num_ranks(self) -> int:
        return self.num_stages * self.tp


@dataclass(frozen=True, slots=True)
class FrozenRow:
    """One line: a model partitioned with or without frozen awareness.

    `result` is what the table measures: iteration seconds (ICML) or inputs/s per GPU (v1).
    """

    llm_size: str
    model: str
    aware: bool
    encoder: StageTimes
    llm: StageTimes
    result: float

    @property
    def name(self) -> str:
        return f"{self.model}/{'aware' if self.aware else 'unaware'}"


def frozen_rows(table: str, *, result: str) -> tuple[FrozenRow, ...]:
    """A table's rows; the LLM's size is its own column, or the last letter of the model."""
    return tuple(_row(row, result) for row in printed_rows(table))


def _row(row: PrintedRow, result: str) -> FrozenRow:
    return FrozenRow(
        llm_size=row.get("llm_size", row["model"][-1]),
        model=row["model"],
        aware=is_true(row["frozen_aware"]),
        encoder=StageTimes.from_ms(row["enc_fwd_ms"], row["enc_bwd_ms"]),
        llm=StageTimes.from_ms(row["llm_fwd_ms"], row["llm_bwd_ms"]),
        result=float(row[result]),
    )


def pairs(rows: Iterable[FrozenRow]) -> dict[str, tuple[FrozenRow, FrozenRow]]:
    """Model -> (frozen-aware row, frozen-unaware row), in order of first appearance."""
    found: dict[str, dict[bool, FrozenRow]] = {}
    for row in rows:
        found.setdefault(row.model, {})[row.aware] = row
    return {model: (both[True], both[False]) for model, both in found.items()}


def implied_llm_stages(groups: Iterable[Sequence[FrozenRow]], *, max_stages: int) -> dict[FrozenRow, int]:
    """LLM stages by row, from backward times; each group runs the same LLM on the same input.

    Raises ValueError when a group's times fit no counts.
    """
    return _implied(groups, lambda row: row.llm.backward_s, max_stages, LLM_SPREAD)


def implied_encoder_stages(groups: Iterable[Sequence[FrozenRow]], *, max_stages: int) -> dict[FrozenRow, int]:
    """Encoder stages by row, from forward times (a frozen encoder has no others)."""
    return _implied(groups, lambda row: row.encoder.forward_s, max_stages, ENCODER_SPREAD)


def _implied(
    groups: Iterable[Sequence[FrozenRow]],
    stage_s: Callable[[FrozenRow], float],
    max_stages: int,
    max_spread: float,
) -> dict[FrozenRow, int]:
    counts: dict[FrozenRow, int] = {}
    for group in groups:
        found = implied_stages([stage_s(row) for row in group], max_stages=max_stages, max_spread=max_spread)
        if found is None:
            raise ValueError(f"no stage counts up to {max_stages} fit the times of {[r.name for r in group]}")
        counts.update(zip(group, found.counts, strict=True))
    return counts


def winner(gain: float) -> str:
    """Which method a gain speaks for."""
    if abs(gain - 1) <= TIE:
        return "a tie"
    return "frozen-aware is faster" if gain > 1 else "frozen-unaware is faster"
