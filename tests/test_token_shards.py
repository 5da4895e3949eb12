"""Token shards of a plan: every block of every row owned, checked, and priced as even as the policy is."""

from dataclasses import replace

import pytest

from tests.plans import disjoint_plan, two_encoders
from workbench.balance.tokens import policies as tokens
from workbench.balance.tokens.exchange import longest_first_exchanged
from workbench.data.sample import Sample, Segment
from workbench.masks.bitfield import dense
from workbench.plan.check import check
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.routing import routing_of
from workbench.plan.token_owners import row_shards
from workbench.plan.token_shards import Scope, token_shards
from workbench.plan.work import even_work_of, row_mask, work_of, works_of


def sample(index: int, text: int, images: int = 1, mask: str = "multimodal") -> Sample:
    segments = [Segment("image", k, 80, 40) for k in range(images)] + [Segment("sound", 0, 30, 15)]
    return Sample(index, (Segment("text", 0, text, text), *segments, Segment("text", 1, text, text)), mask)


def cp_plan(batch, cp: int, encoder_cp: int = 1) -> Plan:
    return disjoint_plan(two_encoders(), batch, grids={"vision": (encoder_cp, 1), "llm": (cp, 1)})


def packed(plan: Plan) -> Plan:
    """All samples of the LLM in one microbatch, a row each; nothing else changed."""
    items = [item for m in plan.microbatches if m.module == "llm" for item in m.items]
    rows = tuple((item,) for item in items)
    others = tuple(m for m in plan.microbatches if m.module != "llm")
    return replace(
        plan, microbatches=(*others, Microbatch(module="llm", replica=0, index=0, rows=rows)), programs=()
    )


def pairs_of_slowest(plan: Plan, shards) -> int:
    """Query-key pairs as the price sees them: cp times the slowest rank's."""
    sharded = replace(plan, token_shards=shards)
    work = [work_of(sharded, m) for m in plan.microbatches if m.module == "llm"]
    return sum(row.attention_area for each in work for row in each.rows)


BATCH = [sample(0, 100), sample(1, 37, images=2), sample(2, 61, images=0)]


@pytest.mark.parametrize("policy", [longest_first_exchanged, tokens.zigzag, tokens.sorted_round_robin])
@pytest.mark.parametrize("scope", Scope)
def test_every_block_of_every_row_has_an_owner(policy, scope):
    plan = cp_plan(BATCH, cp=4)
    shards = token_shards(plan, "llm", policy, block_tokens=16, scope=scope)
    assert [(s.module, s.microbatch, s.row) for s in shards] == [("llm", m, 0) for m in range(len(BATCH))]
    for shard, each in zip(shards, BATCH, strict=True):
        assert len(shard.owners) == -(-each.num_tokens // 16)
    check(replace(plan, token_shards=shards))
    assert shards == token_shards(plan, "llm", policy, block_tokens=16, scope=scope)


def test_work_is_the_tiles_of_the_mask():
    """The owners are the policy's on tiles counted from the dense mask, the sample being one row."""
    plan = cp_plan(BATCH[:1], cp=3)
    (shard,) = token_shards(plan, "llm", tokens.longest_first, block_tokens=32)
    mask = row_mask(plan, plan.model.module("llm"), plan.microbatches_of["llm", 0][0].rows[0])
    attends = dense(mask, mask)
    cuts = range(0, len(mask), 32)
    tiles = [sum(bool(attends[q : q + 32, k : k + 32].any()) for k in cuts) for q in cuts]
    assert list(shard.owners) == tokens.longest_first(tiles, 3).tolist()


def test_balanced_shards_price_lower_than_positions():
    plan = cp_plan([sample(0, 700, images=8)], cp=4)
    balanced = pairs_of_slowest(plan, token_shards(plan, "llm", longest_first_exchanged, block_tokens=8))
    by_position = pairs_of_slowest(plan, token_shards(plan, "llm", tokens.contiguous, block_tokens=8))
    whole = sum(even_work_of(plan, m).attention_area for m in plan.microbatches if m.module == "llm")
    assert whole <= balanced < 1.05 * whole < by_position


def test_rows_of_a_microbatch_are_evened_out_together():
    """Short rows that no rank can share evenly add up to an even microbatch."""
    plan = packed(cp_plan([sample(index, 20 + 7 * index, mask="causal") for index in range(6)], cp=4))
    together, alone = (
        pairs_of_slowest(
            plan, token_shards(plan, "llm", longest_first_exchanged, block_tokens=32, scope=scope)
        )
        for scope in (Scope.MICROBATCH, Scope.ROW)
    )
    assert together < alone


def test_encoder_rows_are_cut_at_their_in_count():
    plan = cp_plan(BATCH[:2], cp=1, encoder_cp=2)
    shards = token_shards(plan, "vision", tokens.longest_first, block_tokens=16)
    assert [len(shard.owners) for shard in shards] == [80 // 16] * 3
    assert token_shards(plan, "llm", tokens.longest_first) == ()
    check(replace(plan, token_shards=shards))


def test_short_rows_get_smaller_blocks():
    plan = cp_plan([Sample(0, (Segment("text", 0, 20, 20),)), Sample(1, (Segment("text", 0, 1, 1),))], cp=4)
    shards = token_shards(plan, "llm", tokens.longest_first)
    assert [(s.block_tokens, len(s.owners)) for s in shards] == [(4, 5), (1, 1)]
    assert set(shards[0].owners) == {0, 1, 2, 3}


def test_bad_input_is_refused():
    plan = cp_plan(BATCH, cp=2)
    with pytest.raises(ValueError, match="power of two, got 100: try 64"):
        token_shards(plan, "llm", tokens.longest_first, block_tokens=100)
    with pytest.raises(ValueError, match="power of two, got 0: try 1"):
        token_shards(plan, "llm", tokens.longest_first, block_tokens=0)
    with pytest.raises(ValueError, match="nose"):
        token_shards(plan, "nose", tokens.longest_first)


def texts(*samples: tuple[int, str], cp: int) -> Plan:
    """Texts of such lengths under such masks, all in one row of the LLM."""
    batch = [Sample(k, (Segment("text", 0, n, n),), mask) for k, (n, mask) in enumerate(samples)]
    plan = cp_plan(batch, cp)
    row = tuple(item for m in plan.microbatches_of["llm", 0] for item in m.items)
    microbatch = Microbatch(module="llm", replica=0, index=0, rows=(row,))
    return replace(plan, microbatches=(microbatch,), programs=())


DOCUMENTS = "causal_document(lengths=[48, 8, 8])"


@pytest.mark.parametrize(
    ("samples", "pairs"),
    [
        pytest.param([(64, DOCUMENTS)], [72, 136, 520, 520], id="documents"),
        pytest.param([(64, "sliding_window(window=16)")], None, id="window"),
        pytest.param([(64, "prefix_lm(prefix=32)")], None, id="prefix"),
        pytest.param([(48, "causal"), (8, "causal"), (8, "causal")], [72, 136, 520, 520], id="packed"),
        pytest.param([(32, "full"), (32, "causal")], None, id="packed-masks"),
        pytest.param([(48, "full"), (16, "full")], None, id="packed-full"),
        pytest.param([(64, "causal")], [520] * 4, id="causal"),
        pytest.param([(64, "full")], [1024] * 4, id="full"),
        pytest.param([(16, "causal")] * 4, [136] * 4, id="packed-equal"),
    ],
)
def test_zigzag_without_shards_counts_as_what_its_busiest_rank_has(samples, pairs):
    """Of the dense mask's rows on each rank: 8 blocks of 8 tokens, the outermost two on rank 0."""
    plan = texts(*samples, cp=4)
    (microbatch,) = plan.microbatches
    mask = row_mask(plan, plan.model.module("llm"), microbatch.rows[0])
    by_block = dense(mask, mask).sum(axis=1).reshape(8, 8).sum(axis=1).tolist()
    by_rank = [by_block[rank] + by_block[7 - rank] for rank in range(4)]
    assert pairs is None or by_rank == pairs
    (work,) = works_of(plan, microbatch)
    assert (work.rows[0].tokens_in, work.attention_area) == (64, 4 * max(by_rank))
    spelled = replace(plan, token_shards=row_shards(routing_of(plan), microbatch))
    assert works_of(spelled, microbatch) == (work,)
    assert works_of(replace(plan, stages=()), microbatch) == (even_work_of(plan, microbatch),)


def test_encoder_items_of_a_row_are_shared_by_zigzag_too():
    """80 and 16 tokens that see their own item alone, in one row over 2 ranks of 4 blocks of 24."""
    batch = [Sample(0, (Segment("image", 0, 80, 40), Segment("image", 1, 16, 8), Segment("text", 0, 9, 9)))]
    plan = cp_plan(batch, cp=1, encoder_cp=2)
    (microbatch,) = plan.microbatches_of["vision", 0]
    items = tuple(item for row in microbatch.rows for item in row)
    (work,) = works_of(plan, replace(microbatch, rows=(items,)))
    assert work.attention_area == 2 * max(24 * 80 + 8 * 80 + 16 * 16, 48 * 80)
