"""What a pass is made of: kernels, a token shard that is heavier, exchanges, launches; and what a STEP is."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from workbench.cost.execution import Execution
from workbench.cost.model import CostModel
from workbench.explain.critical_path import COMPUTE, Cause, PathStep
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.plan.work import even_work_of
from workbench.schedule.action import Action
from workbench.timing.price import Price, pass_prices

PricesOf = Callable[[Lowered, CostModel], Price]
AT_ONCE = 1e12  # a rate at which collectives inside layers take no time


class PassParts(NamedTuple):
    """Shares of a pass's seconds; they add up to 1.

    Args:
        kernels: of the device, as if every context-parallel rank had as much to do.
        straggler: that the slowest context-parallel rank takes longer than that.
        collectives: inside layers: of tensor, context and expert parallelism; what others hide counts not.
        launch: gaps between kernels, waits for the host, the executor's overhead.
    """

    kernels: float
    straggler: float
    collectives: float
    launch: float


class Parts(NamedTuple):
    """What actions are made of.

    Args:
        passes: each one's shares.
        exchanged: by rank, the share of its STEP that it gathers updated weights or adds up parts in.
    """

    passes: Mapping[Action, PassParts]
    exchanged: Mapping[int, float]


class CauseSeconds(NamedTuple):
    """Seconds of one cause, at one module or edge."""

    cause: Cause
    where: str
    seconds: float


def parts_of(lowered: Lowered, cost: CostModel, prices_of: PricesOf, actions: Iterable[Action]) -> Parts:
    """Of each pass: what its price loses when launches, then collectives too, then stragglers take no time.

    What was measured as a whole layer has its launches among its kernels. Of each rank's STEP: what its price
    loses when collectives over weights and gradients take no time.

    Args:
        prices_of: as the step was priced.
        actions: passes.

    Complexity: four prices of the plan, and two of its passes where ranks share tokens.
    """
    whole, unlaunched = prices_of(lowered, cost), prices_of(lowered, launching_at_once(cost))
    kernels = prices_of(lowered, _exchanging_at_once(launching_at_once(cost)))
    behind_s = _behind_s(lowered.plan, cost)
    found = {}
    for action in actions:
        total_s = whole.duration_s(action)
        without_launch_s = min(total_s, unlaunched.duration_s(action))
        kernels_s = min(without_launch_s, kernels.duration_s(action))
        found[action] = _shares(total_s, without_launch_s, kernels_s, min(kernels_s, behind_s(action)))
    alone = prices_of(lowered, _updating_alone(cost))
    exchanged = {
        rank: max(0.0, 1.0 - alone.step_s(rank) / seconds) if seconds else 0.0
        for rank, seconds in whole.steps_s.items()
    }
    return Parts(found, exchanged)


def _behind_s(plan: Plan, cost: CostModel) -> Callable[[Action], float]:
    """Of a pass: by how much it is longer than if context-parallel ranks shared every row evenly."""
    if all(stage.cp == 1 for stage in plan.stages):
        return lambda action: 0.0
    slowest_s = pass_prices(plan, cost).duration_s
    without = replace(plan, token_shards=())  # for keys that go round: zigzag's blocks, whatever works say
    even_s = pass_prices(without, cost, works=lambda each, of: (even_work_of(each, of),)).duration_s
    return lambda action: max(0.0, slowest_s(action) - even_s(action))


def _shares(total_s: float, without_launch_s: float, kernels_s: float, straggler_s: float) -> PassParts:
    if total_s == 0:
        return PassParts(1.0, 0.0, 0.0, 0.0)
    return PassParts(
        (kernels_s - straggler_s) / total_s,
        straggler_s / total_s,
        (without_launch_s - kernels_s) / total_s,
        (total_s - without_launch_s) / total_s,
    )


def launching_at_once(cost: CostModel) -> CostModel:
    """The same machines, on which neither host nor executor takes any time, and no kernel has a floor."""
    return with_launch(cost, 0.0)


def with_launch(cost: CostModel, factor: float) -> CostModel:
    """The same machines; launches, the executor and the shortest kernel take so many times as long."""
    profile = cost.profile
    scaled = replace(
        profile,
        kernel_floor_s=factor * profile.kernel_floor_s,
        overheads_s=tuple((kind, factor * seconds) for kind, seconds in profile.overheads_s),
    )
    beside = {device: with_launch(model, factor) for device, model in cost.beside.items()}
    return CostModel(scaled, _launched(cost.execution, factor), beside)


def _launched(execution: Execution, factor: float) -> Execution:
    return replace(
        execution,
        kernel_gap_s=factor * (execution.kernel_gap_s or 0.0),
        host_kernel_s=factor * (execution.host_kernel_s or 0.0),
        host_collective_s=factor * (execution.host_collective_s or 0.0),
        host_rank_s=factor * execution.host_rank_s,
        host_wait_s=factor * execution.host_wait_s,
    )


def _exchanging_at_once(cost: CostModel) -> CostModel:
    beside = {device: _exchanging_at_once(model) for device, model in cost.beside.items()}
    return CostModel(cost.profile, replace(cost.execution, collective_rate=AT_ONCE), beside)


def _updating_alone(cost: CostModel) -> CostModel:
    beside = {device: _updating_alone(model) for device, model in cost.beside.items()}
    return CostModel(cost.profile, replace(cost.execution, reduction_rate=AT_ONCE), beside)


def path_causes(path: Iterable[PathStep], parts: Parts) -> tuple[CauseSeconds, ...]:
    """Seconds of the path by cause, most first, passes and STEPs taken apart; together they are the path's.

    Args:
        parts: of the path's actions; a pass that is absent is kernels alone.
    """
    found: dict[tuple[Cause, str], float] = {}
    for step in path:
        for cause, seconds in _taken_apart(step, parts):
            found[cause, step.where] = found.get((cause, step.where), 0.0) + seconds
    named = (CauseSeconds(*key, seconds) for key, seconds in found.items() if seconds)
    return tuple(sorted(named, key=lambda each: -each.seconds))


def _taken_apart(step: PathStep, parts: Parts) -> Iterable[tuple[Cause, float]]:
    if step.cause is Cause.STEP and step.rank is not None:
        exchanged = parts.exchanged.get(step.rank, 0.0)
        yield Cause.AT_STEP, exchanged * step.seconds
        yield step.cause, step.seconds * (1.0 - exchanged)
        return
    of = parts.passes.get(step.action) if step.action is not None and step.cause in COMPUTE else None
    if of is None:
        yield step.cause, step.seconds
        return
    yield Cause.STRAGGLER, of.straggler * step.seconds
    yield Cause.INSIDE, of.collectives * step.seconds
    yield Cause.LAUNCH, of.launch * step.seconds
    yield step.cause, step.seconds * (1.0 - of.straggler - of.collectives - of.launch)
