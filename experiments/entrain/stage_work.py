"""Seconds of many samples on every stage of a module, by a quadratic in tokens for each layer.

Source:  Entrain (dissertation, section 4.4.1). A planner passes through the cost model once per microbatch;
         here that is a matrix, so that hundreds of batches can be studied.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum, StrEnum
from functools import cache
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.cornstarch.modelled import a40_cost
from experiments.entrain.workload import TP, model
from workbench.balance.stages.chain_cuts import chain_cuts
from workbench.balance.stages.partition import partition
from workbench.cost.model import CostModel, RowWork, Work
from workbench.cost.quadratic import FIT_TOKENS, Quadratic, fit_quadratic
from workbench.cost.signature import signature
from workbench.data.sample import Sample
from workbench.model.frozen import gradient_needs
from workbench.model.model_graph import TEXT

Seconds = NDArray[np.float64]
MERGED = 4  # patches to a token of the LLM
USUAL_TOKENS = {"vision": 4096, "llm": 1024}  # layers are balanced for these


class Judge(StrEnum):
    """Whose seconds a step takes; whoever balances believes the first's.

    EXACT: the balancer's own. NOISE: every pass over a microbatch off by a normal error of `NOISE_SHARE`,
    alike on all stages of a module, as where a cost model misses something of the samples. ATTENTION:
    attention takes `ATTENTION_FACTOR` times as long as believed, so that long samples weigh more.
    """

    EXACT = "exact"
    NOISE = "noise"
    ATTENTION = "attention"


NOISE_SHARE, ATTENTION_FACTOR = 0.03, 2.0


class StageWork(NamedTuple):
    """[samples, stages] seconds of one module, and the constant cost of calls.

    Args:
        forward_s, backward_s: of whole passes.
        weight_s: the part of the backward that only weights wait for.
        calls_s: [3 passes, stages] of a call without tokens.
        host_s: [3 passes, stages] that the host takes to launch a call: none is shorter.
        noise_seed: of the errors of whole microbatches, where there are any.
    """

    forward_s: Seconds
    backward_s: Seconds
    weight_s: Seconds
    calls_s: Seconds
    host_s: Seconds
    noise_seed: int | None = None

    def recomputed(self) -> "StageWork":
        """The work with the forward repeated in every backward."""
        calls_s, host_s = self.calls_s.copy(), self.host_s.copy()
        for table in (calls_s, host_s):
            table[Which.BACKWARD] += table[Which.FORWARD]
        backward_s = self.backward_s + self.forward_s
        return self._replace(backward_s=backward_s, calls_s=calls_s, host_s=host_s)

    def microbatches_s(self, which: "Which", microbatches: Sequence[Sequence[int]]) -> Seconds:
        """[microbatches, stages] seconds of one pass over each."""
        table: Seconds = (self.forward_s, self.backward_s, self.weight_s)[which]
        summed_s = np.array([table[list(positions)].sum(axis=0) for positions in microbatches])
        pass_s: Seconds = np.maximum(summed_s + self.calls_s[which], self.host_s[which])
        if self.noise_seed is None:
            return pass_s
        rng = np.random.default_rng((self.noise_seed, which))
        return pass_s * rng.normal(1.0, NOISE_SHARE, (len(pass_s), 1))

    def samples_s(self) -> list[float]:
        """Seconds of forward and backward of each sample, called alone, over all stages."""
        alone = [(index,) for index in range(len(self.forward_s))]
        both_s = sum(self.microbatches_s(which, alone) for which in (Which.FORWARD, Which.BACKWARD))
        seconds: list[float] = np.sum(both_s, axis=1).tolist()
        return seconds


class Which(IntEnum):
    """Passes by their index in `StageWork`."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHT = 2


@cache
def _quadratics(llm: str, module: str, signed: str) -> tuple[Quadratic, Quadratic, Quadratic]:
    """Quadratics of the device's forward, backward and weight gradients of a layer, by its signature."""
    times = [_passes_s(llm, module, signed, _device_cost(), tokens) for tokens in FIT_TOKENS]
    forward, backward, weight = (
        fit_quadratic(FIT_TOKENS, [max(seconds, 1e-12) for seconds in pass_seconds])
        for pass_seconds in zip(*times, strict=True)
    )
    return forward, backward, weight


@cache
def _host_s(llm: str, module: str, signed: str) -> tuple[float, float, float]:
    """Least seconds of a layer's passes: those of a single token, limited by the host's launches."""
    return _passes_s(llm, module, signed, a40_cost(), 1)


@cache
def _device_cost() -> CostModel:
    """The machine with a host whose launches take no time."""
    cost = a40_cost()
    return CostModel(cost.profile, replace(cost.execution, host_kernel_s=0.0, host_collective_s=0.0))


def _passes_s(llm: str, module: str, signed: str, cost: CostModel, tokens: int) -> tuple[float, float, float]:
    """Seconds of forward, backward and weight gradients of a layer over one item."""
    graph = model(llm).module(module)
    index = next(i for i, layer in enumerate(graph.layers) if signature(layer) == signed)
    needs = gradient_needs(model(llm))[module][index]
    is_causal = graph.modality == TEXT
    area = tokens * (tokens + 1) // 2 if is_causal else tokens * tokens
    out = tokens if is_causal else max(1, tokens // MERGED)
    work = Work((RowWork(tokens, out, area),))
    time = cost.layer_time(graph.layers[index], work, tp=TP, cp=1, precision="bfloat16")
    return time.forward_s, time.backward_s(needs), time.weights_s(needs)


Cuts = tuple[tuple[int, int], ...]


@cache
def _layer_quadratics(llm: str, module: str) -> tuple[tuple[Quadratic, Quadratic, Quadratic], ...]:
    return tuple(_quadratics(llm, module, signature(layer)) for layer in model(llm).module(module).layers)


def fit_error(llm: str, module: str) -> float:
    """Mean relative error of a block's forward and backward half-way between the sizes of their fits."""
    signed = signature(model(llm).module(module).layers[1])
    fits = _quadratics(llm, module, signed)[:2]
    errors = []
    for low, high in pairwise(FIT_TOKENS):
        tokens = round(math.sqrt(low * high))
        passes_s = _passes_s(llm, module, signed, _device_cost(), tokens)
        errors += [abs(fit.seconds(tokens) / s - 1) for fit, s in zip(fits, passes_s, strict=False)]
    return fmean(errors)


@cache
def layer_quadratics(llm: str, module: str) -> NDArray[np.float64]:
    """[layers, 3 passes, 3] coefficients of every layer."""
    fitted = _layer_quadratics(llm, module)
    return np.array([[(q.square_s, q.linear_s, q.constant_s) for q in passes] for passes in fitted])


@cache
def layer_host_s(llm: str, module: str) -> NDArray[np.float64]:
    """[layers, 3 passes] seconds of the host for every layer."""
    return np.array([_host_s(llm, module, signature(layer)) for layer in model(llm).module(module).layers])


@cache
def even_cuts(llm: str, module: str, num_stages: int) -> Cuts:
    """Cuts into stages that are balanced for the usual sizes."""
    usual = USUAL_TOKENS[module]
    usual_s = tuple(f.seconds(usual) + b.seconds(usual) for f, b, _ in _layer_quadratics(llm, module))
    return partition(usual_s, num_stages)


@cache
def stage_quadratics(llm: str, module: str, cuts: Cuts) -> NDArray[np.float64]:
    """[stages, 3 passes, 3] coefficients of stages."""
    table = layer_quadratics(llm, module)
    return np.array([table[first:last].sum(axis=0) for first, last in cuts])


def tokens_of(samples: Sequence[Sample], module: str) -> NDArray[np.float64]:
    """[samples] tokens in the LLM, or of the one image in the encoder; 0 without an image."""
    if module == "llm":
        return np.array([sample.num_tokens for sample in samples], float)
    return np.array([sum(s.tokens_in for s in sample.of(module)) for sample in samples], float)


def stage_work(
    llm: str, module: str, stages: int | Cuts, samples: Sequence[Sample], judge: Judge = Judge.EXACT
) -> StageWork:
    """Work of every sample on every stage, for a number of stages or given cuts.

    Samples have one image at most.

    Differs: the host bounds a stage's call, not each of its layers.
    """
    tokens = tokens_of(samples, module)
    cuts = even_cuts(llm, module, stages) if isinstance(stages, int) else stages
    table = stage_quadratics(llm, module, cuts)
    squares = tokens**2 * (ATTENTION_FACTOR if judge is Judge.ATTENTION else 1.0)
    passes = np.einsum("spc,cn->pns", table[:, :, :2], np.stack([squares, tokens]))
    forward, backward, weight = passes
    hosts = layer_host_s(llm, module)
    host_s = np.array([hosts[first:last].sum(axis=0) for first, last in cuts])
    seed = int(tokens.sum()) if judge is Judge.NOISE else None
    return StageWork(forward, backward, weight, table[:, :, 2].T, host_s.T, seed)


@cache
def shared_cuts(
    llm: str, batch: tuple[Sample, ...], num_microbatches: int, num_blocks: int
) -> tuple[Cuts, Cuts]:
    """Both modules' cuts where the chain is cut as a whole; a shared block adds one stage."""
    modules = ("vision", "llm")
    costs = []
    for module in modules:
        tokens = tokens_of(batch, module)
        powers = ((tokens**2).sum(), tokens.sum(), num_microbatches)
        device_s = layer_quadratics(llm, module)[:, :2] @ powers
        host_s = num_microbatches * layer_host_s(llm, module)[:, :2]
        costs.append(np.maximum(device_s, host_s).sum(axis=1).tolist())
    pieces = chain_cuts(costs, num_blocks)
    encoder, text = (tuple(p.layers for p in pieces if p.module == number) for number in range(len(modules)))
    return encoder, text
