"""Muon where tensor-parallel ranks cut matrices: weights as in one process; state and time as planned."""

from dataclasses import replace
from math import prod
from typing import Any

import pytest

from experiments.fidelity.memory import measure
from runtime.world.pool import Pool
from tests.plans import LINK
from tests.test_expert_plan import moe_plan
from tests.test_parity import assert_parity, execute
from tests.test_tensor_parallel import CONFIGS
from workbench.cost.collectives import Collective
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.memory.account import static_holders
from workbench.model.muon import muon_matrices
from workbench.plan.check import check
from workbench.plan.kernels import Kernels
from workbench.plan.lower import lower
from workbench.plan.matrix_pools import check_rows, matrices_in, matrix_owners, matrix_pools
from workbench.plan.optimizer import Optimizer
from workbench.plan.plan import ModuleSettings, Plan, Precision, Sharding
from workbench.plan.runnable import check_runnable
from workbench.schedule.action import Pass
from workbench.timing.muon import matrix_bytes, products_s
from workbench.timing.price import price, update_bytes

F64 = Precision.FLOAT64


def cut(
    config: str, sharding: Sharding = Sharding.NONE, *, sequence_parallel: bool = False, **degrees: int
) -> Plan:
    """A language model whose matrices tensor-parallel ranks cut, and perhaps replicas besides."""
    own = ModuleSettings(module="llm", sharding=sharding, sequence_parallel=sequence_parallel)
    given: dict[str, Any] = {"modules": (own,), "optimizer": Optimizer.MUON}
    return moe_plan(
        config=CONFIGS[config] | {"num_key_value_heads": 4, "num_attention_heads": 4}, **given, **degrees
    )


@pytest.mark.parametrize(
    ("config", "degrees", "how"),
    [
        pytest.param("qwen3", {"tp": 2}, {"sequence_parallel": True}, id="tokens-too"),
        pytest.param("phi3", {"tp": 2, "pp": 2}, {}, id="fused-products"),
        pytest.param("qwen3", {"tp": 2, "dp": 2}, {"sharding": Sharding.OPTIMIZER}, id="sharded-state"),
        pytest.param("qwen3", {"tp": 2, "dp": 2}, {"sharding": Sharding.PARAMETERS}, id="sharded-parameters"),
        pytest.param("phi3", {"tp": 2, "cp": 2}, {"sharding": Sharding.OPTIMIZER}, id="shared-tokens"),
    ],
)
def test_trains_as_one_process(config: str, degrees: dict[str, int], how: dict[str, Any], pool: Pool) -> None:
    plan = cut(config, **degrees, **how)
    check(plan)
    check_runnable(plan)
    result, reference = execute(plan, pool, clip_norm=0.05)
    assert_parity(plan, result, reference, F64)


def test_state_is_as_planned() -> None:
    """A rank has the momentum of its part of a matrix that is cut."""
    plan = cut("qwen3", tp=2)
    (stage,) = plan.stages
    expected = 0
    for layer in plan.model.module("llm").layers:
        matrices = {each.name for each in muon_matrices(layer)}
        for parameter in layer.parameters():
            held = parameter.num_elements // (1 if parameter.shard.value == "replicated" else 2)
            expected += 8 * held * (1 if parameter.name in matrices else 2)
    assert [static_holders(plan, rank)["optimizer of llm"] for rank in stage.flat_ranks] == [expected] * 2


def test_no_rank_holds_more_than_predicted(pool: Pool) -> None:
    plan = cut("qwen3", Sharding.OPTIMIZER, tp=2, dp=2)
    settings = replace(plan.settings, kernels=Kernels.EAGER, precision=Precision.FLOAT32)
    for row in measure("muon", replace(plan, settings=settings), pool):
        assert 0.8 * row.predicted_bytes <= row.measured_bytes <= row.predicted_bytes, row


@pytest.mark.parametrize("dp", [1, 2])
def test_a_step_is_priced_as_it_is_executed(dp: int) -> None:
    """Every matrix that a rank orthogonalises is gathered over tp; its products are those of all of it.

    Without replicas, ranks sum the gradients of each block's norms of 16-wide queries and keys then.
    """
    plan = cut("qwen3", Sharding.OPTIMIZER if dp > 1 else Sharding.NONE, tp=2, dp=dp)
    plan = replace(plan, settings=replace(plan.settings, precision=Precision.BFLOAT16))
    settings, cost = plan.settings, CostModel(load_profile("a40"))
    lowered = lower(plan)
    rank = plan.stages[0].flat_ranks[0]
    (shared,) = (each for each in matrix_pools(plan) if rank in each.ranks)
    matrices = [matrix for weights in shared.weights for matrix in matrices_in(plan, weights)]
    owners = matrix_owners([matrix.shape for matrix in matrices], dp)
    loads: list[tuple[float, float, float]] = []
    for owner in range(dp):
        products = gathers = sent = 0.0
        for matrix in (m for m, o in zip(matrices, owners, strict=True) if o == owner):
            assert matrix.tp == 2
            products += products_s(matrix.shape, settings, cost)
            products += cost.update_s(prod(matrix.shape) * 4 * 2)  # joined, and taken apart
            if dp == 1:
                products += cost.update_s(prod(matrix.shape) / 2 * matrix_bytes(settings))
            gathers += cost.between_ranks_s(Collective.ALL_GATHER, 2 * prod(matrix.shape), 2, LINK)
            sent += prod(matrix.shape) / 2
        loads.append((products, gathers, sent))
    products, gathers, _ = max(loads, key=lambda load: load[0] + load[1])
    if dp == 1:
        gathers += 2 * cost.between_ranks_s(Collective.ALL_REDUCE, 2 * (16 + 16), 2, LINK)
    held = sum(prod(matrix.shape) / 2 for matrix in matrices)
    groups = [group for group in lowered.groups if rank in group.ranks]
    others = (sum(group.num_elements for group in groups) - held) / dp
    products += cost.update_s(others * update_bytes(settings, cost))
    if dp > 1:
        products += cost.update_s(held / dp * (matrix_bytes(settings) + 4 * 2))
        most = max(sent for _, _, sent in loads)
        gathers += 2 * cost.between_ranks_s(Collective.ALL_TO_ALL, 2 * most, dp, LINK)
        gathers += sum(
            cost.between_ranks_s(Collective.ALL_GATHER, 2 * group.num_elements, dp, LINK) for group in groups
        )
    factor, overhead_s = cost.profile.pipeline_factor(Pass.STEP), cost.profile.overhead_s(Pass.STEP)
    assert price(lowered, cost).step_s(rank) == pytest.approx(overhead_s + gathers + factor * products)


def test_rows_in_another_order_are_refused() -> None:
    """The second replica has its ranks the other way round: rank 1's peer is then not where rank 0's is."""
    plan = cut("qwen3", Sharding.OPTIMIZER, tp=2, dp=2)
    check_rows(plan)
    rows = {0: ((0, 3),), 1: ((2, 1),)}
    stages = tuple(replace(stage, ranks=rows[stage.replica]) for stage in plan.stages)
    with pytest.raises(ValueError, match=r"matrices over tp ranks \[0, 3\], which hold parts \[0, 1\]"):
        check_rows(replace(plan, stages=stages))
