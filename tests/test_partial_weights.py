"""Weights with partial gradients on tensor-parallel ranks: those that a run adds up, and what that takes."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from runtime.models.choose import adapter_of
from runtime.parallel.expert.cuts import parts_of
from tests.plans import LINK, disjoint_plan
from tests.test_tensor_parallel import CONFIGS, as_it_is, sequence_parallel, text_plan
from workbench.cost.collectives import all_reduce_s
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile
from workbench.model.experts import num_experts
from workbench.model.indexer import is_of_indexer
from workbench.plan.lower import lower
from workbench.plan.partial_weights import may_have_partial_weights, partial_weights
from workbench.plan.plan import Plan
from workbench.plan.sequence import token_borders
from workbench.timing.price import price
from workbench.timing.weights import WeightPrices


@pytest.mark.parametrize("how", [as_it_is, sequence_parallel])
@pytest.mark.parametrize("name", CONFIGS)
def test_they_are_those_that_a_run_adds_up(name: str, how: Callable[[Plan], Plan]) -> None:
    """By numbers of elements of every layer; of mixtures also where each of two ranks has whole experts."""
    plan = how(text_plan(CONFIGS[name] | {"vocab_size": 64}, (0, 1)))
    module = plan.model.module("llm")
    adapter = adapter_of(module)
    for ep in (1, 2) if any(map(num_experts, module.layers)) else (1,):
        stage = replace(plan.stages[0], ep=ep)
        divided, planned = token_borders(plan, stage).divided, partial_weights(plan, stage)
        for index in range(adapter.num_layers):
            layer = adapter.build(index)
            parts, weights = parts_of(layer, tp=2, ep=ep), dict(layer.named_parameters())
            whole = weights.keys() - {*parts.tensor.cut, *parts.experts}
            names = whole if index in divided else parts.tensor.partial
            trained = (weights[local] for local in names if not is_of_indexer(local))
            summed = sum(weight.numel() for weight in trained if weight.requires_grad)
            own = sum(parameter.num_elements for parameter in planned.get(index, ()))
            assert own == summed, (module.layers[index].name, ep)
        assert may_have_partial_weights(plan, "llm") or not planned


def without_trained(plan: Plan) -> Plan:
    module = plan.model.module("llm")
    frozen = replace(module, layers=tuple(replace(layer, trainable=False) for layer in module.layers))
    return replace(plan, model=replace(plan.model, modules=(frozen,)))


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_none_are_frozen_or_of_one_rank(name: str) -> None:
    plan = text_plan(CONFIGS[name], (0, 1))
    assert partial_weights(plan, plan.stages[0])
    assert partial_weights(without_trained(plan), plan.stages[0]) == {}
    assert partial_weights(plan, replace(plan.stages[0], ranks=((0,),))) == {}


def head_norms_s(plan: Plan) -> float:
    """Of a block of Qwen3: one sum over two ranks of the norms of a query's and of a key's head."""
    num_elements = 2 * CONFIGS["qwen3"]["head_dim"]
    return all_reduce_s(num_elements * plan.settings.gradient_bytes, 2, LINK)


def test_they_are_summed_in_the_step_where_nothing_else_is_reduced() -> None:
    """Qwen2 has no such norms."""
    for name in ("qwen3", "qwen2"):
        plan = text_plan(CONFIGS[name], (0, 1))
        lowered, num_blocks = lower(plan), len(plan.model.module("llm").layers) - 2
        prices = WeightPrices(lowered, lambda ranks: CostModel(ideal_profile()))
        total_s = sum(prices.step_s(group) for group in lowered.groups if 0 in group.ranks)
        assert total_s == pytest.approx(num_blocks * head_norms_s(plan) if name == "qwen3" else 0)


def test_they_are_summed_before_replicas_reduce_them() -> None:
    one = text_plan(CONFIGS["qwen3"], (0, 1))
    plan = disjoint_plan(one.model, one.batch, grids={"llm": (1, 2)}, replicas=2)
    lowered, num_blocks = lower(plan), len(one.model.module("llm").layers) - 2
    priced = price(lowered, CostModel(ideal_profile()))
    groups = [group for group in lowered.groups if 0 in group.ranks]
    replicas_s = sum(
        all_reduce_s(group.num_elements * plan.settings.gradient_bytes, 2, LINK) for group in groups
    )
    seconds = sum(priced.duration_s(action) for action in lowered.reductions if action.stage == 0)
    assert seconds == pytest.approx(replicas_s + num_blocks * head_norms_s(plan))
