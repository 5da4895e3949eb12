"""The frozen-aware tables: printed rows and the stages that they imply; our rows by cost model and planner.

Cutting a module differently moves no work, so printed times of a stage imply the number of stages.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from experiments.cornstarch.modelled import TIME_REL_TOL, Setting, layer_times, total
from experiments.cornstarch.planned import (
    STRATEGIES,
    Awareness,
    Placement,
    Planned,
    best_split,
    paper_job,
    simulated,
)
from experiments.harness.causes import open_cause
from experiments.harness.outcome import Evidence, PaperNumber
from experiments.harness.printed import PrintedRow, is_true, printed_rows
from experiments.harness.printed_pipeline import PrintedRun, StageTimes, run_printed
from workbench.cost.model import CostModel
from workbench.model.model_graph import ModelGraph


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
        candidates = _around(stage_times, anchor * max(stage_times), max_spread)
        if candidates is not None and max(candidates.counts) <= max_stages:
            yield candidates


def _around(stage_times: Sequence[float], total: float, max_spread: float) -> ImpliedStages | None:
    """Counts of least spread whose totals differ by at most `max_spread`; the slowest row's is `total`."""
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


def run_row(row: FrozenRow, pipeline: Pipeline, model: ModelGraph, num_microbatches: int) -> PrintedRun:
    """Simulate a step of an encoder and an LLM whose stages take the printed times."""
    encoder, llm = (module.name for module in model.modules)
    counts = {encoder: pipeline.encoder_stages, llm: pipeline.llm_stages}
    return run_printed(model, counts, {encoder: row.encoder, llm: row.llm}, num_microbatches)


def pairs(rows: Iterable[FrozenRow]) -> dict[str, tuple[FrozenRow, FrozenRow]]:
    """Model -> (frozen-aware row, frozen-unaware row), in order of first appearance."""
    rows_of: dict[str, dict[bool, FrozenRow]] = {}
    for row in rows:
        rows_of.setdefault(row.model, {})[row.aware] = row
    return {model: (both[True], both[False]) for model, both in rows_of.items()}


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
        stages = implied_stages([stage_s(row) for row in group], max_stages=max_stages, max_spread=max_spread)
        if stages is None:
            raise ValueError(f"no stage counts up to {max_stages} fit the times of {[r.name for r in group]}")
        counts.update(zip(group, stages.counts, strict=True))
    return counts


def winner(gain: float) -> str:
    """The method that a gain favours."""
    if abs(gain - 1) <= TIE:
        return "a tie"
    return "frozen-aware is faster" if gain > 1 else "frozen-unaware is faster"


GAIN_REL_TOL = 0.15
NVLINK_GPUS = 2  # of both papers' nodes; the four talk over PCIe, whose rate in the profile is no measurement
LINKS = "what collectives reach of PCIe"


@dataclass(frozen=True, slots=True)
class Guess:
    """One plausible setting.

    Args:
        name: its name.
        setting: of a microbatch.
        multiple: factor on all stage counts of the table.
        link_share: share of the profile's rate inside a node that collectives reach.
    """

    name: str
    setting: Setting
    multiple: int = 1
    link_share: float = 1.0

    def cost(self, cost: CostModel) -> CostModel:
        """The cost model with that link rate."""
        return cost if self.link_share == 1.0 else _slower_inside(cost, self.link_share)


def slower_links(guesses: Sequence[Guess]) -> tuple[Guess, ...]:
    """The guesses whose tensor parallelism crosses PCIe, at half of its line rate."""
    return tuple(
        replace(guess, name=f"{guess.name}, PCIe at half its line rate", link_share=0.5)
        for guess in guesses
        if guess.setting.tp > NVLINK_GPUS
    )


@cache
def _slower_inside(cost: CostModel, share: float) -> CostModel:
    links = (
        replace(link, bytes_per_s=share * link.bytes_per_s) if link.scope == "intra" else link
        for link in cost.profile.links
    )
    return CostModel(replace(cost.profile, links=tuple(links)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledTable:
    """The inputs of a table's evidence by our own model.

    Args:
        rows: of the table; pipelines: the stage counts implied by their times.
        model_of: the multimodal model of a row.
        guesses_of: plausible settings of a row, the likeliest first.
        unstated: what they guess at.
        gain_of: printed gain of (frozen-aware, frozen-unaware).
        placement: of the encoders.
        num_microbatches: of an iteration.
        where: the table.
    """

    rows: Sequence[FrozenRow]
    pipelines: Mapping[FrozenRow, Pipeline]
    model_of: Callable[[FrozenRow], ModelGraph]
    guesses_of: Callable[[FrozenRow], Sequence[Guess]]
    unstated: str
    gain_of: Callable[[FrozenRow, FrozenRow], float]
    placement: Placement
    num_microbatches: int
    where: str


def modelled_evidence(table: ModelledTable, cost: CostModel) -> Evidence:
    """Evidence: stage times at the implied counts, then the planner's own counts and gain."""
    evidence = Evidence()
    for row in table.rows:
        _add_stage_times(evidence, table, row, cost)
    same = 0
    for model, (aware, unaware) in pairs(table.rows).items():
        planned = [
            (
                _planned(table, aware, guess, Awareness.AWARE, cost),
                _planned(table, aware, guess, Awareness.UNAWARE, cost),
            )
            for guess in table.guesses_of(aware)
        ]
        gains = {
            guess.name: gain_per_rank(*both)
            for guess, both in zip(table.guesses_of(aware), planned, strict=True)
        }
        printed = table.gain_of(aware, unaware)
        number = PaperNumber(f"modelled/{model}/gain", printed, "x", table.where, GAIN_REL_TOL)
        evidence.add_range(number, gains, table.unstated)
        evidence.plan_hashes += [plan.plan_hash for plan in planned[0]]
        evidence.claim(
            f"{model}: our planner finds what is printed: {winner(printed)};",
            winner(next(iter(gains.values()))) == winner(printed),
            cause=_why_not_found(table, (aware, unaware), planned[0], gains),
        )
        for row, plan in zip((aware, unaware), planned[0], strict=True):
            num_stages = plan.stages[_llm(table.model_of(row))]
            same += num_stages == table.pipelines[row].llm_stages
            evidence.ours[f"modelled/{row.name}/llm_stages"] = num_stages
            evidence.ours[f"modelled/{row.name}/iteration_s"] = plan.iteration_s
    evidence.notes.append(
        f"our planner gives the LLM the implied number of stages in {same} of {len(table.rows)} rows"
    )
    return evidence


def _why_not_found(
    table: ModelledTable,
    rows: tuple[FrozenRow, FrozenRow],
    planned: tuple[Planned, Planned],
    gains: Mapping[str, float],
) -> str:
    """Why our planner's gain favours another method than the printed one: the stages of both."""
    printed = winner(table.gain_of(*rows))
    llm = _llm(table.model_of(rows[0]))
    ours = [f"{sum(plan.stages.values())} with {plan.stages[llm]} of the LLM" for plan in planned]
    implied = [f"{table.pipelines[row].num_stages} with {table.pipelines[row].llm_stages}" for row in rows]
    return (
        f"stages, frozen-aware against unaware: ours {ours[0]} against {ours[1]}, by the printed stage times "
        f"{implied[0]} against {implied[1]}. Of our gains, "
        + open_cause(gains, lambda gain: winner(gain) == printed, table.unstated)
    )


def gain_per_rank(aware: Planned, unaware: Planned) -> float:
    """Throughput per GPU, frozen-aware over frozen-unaware."""
    return unaware.iteration_s * unaware.num_ranks / (aware.iteration_s * aware.num_ranks)


def _add_stage_times(evidence: Evidence, table: ModelledTable, row: FrozenRow, cost: CostModel) -> None:
    ours = {guess.name: stage_times(table, row, guess, cost) for guess in table.guesses_of(row)}
    cells = {
        "enc_fwd": (row.encoder.forward_s, lambda encoder, _: encoder.forward_s),
        "llm_fwd": (row.llm.forward_s, lambda _, llm: llm.forward_s),
        "llm_bwd": (row.llm.backward_s, lambda _, llm: llm.backward_s),
    }
    for name, (printed_s, pick) in cells.items():
        number = PaperNumber(f"modelled/{row.name}/{name}", 1e3 * printed_s, "ms", table.where, TIME_REL_TOL)
        values_ms = {guess: 1e3 * pick(*times) for guess, times in ours.items()}
        evidence.add_range(number, values_ms, table.unstated)


def stage_times(
    table: ModelledTable, row: FrozenRow, guess: Guess, cost: CostModel
) -> tuple[StageTimes, StageTimes]:
    """Mean times of an encoder stage (all encoders together) and of an LLM stage."""
    model, pipeline = table.model_of(row), table.pipelines[row]
    times = layer_times(model, guess.setting, guess.cost(cost))
    llm = _llm(model)
    encoders = total(time for name, module in times.items() if name != llm for time in module)
    return (
        _share(encoders, pipeline.encoder_stages * guess.multiple),
        _share(total(times[llm]), pipeline.llm_stages * guess.multiple),
    )


def _planned(
    table: ModelledTable, row: FrozenRow, guess: Guess, awareness: Awareness, cost: CostModel
) -> Planned:
    """Plans of both methods with as many stages as the frozen-aware row."""
    model = table.model_of(row)
    num_stages = table.pipelines[row].num_stages * guess.multiple
    cost = guess.cost(cost)
    counts = best_split(model, guess.setting, cost, awareness, num_stages)
    job = paper_job(model, guess.setting, counts, table.num_microbatches, cost)
    return simulated(STRATEGIES[table.placement, awareness], job, cost)


def _llm(model: ModelGraph) -> str:
    return model.llm.name


def _share(whole: StageTimes, count: int) -> StageTimes:
    return StageTimes(whole.forward_s / count, whole.backward_s / count)
