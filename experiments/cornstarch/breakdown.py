"""Forward and backward of one encoder and one LLM, trained or frozen: a paper's breakdown and ours."""

from collections.abc import Mapping
from dataclasses import dataclass

from experiments.cornstarch.modelled import RATIO_REL_TOL, TIME_REL_TOL, Setting, a40_cost, layer_times, total
from experiments.harness.outcome import Evidence, PaperNumber
from experiments.harness.printed_pipeline import StageTimes
from workbench.cost.model import CostModel
from workbench.model.layer import LayerKind
from workbench.model.model_graph import ModelGraph, connect
from workbench.model.projector import Projector
from workbench.model.trainable import Trainable
from workbench.model.zoo import from_shape

RULE_REL_TOL = 0.15  # gradients cost what the forward costs, to the accuracy of the rule of thumb


@dataclass(frozen=True, slots=True)
class Part:
    """A printed pair of times, and the backward in forwards by the frozen rule."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """A printed breakdown.

    Args:
        where: its place in the paper.
        unstated: what is unstated of the inputs.
        parts: the printed parts.
        name: name of the model.
        encoder, llm: shapes of the zoo.
        projector: between them.
        settings: plausible inputs by name, the likeliest first.
    """

    where: str
    unstated: str
    parts: tuple[Part, ...]
    name: str
    encoder: str
    llm: str
    projector: Projector
    settings: Mapping[str, Setting]

    def models(self) -> dict[bool, ModelGraph]:
        """Models by frozen flag: only the projector is trained, or everything."""
        return {
            True: self._model(Trainable.PROJECTOR, Trainable.NONE),
            False: self._model(Trainable.ALL, Trainable.ALL),
        }

    def _model(self, encoder: Trainable, llm: Trainable) -> ModelGraph:
        text = from_shape(self.llm, module="llm", trainable=llm)
        vision = from_shape(
            self.encoder,
            module="vision",
            llm_width=text.layers[0].out_width,
            projector=self.projector,
            trainable=encoder,
        )
        return connect(self.name, (vision, text))

    def evidence(self) -> list[Evidence]:
        """Evidence on the frozen rule and on the cost model."""
        return [self._by_rule(), self._modelled(a40_cost())]

    def _by_rule(self) -> Evidence:
        """Add backward over forward in closed form: 1 per gradient that runs, 1 for recomputation."""
        evidence = Evidence()
        for part in self.parts:
            if part.rule_forwards:
                key = f"rule/{part.key}/bwd_over_fwd"
                number = PaperNumber(key, part.printed_ratio, "x", self.where, RULE_REL_TOL)
                evidence.add(number, part.rule_forwards)
            else:
                text = f"{part.key}: no gradient runs, the backward takes below 2 % of the forward in print:"
                evidence.claim(text, part.printed_ratio < 0.02)
        return evidence

    def _modelled(self, cost: CostModel) -> Evidence:
        """Add times and ratios of the cost model."""
        evidence, models = Evidence(), self.models()
        for part in self.parts:
            model = models[part.frozen]
            ours = {
                name: part_times(model, part.name, setting, cost) for name, setting in self.settings.items()
            }
            times = {
                "fwd": (part.printed.forward_s, {name: 1e3 * time.forward_s for name, time in ours.items()}),
                "bwd": (
                    part.printed.backward_s,
                    {name: 1e3 * time.backward_s for name, time in ours.items()},
                ),
            }
            for name, (printed_s, values_ms) in times.items():
                key = f"modelled/{part.key}/{name}"
                number = PaperNumber(key, 1e3 * printed_s, "ms", self.where, TIME_REL_TOL)
                if max(values_ms.values()) > 0:
                    evidence.add_range(number, values_ms, self.unstated)
            if part.rule_forwards:
                ratios = {name: time.backward_s / time.forward_s for name, time in ours.items()}
                key = f"modelled/{part.key}/bwd_over_fwd"
                number = PaperNumber(key, part.printed_ratio, "x", self.where, RATIO_REL_TOL)
                evidence.add_range(number, ratios, self.unstated)
        return evidence


def part_times(model: ModelGraph, part: str, setting: Setting, cost: CostModel) -> StageTimes:
    """Times of the encoder's layers before the projector, of the projector, or of the LLM."""
    module = model.modules[-1] if part == "llm" else model.modules[0]
    times = layer_times(model, setting, cost)[module.name]
    layers = [
        time
        for layer, time in zip(module.layers, times, strict=True)
        if part == "llm" or (layer.kind is LayerKind.PROJECTOR) == (part == "projector")
    ]
    return total(layers)
