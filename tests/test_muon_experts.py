"""Muon in mixtures of experts: a matrix an expert, orthogonalised where it is, weights as in one process."""

from typing import Any

import pytest
import torch

from runtime.step.newton_schulz import orthogonalised
from runtime.world.pool import Pool
from tests.plans import LINK
from tests.test_expert_parallel import example
from tests.test_expert_plan import MIXTRAL, moe_plan
from tests.test_parity import assert_parity, execute
from workbench.cost.collectives import Collective
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.memory.account import static_holders
from workbench.memory.muon import muon_working
from workbench.model.experts import is_of_expert
from workbench.model.muon import muon_matrices, newton_schulz_bytes
from workbench.plan.check import check
from workbench.plan.lower import lower
from workbench.plan.matrix_pools import matrices_in, matrix_owners, matrix_pools
from workbench.plan.optimizer import Optimizer
from workbench.plan.plan import ModuleSettings, Plan, Precision, Sharding
from workbench.plan.runnable import check_runnable
from workbench.timing.muon import MuonPrices, products_s
from workbench.timing.weights import WeightPrices

F64 = Precision.FLOAT64


def mixture(config: dict[str, Any] = MIXTRAL, sharding: Sharding = Sharding.NONE, **degrees: int) -> Plan:
    own = ModuleSettings(module="llm", sharding=sharding)
    given: dict[str, Any] = {"modules": (own,), "optimizer": Optimizer.MUON}
    return moe_plan(config=config, **given, **degrees)


@pytest.mark.parametrize(
    ("config", "degrees", "sharding"),
    [
        pytest.param(MIXTRAL, {"pp": 2}, Sharding.NONE, id="whole"),
        pytest.param(MIXTRAL, {"tp": 2}, Sharding.NONE, id="cut"),
        pytest.param(MIXTRAL, {"tp": 2, "cp": 2, "ep": 2, "dp": 2}, Sharding.NONE, id="distributed"),
        pytest.param(example("gpt_oss"), {"tp": 2, "dp": 2}, Sharding.OPTIMIZER, id="transposed-with-biases"),
        pytest.param(MIXTRAL, {"cp": 2, "ep": 2, "dp": 2}, Sharding.OPTIMIZER, id="sharded-state"),
        pytest.param(MIXTRAL, {"cp": 2, "ep": 2, "dp": 2}, Sharding.PARAMETERS, id="sharded-parameters"),
        pytest.param(example("minimax_m2"), {"cp": 2, "ep": 2}, Sharding.PARAMETERS, id="one-holder"),
    ],
)
def test_trains_as_one_process(
    config: dict[str, Any], degrees: dict[str, int], sharding: Sharding, pool: Pool
) -> None:
    plan = mixture(config, sharding, **degrees)
    check(plan)
    check_runnable(plan)
    result, reference = execute(plan, pool, clip_norm=0.05)
    assert_parity(plan, result, reference, F64)


@pytest.mark.parametrize("shape", [(3, 5, 9), (3, 9, 5)])
def test_a_stack_is_its_matrices(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    updates = torch.randn(shape, dtype=torch.float64)
    alone = torch.stack([orthogonalised(update) for update in updates])
    assert (orthogonalised(updates) - alone).norm() < 1e-13 * alone.norm()


@pytest.mark.parametrize("ep", [1, 2])
def test_state_and_temporaries_are_of_the_experts_of_a_rank(ep: int) -> None:
    """One momentum of each; those of a role are orthogonalised at once, in float64."""
    plan = mixture(cp=2, ep=ep)
    expected, largest = 0.0, 0
    for layer in plan.model.module("llm").layers:
        matrices = {each.name for each in muon_matrices(layer)}
        for parameter in layer.parameters():
            held = parameter.num_elements / (ep if is_of_expert(parameter) else 1)
            expected += 8 * held * (1 if parameter.name in matrices else 2)
        of_experts = [each.shape for each in muon_matrices(layer) if is_of_expert(each)]
        for shape in set(of_experts):
            size = of_experts.count(shape) // ep * newton_schulz_bytes(shape, 8, 8)
            largest = max(largest, size)
    for rank in plan.ranks:
        assert static_holders(plan, rank)["optimizer of llm"] == expected
        assert muon_working(plan, rank) == largest


def test_distributed_experts_are_priced_where_they_are() -> None:
    """Each rank has the products of its own experts, and of all other matrices."""
    cost = CostModel(load_profile("a40"))
    whole, distributed = mixture(cp=2), mixture(cp=2, ep=2)
    seconds = {}
    for plan in (whole, distributed):
        lowered = lower(plan)
        updated = [float(group.num_elements) for group in lowered.groups]
        prices = MuonPrices(plan, lambda ranks: cost, WeightPrices(lowered, lambda ranks: cost))
        seconds[plan] = prices.seconds(lowered.groups, updated)
        assert not seconds[plan].exchanges.any()
        left = sum(n for n, group in zip(updated, lowered.groups, strict=True) if 0 in group.ranks)
        layers = plan.model.module("llm").layers
        matrices = {each.name for layer in layers for each in muon_matrices(layer)}
        vectors = [p for layer in layers for p in layer.parameters() if p.name not in matrices]
        assert left == sum(p.num_elements for p in vectors)
    layers = whole.model.module("llm").layers
    of_experts = [m.shape for layer in layers for m in muon_matrices(layer) if is_of_expert(m)]
    less_s = sum(products_s(shape, whole.settings, cost) for shape in of_experts) / 2
    gap = seconds[whole].updates[0] - seconds[distributed].updates[0]
    assert gap > less_s > 0


def test_owners_are_of_single_experts() -> None:
    """With two replicas, half of a rank's experts go to each: their parts are sent there and back."""
    plan = mixture(sharding=Sharding.OPTIMIZER, cp=2, ep=2, dp=2)
    lowered, cost = lower(plan), CostModel(load_profile("a40"))
    updated = [float(group.num_elements) for group in lowered.groups]
    prices = MuonPrices(plan, lambda ranks: cost, WeightPrices(lowered, lambda ranks: cost))
    found = prices.seconds(lowered.groups, updated)
    expected_s = 0.0
    for pool in (pool for pool in matrix_pools(plan) if 0 in pool.ranks):
        held = [matrix for weights in pool.weights for matrix in matrices_in(plan, weights)]
        of_experts = all(weights.experts for weights in pool.weights)
        assert len(pool.ranks) == (2 if of_experts else 4)
        assert {matrix.num_stacked for matrix in held} == {
            MIXTRAL["num_local_experts"] // 2 if of_experts else 1
        }
        singles = [each for matrix in held for each in matrix.each()]
        owners = matrix_owners([each.shape for each in singles], len(pool.ranks))
        owned = [0] * len(pool.ranks)
        for each, owner in zip(singles, owners, strict=True):
            owned[owner] += each.num_elements
        assert not of_experts or owned[0] == owned[1]
        exchange_s = cost.between_ranks_s(Collective.ALL_TO_ALL, 8 * max(owned), len(pool.ranks), LINK)
        expected_s += 2 * exchange_s
    assert found.exchanges[0] == pytest.approx(expected_s)
