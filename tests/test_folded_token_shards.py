"""Replicas whose tokens have owners: one stands for those whose owners are equal, and for no others."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from sim.predict import step_s
from tests.test_candidates import COST, in_brief, in_full
from tests.test_folded_placements import MODULES, placed
from workbench.memory.account import memory_table, peak_bytes
from workbench.plan.alike import alike_replicas, components, part_of
from workbench.plan.check import check
from workbench.plan.folded import checked_part, judged_part
from workbench.plan.key_exchange import check_key_exchange
from workbench.plan.lower import lower
from workbench.plan.lru_cache import clear_caches
from workbench.plan.plan import KeyExchange, ModuleSettings, Plan, Sharding, TokenShard
from workbench.search.joint.arrangement import Placement
from workbench.search.joint.choice import TokenRule, build
from workbench.timing.accept import judged

Change = Callable[[TokenShard], TokenShard]
ISLANDS = {"vision": (4, 1, 1), "audio": (4, 1, 1), "llm": (4, 2, 1)}
TOGETHER = {"vision": (4, 1, 1), "audio": (4, 1, 1), "llm": (4, 1, 1)}
FAN_IN = {"vision": (4, 1, 1), "audio": (2, 1, 1), "llm": (2, 2, 1)}


def sharded(
    placement: Placement = Placement.ISLANDS,
    sizes: dict[str, tuple[int, int, int]] | None = None,
    *,
    node: tuple[int, ...] = (4, 4),
    cp: dict[str, int] | None = None,
    sharding: Sharding = Sharding.NONE,
    tokens: TokenRule = TokenRule.EXCHANGED,
) -> Plan:
    """A plan whose context-parallel modules have token shards."""
    job, choice = placed(
        placement,
        sizes or ISLANDS,
        node=node,
        sharding=dict.fromkeys(MODULES, sharding) if sharding is not Sharding.NONE else None,
        cp=cp or {"llm": 2},
    )
    plan = build(job, replace(choice, tokens=tokens), COST)
    assert plan.token_shards
    return plan


def with_owners(plan: Plan, replica: int, change: Change, microbatch: int = 0) -> Plan:
    """The plan with other owners in the first row of one microbatch of the LLM."""
    where = "llm", replica, microbatch, 0
    shards = tuple(
        change(each) if (each.module, each.replica, each.microbatch, each.row) == where else each
        for each in plan.token_shards
    )
    assert shards != plan.token_shards
    return replace(plan, token_shards=shards)


def swapped(shard: TokenShard) -> TokenShard:
    """Owners have changed places: as many tokens each, but for the last block."""
    return replace(shard, owners=tuple(1 - owner for owner in shard.owners))


def finer(shard: TokenShard) -> TokenShard:
    """The same tokens have the same owners, in blocks of half the size."""
    owners = tuple(owner for owner in shard.owners for _ in range(2))
    return replace(shard, block_tokens=shard.block_tokens // 2, owners=owners)


def short(shard: TokenShard) -> TokenShard:
    return replace(shard, owners=shard.owners[:-1])


def holds(plan: Plan) -> int:
    """Times, bytes and refusals of what is judged are those of the whole; how many of the replicas it has."""
    clear_caches()
    seconds = in_brief(plan)
    assert seconds == in_full(replace(plan))
    clear_caches()
    if isinstance(seconds, float):
        part, memory = judged(plan)
        whole = lower(replace(plan))
        table = memory_table(whole)
        peaks = peak_bytes(whole, table)
        assert seconds == step_s(whole, COST)
        for rank in memory.static_bytes:
            assert memory.static_bytes[rank] == table.static_bytes[rank]
            assert list(memory.acquired_bytes[rank]) == list(table.acquired_bytes[rank])
            assert list(memory.released_bytes[rank]) == list(table.released_bytes[rank])
        checked = lower(checked_part(plan))
        assert max(peaks.values()) == max(peak_bytes(checked, memory_table(checked)).values())
        assert {shard.replica for shard in part.plan.token_shards if shard.module == "llm"} <= {
            stage.replica for stage in part.plan.stages if stage.module == "llm"
        }
    return len({stage.replica for stage in judged_part(plan).stages if stage.module == "llm"})


@pytest.mark.parametrize("tokens", [TokenRule.EXCHANGED, TokenRule.CONTIGUOUS, TokenRule.ROUND_ROBIN])
@pytest.mark.parametrize(
    ("placement", "sizes", "node", "cp", "replicas"),
    [
        pytest.param(Placement.ISLANDS, ISLANDS, (4, 4), {"llm": 2}, 1, id="islands"),
        pytest.param(Placement.ISLANDS, ISLANDS, (2, 1), {"llm": 2}, 2, id="a-port-of-two"),
        pytest.param(Placement.ISLANDS, ISLANDS, (4, 1), {"llm": 2}, 4, id="a-port-of-all"),
        pytest.param(Placement.ISLANDS, ISLANDS, (3, 1), {"llm": 2}, 4, id="that-lie-unlike"),
        pytest.param(Placement.ISLANDS, ISLANDS, (4, 4), {"llm": 2, "vision": 2}, 1, id="encoders-too"),
        pytest.param(Placement.ISLANDS, FAN_IN, (4, 4), {"llm": 2, "audio": 2}, 1, id="fan-in"),
        pytest.param(Placement.TOGETHER, TOGETHER, (2, 1), {"llm": 2}, 2, id="together-a-port-of-two"),
        pytest.param(
            Placement.EVERYWHERE, TOGETHER, (2, 1), dict.fromkeys(MODULES, 2), 1, id="on-the-same-ranks"
        ),
    ],
)
def test_equal_owners(placement, sizes, node, cp, replicas, tokens) -> None:
    assert holds(sharded(placement, sizes, node=node, cp=cp, tokens=tokens)) == replicas


@pytest.mark.parametrize("change", [swapped, finer])
@pytest.mark.parametrize("replica", [0, 2])
def test_a_replica_with_other_owners_stands_for_itself(change: Change, replica: int) -> None:
    plan = with_owners(sharded(), replica, change)
    assert [[one.replicas[-1][1] for one in each] for each in alike_replicas(plan)] == (
        [[0], [1, 2, 3]] if replica == 0 else [[0, 1, 3], [2]]
    )
    assert holds(plan) == 2


def test_owners_of_another_microbatch_are_others() -> None:
    """All replicas have the same shards, but one has them of its microbatches the other way round."""
    plan = with_owners(sharded(), 1, swapped, microbatch=1)
    for replica in (0, 2, 3):
        plan = with_owners(plan, replica, swapped, microbatch=0)
    assert holds(plan) == 2


def test_a_row_without_a_shard_is_zigzag_in_its_replica_alone() -> None:
    plan = sharded()
    kept = tuple(each for each in plan.token_shards if (each.replica, each.microbatch) != (3, 1))
    assert holds(replace(plan, token_shards=kept)) == 2


@pytest.mark.parametrize("sharding", [Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS])
def test_whatever_is_sharded_besides(sharding: Sharding) -> None:
    plan = sharded(sharding=sharding)
    assert holds(plan) == 1
    assert holds(with_owners(plan, 1, swapped)) > 1


@pytest.mark.parametrize("kind", [KeyExchange.RING, KeyExchange.ALL_TO_ALL])
def test_keys_that_go_another_way(kind: KeyExchange) -> None:
    plan = sharded()
    settings = plan.settings.with_module(ModuleSettings(module="llm", key_exchange=kind))
    plan = replace(plan, settings=settings)
    check_key_exchange(plan)
    assert holds(plan) == 1


def held_by_one(shard: TokenShard) -> TokenShard:
    return replace(shard, owners=(0,) * len(shard.owners))


@pytest.mark.parametrize("replica", [0, 3])
def test_what_does_not_fit_is_refused_as_the_whole(replica: int) -> None:
    """With memory for all replicas but the one in which a rank owns all tokens of a row, and for none."""
    plan = sharded()
    changed = with_owners(plan, replica, held_by_one)
    most = [max(peak_bytes(of, memory_table(of)).values()) for of in map(lower, (plan, changed))]
    assert most[0] < most[1]
    for limit, is_refused in ((most[0], False), (most[0] - 1, True)):
        assert isinstance(in_brief(sharded(node=(4, 4, limit))), str) == is_refused
        holds(sharded(node=(4, 4, limit)))
        tight = with_owners(sharded(node=(4, 4, limit)), replica, held_by_one)
        assert "does not fit" in str(in_brief(tight))
        holds(tight)


@pytest.mark.parametrize("replica", [0, 3])
def test_shards_that_break_a_rule_are_refused_as_of_the_whole(replica: int) -> None:
    plan = sharded()
    assert isinstance(in_brief(plan), float)
    broken = with_owners(plan, replica, short)
    message = in_brief(broken)
    assert f"llm[{replica}] microbatch 0 row 0" in str(message)
    assert message == in_full(broken)


@pytest.mark.parametrize("changed", [{"replica": 4}, {"microbatch": 9}, {"row": 9}, {"module": "sound"}])
def test_a_shard_of_nothing_is_refused_though_all_components_are_equal(changed: dict[str, object]) -> None:
    plan = sharded()
    assert isinstance(in_brief(plan), float)
    lost = replace(plan, token_shards=(*plan.token_shards, replace(plan.token_shards[-1], **changed)))
    with pytest.raises(ValueError, match="token shard"):
        check(lost)


def test_a_row_with_two_shards_is_refused_in_every_replica() -> None:
    plan = sharded()
    assert isinstance(in_brief(plan), float)
    twice = replace(plan, token_shards=plan.token_shards * 2)
    with pytest.raises(ValueError, match="an owner for every token already"):
        check(twice)


def test_a_part_has_the_shards_of_its_replicas_alone() -> None:
    plan = sharded(cp={"llm": 2, "vision": 2})
    part = part_of(plan, components(plan)[1].replicas)
    assert {(each.module, each.replica) for each in part.token_shards} == {("llm", 1), ("vision", 1)}
    assert len(part.token_shards) * len(components(plan)) == len(plan.token_shards)
