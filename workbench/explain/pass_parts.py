"""Split passes into kernels, token stragglers, collectives and launches; and STEP into collectives and
update.
"""

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
AT_ONCE = 1e12  # a rate at which collectives take no time


class PassParts(NamedTuple):
    """Shares of a pass's seconds; they add up to 1.

    Args:
        kernels: on the device, as if every context-parallel rank had equal work.
        straggler: excess of the slowest context-parallel rank.
        collectives: exposed ones inside layers, of tensor, context and expert parallelism.
        launch: gaps between kernels, waits for the host, the executor's overhead.
    """

    kernels: float
    straggler: float
    collectives: float
    launch: float


class Parts(NamedTuple):
    """Parts of actions.

    Args:
        passes: each pass's shares.
        exchanged: by rank, the share of its STEP spent on gathering updated weights or reducing parts.
    """

    passes: Mapping[Action, PassParts]
    exchanged: Mapping[int, float]


class CauseSeconds(NamedTuple):
    """Seconds of one cause, at one module or edge."""

    cause: Cause
    where: str
    seconds: float


def parts_of(lowered: Lowered, cost: CostModel, prices_of: PricesOf, actions: Iterable[Action]) -> Parts:
    """Split each pass by how much its price drops without launches, then also without collectives and
    stragglers.

    What was measured as a whole layer has its launches among its kernels. Each rank's STEP is split by how
    much its price drops without collectives over weights and gradients.

    Args:
        prices_of: prices the plan as the simulation did.
        actions: passes.

    Complexity: four pricings of the plan, and two of its passes if ranks share tokens.
    """
    full, unlaunched = prices_of(lowered, cost), prices_of(lowered, without_launches(cost))
    kernels = prices_of(lowered, without_layer_collectives(without_launches(cost)))
    straggler_s = _straggler_s(lowered.plan, cost)
    passes = {}
    for action in actions:
        total_s = full.duration_s(action)
        without_launch_s = min(total_s, unlaunched.duration_s(action))
        kernels_s = min(without_launch_s, kernels.duration_s(action))
        passes[action] = _shares(total_s, without_launch_s, kernels_s, min(kernels_s, straggler_s(action)))
    without_collectives = prices_of(lowered, _without_update_collectives(cost))
    exchanged = {
        rank: max(0.0, 1.0 - without_collectives.step_s(rank) / seconds) if seconds else 0.0
        for rank, seconds in full.steps_s.items()
    }
    return Parts(passes, exchanged)


def _straggler_s(plan: Plan, cost: CostModel) -> Callable[[Action], float]:
    """By how much a pass is longer than if context-parallel ranks shared every row evenly."""
    if all(stage.cp == 1 for stage in plan.stages):
        return lambda action: 0.0
    slowest_s = pass_prices(plan, cost).duration_s
    without = replace(plan, token_shards=())  # ring attention prices zigzag's blocks, whatever works say
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


def without_launches(cost: CostModel) -> CostModel:
    """The same machines, with no host or executor time and no minimum kernel time."""
    return with_launch(cost, 0.0)


def with_launch(cost: CostModel, factor: float) -> CostModel:
    """The same machines, with launches, the executor and the shortest kernel slower by a factor."""
    profile = cost.profile
    scaled = replace(
        profile,
        kernel_floor_s=factor * profile.kernel_floor_s,
        overheads_s=tuple((kind, factor * seconds) for kind, seconds in profile.overheads_s),
    )
    beside = {device: with_launch(model, factor) for device, model in cost.beside.items()}
    return CostModel(scaled, _with_launch_factor(cost.execution, factor), beside)


def _with_launch_factor(execution: Execution, factor: float) -> Execution:
    return replace(
        execution,
        kernel_gap_s=factor * (execution.kernel_gap_s or 0.0),
        host_kernel_s=factor * (execution.host_kernel_s or 0.0),
        host_collective_s=factor * (execution.host_collective_s or 0.0),
        host_rank_s=factor * execution.host_rank_s,
        host_wait_s=factor * execution.host_wait_s,
    )


def without_layer_collectives(cost: CostModel) -> CostModel:
    """The same machines, with no time for collectives of tensor, context and expert parallelism."""
    beside = {device: without_layer_collectives(model) for device, model in cost.beside.items()}
    return CostModel(cost.profile, replace(cost.execution, collective_rate=AT_ONCE), beside)


def _without_update_collectives(cost: CostModel) -> CostModel:
    beside = {device: _without_update_collectives(model) for device, model in cost.beside.items()}
    return CostModel(cost.profile, replace(cost.execution, reduction_rate=AT_ONCE), beside)


def path_causes(path: Iterable[PathStep], parts: Parts) -> tuple[CauseSeconds, ...]:
    """Seconds of the path by cause, most first, with passes and STEPs split; they add up to the path.

    Args:
        parts: of the path's actions; a missing pass counts as kernels alone.
    """
    seconds_by_key: dict[tuple[Cause, str], float] = {}
    for step in path:
        for cause, seconds in _split(step, parts):
            seconds_by_key[cause, step.where] = seconds_by_key.get((cause, step.where), 0.0) + seconds
    named = (CauseSeconds(*key, seconds) for key, seconds in seconds_by_key.items() if seconds)
    return tuple(sorted(named, key=lambda each: -each.seconds))


def _split(step: PathStep, parts: Parts) -> Iterable[tuple[Cause, float]]:
    if step.cause is Cause.STEP and step.rank is not None:
        exchanged = parts.exchanged.get(step.rank, 0.0)
        yield Cause.AT_STEP, exchanged * step.seconds
        yield step.cause, step.seconds * (1.0 - exchanged)
        return
    shares = parts.passes.get(step.action) if step.action is not None and step.cause in COMPUTE else None
    if shares is None:
        yield step.cause, step.seconds
        return
    yield Cause.STRAGGLER, shares.straggler * step.seconds
    yield Cause.INSIDE, shares.collectives * step.seconds
    yield Cause.LAUNCH, shares.launch * step.seconds
    yield step.cause, step.seconds * (1.0 - shares.straggler - shares.collectives - shares.launch)
