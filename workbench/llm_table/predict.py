"""Seconds and bytes of an iteration of a row, through plan, lowering, price and memory table."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from workbench.cost.execution import ActivationCut, AttentionKernel, Execution
from workbench.cost.model import CostModel
from workbench.cost.profile import Profile, load_profile
from workbench.llm_table.fewer_microbatches import Orders, passes_of_all, with_few
from workbench.llm_table.llm_row import LlmRow, Number, Recomputed, Scores, YesNo
from workbench.llm_table.replicas import in_one_buffer, standing_for
from workbench.llm_table.row_bytes import row_bytes
from workbench.llm_table.row_plan import plan_of
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.timing.price import Price, price

Timer = Callable[[Lowered, Price, Orders | None], float]
"""Seconds of an iteration; with orders, of more microbatches than the plan's."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one row takes.

    Args:
        iteration_s: seconds of an iteration.
        peak_bytes: most bytes that a rank holds at once.
        memory_bytes: of a GPU.
        unmeasured: what the prediction rests on and nobody measured, sorted.
    """

    iteration_s: float
    peak_bytes: int
    memory_bytes: int
    unmeasured: tuple[str, ...]


class RowPredictor:
    """Prices rows; what rows share is computed once.

    Args:
        timer: what finds the iteration time of a priced plan.
        profile: the machine of every row; None: each row's own, by name or file.
        execution: rates and host times of the training system; None: the profile's as they are.
    """

    def __init__(
        self, timer: Timer, *, profile: Profile | None = None, execution: Execution | None = None
    ) -> None:
        self._timer, self._profile = timer, profile
        self._execution = execution or Execution()
        self._cost = cache(self._cost_model)
        self._machine = cache(lambda name: CostModel(profile or load_profile(name)))

    def predict(self, row: LlmRow) -> Prediction:
        """Time, memory and unmeasured costs of one row.

        Raises:
            ValueError: what planner, profile or schedule refuse.

        Complexity: O(stages^2 x ranks of a stage + stages x microbatches), whatever the number of replicas;
        where microbatches are planned one by one, O(stages x microbatches x ranks of a stage).
        """
        cost = self.cost(row)
        few = with_few(row)
        plan = plan_of(few, cost.profile)
        orders = passes_of_all(plan, row) if few != row else None
        if orders is None and few != row:
            plan = plan_of(row, cost.profile)
        alone = lower(plan)
        whole = with_replicas(alone, row)
        prices = price(whole, cost)
        unmeasured = {*prices.unmeasured, *cost.profile.unmeasured}
        if row.precision is Number.FP16:
            unmeasured.add("fp16: rates of bf16")
        return Prediction(
            self._timer(whole, prices, orders),
            row_bytes(alone, row),
            cost.profile.memory_bytes,
            tuple(sorted(unmeasured)),
        )

    def cost(self, row: LlmRow) -> CostModel:
        """The cost model of the row's machine, run as the row says."""
        return self._cost(
            "" if self._profile else row.gpu, row.attention, row.recompute, row.sequence_parallel
        )

    def _cost_model(
        self, name: str, scores: Scores, recompute: Recomputed, sequence_parallel: YesNo
    ) -> CostModel:
        attention = AttentionKernel.FUSED
        if scores is Scores.STORED:
            is_selective = recompute is Recomputed.SELECTIVE
            attention = AttentionKernel.RECOMPUTED if is_selective else AttentionKernel.STORED
        cut = ActivationCut.SEQUENCE if sequence_parallel is YesNo.YES else ActivationCut.WHOLE
        machine: CostModel = self._machine(name)
        return machine.executed(replace(self._execution, attention=attention, activations=cut))


def with_replicas(alone: Lowered, row: LlmRow) -> Lowered:
    """The row's one replica, reducing its gradients in flat buffers as all of them."""
    whole = standing_for(alone, num_replicas=row.dp, stride=row.tp * row.cp)
    return in_one_buffer(whole)
