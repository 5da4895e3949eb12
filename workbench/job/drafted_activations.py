"""Activations of a drafted job: what a module keeps of long microbatches, and what a layer has in work."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from workbench.cost.roofline import Grid, RowWork, Work
from workbench.data.sample import Sample
from workbench.memory.fused_working import fused_working
from workbench.memory.layer import saved_bytes
from workbench.memory.setting import Setting
from workbench.model.frozen import Needs, gradient_needs
from workbench.model.model_graph import TEXT, ModelGraph, Module
from workbench.plan.plan import Precision

PRECISION, WIDE = Precision.BFLOAT16, Precision.FLOAT32  # of weights, and of what the optimizer updates
LONG = 0.95  # quantile of microbatches that must fit


class Activations(NamedTuple):
    """Bytes of one microbatch on a tensor-parallel rank.

    Args:
        kept: by all layers of the module, from forward to backward.
        in_work: of the layer with most in work.
    """

    kept: float
    in_work: float


def long_activations(
    graph: ModelGraph, tp: Mapping[str, int], data: Sequence[Sample], samples: int
) -> dict[str, Activations]:
    """Return the activations of every module that has tokens, of long microbatches of consecutive samples.

    Args:
        tp: of each module.
        samples: of a microbatch.
    """
    groups = [data[first : first + samples] for first in range(0, len(data) - samples + 1, samples)]
    needs = gradient_needs(graph)
    found = {}
    for module in graph.modules:
        lengths = [_tokens(module, group) for group in groups or [data]]
        tokens_in, tokens_out = (long_value(list(each)) for each in zip(*lengths, strict=True))
        if tokens_in:
            work = Work((RowWork(tokens_in, max(1, tokens_out), attention_area=0),))
            found[module.name] = _of_module(module, needs[module.name], work, Grid(tp=tp[module.name]))
    return found


def long_value(values: Sequence[int]) -> int:
    """The value at `LONG` of the sorted values."""
    return sorted(values)[min(len(values) - 1, int(LONG * len(values)))]


def _of_module(module: Module, needs: Sequence[Needs], work: Work, grid: Grid) -> Activations:
    setting = Setting(work, grid, PRECISION.num_bytes, is_gathered=False)
    kept, in_work = 0, 0
    for layer, need in zip(module.layers, needs, strict=True):
        working = fused_working(layer, setting)
        kept += saved_bytes(layer, need, work, grid, PRECISION.num_bytes)
        in_work = max(in_work, working.backward if need.any else working.forward)
    return Activations(kept, in_work)


def _tokens(module: Module, samples: Sequence[Sample]) -> tuple[int, int]:
    """Tokens that enter and leave a module's blocks."""
    if module.modality == TEXT:
        total = sum(sample.num_tokens for sample in samples)
        return total, total
    segments = [segment for sample in samples for segment in sample.of(module.modality)]
    return sum(each.tokens_in for each in segments), sum(each.tokens_out for each in segments)
