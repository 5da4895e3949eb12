"""Stage times of our own cost model: layers of a model on one microbatch of a paper's input."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from experiments.harness.printed_pipeline import StageTimes
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.cost.roofline import RowWork, Work
from workbench.data.corpus import ItemTokens
from workbench.float_sum import float_sum
from workbench.model.frozen import gradient_needs
from workbench.model.model_graph import TEXT, ModelGraph, Module
from workbench.plan.plan import Recompute
from workbench.timing.pass_times import pass_times

A40 = "A40"
TIME_REL_TOL = 0.25  # absolute times of another machine's kernels
RATIO_REL_TOL = 0.15  # of two such times


@cache
def a40_cost() -> CostModel:
    """The papers' GPU, as its profile has it."""
    return CostModel(load_profile(A40))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The contents of a microbatch, and how it runs.

    Args:
        text_tokens: text tokens of one sample.
        items: (modality, tokens) of the one image and clip of a sample.
        microbatch_samples: samples of a microbatch.
        tp, cp: degrees of every stage.
        recompute: recomputation of every module.
        precision: "bfloat16" or "float32".
    """

    text_tokens: int
    items: tuple[tuple[str, ItemTokens], ...]
    microbatch_samples: int = 1
    tp: int = 1
    cp: int = 1
    recompute: Recompute = Recompute.FULL
    precision: str = "bfloat16"

    def tokens(self, modality: str) -> ItemTokens:
        return dict(self.items)[modality]

    def sequence_tokens(self, model: ModelGraph) -> int:
        """Tokens of one sample in the LLM."""
        return self.text_tokens + sum(self.tokens(each.modality).tokens_out for each in model.encoders)


def layer_times(model: ModelGraph, setting: Setting, cost: CostModel) -> dict[str, tuple[StageTimes, ...]]:
    """Forward and backward of every layer, by module, under the exact frozen rule.

    Complexity: O(distinct layers).
    """
    needs = gradient_needs(model)
    times_of: dict[str, tuple[StageTimes, ...]] = {}
    for module in model.modules:
        work, tp = module_work(model, module, setting), module_tp(module, setting.tp)
        times = []
        for layer, need in zip(module.layers, needs[module.name], strict=True):
            time = cost.layer_time(layer, work, tp=tp, cp=setting.cp, precision=setting.precision)
            passes = pass_times([time], [need], [setting.recompute is Recompute.FULL])
            backward_s = passes.recompute_s + passes.through_s + passes.weights_s
            times.append(StageTimes(passes.forward_s, backward_s))
        times_of[module.name] = tuple(times)
    return times_of


def module_work(model: ModelGraph, module: Module, setting: Setting) -> Work:
    """The work with one row per sample; encoder items attend in full, samples causally."""
    if module.modality == TEXT:
        tokens = setting.sequence_tokens(model)
        row = RowWork(tokens, tokens, tokens * (tokens + 1) // 2)
    else:
        tokens_in, tokens_out = setting.tokens(module.modality)
        row = RowWork(tokens_in, tokens_out, tokens_in**2)
    return Work((row,) * setting.microbatch_samples)


def module_tp(module: Module, tp: int) -> int:
    """The largest degree up to `tp` that divides the module's key-value heads and `tp`.

    Whisper at 1,920 has 30 heads of 64, which 4 does not divide.
    """
    return max(
        degree for degree in range(1, tp + 1) if all(count % degree == 0 for count in (*module.kv_heads, tp))
    )


def total(times: Iterable[StageTimes]) -> StageTimes:
    """The total time of consecutive layers."""
    listed = list(times)
    return StageTimes(
        float_sum(time.forward_s for time in listed), float_sum(time.backward_s for time in listed)
    )
