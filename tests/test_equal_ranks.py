"""Ranks with equal accounts are told apart from all others before their accounts are made."""

from dataclasses import replace

import pytest

from experiments.bench.speed_cases import plan_of
from tests.test_alike import PLANS as REPLICAS
from tests.test_alike import SMALL
from tests.test_candidates import COST
from tests.test_folded_placements import ALIKE, FAN_IN, FAN_OUT, GRIDS, WIDE, placed
from tests.test_folded_token_shards import sharded
from workbench.memory import account
from workbench.memory import equal_ranks as of_ranks
from workbench.memory.account import memory_table
from workbench.memory.accounts import Accounts
from workbench.memory.equal_ranks import equal_ranks
from workbench.plan.lower import lower
from workbench.plan.lru_cache import clear_caches
from workbench.plan.plan import Plan
from workbench.search.joint.arrangement import Placement
from workbench.search.joint.choice import build


def arranged(placement: Placement, sizes: dict, node: tuple[int, int] = (4, 1), **told) -> Plan:
    return build(*placed(placement, sizes, node=node, **told), COST)


PLANS = {
    **REPLICAS,
    "islands": lambda: arranged(Placement.ISLANDS, ALIKE),
    "wide islands": lambda: arranged(Placement.ISLANDS, WIDE, (8, 8)),
    "fan-in": lambda: arranged(Placement.ISLANDS, FAN_IN, (2, 1)),
    "fan-in to more tensor-parallel ranks": lambda: arranged(
        Placement.ISLANDS, {"vision": (4, 1, 1), "audio": (4, 1, 2), "llm": (2, 2, 4)}, (8, 2)
    ),
    "fan-out": lambda: arranged(Placement.ISLANDS, FAN_OUT, (2, 1)),
    "first stage": lambda: arranged(Placement.FIRST_STAGE, WIDE),
    "everywhere": lambda: arranged(Placement.EVERYWHERE, GRIDS, (2, 1)),
    "context-parallel": lambda: arranged(Placement.ISLANDS, WIDE, (8, 2), cp={"llm": 2, "audio": 2}),
    "token shards": lambda: sharded(cp={"llm": 2, "vision": 2}),
}


@pytest.mark.parametrize("least", [0, of_ranks.LEAST_ROWS])
@pytest.mark.parametrize("name", PLANS)
def test_accounts_are_those_of_ranks_that_are_looked_at_one_by_one(name, least, monkeypatch):
    monkeypatch.setattr(of_ranks, "LEAST_ROWS", least)
    clear_caches()
    lowered = lower(PLANS[name]())
    table = memory_table(lowered)
    monkeypatch.setattr(account, "equal_ranks", lambda accounts: {rank: rank for rank in accounts.ranks})
    monkeypatch.setattr(account, "alike_replicas", lambda plan: ())
    clear_caches()
    assert memory_table(lower(replace(lowered.plan))) == table


def test_ranks_of_a_tensor_parallel_group_have_one_account_but_for_who_hands_on():
    lowered = lower(plan_of(replace(SMALL, replicas=1, microbatches=24)))
    plan, first_of = lowered.plan, equal_ranks(Accounts(lowered))
    assert all(plan.stages_on[rank] == plan.stages_on[first] for rank, first in first_of.items())
    equal = {stage.ranks: len({first_of[rank] for rank in stage.flat_ranks}) for stage in plan.stages}
    assert list(equal.values()) == [2, 1, 1, 2, 1, 1]


def test_a_plan_without_rows():
    lowered = lower(
        arranged(Placement.EVERYWHERE, {"vision": (4, 1, 1), "audio": (4, 1, 1), "llm": (4, 1, 1)})
    )
    assert set(equal_ranks(Accounts(lowered))) == set(lowered.plan.ranks)
    empty = replace(lowered, transfers=(), inputs={}, outputs={})
    assert set(equal_ranks(Accounts(empty)).values()) <= set(lowered.plan.ranks)
