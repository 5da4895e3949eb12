"""Seconds of many samples on every stage of a module, by a quadratic in tokens for each layer.

Source: Entrain (dissertation, section 4.4.1). What takes a planner a pass through the cost model per
microbatch is a matrix here, so that hundreds of batches can be studied.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.cornstarch.modelled import a40_cost
from experiments.entrain.workload import TP, model
from workbench.balance.stages.chain_cuts import chain_cuts
from workbench.balance.stages.partition import partition
from workbench.cost.model import LayerTime, RowWork, Work
from workbench.cost.quadratic import FIT_TOKENS, Quadratic, fit_quadratic
from workbench.cost.signature import signature
from workbench.data.sample import Sample
from workbench.model.frozen import Needs, gradient_needs
from workbench.model.layer import Layer
from workbench.model.model_graph import TEXT

Seconds = NDArray[np.float64]
MERGED = 4  # patches to a token of the LLM
USUAL_TOKENS = {"vision": 4096, "llm": 1024}  # layers are balanced for these


class StageWork(NamedTuple):
    """[samples, stages] seconds of one module, and what every call takes whatever is in it.

    Args:
        forward_s, backward_s: of whole passes.
        weight_s: the part of the backward that only weights wait for.
        calls_s: [3 passes, stages] of a call without tokens.
    """

    forward_s: Seconds
    backward_s: Seconds
    weight_s: Seconds
    calls_s: Seconds

    def microbatches_s(self, which: "Which", microbatches: Sequence[Sequence[int]]) -> Seconds:
        """[microbatches, stages] seconds of one pass over each."""
        table: Seconds = self[which]
        found = np.array([table[list(places)].sum(axis=0) for places in microbatches])
        found += self.calls_s[which]
        return found

    def samples_s(self) -> list[float]:
        """Forward and backward of each sample in a call of its own over all stages."""
        alone_s = (self.forward_s + self.backward_s).sum(axis=1)
        found: list[float] = (alone_s + self.calls_s[:2].sum()).tolist()
        return found


class Which(IntEnum):
    """Passes by their place in `StageWork`."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHT = 2


@cache
def _quadratics(llm: str, module: str, signed: str) -> tuple[Quadratic, Quadratic, Quadratic]:
    """Forward, backward and weight gradients of a layer, known by its signature."""
    graph = model(llm).module(module)
    index = next(i for i, layer in enumerate(graph.layers) if signature(layer) == signed)
    needs = gradient_needs(model(llm))[module][index]
    times = [_time(graph.layers[index], tokens, is_causal=graph.modality == TEXT) for tokens in FIT_TOKENS]
    parts: Sequence[Callable[[LayerTime], float]] = (
        lambda time: time.forward_s,
        lambda time: time.backward_s(needs),
        lambda time: _weights_s(time, needs),
    )
    fitted = [fit_quadratic(FIT_TOKENS, [max(part(time), 1e-12) for time in times]) for part in parts]
    return fitted[0], fitted[1], fitted[2]


def _weights_s(time: LayerTime, needs: Needs) -> float:
    return time.weight_grad_s if needs.weight_grad else 0.0


def _time(layer: Layer, tokens: int, *, is_causal: bool) -> LayerTime:
    area = tokens * (tokens + 1) // 2 if is_causal else tokens * tokens
    out = tokens if is_causal else max(1, tokens // MERGED)
    work = Work((RowWork(tokens, out, area),))
    return a40_cost().layer_time(layer, work, tp=TP, cp=1, precision="bfloat16")


Cuts = tuple[tuple[int, int], ...]


@cache
def _layers(llm: str, module: str) -> tuple[tuple[Quadratic, Quadratic, Quadratic], ...]:
    return tuple(_quadratics(llm, module, signature(layer)) for layer in model(llm).module(module).layers)


@cache
def layer_quadratics(llm: str, module: str) -> NDArray[np.float64]:
    """[layers, 3 passes, 3] coefficients of every layer."""
    fitted = _layers(llm, module)
    return np.array([[(q.square_s, q.linear_s, q.constant_s) for q in of] for of in fitted])


@cache
def even_cuts(llm: str, module: str, num_stages: int) -> Cuts:
    """Layers of stages that are balanced for usual sizes."""
    usual = USUAL_TOKENS[module]
    usual_s = tuple(f.seconds(usual) + b.seconds(usual) for f, b, _ in _layers(llm, module))
    return partition(usual_s, num_stages)


@cache
def stage_quadratics(llm: str, module: str, cuts: Cuts) -> NDArray[np.float64]:
    """[stages, 3 passes, 3] coefficients of stages."""
    table = layer_quadratics(llm, module)
    return np.array([table[first:last].sum(axis=0) for first, last in cuts])


def tokens_of(samples: Sequence[Sample], module: str) -> NDArray[np.float64]:
    """[samples] tokens of each in the LLM, or of its one image in the encoder; 0 for none."""
    if module == "llm":
        return np.array([sample.num_tokens for sample in samples], float)
    return np.array([sum(s.tokens_in for s in sample.of(module)) for sample in samples], float)


def stage_work(llm: str, module: str, stages: int | Cuts, samples: Sequence[Sample]) -> StageWork:
    """Every sample on every stage, so many or cut so. Samples have one image at most."""
    tokens = tokens_of(samples, module)
    cuts = even_cuts(llm, module, stages) if isinstance(stages, int) else stages
    table = stage_quadratics(llm, module, cuts)
    passes = np.einsum("spc,cn->pns", table[:, :, :2], np.stack([tokens**2, tokens]))
    forward, backward, weight = passes
    return StageWork(forward, backward, weight, table[:, :, 2].T)


@cache
def shared_cuts(
    llm: str, batch: tuple[Sample, ...], num_microbatches: int, num_blocks: int
) -> tuple[Cuts, Cuts]:
    """Both modules' stages where the chain is cut as a whole; one stage more than blocks if one is shared."""
    modules = ("vision", "llm")
    costs = []
    for module in modules:
        tokens = tokens_of(batch, module)
        powers = ((tokens**2).sum(), tokens.sum(), num_microbatches)
        costs.append((layer_quadratics(llm, module)[:, :2].sum(axis=1) @ powers).tolist())
    pieces = chain_cuts(costs, num_blocks)
    encoder, text = (tuple(p.layers for p in pieces if p.module == number) for number in range(len(modules)))
    return encoder, text
