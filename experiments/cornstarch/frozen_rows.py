"""Rows of the papers' frozen-aware against frozen-unaware tables, and the pipelines they describe."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from experiments.cornstarch.implied_stages import implied_stages
from experiments.harness.printed import PrintedRow, is_true, printed_rows
from experiments.harness.printed_pipeline import StageTimes

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
