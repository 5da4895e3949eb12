"""How sensitive a step is: one quantity at a time, ten percent less and ten percent more."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from workbench.cost.hardware import Cluster, Link, Node
from workbench.cost.model import CostModel
from workbench.data.sample import Sample, Segment
from workbench.explain.pass_parts import with_launch
from workbench.model.expert_load import load_cv, with_load_cv
from workbench.model.model_graph import TEXT
from workbench.plan.following import next_plan
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.timing.shares import RATES, Source

TENTH = 0.1
StepSeconds = Callable[[Lowered, CostModel], float]

RATE_NAMES: dict[Source, str] = {
    Source.PRODUCTS: "matrix product rate",
    Source.ATTENTION: "attention rate",
    Source.MEMORY: "device memory bandwidth",
    Source.COLLECTIVES: "rate of collectives inside layers",
    Source.REDUCTION: "rate of collectives over weights and gradients",
}


class Variation(NamedTuple):
    """The plan and cost model to simulate instead."""

    lowered: Lowered
    cost: CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """The step's sensitivity to one quantity.

    Args:
        about: what is varied, in words.
        less_s, more_s: seconds of the step with a tenth less and a tenth more of it.
        refusal: why it is unknown; "": it is known.
    """

    about: str
    less_s: float = 0.0
    more_s: float = 0.0
    refusal: str = ""

    @property
    def span_s(self) -> float:
        """Difference between both ends."""
        return abs(self.more_s - self.less_s)


Vary = Callable[[float], Variation]


def sensitivities(lowered: Lowered, cost: CostModel, step_s: StepSeconds) -> Iterator[Sensitivity]:
    """The step with 0.9 and 1.1 times each rate, bandwidth, launch time and sample size.

    The plan is fixed: its stages, its order and the position of each sample. Sizes are those of all
    samples, then their distance from the mean, which changes no total. Where a module says how unequal the
    loads of its experts are, so is that. Collectives follow the bandwidth of
    their links, whether measured or by formula.

    Args:
        step_s: simulates a lowered plan.

    Complexity: two pricings and simulations per quantity, about 20.
    """
    for about, vary in _varied(lowered, cost):
        try:
            ends_s = [step_s(*vary(1 + sign * TENTH)) for sign in (-1, 1)]
        except ValueError as error:
            yield Sensitivity(about=about, refusal=" ".join(str(error).split()))
            continue
        yield Sensitivity(about=about, less_s=ends_s[0], more_s=ends_s[1])


def _varied(lowered: Lowered, cost: CostModel) -> Iterator[tuple[str, Vary]]:
    for source, rates in RATES.items():
        yield RATE_NAMES[source], _rates(lowered, cost, rates)
    cluster = lowered.plan.cluster
    yield "link bandwidth inside a node", lambda factor: _linked(lowered, cost, factor, 1.0)
    if len(cluster.nodes) > 1:
        yield "link bandwidth between nodes", lambda factor: _linked(lowered, cost, 1.0, factor)
    yield "kernel launch times", lambda factor: Variation(lowered, with_launch(cost, factor))
    for modality in dict.fromkeys(module.modality for module in lowered.plan.model.modules):
        yield f"{modality} tokens", _sizes(lowered.plan, cost, modality)
    yield (
        "spread of sample sizes",
        lambda factor: Variation(_of_batch(lowered.plan, _spread(lowered.plan, factor)), cost),
    )
    if any(load_cv(layer) for module in lowered.plan.model.modules for layer in module.layers):
        yield "spread of expert loads", lambda factor: _loaded(lowered, cost, factor)


def _rates(lowered: Lowered, cost: CostModel, rates: tuple[str, ...]) -> Vary:
    def vary(factor: float) -> Variation:
        execution = cost.execution
        faster = replace(execution, **{name: factor * getattr(execution, name) for name in rates})
        return Variation(lowered, cost.executed(faster))

    return vary


def _linked(lowered: Lowered, cost: CostModel, inside: float, between: float) -> Variation:
    """The same plan on links faster by a factor."""
    cluster = lowered.plan.cluster

    def scaled(link: Link, factor: float) -> Link:
        return replace(link, bytes_per_s=factor * link.bytes_per_s)

    def scaled_node(node: Node) -> Node:
        link = None if node.link is None else scaled(node.link, inside)
        return replace(node, link=link, card=None if node.card is None else scaled(node.card, between))

    faster: Cluster = replace(
        cluster,
        intra=scaled(cluster.intra, inside),
        inter=scaled(cluster.inter, between),
        nodes=tuple(map(scaled_node, cluster.nodes)),
    )
    return Variation(replace(lowered, plan=replace(lowered.plan, cluster=faster)), cost)


def _loaded(lowered: Lowered, cost: CostModel, factor: float) -> Variation:
    """The same plan with shares of experts more unequal by a factor."""
    model = lowered.plan.model
    modules = tuple(
        replace(module, layers=tuple(with_load_cv(each, factor * load_cv(each)) for each in module.layers))
        for module in model.modules
    )
    plan = replace(lowered.plan, model=replace(model, modules=modules))
    return Variation(replace(lowered, plan=plan), cost)


def _sizes(plan: Plan, cost: CostModel, modality: str) -> Vary:
    def grown(segment: Segment, factor: float) -> Segment:
        return _scaled(segment, factor) if segment.modality == modality else segment

    def vary(factor: float) -> Variation:
        batch = tuple(
            replace(sample, segments=tuple(grown(segment, factor) for segment in sample.segments))
            for sample in plan.batch
        )
        return Variation(_of_batch(plan, batch), cost)

    return vary


def _spread(plan: Plan, factor: float) -> tuple[Sample, ...]:
    """Scale every segment's distance from its modality's mean size."""
    sizes: dict[str, list[int]] = {}
    for sample in plan.batch:
        for segment in sample.segments:
            sizes.setdefault(segment.modality, []).append(segment.tokens_in)
    means = {
        modality: sum(modality_sizes) / len(modality_sizes) for modality, modality_sizes in sizes.items()
    }

    def spread(segment: Segment) -> Segment:
        mean = means[segment.modality]
        wanted = mean + factor * (segment.tokens_in - mean)
        return _scaled(segment, max(wanted, 1.0) / segment.tokens_in)

    return tuple(replace(each, segments=tuple(map(spread, each.segments))) for each in plan.batch)


def _scaled(segment: Segment, factor: float) -> Segment:
    """Scale the number of tokens, at least one; an image's grid is left to its encoder's default.

    Of an image in tiles, scale the number of tiles, at least one beside the overview.
    """
    if factor == 1.0:
        return segment
    if segment.modality == TEXT:
        tokens = max(1, round(factor * segment.tokens_in))
        return replace(segment, tokens_in=tokens, tokens_out=tokens)
    if segment.num_tiles > 1:
        tiles = max(2, round(factor * segment.num_tiles))
        outputs = max(1, round(segment.tokens_out * tiles / segment.num_tiles))
        inside = tiles * segment.tile_tokens
        return replace(segment, tokens_in=inside, tokens_out=outputs, grid=(1, tiles - 1))
    merged = max(1, segment.tokens_in // segment.tokens_out)  # encoder tokens per output
    outputs = max(1, round(factor * segment.tokens_out))
    return replace(segment, tokens_in=outputs * merged, tokens_out=outputs, grid=None)


def _of_batch(plan: Plan, batch: tuple[Sample, ...]) -> Lowered:
    return lower(next_plan(plan, batch))
