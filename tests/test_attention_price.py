"""Attention's time given from outside: what `price` does with it, and what the simulation gives."""

from dataclasses import replace

import numpy as np
import pytest

from sim.attention.gpu import COMPUTE_UNITS
from sim.attention.pieces import Order, Split
from sim.attention.policies import Kernel, Launches, Wires, simulate_attention
from sim.attention.price import (
    SimulatedAttention,
    attention_of,
    column_tiles,
    gpu_of,
    rank_tiles,
    row_tiles,
    weights,
    wires_of,
)
from sim.predict import prices_of
from tests.plans import LINK, disjoint_plan, finish
from workbench.balance.tokens.policies import contiguous, longest_first, zigzag
from workbench.cost.hardware import Cluster, Node
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile, load_profile
from workbench.data.sample import Item, Sample, Segment
from workbench.masks.bitfield import dense
from workbench.masks.builders import causal, full
from workbench.masks.patterns import sample_bitfield
from workbench.masks.tiles import classify, row_work
from workbench.model.layer import Attention, Layer, LayerKind, Matmul, TokenCount
from workbench.model.model_graph import ModelGraph, Module
from workbench.plan.lower import lower
from workbench.plan.plan import Microbatch, Plan, Precision, TokenShard
from workbench.plan.routing import routing_of
from workbench.plan.token_owners import owned_tokens
from workbench.timing.attention import AttentionCall, AttentionTime
from workbench.timing.price import price

HEADS = Attention(name="attention", num_heads=4, num_kv_heads=2, head_dim=64, causal=True)
BLOCK = 128
LENGTH = 8 * BLOCK


def linear(name: str) -> Matmul:
    return Matmul(name=name, in_features=256, out_features=256)


def llm(trainable: bool = True) -> ModelGraph:
    layers = tuple(
        Layer(
            name=f"block.{index}",
            kind=LayerKind.BLOCK,
            operators=(linear("qkv"), HEADS, linear("out")),
            out_width=256,
            trainable=trainable,
        )
        for index in range(2)
    )
    return ModelGraph(name="llm", modules=(Module(name="llm", modality="text", layers=layers),), edges=())


def plan_of(cp: int = 1, owners=None, *, mask: str = "causal") -> Plan:
    segments = (Segment("text", 0, LENGTH - 256, LENGTH - 256), Segment("image", 0, 256, 256))
    plan = disjoint_plan(llm(), [Sample(0, segments, mask)], grids={"llm": (cp, 1)})
    if owners is None:
        return plan
    shard = TokenShard(
        module="llm", replica=0, microbatch=0, row=0, block_tokens=BLOCK, owners=tuple(map(int, owners))
    )
    return replace(plan, token_shards=(shard,))


def cost_of(flop_per_s: float = 1e9) -> CostModel:
    return CostModel(ideal_profile(flop_per_s=flop_per_s, bytes_per_s=1e9))


def prices(plan: Plan, attention=None) -> dict[str, float]:
    return {str(a): s for a, s in price(lower(plan), cost_of(), attention=attention).durations_s.items()}


def time_of(plan: Plan, operator: Attention = HEADS, *, num_units: int = 4) -> AttentionTime | None:
    """What the simulation says of the plan's first microbatch."""
    stage, microbatch = plan.stages[0], plan.microbatches[0]
    call = AttentionCall(plan=plan, stage=stage, microbatch=microbatch, operator=operator)
    return SimulatedAttention(cost_of(), num_units=num_units)(call)


def test_without_an_answer_prices_are_those_of_the_cost_model():
    plan = plan_of()
    assert prices(plan, attention=lambda _: None) == prices(plan)


def test_given_times_replace_those_of_the_cost_model():
    """Two layers; the first layer's attention lies between its first weights and its output."""
    plan = plan_of()
    free = prices(plan, attention=lambda _: AttentionTime(forward_s=0.0, backward_s=0.0))
    given = prices(plan, attention=lambda _: AttentionTime(forward_s=2.0, backward_s=5.0))
    assert given["0F0"] - free["0F0"] == pytest.approx(2 * 2.0)
    assert given["0B0"] - free["0B0"] == pytest.approx(2 * 5.0)
    assert free["0F0"] < prices(plan)["0F0"]


def test_reasons_reach_the_price():
    time = AttentionTime(forward_s=0.0, backward_s=0.0, unmeasured=frozenset({"a guess"}))
    assert "a guess" in price(lower(plan_of()), cost_of(), attention=lambda _: time).unmeasured


def test_the_model_is_told_which_attention_it_prices():
    plan = plan_of()
    calls = []
    prices(plan, attention=calls.append)
    assert {call.operator for call in calls} == {HEADS}
    assert {(call.stage.id, call.microbatch.index) for call in calls} == {(0, 0)}
    assert all(call.plan is plan for call in calls)


def test_microbatches_of_equal_rows_and_owners_share_a_price_and_no_others_do() -> None:
    """As if each had been asked for alone: a model without an identity is asked for every microbatch.

    Owners of the fourth have as many tokens and pairs as zigzag's, in other blocks.
    """
    lengths, masks = (LENGTH, LENGTH // 2, LENGTH), ("causal", "causal", "full")
    batch = [
        Sample(number, (Segment("text", 0, length, length),), mask)
        for number, (length, mask) in enumerate(zip(lengths * 3, masks * 3, strict=True))
    ]
    plan = disjoint_plan(llm(), batch, grids={"llm": (2, 1)})
    owners = {0: (0, 0, 0, 0, 1, 1, 1, 1), 3: (0, 1, 1, 0, 1, 0, 0, 1), 5: (0, 0, 0, 1, 1, 1, 0, 1)}
    shards = tuple(
        TokenShard(module="llm", replica=0, microbatch=at, row=0, block_tokens=BLOCK, owners=of)
        for at, of in owners.items()
    )
    for each in (plan, replace(plan, token_shards=shards)):
        cost, lowered, asked = CostModel(load_profile("H100")), lower(each), []
        simulated = SimulatedAttention(cost, num_units=13)

        def alone(call: AttentionCall, simulated=simulated, asked=asked) -> AttentionTime | None:
            asked.append(call.microbatch.index)
            return simulated(call)

        apart = price(lowered, cost, attention=alone).durations_s
        assert set(asked) == set(range(len(batch)))
        assert price(lowered, cost, attention=simulated).durations_s == apart
        assert len({apart[action] for action in apart if str(action).startswith("0F")}) >= 3


def test_negative_times_are_refused():
    with pytest.raises(ValueError, match="attention: want times >= 0"):
        AttentionTime(forward_s=-1.0, backward_s=0.0)


@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_tiles_by_row_slot_and_column(num_slots):
    """Of 8 x 8 causal tiles, row i has i + 1 and column j has 8 - j; partial ones are the diagonal."""
    tiles = classify(causal(LENGTH), causal(LENGTH), BLOCK, BLOCK)
    rows = row_tiles(tiles, num_slots=num_slots, partial_tile=1.5)
    assert rows.shape == (8, num_slots)
    assert rows.sum(axis=1).tolist() == [i + 1.5 for i in range(8)]
    for row, slots in enumerate(rows):
        width = 8 // num_slots
        full_tiles = [min(max(row - slot * width, 0), width) for slot in range(num_slots)]
        full_tiles[row // width] += 1.5
        assert slots.tolist() == full_tiles
    assert column_tiles(tiles).tolist() == [8 - j for j in range(8)]
    assert weights(tiles).sum() == row_work(tiles).sum() == 36


def test_ranks_own_the_tokens_of_their_blocks():
    owners = (0, 1, 1, 0, 1, 0, 0, 1)
    plan = plan_of(2, owners)
    found = owned_tokens(routing_of(plan), plan.microbatches[0])
    assert [tokens.tolist() for tokens in found] == [
        [t for t in range(LENGTH) if owners[t // BLOCK] == rank] for rank in range(2)
    ]
    short = replace(plan, token_shards=(replace(plan.token_shards[0], owners=owners[:7]),))
    with pytest.raises(ValueError, match="row 0: 7 blocks of 128 do not cover 1024 tokens"):
        owned_tokens(routing_of(short), short.microbatches[0])


@pytest.mark.parametrize("mask", ["causal", "full", "multimodal", "gemma"])
def test_tiles_of_the_ranks_are_those_of_the_mask(mask):
    plan = plan_of(mask=mask)
    field = sample_bitfield([plan.batch])
    owned = [
        np.concatenate([np.arange(r * BLOCK, (r + 1) * BLOCK) for r in rows]) for rows in ([0, 3, 7], [5])
    ]
    for tokens, tiles in zip(owned, rank_tiles(field, owned), strict=True):
        seen = dense(field.take(tokens), field).reshape(-1, BLOCK, LENGTH // BLOCK, BLOCK).any(axis=(1, 3))
        assert row_tiles(tiles)[:, 0].tolist() == seen.sum(axis=1).tolist()
        assert column_tiles(tiles).tolist() == seen.sum(axis=0).tolist()


def test_a_stage_takes_what_its_slowest_rank_takes():
    """Causal over two ranks: contiguous gives one of them 26 of 36 tiles, zigzag 18."""
    cost = cost_of()
    model = SimulatedAttention(cost, num_units=1, kernel=Kernel(order=Order.STATIC, split=Split.NONE))
    work = np.arange(1, 9)
    seconds = {}
    for policy in (contiguous, zigzag, longest_first):
        plan = plan_of(2, policy(work, 2))
        seconds[policy] = (
            prices(plan, model)["0F0"]
            - prices(plan, lambda _: AttentionTime(forward_s=0, backward_s=0))["0F0"]
        )
    tile_s = gpu_of(cost, HEADS, precision="float32", num_units=1).timing.tile_s
    # 4 heads, 2 layers; the gathers and the blocks' loads and stores come on top.
    assert seconds[contiguous] == pytest.approx(26 * 4 * 2 * tile_s, rel=0.05)
    assert seconds[zigzag] == pytest.approx(18 * 4 * 2 * tile_s, rel=0.05)
    assert seconds[longest_first] == pytest.approx(seconds[zigzag], rel=1e-9)


def test_without_shards_the_plan_is_zigzag():
    """1,024 tokens on 2 ranks: four runs of 256, the outer two on rank 0."""
    plan = plan_of(2)
    found = owned_tokens(routing_of(plan), plan.microbatches[0])
    assert [tokens.tolist() for tokens in found] == [
        [*range(256), *range(768, 1024)],
        [*range(256, 768)],
    ]
    by_hand = plan_of(2, zigzag(np.ones(8), 2))
    model = SimulatedAttention(cost_of(), num_units=1)
    assert prices(plan, model) == prices(by_hand, model)


def test_rows_of_a_microbatch_do_not_see_each_other():
    """Two samples of one microbatch cost as much as two of their own, but that keys travel together."""
    segments = (Segment("text", 0, LENGTH, LENGTH),)
    plan = finish(llm(), [Sample(0, segments), Sample(1, segments)], plan_of(2).stages)
    joint = Microbatch(module="llm", replica=0, index=0, rows=((Item(0, 0),), (Item(1, 0),)))
    first = replace(joint, rows=joint.rows[:1])
    alone = time_of(replace(plan, microbatches=(first,)), num_units=1)
    both = time_of(replace(plan, microbatches=(joint,)), num_units=1)
    assert both.forward_s == pytest.approx(2 * alone.forward_s - LINK.latency_s, rel=1e-9)
    assert both.backward_s == pytest.approx(2 * alone.backward_s - 2 * LINK.latency_s, rel=1e-9)


@pytest.mark.parametrize(
    "other",
    [replace(HEADS, num_keys=77), replace(HEADS, tokens_scale=0.25), replace(HEADS, tokens=TokenCount.OUT)],
)
def test_other_attentions_are_left_to_the_cost_model(other):
    assert time_of(plan_of(2), other) is None
    assert time_of(plan_of(2)) is not None


def test_what_one_rank_computes_alone_is_left_to_the_cost_model():
    assert time_of(plan_of()) is None


def test_masks_count_and_a_full_one_takes_what_its_tiles_take():
    cost, plan = cost_of(), plan_of(2, mask="full")
    by_mask = {mask: time_of(plan_of(2, mask=mask)) for mask in ("causal", "full")}
    assert by_mask["full"].forward_s > by_mask["causal"].forward_s
    owned = owned_tokens(routing_of(plan), plan.microbatches[0])
    rows = [row_tiles(tiles) for tiles in rank_tiles(full(LENGTH), owned)]
    launches = Launches(count=1, heads=4, kv_heads=2)
    gpu = gpu_of(cost, HEADS, precision="float32", num_units=4)
    wires = wires_of(cost, HEADS, launches, [LENGTH // 2] * 2, precision="float32", link=LINK)
    found = simulate_attention(rows, launches, gpu, Wires(gather_s=wires.gather_s), Kernel())
    assert by_mask["full"].forward_s == pytest.approx(found.makespan_s)


def test_answers_hold_for_one_plan():
    model = SimulatedAttention(cost_of(), num_units=1)
    first = prices(plan_of(2, zigzag(np.ones(8), 2)), model)
    prices(plan_of(2, (0,) * 7 + (1,)), model)
    assert prices(plan_of(2, zigzag(np.ones(8), 2)), model) == first


def test_a_partial_tile_is_no_cheaper_than_a_full_one():
    tiles = classify(causal(LENGTH), causal(LENGTH), BLOCK, BLOCK)
    with pytest.raises(ValueError, match="at least as long as a full one"):
        weights(tiles, 0.5)
    with pytest.raises(ValueError, match="slots of key positions: want >= 1, got 0"):
        row_tiles(tiles, num_slots=0)


def on_gpus(plan: Plan, device: str) -> Plan:
    link = load_profile("A40").machine_link("intra").link
    node = Node(device=device, num_ranks=8, memory_bytes=1 << 36)
    return replace(
        plan,
        cluster=Cluster(name="gpus", nodes=(node,), intra=link, inter=link),
        settings=replace(plan.settings, precision=Precision.BFLOAT16),
    )


def gpu_prices(plan: Plan, cost: CostModel) -> dict[str, float]:
    return {str(action): s for action, s in prices_of(lower(plan), cost).durations_s.items()}


@pytest.mark.parametrize("device", sorted(COMPUTE_UNITS))
def test_zigzag_by_hand_and_by_default_are_one_plan_at_one_price(device):
    cost = CostModel(load_profile(device))
    by_default, by_hand = (on_gpus(plan_of(2, owners), device) for owners in (None, zigzag(np.ones(8), 2)))
    assert gpu_prices(by_default, cost) == gpu_prices(by_hand, cost)


def test_a_stage_is_priced_on_its_own_device():
    """Where pools of other devices stand beside the first one's."""
    shards = zigzag(np.ones(8), 2)
    beside = CostModel(load_profile("A40"), beside={"H100": CostModel(load_profile("H100"))})
    on_h100 = on_gpus(plan_of(2, shards), "H100")
    assert gpu_prices(on_h100, beside) == gpu_prices(on_h100, beside.on("H100"))


def test_devices_of_unknown_units_are_left_to_the_table():
    cost = CostModel(load_profile("MI300X"))
    plan = on_gpus(plan_of(2), "MI300X")
    assert attention_of(plan, cost) is None
    assert attention_of(on_gpus(plan_of(1), "A40"), CostModel(load_profile("A40"))) is None
