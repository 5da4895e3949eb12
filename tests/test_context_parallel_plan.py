"""Context-parallel lowering: rows carry the tokens that ranks hold, and gradients come back once."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plans import WIDTH, cluster, disjoint_plan, sample, two_encoders
from workbench.data.sample import Sample, Segment
from workbench.memory.sizes import Sizes
from workbench.model.layer import TokenCount
from workbench.plan import lower as lowering
from workbench.plan.build import with_programs
from workbench.plan.check import check
from workbench.plan.crossing import shape_of
from workbench.plan.deadlock import check_deadlock
from workbench.plan.gradient_groups import gradient_groups
from workbench.plan.lower import lower
from workbench.plan.lowered import Direction, Route, Slice, Transfer
from workbench.plan.lru_cache import clear_caches
from workbench.plan.microbatches import batched_microbatches
from workbench.plan.plan import Plan, TokenShard
from workbench.plan.routing import routing_of
from workbench.plan.token_owners import held_runs, owned_parts, row_shards, row_tokens

BATCH = [sample(0), sample(1, images=0), sample(2, images=2, sounds=0), sample(3, images=0, sounds=0)]


def cp_plan(cp: int = 2, encoder_cp: int = 1, batch=None, trainable: bool = True) -> Plan:
    """Vision and audio on ranks of their own, then two LLM stages of cp ranks each."""
    model = two_encoders(vision=(True,) * 2, audio=(True,) * 2, llm=(trainable,) * 4)
    cuts = {"vision": (2,), "audio": (2,), "llm": (2, 2)}
    grids = {"vision": (encoder_cp, 1), "audio": (encoder_cp, 1), "llm": (cp, 1)}
    return disjoint_plan(model, BATCH if batch is None else batch, cuts, grids=grids)


def shards_of(plan: Plan, draw: st.DrawFn, cp: int) -> tuple[TokenShard, ...]:
    """Any owners at all, also ranks without a token."""
    routing = routing_of(plan)
    shards = []
    for microbatch in plan.microbatches:
        if microbatch.module != "llm":
            continue
        for row, tokens in enumerate(row_tokens(routing, microbatch)):
            block = draw(st.integers(1, 5))
            owners = draw(
                st.lists(st.integers(0, cp - 1), min_size=-(-tokens // block), max_size=-(-tokens // block))
            )
            shards.append(
                TokenShard(
                    module="llm",
                    replica=0,
                    microbatch=microbatch.index,
                    row=row,
                    block_tokens=block,
                    owners=tuple(owners),
                )
            )
    return tuple(shards)


@st.composite
def sharded(draw: st.DrawFn) -> Plan:
    cp = draw(st.sampled_from([1, 2, 3, 4]))
    plan = cp_plan(cp)
    return replace(plan, token_shards=shards_of(plan, draw, cp))


def owner_of(plan: Plan, microbatch: int, token: int) -> int:
    """The definition: block by block, one row per LLM microbatch here."""
    shard = plan.token_shard["llm", 0, microbatch, 0]
    return shard.owners[token // shard.block_tokens]


@given(sharded())
def test_a_rank_sends_the_next_stage_exactly_its_tokens(plan: Plan) -> None:
    check(plan)
    lowered = lower(plan)
    check_deadlock(lowered)
    first, second = plan.stage[2], plan.stage[3]
    rows = {(t.producer, t.source_rank): t for t in lowered.transfers if t.edge == "llm"}
    for microbatch in plan.microbatches_of["llm", 0]:
        tokens = plan.sample[microbatch.items[0].sample].num_tokens
        owners = [owner_of(plan, microbatch.index, token) for token in range(tokens)]
        for index in range(first.cp):
            forward = [
                t
                for (a, r), t in rows.items()
                if r == first.ranks[index][0] and a.microbatch == microbatch.index
            ]
            count = owners.count(index)
            assert len(forward) == (count > 0)
            for row in forward:
                assert row.slices == (Slice(microbatch.items[0], 0, 0, count),)
                assert (row.num_tokens, row.num_bytes) == (count, count * WIDTH * 4)
                assert row.destination_ranks == second.ranks[index]


@given(sharded())
def test_features_go_to_the_owner_of_every_token_and_their_gradients_come_back_from_it(plan: Plan) -> None:
    """Every token crosses once each way, and nothing is broadcast."""
    lowered = lower(plan)
    stage = plan.stage[2]
    for edge, modality in (("vision>llm", "image"), ("audio>llm", "sound")):
        for target in plan.microbatches_of["llm", 0]:
            item = plan.sample[target.items[0].sample]
            places, start = [], 0
            for segment in item.segments:
                if segment.modality == modality:
                    places += range(start, start + segment.tokens_out)
                start += segment.tokens_out
            owners = [stage.ranks[owner_of(plan, target.index, index)][0] for index in places]
            rows = [t for t in lowered.transfers if t.edge == edge]
            assert all(t.route is Route.P2P for t in rows)
            there = [
                t for t in rows if t.direction is Direction.FORWARD and t.consumer.microbatch == target.index
            ]
            back = [
                t for t in rows if t.direction is Direction.BACKWARD and t.producer.microbatch == target.index
            ]
            received = [
                (t.destination_rank, index) for t in there for index in tokens(t, "destination_start")
            ]
            returned = [(t.source_rank, index) for t in back for index in tokens(t, "source_start")]
            own = [(rank, index) for rank in stage.flat_ranks for index in range(owners.count(rank))]
            assert sorted(received) == sorted(returned) == own


@st.composite
def of_few_sizes(draw: st.DrawFn) -> Plan:
    """Samples of two sizes, some to a microbatch, with owners or without."""
    sizes = draw(st.lists(st.booleans(), min_size=4, max_size=8).filter(lambda sizes: len(sizes) % 2 == 0))
    batch = [sample(at, images=1 + big, sounds=1 - big) for at, big in enumerate(sizes)]
    cp = draw(st.integers(1, 3))
    plan = replace(cp_plan(cp, draw(st.integers(1, 2)), batch), programs=(), microbatches=())
    count = draw(st.integers(1, 2))
    microbatches = batched_microbatches(plan, samples_per_microbatch=count, replicas=range(1))
    plan = with_programs(replace(plan, microbatches=microbatches))
    return replace(plan, token_shards=shards_of(plan, draw, cp)) if draw(st.booleans()) else plan


@given(of_few_sizes())
def test_rows_are_those_of_every_microbatch_lowered_by_itself(plan: Plan) -> None:
    def by_name(*given: Any) -> tuple[tuple[object, ...], tuple[int, ...]]:
        shape, samples = shape_of(*given)
        return (shape, samples, given[1][-1].index), samples

    rows = lower(plan).transfers
    clear_caches()
    with patch.object(lowering, "shape_of", by_name):
        assert lower(replace(plan)).transfers == rows


def tokens(row: Transfer, end: str) -> list[int]:
    """Places of a row's tokens in the tensor at one end."""
    starts = ((getattr(piece, end), piece.num_tokens) for piece in row.slices)
    return [index for start, count in starts for index in range(start, start + count)]


def test_fewer_tokens_travel_than_through_leaders() -> None:
    """6 features from 2 ranks to 4: through leaders each of the 4 would receive all of them, 24 tokens, and
    each of the 2 all of their gradient, 12."""
    plan = cp_plan(4, encoder_cp=2, batch=[sample(0, images=0, sounds=2)])
    rows = [t for t in lower(plan).transfers if t.edge == "audio>llm"]
    received = {
        direction: sum(t.num_tokens * len(t.destination_ranks) for t in rows if t.direction is direction)
        for direction in Direction
    }
    assert received == {Direction.FORWARD: 6, Direction.BACKWARD: 6}


def test_backward_slices_lead_to_the_producers_tokens() -> None:
    """Microbatch of two images: the second one's tokens start behind the first's."""
    plan = cp_plan(2, batch=[sample(0, images=2, sounds=0)])
    shard = TokenShard(module="llm", replica=0, microbatch=0, row=0, block_tokens=7, owners=(0, 1, 0))
    rows = lower(replace(plan, token_shards=(shard,))).transfers
    # 15 tokens: text 0-4, images 5-8 and 9-12, text 13-14; rank 2 owns 0-6 and 14, rank 3 owns 7-13.
    back = {
        t.source_rank: t.slices for t in rows if t.edge == "vision>llm" and t.direction is Direction.BACKWARD
    }
    first, second = (item for item in plan.microbatches[0].items)
    assert back == {2: (Slice(first, 0, 0, 2),), 3: (Slice(first, 0, 2, 2), Slice(second, 2, 4, 4))}


def test_without_shards_a_row_is_cut_zigzag() -> None:
    plan = cp_plan(2, batch=[sample(0, images=0, sounds=0, text=6)])
    llm = plan.microbatches_of["llm", 0][0]
    (shard,) = row_shards(routing_of(plan), llm)
    assert (shard.block_tokens, shard.owners) == (2, (0, 1, 1, 0))
    short = cp_plan(4, batch=[sample(0, images=0, sounds=0, text=1)])
    (shard,) = row_shards(routing_of(short), short.microbatches_of["llm", 0][0])
    assert (shard.block_tokens, shard.owners) == (1, (0, 1, 2))  # rank 3 has none of the 3 tokens


@given(st.integers(1, 9), st.lists(st.integers(0, 3), min_size=1, max_size=9), st.data())
def test_owned_parts_say_what_every_block_says(block: int, owners: list[int], data) -> None:
    shard = TokenShard(module="m", replica=0, microbatch=0, row=0, block_tokens=block, owners=tuple(owners))
    stop = data.draw(st.integers(0, block * len(owners)))
    start = data.draw(st.integers(0, stop))
    parts = list(owned_parts(shard, start, stop))
    assert [o for o, a, b in parts for _ in range(a, b)] == [owners[t // block] for t in range(start, stop)]
    assert all(one[0] != two[0] and one[2] == two[1] for one, two in pairwise(parts))


def test_a_context_parallel_encoder_hands_over_what_each_rank_holds() -> None:
    """Behind the layer that halves the tokens, a token belongs to the owner of its fraction of the item."""
    plan = cp_plan(2, encoder_cp=2, batch=[sample(0, images=1, sounds=1)])
    routing = routing_of(plan)
    vision = plan.microbatches_of["vision", 0][0]
    shard = TokenShard(module="vision", replica=0, microbatch=0, row=0, block_tokens=3, owners=(0, 1, 0))
    routing = routing_of(replace(plan, token_shards=(shard,)))
    inside = held_runs(routing, vision, TokenCount.IN)
    behind = held_runs(routing, vision, TokenCount.OUT)
    assert [sum(run.num_tokens for run in runs) for runs in inside] == [5, 3]
    assert [[(run.first, run.num_tokens) for run in runs] for runs in behind] == [[(0, 2), (3, 1)], [(2, 1)]]
    lowered = lower(replace(plan, token_shards=(shard,)))
    check_deadlock(lowered)
    rows = [t for t in lowered.transfers if t.edge == "vision>llm"]
    assert {t.route for t in rows} == {Route.P2P}
    # the LLM's zigzag puts all four features on its second rank
    assert [(t.direction, t.source_rank, t.destination_rank, t.num_tokens) for t in rows] == [
        (Direction.FORWARD, 0, 5, 3),
        (Direction.FORWARD, 1, 5, 1),
        (Direction.BACKWARD, 5, 0, 3),
        (Direction.BACKWARD, 5, 1, 1),
    ]


def test_context_parallel_ranks_share_one_gradient_group() -> None:
    groups = gradient_groups(cp_plan(2))
    assert {group.ranks for group in groups if group.weights[0].module == "llm"} == {(2, 3), (4, 5)}


@given(sharded())
def test_the_account_is_that_of_the_rank_that_holds_most_tokens(plan: Plan) -> None:
    """A first stage's output, one row a microbatch: by the definition of owners, of the rank with most."""
    routing, (stage, _) = routing_of(plan), plan.chain["llm", 0]
    sizes = Sizes(plan, routing)
    for microbatch in plan.microbatches_of["llm", 0]:
        (tokens,) = row_tokens(routing, microbatch)
        held = Counter(owner_of(plan, microbatch.index, token) for token in range(tokens))
        expected = max(held.values()) * WIDTH * plan.settings.precision.num_bytes
        assert sizes.of(stage, microbatch, keeps=True).output == expected


def test_an_account_goes_by_tokens_not_by_pairs() -> None:
    """Of 1000 causal tokens one rank holds the first 600 and another 400 with more pairs; an encoder's
    items of 10 tokens lie 6 and 4, of which 5 features come out, 3 and 2."""
    batch = [Sample(0, (Segment("image", 0, 10, 5), Segment("text", 0, 995, 995)), "causal")]
    cuts = {"vision": (3,), "audio": (2,), "llm": (2, 2)}
    plan = disjoint_plan(two_encoders(), batch, cuts, grids={"vision": (2, 1), "llm": (2, 1)})
    shards = tuple(
        TokenShard(module=name, replica=0, microbatch=0, row=0, block_tokens=size, owners=(0, 0, 0, 1, 1))
        for name, size in (("vision", 2), ("llm", 200))
    )
    cut = replace(plan, token_shards=shards)
    sizes, element_bytes = Sizes(cut, routing_of(cut)), plan.settings.precision.num_bytes
    for name, most in (("vision", 3), ("llm", 600)):
        stage, (microbatch,) = cut.chain[name, 0][0], cut.microbatches_of[name, 0]
        assert sizes.of(stage, microbatch, keeps=True).output == most * WIDTH * element_bytes


def bad(plan: Plan, **changes: object) -> Plan:
    shard = TokenShard(module="llm", replica=0, microbatch=0, row=0, block_tokens=7, owners=(0, 1))
    return replace(plan, token_shards=(replace(shard, **changes),))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"owners": (0, 1, 0)}, r"row 0: 14 tokens are 2 blocks of 7, want as many owners, got 3"),
        ({"owners": (0,)}, r"14 tokens are 2 blocks of 7, want as many owners, got 1"),
        ({"owners": (0, 2)}, r"owners in 0\.\.1, got 7 tokens and owners \[0, 2\]"),
        ({"block_tokens": 0}, r"want blocks of >= 1 token .* got 0 tokens"),
        ({"row": 1}, r"row 1: the microbatch has rows 0\.\.0"),
        ({"microbatch": 4}, r"microbatch 4 row 0: the replica has microbatches 0\.\.3"),
        ({"replica": 1}, r"token shard llm\[1\] microbatch 0 row 0: there is no such replica"),
    ],
)
def test_shards_that_do_not_cover_a_row_are_refused(changes, message) -> None:
    plan = cp_plan(2)
    check(bad(plan))
    with pytest.raises(ValueError, match=message):
        check(bad(plan, **changes))


def test_two_shards_of_one_row_are_refused() -> None:
    plan = bad(cp_plan(2))
    twice = replace(plan, token_shards=plan.token_shards * 2)
    with pytest.raises(ValueError, match="the row has an owner for every token already"):
        check(twice)


def test_context_parallel_degree_must_not_change_inside_a_replica() -> None:
    plan = cp_plan(2)
    narrow = replace(plan.stages[3], ranks=((4,),))
    with pytest.raises(ValueError, match="'llm' replica 0: cp must not change"):
        check(replace(plan, stages=(*plan.stages[:3], narrow), cluster=cluster(8)))
