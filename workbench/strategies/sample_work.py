"""Work of single samples on the encoders' side and on the LLM's, by quadratics in tokens."""

from typing import NamedTuple

from workbench.cost.model import CostModel, RowWork, Work
from workbench.cost.quadratic import FIT_TOKENS, Quadratic, fit_quadratic
from workbench.data.sample import Sample
from workbench.graph.frozen import gradient_needs
from workbench.graph.model_graph import TEXT, Module
from workbench.job import Job
from workbench.strategies.assembly import layout_of


class SampleWork(NamedTuple):
    """Seconds of forward and backward by sample of the batch, in its order."""

    encoder_s: tuple[float, ...]
    llm_s: tuple[float, ...]


def sample_work(job: Job, cost: CostModel) -> SampleWork:
    """Of every sample alone; several encoders are added up.

    Source: Entrain (dissertation, sections 4.4.1 and 4.5): a quadratic per layer, summed over the layers
    of a module; all encoders count as one.
    Differs: gradients that do not run are left out, as everywhere here.

    Complexity: O(layers) prices a module, then O(items).
    """
    quadratics = {module.name: module_quadratic(job, cost, module) for module in job.model.modules}
    encoders = [module for module in job.model.modules if module.modality != TEXT]
    llm = next(module for module in job.model.modules if module.modality == TEXT)
    return SampleWork(
        encoder_s=tuple(_encoder_s(sample, encoders, quadratics) for sample in job.batch),
        llm_s=tuple(quadratics[llm.name].seconds(sample.num_tokens) for sample in job.batch),
    )


def module_quadratic(job: Job, cost: CostModel, module: Module) -> Quadratic:
    """Forward and backward of a whole module over one item, fitted at the paper's token counts."""
    layout = layout_of(job, module.name)
    cost = cost.dealing(layout.ep)
    needs = gradient_needs(job.model)[module.name]
    ratio = _out_per_in(job, module)

    def seconds(tokens: int) -> float:
        causal = module.modality == TEXT
        area = tokens * (tokens + 1) // 2 if causal else tokens * tokens
        work = Work((RowWork(tokens, max(1, round(tokens * ratio)), area),))
        times = [
            cost.layer_time(layer, work, tp=layout.tp, cp=layout.cp, precision=job.settings.precision)
            for layer in module.layers
        ]
        return sum(time.forward_s + time.backward_s(need) for time, need in zip(times, needs, strict=True))

    return fit_quadratic(FIT_TOKENS, [seconds(tokens) for tokens in FIT_TOKENS])


def _out_per_in(job: Job, module: Module) -> float:
    if module.modality == TEXT:
        return 1.0
    segments = [segment for sample in job.batch for segment in sample.of(module.modality)]
    total_in = sum(segment.tokens_in for segment in segments)
    return sum(segment.tokens_out for segment in segments) / total_in if total_in else 1.0


def _encoder_s(sample: Sample, encoders: list[Module], quadratics: dict[str, Quadratic]) -> float:
    return sum(
        quadratics[module.name].seconds(segment.tokens_in)
        for module in encoders
        for segment in sample.of(module.modality)
    )
