"""Products that run beside their own sums, piece by piece: what is under way when, and parity."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from runtime.emulation.emulate import emulate
from runtime.parallel.tensor.pieces import summed_in_pieces
from runtime.run_settings import RunSettings
from runtime.world.pool import Pool
from tests.test_parity import assert_same
from tests.test_tensor_parallel import CONFIGS, text_plan
from tests.test_tensor_sequence import sequence_parallel
from workbench.cost.execution import Execution
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile
from workbench.plan.build import with_programs
from workbench.plan.lower import lower
from workbench.plan.plan import ModuleSettings, Plan, Precision, Recompute
from workbench.plan.runnable import check_whole_backwards
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.timing.price import price


@dataclass(slots=True)
class Logged:
    """A member alone, that notes what it begins and waits for."""

    events: list[str] = field(default_factory=list)

    def cut(self, x_TD: Tensor, num_pieces: int) -> list[Tensor]:
        return list(x_TD.chunk(num_pieces))

    def start_sum(self, y_TD: Tensor) -> tuple[Tensor, "Wait"]:
        return self._start(y_TD, "sum")

    def start_spread(self, gradient_ND: Tensor) -> tuple[Tensor, "Wait"]:
        return self._start(gradient_ND, "spread")

    def _start(self, x: Tensor, what: str) -> tuple[Tensor, "Wait"]:
        self.events.append(f"start {what}")
        return x.detach().clone(), Wait(self, what)


@dataclass(slots=True)
class Wait:
    log: Logged
    what: str

    def wait(self) -> None:
        self.log.events.append(f"wait {self.what}")


def test_a_piece_is_added_up_beside_the_product_of_the_next() -> None:
    log, weight = Logged(), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(1, 7, 4, dtype=torch.float64, requires_grad=True)

    def product(piece: Tensor) -> Tensor:
        log.events.append("product")
        return piece @ weight.t()

    total = summed_in_pieces(product, x, log, 3)
    assert log.events == ["product", "start sum"] * 3 + ["wait sum"] * 3
    log.events.clear()
    upstream = torch.randn_like(total)
    total.backward(upstream)
    assert log.events == ["start spread"] * 3 + ["wait spread"] * 3
    torch.testing.assert_close(total, x @ weight.t(), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(x.grad, upstream @ weight, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(weight.grad, (upstream.flatten(0, 1).t() @ x.flatten(0, 1)).detach())


def in_pieces(plan: Plan, num_pieces: int, recompute: Recompute = Recompute.NONE) -> Plan:
    modules = tuple(
        replace(plan.settings.of(m.name), collective_pieces=num_pieces, recompute=recompute)
        for m in plan.model.modules
    )
    return replace(plan, settings=replace(plan.settings, modules=modules))


@pytest.mark.parametrize("pieces", [2, 5])
def test_tensor_parallel_ranks_in_pieces_train_as_one_process(pieces: int, pool: Pool) -> None:
    plan = text_plan(CONFIGS["llama"], (0, 1))
    assert_same(in_pieces(plan, pieces), pool, Precision.FLOAT64)


@pytest.mark.parametrize(("pieces", "recompute"), [(2, Recompute.NONE), (4, Recompute.FULL)])
def test_ranks_that_split_tokens_in_pieces_train_as_one_process(
    pieces: int, recompute: Recompute, pool: Pool
) -> None:
    plan = sequence_parallel(text_plan(CONFIGS["llama"], (0, 1)))
    assert_same(in_pieces(plan, pieces, recompute), pool, Precision.FLOAT64)


@pytest.mark.parametrize("cut", [lambda plan: plan, sequence_parallel])
def test_a_price_is_of_sums_beside_products(cut: Callable[[Plan], Plan]) -> None:
    """As a machine's whose row-cut products all run in pieces; nothing new is unmeasured."""
    plan, cost = cut(text_plan(CONFIGS["llama"], (0, 1))), CostModel(ideal_profile())
    whole, two = (price(lower(in_pieces(plan, pieces)), cost) for pieces in (1, 2))
    assert two.unmeasured == whole.unmeasured
    assert two.durations_s != whole.durations_s
    assert two.durations_s == price(lower(plan), cost.executed(Execution(sum_pieces=2))).durations_s


def test_threads_of_an_emulation_run_in_pieces_too() -> None:
    plan = in_pieces(text_plan(CONFIGS["llama"], (0, 1)), 3)
    whole, cut = (
        emulate(lower(each), RunSettings(precision=Precision.FLOAT64)).losses
        for each in (in_pieces(plan, 1), plan)
    )
    assert cut == pytest.approx(whole, rel=1e-12)


def test_biases_and_transposed_products_are_added_once(pool: Pool) -> None:
    assert_same(in_pieces(text_plan(CONFIGS["gpt2"], (0, 1)), 3), pool, Precision.FLOAT64)


def test_what_cannot_run_in_pieces_is_named() -> None:
    with pytest.raises(ValueError, match="want collective_pieces >= 1, got 0"):
        ModuleSettings(module="llm", collective_pieces=0)
    plan = in_pieces(text_plan(CONFIGS["llama"], (0, 1)), 2)
    split = with_programs(plan, Schedule(kind=ScheduleKind.ZB_H1))
    with pytest.raises(ValueError, match="want collective_pieces 1 or a schedule with whole ones"):
        check_whole_backwards(split, split.stages[0])
