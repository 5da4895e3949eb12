"""Where a row's iteration goes: the busiest rank's seconds by kind of work, and its waits."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from workbench.cost.expert_parallel import on_rank
from workbench.cost.hardware import Link
from workbench.cost.model import CostModel
from workbench.cost.roofline import Grid, Work
from workbench.explain.pass_parts import without_launches, without_layer_collectives
from workbench.float_sum import float_sum
from workbench.llm_table.columns import SHARES
from workbench.model.layer import Attention, Layer, Lookup, Matmul, Pointwise, Recurrence
from workbench.plan.lowered import Lowered
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.narrow_products import multiplying
from workbench.plan.plan import Plan
from workbench.plan.sequence import dividing
from workbench.plan.stage import Stage
from workbench.plan.work import work_of
from workbench.schedule.action import COMPUTE, Pass
from workbench.timing.grid_links import GridCost, GridLinks, grid_links
from workbench.timing.price import Price

AT_ONCE = Link(name="at once", bytes_per_s=1e30, latency_s=0.0)
_ALONE = GridLinks(AT_ONCE, AT_ONCE)
_WITHOUT_LAUNCHES: LruCache[CostModel] = LruCache(64)
_WITHOUT_COLLECTIVES: LruCache[CostModel] = LruCache(64)
KINDS = {"products": (Matmul,), "attention": (Attention, Recurrence), "memory_bound": (Pointwise, Lookup)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CostParts:
    """Seconds of an iteration, by the names of `columns.SHARES`; they add up to it.

    Args:
        products: matrix products.
        attention: scores and weighted sums.
        memory_bound: norms, activations, residuals, tables, the loss.
        in_layers: collectives inside layers, as long as the device takes for them alone.
        launches: gaps between kernels, and waits for the host.
        data: exposed communication between data-parallel ranks.
        optimizer: the update, with the gathers that belong to it.
        idle: pipeline bubbles and messages.
    """

    products: float
    attention: float
    memory_bound: float
    in_layers: float
    launches: float
    data: float
    optimizer: float
    idle: float

    def continued(self, more: "CostParts", times: float) -> "CostParts":
        """Extrapolate: these parts plus `times` times the excess of `more`."""
        parts = {name: getattr(self, name) for name in SHARES}
        return CostParts(
            **{name: seconds + times * (getattr(more, name) - seconds) for name, seconds in parts.items()}
        )

    def shares(self) -> dict[str, float]:
        """Shares of the whole, by name."""
        total = float_sum(getattr(self, name) for name in SHARES)
        return {name: getattr(self, name) / total for name in SHARES}


def parts_of(
    whole: Lowered,
    prices: Price,
    cost: CostModel,
    iteration_s: float,
    *,
    num_repeats: float,
    retimed: Callable[[Price], float],
) -> CostParts:
    """Split a priced row into its parts.

    Args:
        whole: the plan that stands for all replicas.
        prices: of it.
        cost: model of the row's machine.
        iteration_s: of all microbatches.
        num_repeats: microbatches of the row for each one of the plan.
        retimed: returns seconds of an iteration at other prices.

    Complexity: O(actions), a second timing, and one pricing of each distinct layer.
    """
    plan = whole.plan
    passes = {
        program.ranks[0]: float_sum(prices.durations_s[a] for a in program.actions if a.kind in COMPUTE)
        for program in plan.programs
    }
    rank = max(passes, key=lambda each: passes[each])
    busy_s, step_s = passes[rank] * num_repeats, prices.steps_s[rank]
    data_s = max(0.0, iteration_s - retimed(_without_exchanges(prices)))
    shares = _shares(whole, cost, [stage for stage in plan.stages if rank in stage.flat_ranks])
    return CostParts(
        **{kind: busy_s * share for kind, share in shares.items()},
        launches=busy_s * max(0.0, 1 - sum(shares.values())),
        data=data_s,
        optimizer=step_s,
        idle=max(0.0, iteration_s - busy_s - step_s - data_s),
    )


def _without_exchanges(prices: Price) -> Price:
    """Prices with free communication between data-parallel ranks; messages and passes as they are."""
    durations_s = {
        action: seconds if action.kind in COMPUTE or action.kind is Pass.STEP else 0.0
        for action, seconds in prices.durations_s.items()
    }
    return replace(prices, durations_s=durations_s)


def _shares(whole: Lowered, cost: CostModel, stages: list[Stage]) -> dict[str, float]:
    """Shares of these stages' passes by kind of operator and of collectives, at most all together.

    Parts that were not measured as parts of their layer may take longer than it, all together.
    """
    plan = whole.plan
    work = work_of(plan, plan.microbatches[0])
    totals = dict.fromkeys((*KINDS, "in_layers", "all"), 0.0)
    known: dict[int, dict[str, float]] = {}
    for stage in stages:
        for layer in plan.model.module(stage.module).layers[slice(*stage.layers)]:
            if id(layer.operators) not in known:
                known[id(layer.operators)] = _by_part(layer, stage, work, plan, cost)
            for part, seconds in known[id(layer.operators)].items():
                totals[part] += seconds
    all_s = totals.pop("all")
    whole_s = max(all_s, float_sum(totals.values()))
    return {part: seconds / whole_s for part, seconds in totals.items()}


def _by_part(layer: Layer, stage: Stage, work: Work, plan: Plan, cost: CostModel) -> dict[str, float]:
    """Seconds of a layer's forward and backward: of its operators by kind, collectives, and of everything.

    Parts are priced without launches, as `explain` does: alone, small kernels would wait for the host, whose
    work hides behind others in a layer.
    """
    links, precision = grid_links(plan.cluster, stage), plan.settings.precision

    def seconds(layer: Layer, model: CostModel, links: GridLinks) -> float:
        model = dividing(multiplying(model, plan.settings, stage.module), plan.settings, stage.module)
        model = model.with_expert_parallel(1 if links is _ALONE else stage.ep, links.experts)
        time = GridCost(model, stage.tp, stage.cp, precision, links).layer_time(layer, work)
        return time.forward_s + time.input_grad_s + time.weight_grad_s

    kernels = _WITHOUT_LAUNCHES.get_or(Identity(cost), lambda: without_launches(cost))
    alone = _WITHOUT_COLLECTIVES.get_or(Identity(cost), lambda: without_layer_collectives(kernels))
    local_layer = on_rank(layer, work, Grid(stage.tp, stage.cp, stage.ep))
    by_kind = {kind: seconds(_only(local_layer, kind), kernels, _ALONE) for kind in KINDS}
    return by_kind | {
        "in_layers": max(0.0, seconds(layer, kernels, links) - seconds(layer, alone, links)),
        "all": seconds(layer, cost, links),
    }


def _only(layer: Layer, kind: str) -> Layer:
    """The layer with the operators of one kind, cut as they are."""
    operators = tuple(operator for operator in layer.operators if isinstance(operator, KINDS[kind]))
    return replace(layer, operators=operators, tied=())
