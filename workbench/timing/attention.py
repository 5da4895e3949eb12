"""Attention times that do not come from the cost model: of a mask, token shards and a kernel.

The cost model knows an attention by its number of query-key pairs. Who owns which tokens of a long sequence,
how tiles fall on compute units and what a gather overlaps with is simulated separately and passed to `price`
as a callable, so that the planner imports no simulator.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace

from workbench.cost.model import CostModel, LayerTime
from workbench.float_sum import float_sum
from workbench.model.layer import Attention, Layer
from workbench.model.reach import ANY, Reach
from workbench.model.trained import first_trained
from workbench.plan.joint import microbatch_apart, replicas_apart, stage_apart
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.routing import routing_of
from workbench.plan.stage import Stage
from workbench.plan.token_owners import row_shards
from workbench.plan.work import even_work_of, row_kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One attention operator of one stage over one microbatch."""

    plan: Plan
    stage: Stage
    microbatch: Microbatch
    operator: Attention

    def reach(self, cost: CostModel) -> Reach:
        """Return how far queries attend, if that hides any pairs and the machine's kernels skip these."""
        if self.operator.reach == ANY:
            return ANY
        return cost.computed(even_work_of(self.plan, self.microbatch)).reach(self.operator)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTime:
    """Seconds of the slowest rank of the stage, with gathers and scatters of keys and values.

    Args:
        forward_s: forward.
        backward_s: gradients of queries, keys and values, with their scores' recomputation.
        unmeasured: what went into it that was not measured.
    """

    forward_s: float
    backward_s: float
    unmeasured: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if min(self.forward_s, self.backward_s) < 0:
            raise ValueError(f"attention: want times >= 0, got {self}")


AttentionModel = Callable[[AttentionCall], AttentionTime | None]
"""Time of one call, or None to leave it to the cost model."""


def identity_of(model: AttentionModel | None) -> Hashable | None:
    """Return a key of what a model's times follow from, besides grid, links, rows and token owners.

    None: the model has no `identity`, so its times are valid for one plan alone.
    """
    return "none" if model is None else getattr(model, "identity", None)


Times = Mapping[str, AttentionTime]
"""Times from an attention model, by name of the operator in its layer."""

_REST: LruCache[Layer] = LruCache(4096)  # one object for each, as the cost model caches by identity


def times_of(model: AttentionModel, plan: Plan, stage: Stage, microbatch: Microbatch, layer: Layer) -> Times:
    """Return the model's times of the attentions of one layer; of joint replicas, those of the slowest."""
    times: dict[str, AttentionTime] = {}
    parts = _parts(plan, stage, microbatch)
    for operator in layer.operators:
        if isinstance(operator, Attention):
            of_parts = (
                model(AttentionCall(plan=own_plan, stage=own_stage, microbatch=own, operator=operator))
                for own_plan, own_stage, own in parts
            )
            known = [time for time in of_parts if time is not None]
            if known:
                times[operator.name] = max(known, key=lambda time: time.forward_s + time.backward_s)
    return times


def _parts(plan: Plan, stage: Stage, microbatch: Microbatch) -> list[tuple[Plan, Stage, Microbatch]]:
    """Return what each joint replica runs, if it has rows; the same rows once."""
    if stage.joint_replicas == 1:
        return [(plan, stage, microbatch)]
    apart = replicas_apart(plan)
    parts: dict[Hashable, tuple[Plan, Stage, Microbatch]] = {}
    for number in range(stage.joint_replicas):
        own = microbatch_apart(plan, microbatch, number)
        owners = tuple((shard.block_tokens, shard.owners) for shard in row_shards(routing_of(apart), own))
        if own.rows:
            parts.setdefault((row_kinds(plan, own), owners), (apart, stage_apart(stage, number), own))
    return list(parts.values())


def without_attention(layer: Layer, times: Times) -> Layer:
    """Return the layer without the attentions whose times are given.

    A measurement of the whole layer is valid for the mask it was taken with; the remaining operators have a
    signature of their own, so the cost model sums them.
    """
    if not times:
        return layer
    return _REST.get_or(
        (Identity(layer), frozenset(times)),
        lambda: replace(
            layer, operators=tuple(operator for operator in layer.operators if operator.name not in times)
        ),
    )


def with_attention(rest: LayerTime, layer: Layer, times: Times) -> LayerTime:
    """Return the time of the whole layer from that of `without_attention`.

    Gradients of the layer's first weights pass through the attentions after them.
    """
    if not times:
        return rest
    after_first = {operator.name for operator in layer.operators[first_trained(layer) + 1 :]}
    return LayerTime(
        rest.forward_s + float_sum(time.forward_s for time in times.values()),
        rest.input_grad_s + float_sum(time.backward_s for time in times.values()),
        rest.weight_grad_s,
        rest.unmeasured.union(*(time.unmeasured for time in times.values())),
        rest.interior_grad_s
        + float_sum(time.backward_s for name, time in times.items() if name in after_first),
    )
