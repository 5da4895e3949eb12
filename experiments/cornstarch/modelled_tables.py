"""The frozen-aware tables out of our own cost model: stage times, and the gain of our own planner."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from experiments.cornstarch.frozen_rows import FrozenRow, Pipeline, pairs, winner
from experiments.cornstarch.modelled import Setting, layer_times, total
from experiments.cornstarch.planned import (
    STRATEGIES,
    Awareness,
    Placement,
    Planned,
    best_split,
    paper_job,
    simulated,
)
from experiments.harness.outcome import Evidence, PaperNumber
from experiments.harness.printed_pipeline import StageTimes
from workbench.cost.model import CostModel
from workbench.model.model_graph import ModelGraph

TIME_REL_TOL = 0.25  # absolute times of another machine's kernels
GAIN_REL_TOL = 0.15
NVLINK_GPUS = 2  # of both papers' nodes; the four talk over PCIe, whose rate in the profile is no measurement
LINKS = "what collectives reach of PCIe"


@dataclass(frozen=True, slots=True)
class Guess:
    """One plausible setting.

    Args:
        name: of it.
        setting: of a microbatch.
        multiple: of all stage counts of the table.
        link_share: of the profile's rate inside a node that collectives reach.
    """

    name: str
    setting: Setting
    multiple: int = 1
    link_share: float = 1.0

    def cost(self, cost: CostModel) -> CostModel:
        """With that rate."""
        return cost if self.link_share == 1.0 else _slower_inside(cost, self.link_share)


def slower_links(guesses: Sequence[Guess]) -> tuple[Guess, ...]:
    """Those of them whose tensor parallelism crosses PCIe, at half of its line rate."""
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
    """What a table's own-model evidence needs.

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
    """Stage times at the implied counts, then the planner's own counts and gain."""
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
        )
        for row, plan in zip((aware, unaware), planned[0], strict=True):
            chosen = plan.stages[_llm(table.model_of(row))]
            same += chosen == table.pipelines[row].llm_stages
            evidence.ours[f"modelled/{row.name}/llm_stages"] = chosen
            evidence.ours[f"modelled/{row.name}/iteration_s"] = plan.iteration_s
    evidence.notes.append(
        f"our planner gives the LLM the implied number of stages in {same} of {len(table.rows)} rows"
    )
    return evidence


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
    """Both methods get as many stages as the frozen-aware row has."""
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
