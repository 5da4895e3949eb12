"""Forward and backward of one encoder and one LLM, trained or frozen: a paper's breakdown against ours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.cornstarch.modelled import Setting, layer_times, total
from experiments.harness.outcome import Evidence, PaperNumber
from experiments.harness.printed_pipeline import StageTimes
from workbench.cost.model import CostModel
from workbench.model.layer import LayerKind
from workbench.model.model_graph import ModelGraph

RULE_REL_TOL = 0.15  # gradients cost what the forward costs, to the accuracy of the rule of thumb
RATIO_REL_TOL = 0.15
TIME_REL_TOL = 0.25  # absolute times of another machine's kernels


@dataclass(frozen=True, slots=True)
class Part:
    """A printed pair of times, and by how many forwards the frozen rule says its backward takes."""

    name: str  # "encoder", "projector" or "llm"
    frozen: bool
    printed: StageTimes
    rule_forwards: int

    @property
    def key(self) -> str:
        return f"{self.name}/{'frozen' if self.frozen else 'trained'}"

    @property
    def printed_ratio(self) -> float:
        return self.printed.backward_s / self.printed.forward_s


def rule_evidence(parts: Sequence[Part], where: str) -> Evidence:
    """Backward over forward by the closed form: 1 for each gradient that runs, 1 for the recompute."""
    evidence = Evidence()
    for part in parts:
        if part.rule_forwards:
            number = PaperNumber(
                f"rule/{part.key}/bwd_over_fwd", part.printed_ratio, "x", where, RULE_REL_TOL
            )
            evidence.add(number, part.rule_forwards)
        else:
            text = f"{part.key}: no gradient runs, the backward takes below 2 % of the forward in print:"
            evidence.claim(text, part.printed_ratio < 0.02)
    return evidence


def modelled_evidence(
    parts: Sequence[Part],
    models: Mapping[bool, ModelGraph],
    settings: Mapping[str, Setting],
    cost: CostModel,
    where_unstated: tuple[str, str],
) -> Evidence:
    """Times and ratios of the cost model.

    Args:
        parts: the printed ones.
        models: by frozen flag.
        settings: plausible inputs by name, the likeliest first.
        cost: of the paper's machine.
        where_unstated: place of the printed numbers, and what is unstated.
    """
    where, unstated = where_unstated
    evidence = Evidence()
    for part in parts:
        model = models[part.frozen]
        ours = {name: part_times(model, part.name, setting, cost) for name, setting in settings.items()}
        times = {
            "fwd": (part.printed.forward_s, {name: 1e3 * time.forward_s for name, time in ours.items()}),
            "bwd": (part.printed.backward_s, {name: 1e3 * time.backward_s for name, time in ours.items()}),
        }
        for name, (printed_s, values_ms) in times.items():
            number = PaperNumber(f"modelled/{part.key}/{name}", 1e3 * printed_s, "ms", where, TIME_REL_TOL)
            if max(values_ms.values()) > 0:
                evidence.add_range(number, values_ms, unstated)
        if part.rule_forwards:
            ratios = {name: time.backward_s / time.forward_s for name, time in ours.items()}
            number = PaperNumber(
                f"modelled/{part.key}/bwd_over_fwd", part.printed_ratio, "x", where, RATIO_REL_TOL
            )
            evidence.add_range(number, ratios, unstated)
    return evidence


def part_times(model: ModelGraph, part: str, setting: Setting, cost: CostModel) -> StageTimes:
    """Of the encoder's layers before the projector, of the projector, or of the LLM."""
    module = model.modules[-1] if part == "llm" else model.modules[0]
    times = layer_times(model, setting, cost)[module.name]
    chosen = [
        time
        for layer, time in zip(module.layers, times, strict=True)
        if part == "llm" or (layer.kind is LayerKind.PROJECTOR) == (part == "projector")
    ]
    return total(chosen)
