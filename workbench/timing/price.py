"""Seconds of every action of a lowered plan under one cost model."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np

from workbench.arrays import ints
from workbench.collector import collector_paused
from workbench.cost.eager_traffic import EAGER_UPDATE_TENSORS, OptimizerKernels
from workbench.cost.model import CostModel
from workbench.cost.traffic import WIDE_BYTES
from workbench.cost.weight_update import Clipping
from workbench.memory.stage import GRADIENTS, state_of
from workbench.plan.lowered import Lowered
from workbench.plan.optimizer import Optimizer
from workbench.plan.optimizer_shards import optimizer_shards
from workbench.plan.plan import Plan, Precision, Settings
from workbench.plan.stage import Stage
from workbench.plan.work import works_of
from workbench.schedule.action import COMPUTE, MEANING, Action, Activity, Pass, TaskKind, measured_as
from workbench.timing.attention import AttentionModel
from workbench.timing.clipping import clipped_s, norm_sum_s
from workbench.timing.key_exchange import with_key_exchange
from workbench.timing.muon import MuonPrices, MuonSeconds, matrix_bytes
from workbench.timing.pass_prices import PassPrices, Works, machines
from workbench.timing.weights import WeightPrices
from workbench.units import GB

HOST_BYTES_PER_S = 25 * GB  # PCIe 4.0 x16 has 31.5 GB/s on the wire; copies from pinned memory reach 25


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds by action, of the STEP by rank, and which of them rest on nothing measured."""

    durations_s: dict[Action, float]
    steps_s: dict[int, float]
    unmeasured: tuple[str, ...]

    def duration_s(self, action: Action) -> float:
        """Return the seconds of an action on its slowest rank; ValueError if it is not in the plan. O(1)."""
        seconds = self.durations_s.get(action)
        if seconds is None:
            raise ValueError(f"action {action} has no price: it stands in no program of the plan")
        return seconds

    def step_s(self, rank: int) -> float:
        """Return the seconds of the STEP of one rank."""
        return self.steps_s[rank]


@collector_paused()
def price(lowered: Lowered, cost: CostModel, *, attention: AttentionModel | None = None) -> Price:
    """Price every action of the programs.

    Passes are sums over the stage's layers, with the gradients that run for the modules present in the
    microbatch; a gradient reduction is its groups' all-reduces one after the other, a collective of sharded
    weights one per tensor of the unit; STEP is each rank's own optimizer update, behind the clipping of
    gradients where the execution clips, and the collectives of weights then. Each is multiplied by the
    factor measured in a pipeline, and each action also takes the executor's measured overhead; copies to and
    from the host only that.

    Args:
        attention: times of attentions that depend on masks, token shards and a kernel's
            balance; None, or where it returns None: the cost model's, by query-key pairs.

    Raises:
        ValueError: a backward of a stage in which no gradient runs.

    Complexity: O(actions) plus one pricing of each distinct (layers, work, gradients).
    """
    passes = pass_prices(lowered.plan, cost, attention)
    pricing = _Pricing(lowered, cost, passes)
    durations_s = {
        action: passes.duration_s(action) if action.kind in COMPUTE else pricing.duration_s(action)
        for action in lowered.plan.program_actions
    }
    return Price(durations_s, pricing.steps_s, tuple(sorted(pricing.all_unmeasured())))


def pass_prices(
    plan: Plan, cost: CostModel, attention: AttentionModel | None = None, works: Works = works_of
) -> PassPrices:
    """Return the prices of passes alone, for a plan that needs no programs; arguments as in `price`."""
    return PassPrices(plan, machines(cost, plan.cluster), with_key_exchange(attention, plan, cost), works)


class _Pricing:
    """Prices of actions that are no passes."""

    def __init__(self, lowered: Lowered, cost: CostModel, passes: PassPrices) -> None:
        self._lowered, self._plan, self._passes = lowered, lowered.plan, passes
        self._cost_of = machines(cost, self._plan.cluster)
        self._weights = WeightPrices(lowered, self._cost_of)
        self._durations_s: dict[tuple[int | None, Pass], float] = {}  # by stage and kind
        self._unmeasured: set[str] = set()
        if not cost.profile.overheads_s:
            self._unmeasured.add("executor overhead per action: taken as 0")
        self.steps_s = self._steps()

    def all_unmeasured(self) -> set[str]:
        return self._unmeasured | self._weights.unmeasured | self._passes.unmeasured

    def duration_s(self, action: Action) -> float:
        key = action.stage, action.kind
        if key not in self._durations_s:
            self._durations_s[key] = self._duration_s(action)
        return self._durations_s[key]

    def _duration_s(self, action: Action) -> float:
        meaning = MEANING[action.kind]
        if meaning.activity is Activity.UPDATE:
            return max(self.steps_s.values())
        if meaning.activity is Activity.RELEASE:
            return 0.0
        stage = self._passes.stage_of(action)
        profile, measured = self._cost_of(stage.flat_ranks).profile, measured_as(action.kind)
        overhead_s = profile.overhead_s(measured)
        if meaning.activity is Activity.COPY:
            return overhead_s + self._move_s(stage)
        if meaning.task is TaskKind.FSDP:
            return overhead_s + self._passes.round_s(action)
        factor = profile.pipeline_factor(measured)
        return overhead_s + factor * self._weights.reduce_s(action)

    def _move_s(self, stage: Stage) -> float:
        """Return the seconds of a copy of the stage's weights and optimizer state to or from the host."""
        self._unmeasured.add(f"copies to and from the host: taken at {HOST_BYTES_PER_S / GB:g} GB/s")
        state = state_of(self._plan, stage.flat_ranks[0])
        moved = (size for owner, kind, size in state if owner.id == stage.id and kind.part != GRADIENTS)
        return sum(moved) / HOST_BYTES_PER_S

    def _steps(self) -> dict[int, float]:
        """Return, by rank, the seconds of the update of its weights and of their groups' collectives."""
        ranks, groups, settings = self._plan.ranks, self._lowered.groups, self._plan.settings
        machines = [self._cost_of((rank,)) for rank in ranks]
        steps_s = np.array([cost.profile.overhead_s(Pass.STEP) for cost in machines], np.float64)
        elements, clipped = np.zeros((2, len(ranks)))
        index_of = {rank: index for index, rank in enumerate(ranks)}
        # By identity of ranks, which most groups share: quicker to hash than the ranks.
        alike = {(group.weights[0].module, id(group.ranks)): group for group in groups}
        shards = {key: optimizer_shards(self._plan, group).num_shards for key, group in alike.items()}
        updated = [group.num_elements / shards[group.weights[0].module, id(group.ranks)] for group in groups]
        present = {  # the others are in replicas folded away
            ranks: [index_of[rank] for rank in group.ranks if rank in index_of]
            for (_, ranks), group in alike.items()
        }
        sizes = ints(len(present[id(group.ranks)]) for group in groups)
        index = ints(chain.from_iterable(present[id(group.ranks)] for group in groups))
        if self._clips(machines):
            np.add.at(clipped, index, np.repeat(updated, sizes))
            steps_s += norm_sum_s(groups, self._weights)
        matrices_s = self._matrices_s(updated)
        steps_s += matrices_s.exchanges
        np.add.at(elements, index, np.repeat(updated, sizes))  # in the order of groups
        np.add.at(steps_s, index, np.repeat([self._weights.step_s(group) for group in groups], sizes))
        return {
            rank: step_s
            + cost.profile.pipeline_factor(Pass.STEP)
            * (self._update_s(num_elements, cost) + matrix_s + clipped_s(num_clipped, cost, settings))
            for rank, step_s, num_elements, num_clipped, matrix_s, cost in zip(
                ranks,
                steps_s.tolist(),
                elements.tolist(),
                clipped.tolist(),
                matrices_s.updates.tolist(),
                machines,
                strict=True,
            )
        }

    def _clips(self, machines: Iterable[CostModel]) -> bool:
        """Return whether gradients are clipped, which no profile measures."""
        if all(cost.execution.clipping is Clipping.OFF for cost in machines):
            return False
        self._unmeasured.add("clipping of gradients: bytes over memory bandwidth")
        return True

    def _matrices_s(self, updated: list[float]) -> MuonSeconds:
        """Return the seconds of Muon's updates; take their elements from each group's `updated`."""
        if self._plan.settings.optimizer is not Optimizer.MUON:
            return MuonSeconds(*np.zeros((2, len(self._plan.ranks))))
        self._unmeasured.add("Muon's update: products in short loops, and bytes over memory bandwidth")
        return MuonPrices(self._plan, self._cost_of, self._weights).seconds(self._lowered.groups, updated)

    def _update_s(self, num_parameters: float, cost: CostModel) -> float:
        settings = self._plan.settings
        if _measured_update_s(cost, settings) is None:
            self._unmeasured.add("optimizer step: bytes over memory bandwidth")
        return adamw_s(num_parameters, cost, settings)


def adamw_s(num_parameters: float, cost: CostModel, settings: Settings) -> float:
    """Return the seconds of AdamW's update of that many parameters on one rank, alone."""
    measured_s = _measured_update_s(cost, settings)
    if measured_s is not None:
        return num_parameters * measured_s
    return cost.update_s(num_parameters * update_bytes(settings, cost))


def least_update_s(num_parameters: float, cost: CostModel, settings: Settings) -> float:
    """Return a lower bound of the seconds of updates of that many parameters, on any number of ranks.

    With Muon, any number of them may be in its matrices, whose products are left out.
    """
    least_s = _least_adamw_s(num_parameters, cost, settings)
    if settings.optimizer is Optimizer.ADAMW:
        return least_s
    factor, moved = cost.profile.pipeline_factor(Pass.STEP), num_parameters * matrix_bytes(settings)
    return min(least_s, factor * cost.least_update_s(moved))


def _least_adamw_s(num_parameters: float, cost: CostModel, settings: Settings) -> float:
    factor, measured_s = cost.profile.pipeline_factor(Pass.STEP), _measured_update_s(cost, settings)
    if measured_s is not None:
        return factor * num_parameters * measured_s
    return factor * cost.least_update_s(num_parameters * update_bytes(settings, cost))


def _measured_update_s(cost: CostModel, settings: Settings) -> float | None:
    """Return the measured seconds per parameter of an update in the settings' precision, if any."""
    if settings.optimizer_precision not in (None, settings.precision):
        return None
    return dict(cost.profile.optimizer_s_per_parameter).get(settings.precision)


def update_bytes(settings: Settings, cost: CostModel) -> int:
    """Return the bytes that an optimizer step moves per trainable parameter, with the execution's kernels.

    PyTorch's own kernels are taken to update float32 weights, as without a master copy of narrower ones.
    """
    if cost.execution.optimizer_kernels is OptimizerKernels.FUSED:
        return step_bytes(settings.precision, settings.optimizer_precision)
    return EAGER_UPDATE_TENSORS * max(WIDE_BYTES, settings.precision.num_bytes)


def step_bytes(precision: Precision, wide: Precision | None = None) -> int:
    """Return the bytes that AdamW moves per trainable parameter.

    float32 and float64: reads weight, gradient and two moments, writes all but the gradient.
    bfloat16: reads the gradient, a float32 master copy and two moments; writes those three
    and the weight (Rajbhandari et al. 2020, "ZeRO", section 3.1, mixed-precision Adam).
    A wide optimizer of narrower weights does the same with a gradient as wide as itself.
    """
    if wide is not None:
        return 7 * wide.num_bytes + (0 if wide is precision else precision.num_bytes)
    if precision is Precision.BFLOAT16:
        return 2 + 3 * 4 + 3 * 4 + 2
    return 7 * precision.num_bytes
