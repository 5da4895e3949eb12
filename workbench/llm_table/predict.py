"""Predict seconds and bytes of a row's iteration through plan, lowering, price and memory table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from workbench.collector import collector_paused
from workbench.cost.execution import Execution
from workbench.cost.model import CostModel
from workbench.cost.profile import Profile, load_profile
from workbench.llm_table.cost_parts import CostParts, parts_of
from workbench.llm_table.fewer_microbatches import Orders, passes_of_all, with_few
from workbench.llm_table.llm_row import LlmRow
from workbench.llm_table.replicas import with_replicas
from workbench.llm_table.row_bytes import row_bytes
from workbench.llm_table.row_doubts import relevant_doubts
from workbench.llm_table.row_execution import doubts, execution_of
from workbench.llm_table.row_interval import reasons_of
from workbench.llm_table.row_model import model_without_copies
from workbench.llm_table.row_plan import is_cut_further, plan_of
from workbench.llm_table.row_prices import prices_of
from workbench.plan.flop import model_flop
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.timing.interval import Interval, interval
from workbench.timing.price import Price

Timer = Callable[[Lowered, Price, Orders | None], float]
"""Seconds of an iteration; with orders, of more microbatches than the plan's."""

FEW = 2  # microbatches of a one-stage pipeline, after which each further one takes equally long


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted iteration of one row.

    Args:
        iteration_s: seconds of an iteration.
        interval: its 80 % prediction interval, with reasons.
        peak_bytes: of the fullest rank.
        memory_bytes: of a GPU.
        unmeasured: unmeasured costs behind notable parts of it, sorted.
        parts: where the seconds go.
        tokens_per_s_per_gpu: of an iteration.
        mfu: useful FLOP/s over the GPU's dense peak in two-byte numbers.
    """

    iteration_s: float
    interval: Interval
    peak_bytes: int
    memory_bytes: int
    unmeasured: tuple[str, ...]
    parts: CostParts
    tokens_per_s_per_gpu: float
    mfu: float

    @property
    def spare_bytes(self) -> int:
        """Free memory of a GPU; negative: the missing bytes."""
        return self.memory_bytes - self.peak_bytes


class RowPredictor:
    """Predicts rows; what rows share is computed once.

    Args:
        timer: returns the iteration time of a priced plan.
        profile: the machine of every row; None: each row's own, by name or file.
        execution: rates and host times of the training system; None: the profile's.
    """

    def __init__(
        self, timer: Timer, *, profile: Profile | None = None, execution: Execution | None = None
    ) -> None:
        self._timer, self._profile = timer, profile
        self._execution = execution or Execution()
        self._cost = cache(self._cost_model)
        self._machine = cache(lambda name: CostModel(profile or load_profile(name)))

    @collector_paused()
    def predict(self, row: LlmRow, unsaid: Mapping[str, float] | None = None) -> Prediction:
        """Time with its 80 % interval, memory and unmeasured costs of one row.

        Args:
            row: to price.
            unsaid: columns that were left to their defaults and how open they are, see `unsaid_of`.

        Raises:
            ValueError: what planner, profile or schedule refuse.

        Complexity: O(stages^2 x ranks of a stage + stages x microbatches), for any number of replicas; if
        microbatches are planned one by one, O(stages x microbatches x ranks of a stage).
        """
        cost = self.cost(row)
        if is_cut_further(row) and row.pp == 1 and row.num_microbatches > FEW + 1:
            prediction = self._extrapolated(row, cost)
        else:
            plan, orders = _plan(row, cost)
            prediction = self._predicted(lower(plan), row, cost, orders)
        reasons = reasons_of(row, cost.profile, prediction.parts, unsaid or {})
        return replace(prediction, interval=interval(prediction.iteration_s, reasons))

    def _predicted(
        self, alone: Lowered, row: LlmRow, cost: CostModel, orders: Orders | None = None
    ) -> Prediction:
        whole = with_replicas(alone, row)
        prices = prices_of(whole, row, cost)
        unmeasured = {*prices.unmeasured, *cost.profile.unmeasured, *doubts(row)}
        seconds = self._timer(whole, prices, orders)
        num_repeats = row.num_microbatches / len(alone.plan.microbatches)
        flop = model_flop(_without_copies(alone.plan, row)) * num_repeats * row.dp
        parts = parts_of(
            whole,
            prices,
            cost,
            seconds,
            num_repeats=num_repeats,
            retimed=lambda other: self._timer(whole, other, orders),
        )
        return Prediction(
            iteration_s=seconds,
            interval=interval(seconds, ()),
            peak_bytes=row_bytes(alone, row),
            memory_bytes=cost.profile.memory_bytes,
            unmeasured=relevant_doubts(unmeasured, parts.shares(), row),
            parts=parts,
            tokens_per_s_per_gpu=row.tokens / seconds / row.num_gpus,
            mfu=flop / seconds / row.num_gpus / cost.profile.peak(cost.profile.table_precision),
        )

    def _extrapolated(self, row: LlmRow, cost: CostModel) -> Prediction:
        """Extrapolate two shorter iterations: without a pipeline each further microbatch takes equally
        long.
        """
        few, more = (
            self._predicted(lower(plan_of(shorter, cost.profile)), shorter, cost)
            for shorter in (_with_microbatches(row, FEW), _with_microbatches(row, FEW + 1))
        )
        num_more = row.num_microbatches - FEW
        seconds = few.iteration_s + num_more * (more.iteration_s - few.iteration_s)
        slower = (
            seconds / more.iteration_s * (FEW + 1) / row.num_microbatches
        )  # an iteration's share of tokens
        return replace(
            more,
            iteration_s=seconds,
            parts=few.parts.continued(more.parts, num_more),
            tokens_per_s_per_gpu=more.tokens_per_s_per_gpu / slower,
            mfu=more.mfu / slower,
        )

    def cost(self, row: LlmRow) -> CostModel:
        """The cost model of the row's machine, executed as the row states."""
        execution = execution_of(row, self._execution)
        model: CostModel = self._cost("" if self._profile else row.gpu, execution)
        return model

    def _cost_model(self, name: str, execution: Execution) -> CostModel:
        machine: CostModel = self._machine(name)
        return machine.executed(execution)


def _without_copies(plan: Plan, row: LlmRow) -> Plan:
    """The plan without copies of key heads for tensor parallelism, which are no useful work."""
    return plan if row.kv_heads >= row.tp else replace(plan, model=model_without_copies(row))


def _with_microbatches(row: LlmRow, num_microbatches: int) -> LlmRow:
    """The row with `num_microbatches` per replica."""
    return replace(row, global_batch=num_microbatches * row.dp * row.micro_batch)


def _plan(row: LlmRow, cost: CostModel) -> tuple[Plan, Orders | None]:
    """The row's plan, with as few microbatches as suffice, and the passes of all."""
    few = with_few(row)
    plan = plan_of(few, cost.profile)
    orders = passes_of_all(plan, row) if few != row else None
    if orders is None and few != row:
        plan = plan_of(row, cost.profile)
    return plan, orders
