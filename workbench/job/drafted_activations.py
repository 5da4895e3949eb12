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
from workbench.plan.plan import Precision, Recompute
from workbench.plan.recomputed_layers import recomputed_layers

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
    graph: ModelGraph,
    tp: Mapping[str, int],
    data: Sequence[Sample],
    samples: int,
    recompute: Mapping[str, Recompute],
) -> dict[str, Activations]:
    """Return the activations of every module that has tokens, of long microbatches of consecutive samples.

    Args:
        tp: of each module.
        samples: of a microbatch.
        recompute: of modules, which of their layers are computed again; of others none.
    """
    groups = [data[first : first + samples] for first in range(0, len(data) - samples + 1, samples)]
    needs = gradient_needs(graph)
    found = {}
    for module in graph.modules:
        lengths = [_tokens(module, group) for group in groups or [data]]
        tokens_in, tokens_out = (long_value(list(each)) for each in zip(*lengths, strict=True))
        if tokens_in:
            work = Work((RowWork(tokens_in, max(1, tokens_out), attention_area=0),))
            again = recomputed_layers(recompute.get(module.name, Recompute.NONE), None, module.layers)
            grid = Grid(tp=tp[module.name])
            found[module.name] = _of_module(module, needs[module.name], again, work, grid)
    return found


def long_value(values: Sequence[int]) -> int:
    """The value at `LONG` of the sorted values."""
    return sorted(values)[min(len(values) - 1, int(LONG * len(values)))]


def _of_module(
    module: Module, needs: Sequence[Needs], again: Sequence[bool], work: Work, grid: Grid
) -> Activations:
    setting = Setting(work, grid, PRECISION.num_bytes, is_gathered=False)
    kept, in_work = 0.0, 0.0
    for layer, need, is_again in zip(module.layers, needs, again, strict=True):
        working = fused_working(layer, setting)
        saved = saved_bytes(layer, need, work, grid, PRECISION.num_bytes)
        inside = working.backward if need.any else working.forward
        if is_again and need.any:  # until its backward, the layer's input alone is kept
            kept += work.tokens(layer.emits) * layer.out_width * PRECISION.num_bytes
            inside += saved
        else:
            kept += saved
        in_work = max(in_work, inside)
    return Activations(kept, in_work)


def _tokens(module: Module, samples: Sequence[Sample]) -> tuple[int, int]:
    """Tokens that enter and leave a module's blocks."""
    if module.modality == TEXT:
        total = sum(sample.num_tokens for sample in samples)
        return total, total
    segments = [segment for sample in samples for segment in sample.of(module.modality)]
    return sum(each.tokens_in for each in segments), sum(each.tokens_out for each in segments)
