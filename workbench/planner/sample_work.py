"""Seconds of single samples in the encoders and in the LLM, by quadratics in their tokens."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from workbench.cost.model import CostModel, RowWork, Work
from workbench.cost.quadratic import FIT_TOKENS, Quadratic, fit_quadratic
from workbench.data.sample import Sample
from workbench.float_sum import float_sum
from workbench.job.job import Job
from workbench.model.layer import Attention
from workbench.model.model_graph import TEXT, Module
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.work import work_of
from workbench.planner.assembly import layout_of, shared_draft
from workbench.planner.layer_cost import alike_layers, machine_of, mean_cost


class SampleWork(NamedTuple):
    """Seconds of forward and backward of each sample, in the order of the batch."""

    encoder_s: tuple[float, ...]
    llm_s: tuple[float, ...]


_WORK: LruCache[SampleWork] = LruCache(8)


def sample_work(job: Job, cost: CostModel) -> SampleWork:
    """Seconds of every sample alone, in the encoders together and in the LLM.

    Source: Entrain (dissertation, sections 4.4.1 and 4.5): a quadratic per layer, summed over the layers
    of a module; all encoders count as one.
    Differs: gradients that do not run are left out, as everywhere here; layers of the LLM that read other
    modules' tokens, or whose windows hide some tokens, are not quadratic in the sample's length, so they are
    priced on each sample.

    Complexity: O(layers) to price a module, O(items), and one price for each sample where needed; then O(1)
    for the same job.
    """
    return _WORK.get_or((Identity(job), Identity(cost)), lambda: _sample_work(job, cost))


def _sample_work(job: Job, cost: CostModel) -> SampleWork:
    encoders, llm = job.model.encoders, job.model.llm
    works = _llm_works(job)
    aside = _aside(job, cost, works)
    quadratics = {
        module.name: module_quadratic(job, cost, module, aside if module is llm else ())
        for module in job.model.modules
    }
    aside_s = [_layers_s(job, cost, llm, work, aside) for work in works] if aside else [0.0] * len(job.batch)
    return SampleWork(
        encoder_s=tuple(_encoder_s(sample, encoders, quadratics) for sample in job.batch),
        llm_s=tuple(
            quadratics[llm.name].seconds(sample.num_tokens) + seconds
            for sample, seconds in zip(job.batch, aside_s, strict=True)
        ),
    )


def _llm_works(job: Job) -> list[Work]:
    """The LLM's work for every sample; empty where no layer depends on more than its length."""
    llm = job.model.llm
    if not (llm.context_layers or llm.reaches):
        return []
    draft = shared_draft(replace(job, layouts=(), replicas=1, microbatch_samples=1), "sample work")
    return [work_of(draft, microbatch) for microbatch in draft.microbatches_of[llm.name, 0]]


def _aside(job: Job, cost: CostModel, works: Sequence[Work]) -> tuple[int, ...]:
    """Indices of the LLM's layers that read other modules' tokens, or do not reach all of some sample."""
    llm = job.model.llm
    machine = machine_of(job, layout_of(job, llm.name), cost).cost
    limited = {reach for work in works for reach, _ in machine.computed(work).sums.reached}
    return tuple(
        index
        for index, layer in enumerate(llm.layers)
        if layer.reads_context
        or any(isinstance(op, Attention) and op.reach in limited for op in layer.operators)
    )


def _layers_s(job: Job, cost: CostModel, module: Module, work: Work, indices: Sequence[int]) -> float:
    """Seconds of a forward and a backward of some layers of a module."""
    machine = machine_of(job, layout_of(job, module.name), cost)
    needs, firsts = alike_layers(job.model, module.name)
    total_s = {
        first: mean_cost(machine, module.layers[first], needs[first], [(work, 1.0)], recomputed=False).total_s
        for first in {firsts[index] for index in indices}
    }
    return float_sum(total_s[firsts[index]] for index in indices)


def module_quadratic(job: Job, cost: CostModel, module: Module, aside: Collection[int] = ()) -> Quadratic:
    """Forward and backward seconds of a module as a quadratic, fitted at the paper's token counts.

    Layers that read other modules' tokens are left out.

    Args:
        aside: indices of more layers to leave out.
    """
    ratio = _out_per_in(job, module)
    indices = [i for i, layer in enumerate(module.layers) if not layer.reads_context and i not in aside]

    def seconds(tokens: int) -> float:
        causal = module.modality == TEXT
        area = tokens * (tokens + 1) // 2 if causal else tokens * tokens
        work = Work((RowWork(tokens, max(1, round(tokens * ratio)), area),))
        return _layers_s(job, cost, module, work, indices)

    return fit_quadratic(FIT_TOKENS, [seconds(tokens) for tokens in FIT_TOKENS])


def _out_per_in(job: Job, module: Module) -> float:
    if module.modality == TEXT:
        return 1.0
    segments = [segment for sample in job.batch for segment in sample.of(module.modality)]
    total_in = sum(segment.tokens_in for segment in segments)
    return sum(segment.tokens_out for segment in segments) / total_in if total_in else 1.0


def _encoder_s(sample: Sample, encoders: Sequence[Module], quadratics: dict[str, Quadratic]) -> float:
    return float_sum(
        segment.num_tiles * quadratics[module.name].seconds(segment.tile_tokens)
        for module in encoders
        for segment in sample.of(module.modality)
    )
