"""Where the GPU-seconds of a training sample go: published throughput against what our model counts."""

from dataclasses import dataclass

from experiments.cornstarch.modelled import A40
from experiments.oobleck.modelled import (
    ELEMENT_BYTES,
    FUSED,
    MICROBATCH,
    TF32_OVER_BFLOAT16,
    TOKENS,
    Written,
    graph,
    layer_s,
    oobleck_layout,
    planned,
    stored,
)
from experiments.oobleck.systems import MOST_NODES, published_rates
from workbench.cost.execution import Execution
from workbench.cost.profile import load_profile
from workbench.cost.roofline import RowWork, Work, layer_flop
from workbench.plan.plan import Recompute

PASSES = 4  # forward, that again, and a backward of twice its products
NETWORK_BYTES_PER_S = 200e9 / 8  # section 2.7.1: one adaptor of 200 Gb/s a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """GPU-seconds of one sample on 30 nodes.

    Args:
        published_s: 30 nodes over the published throughput.
        flop: of products, forward, recomputation and backward.
        fused_s: of all layers, attention in one kernel, scores never in memory.
        stored_s: the same with scores in memory.
        spelled_s: of all layers as transformers ran them, activations and dropouts in kernels of their own.
        float32_s: the same with products in float32 instead of TF32.
        ours_s: 30 nodes over the simulated throughput; beyond `spelled_s` GPUs idle.
        exchange_s: summing gradients after the last backward, were none of it hidden.
        tf32_flop_per_s, float32_flop_per_s: peaks.
    """

    published_s: float
    flop: float
    fused_s: float
    stored_s: float
    spelled_s: float
    float32_s: float
    ours_s: float
    exchange_s: float
    tf32_flop_per_s: float
    float32_flop_per_s: float

    @property
    def achieved_flop_per_s(self) -> float:
        """Of a GPU, by the published throughput."""
        return self.flop / self.published_s

    def parts(self) -> dict[str, float]:
        """By name, for the result file."""
        return {
            "published": self.published_s,
            "products_at_tf32_peak": self.flop / self.tf32_flop_per_s,
            "layers_with_fused_attention": self.fused_s,
            "stored_scores": self.stored_s - self.fused_s,
            "spelled_out_operators": self.spelled_s - self.stored_s,
            "idle": self.ours_s - self.spelled_s,
            "unexplained": self.published_s - self.ours_s,
            "exchange_if_not_hidden": self.exchange_s,
            "layers_in_float32": self.float32_s,
            "achieved_over_tf32_peak": self.achieved_flop_per_s / self.tf32_flop_per_s,
            "achieved_over_float32_peak": self.achieved_flop_per_s / self.float32_flop_per_s,
        }

    def told(self, model: str) -> str:
        """One line."""
        parts = {name: value * 1e3 for name, value in self.parts().items()}
        return (
            f"{model}, 30 nodes, GPU-ms a sample: published {parts['published']:.0f} "
            f"({self.achieved_flop_per_s / 1e12:.1f} TFLOP/s a GPU, "
            f"{self.achieved_flop_per_s / self.tf32_flop_per_s:.0%} of the TF32 peak, "
            f"{self.achieved_flop_per_s / self.float32_flop_per_s:.0%} of float32's); ours "
            f"{parts['layers_with_fused_attention']:.0f} layers with fused attention + "
            f"{parts['stored_scores']:.0f} stored scores + "
            f"{parts['spelled_out_operators']:.0f} spelled-out operators + {parts['idle']:.0f} idle, "
            f"{parts['unexplained']:+.0f} unexplained; gradients over 200 Gb/s, none hidden, "
            f"{parts['exchange_if_not_hidden']:.1f}; products in float32 instead of TF32 "
            f"{parts['layers_in_float32'] - self.spelled_s * 1e3:+.0f}"
        )


def seconds_of(model: str, rate: float) -> Seconds:
    """Of a model that our simulator trains at `rate` samples per second on 30 nodes."""
    profile = load_profile(A40)
    return Seconds(
        published_s=MOST_NODES / published_rates("oobleck", model)[MOST_NODES],
        flop=PASSES * _forward_flop(model),
        fused_s=_sample_s(model, FUSED, written=Written.FUSED),
        stored_s=_sample_s(model, stored(model), written=Written.FUSED),
        spelled_s=_sample_s(model, stored(model)),
        float32_s=_sample_s(model, stored(model), "float32"),
        ours_s=MOST_NODES / rate,
        exchange_s=_exchange_s(model, rate),
        tf32_flop_per_s=profile.peak("bfloat16") / TF32_OVER_BFLOAT16,
        float32_flop_per_s=profile.peak("float32"),
    )


def _sample_s(
    model: str, execution: Execution, precision: str = "tf32", written: Written = Written.SPELLED_OUT
) -> float:
    microbatch = MICROBATCH[model]
    times = layer_s(model, microbatch, Recompute.FULL, execution, precision, written)
    return sum(time.total_s for time in times) / microbatch


def _forward_flop(model: str) -> float:
    tokens = TOKENS[model]
    work = Work((RowWork(tokens, tokens, tokens * tokens),))  # stored scores: masked ones are computed too
    return sum(layer_flop(layer, work) for layer in graph(model).modules[0].layers)


def _exchange_s(model: str, rate: float) -> float:
    """GPU-seconds a sample: a ring all-reduce of the largest stage's gradients once an iteration."""
    chosen, layers = oobleck_layout(model, MOST_NODES), graph(model).modules[0].layers
    replicas = len(chosen.sizes)
    largest = max(
        sum(layers[layer].num_parameters for layer in range(stage.first, stage.end))
        for size in set(chosen.sizes)
        for stage in planned(model).of_size(size).stages
    )
    num_bytes = 2 * (replicas - 1) / replicas * largest * ELEMENT_BYTES
    samples = sum(chosen.microbatches) * MICROBATCH[model]
    return MOST_NODES * num_bytes / NETWORK_BYTES_PER_S / samples
