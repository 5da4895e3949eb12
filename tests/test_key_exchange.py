"""Ring and all-to-all attention as settings of a plan: what they refuse, compute and take."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from runtime.world.pool import Pool
from sim.attention.price import SimulatedAttention
from tests.plans import LINK, disjoint_plan, finish
from tests.test_context_parallel_step import BATCHES, modality_alone, plan_of, with_owners
from tests.test_parity import assert_same, mixed
from tests.tiny_models import LLAMA, SIGLIP, encoder, llm
from workbench.cost.hardware import Link, Node, uniform
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.data.sample import Sample, Segment
from workbench.model.layer import Attention
from workbench.model.model_graph import connect
from workbench.plan.lower import lower
from workbench.plan.plan import KeyExchange, ModuleSettings, Plan, Recompute, Settings, TokenShard
from workbench.plan.stage import Stage
from workbench.schedule.action import parse_action
from workbench.timing.accept import accept
from workbench.timing.attention import AttentionCall, AttentionTime
from workbench.timing.key_exchange import with_key_exchange
from workbench.timing.price import price
from workbench.units import GB, GIB


def exchanging(plan: Plan, kind: KeyExchange, recompute: Recompute = Recompute.NONE) -> Plan:
    modules = tuple(
        ModuleSettings(module=m.name, key_exchange=kind, recompute=recompute) for m in plan.model.modules
    )
    return replace(plan, settings=replace(plan.settings, modules=modules))


RING, ALL_TO_ALL = KeyExchange.RING, KeyExchange.ALL_TO_ALL


@pytest.mark.parametrize("kind", [RING, ALL_TO_ALL])
@pytest.mark.parametrize("distribution", ["zigzag", "random", "lpt"])
@pytest.mark.parametrize("batch", ["causal", "full"])
def test_two_ranks(batch: str, distribution: str, kind: KeyExchange, pool: Pool) -> None:
    plan = with_owners(plan_of("projectors-and-llm", batch), distribution)
    assert_same(exchanging(plan, kind), pool)


@pytest.mark.parametrize("batch", ["ee", "mp"])
def test_all_to_all_takes_any_mask(batch: str, pool: Pool) -> None:
    assert_same(exchanging(with_owners(plan_of("everything", batch), "lpt"), ALL_TO_ALL), pool)


@pytest.mark.parametrize("kind", [RING, ALL_TO_ALL])
def test_frozen_parts_and_recompute(kind: KeyExchange, pool: Pool) -> None:
    """A rank whose tokens ask for no gradient still passes the others' on."""
    plan = plan_of("vision-frozen", "causal", llm=(6,))
    sharded = replace(plan, token_shards=modality_alone(plan))
    assert_same(exchanging(sharded, kind), pool)
    assert_same(exchanging(sharded, kind, Recompute.FULL), pool)


def four_heads(cp: int, batch: Sequence[Sample]) -> Plan:
    """A language model with as many key/value heads as four ranks, on its own or behind images."""
    model = connect("mha", (encoder(SIGLIP, "vision"), llm(LLAMA | {"num_key_value_heads": 4})))
    return disjoint_plan(model, batch, grids={"llm": (cp, 1)})


def texts_and_images(*lengths: int) -> list[Sample]:
    return [
        Sample(index, (Segment("vision", 0, 9, 9), Segment("text", 0, length, length)))
        for index, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("kind", [RING, ALL_TO_ALL])
def test_four_ranks(kind: KeyExchange, pool: Pool) -> None:
    assert_same(exchanging(four_heads(4, texts_and_images(12, 1, 30)), kind), pool)


@pytest.mark.parametrize("kind", [RING, ALL_TO_ALL])
def test_encoders_too(kind: KeyExchange, pool: Pool) -> None:
    stages = [
        Stage(id=0, module="vision", replica=0, layers=(0, 2), ranks=((0,), (1,))),
        Stage(id=1, module="vision", replica=0, layers=(2, 5), ranks=((3,), (2,))),
        Stage(id=2, module="audio", replica=0, layers=(0, 4), ranks=((4,), (5,))),
        Stage(id=3, module="llm", replica=0, layers=(0, 6), ranks=((6,), (7,))),
    ]
    assert_same(exchanging(finish(mixed("everything"), BATCHES["causal"], stages), kind), pool)


def test_limits_are_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match="must be causal or full, sample 0 has 'multimodal'; want all-gather"
    ):
        accept(exchanging(plan_of("everything", "ee"), RING))
    three = plan_of("everything", "causal", cp=3)
    with pytest.raises(ValueError, match=r"must divide the 2 key/value heads of llm.*got cp = 3; want 2, or"):
        accept(exchanging(three, ALL_TO_ALL))
    accept(exchanging(three, RING))
    alone = plan_of("everything", "ee", cp=1)
    accept(exchanging(alone, RING))  # nobody to exchange with


COST = CostModel(load_profile("A40"))
WIDE = LLAMA | {"hidden_size": 128, "num_attention_heads": 16, "num_key_value_heads": 16}
TOKENS = 2048


def time_of(plan: Plan, kind: KeyExchange) -> AttentionTime:
    exchanged = exchanging(plan, kind)
    model = with_key_exchange(None, exchanged, COST)
    assert model is not None
    stage = next(stage for stage in plan.stages if stage.module == "llm")
    layers = plan.model.module("llm").layers
    operator = next(o for layer in layers for o in layer.operators if isinstance(o, Attention))
    (microbatch,) = plan.microbatches_of["llm", 0]
    found = model(AttentionCall(plan=exchanged, stage=stage, microbatch=microbatch, operator=operator))
    assert found is not None
    return found


def long_text(mask: str, cp: int = 2) -> Plan:
    sample = Sample(0, (Segment("vision", 0, 9, 9), Segment("text", 0, 16375, 16375)), mask)
    return four_heads(cp, [sample])


def test_a_ring_waits_for_its_slowest_rank_in_every_step() -> None:
    """Contiguous causal halves: all the work of the second step is one rank's, as in a full mask."""
    ring = time_of(long_text("full"), RING)
    causal = long_text("causal")
    halves = with_shards(causal, 8192, (0, 1))
    zigzag = with_shards(causal, 4096, (0, 1, 1, 0))
    assert time_of(halves, RING).forward_s > time_of(zigzag, RING).forward_s
    assert time_of(halves, RING).forward_s <= ring.forward_s
    assert time_of(halves, RING).forward_s >= 0.5 * ring.forward_s


def with_shards(plan: Plan, block_tokens: int, owners: tuple[int, ...]) -> Plan:
    shard = TokenShard(module="llm", replica=0, microbatch=0, row=0, block_tokens=block_tokens, owners=owners)
    return replace(plan, token_shards=(shard,))


def test_all_to_all_costs_the_same_whoever_holds_the_tokens() -> None:
    plan = long_text("causal")
    even = time_of(with_shards(plan, 8192, (0, 1)), ALL_TO_ALL)
    assert even == time_of(with_shards(plan, 4096, (0, 1, 1, 0)), ALL_TO_ALL)
    uneven = time_of(with_shards(plan, 4096, (0, 1, 0, 0)), ALL_TO_ALL)
    elements = 4096 * (2 * 4 + 2 * 4) * 8 / 2  # more tokens to send, half of them to the other
    more_s = elements * plan.settings.precision.num_bytes / LINK.bytes_per_s
    assert uneven.forward_s - even.forward_s == pytest.approx(more_s)
    assert uneven.backward_s - even.backward_s == pytest.approx(more_s)


def test_the_price_of_a_plan_is_that_of_its_exchange() -> None:
    plan = long_text("causal")
    forward = parse_action("1F0")
    found = {kind: price(lower(exchanging(plan, kind)), COST) for kind in KeyExchange}
    seconds = {kind: priced.duration_s(forward) for kind, priced in found.items()}
    assert len(set(seconds.values())) == len(KeyExchange)
    assert any("ring attention" in reason for reason in found[RING].unmeasured)
    assert any("all-to-all attention" in reason for reason in found[ALL_TO_ALL].unmeasured)
    layers = plan.model.module("llm").layers
    attentions = sum(isinstance(o, Attention) for layer in layers for o in layer.operators)
    gap_s = attentions * (time_of(plan, RING).forward_s - time_of(plan, ALL_TO_ALL).forward_s)
    assert seconds[RING] - seconds[ALL_TO_ALL] == pytest.approx(gap_s)


def test_settings_stand_in_the_plan() -> None:
    assert Settings().of("llm").key_exchange is KeyExchange.ALL_GATHER


def on_nodes(cp: int, tp: int, num_cards: int) -> Plan:
    """A text on sixteen ranks of two nodes, whose cards send 1 MB/s each: what computes takes no time."""
    model = connect("text", (llm(WIDE),))
    plan = disjoint_plan(model, [Sample(0, (Segment("text", 0, TOKENS, TOKENS),))], grids={"llm": (cp, tp)})
    node = Node(device="A40", num_ranks=8, memory_bytes=GIB, num_cards=num_cards)
    near = Link(name="near", bytes_per_s=100 * GB, latency_s=0.0)
    card = Link(name="card", bytes_per_s=1e6, latency_s=0.0)
    return replace(plan, cluster=uniform("nodes", node, num_nodes=2, intra=near, inter=card))


def forward_s(plan: Plan, kind: KeyExchange, cost: CostModel = COST) -> float:
    (stage,), (microbatch,) = plan.stages, plan.microbatches
    operator = next(o for layer in plan.model.llm.layers for o in layer.operators if isinstance(o, Attention))
    plan = exchanging(plan, kind)
    model = with_key_exchange(SimulatedAttention(cost), plan, cost)
    assert model is not None
    found = model(AttentionCall(plan=plan, stage=stage, microbatch=microbatch, operator=operator))
    assert found is not None
    return found.forward_s


@pytest.mark.parametrize("kind", KeyExchange)
@pytest.mark.parametrize(
    ("cp", "tp", "all_faster", "ring_faster"),
    [pytest.param(2, 8, 8.0, 8.0, id="columns-share"), pytest.param(16, 1, 8.0, 1.0, id="one-column")],
)
def test_what_leaves_a_node_goes_over_all_of_its_cards(
    kind: KeyExchange, cp: int, tp: int, all_faster: float, ring_faster: float
) -> None:
    """Eight columns share one card or have one each; of a single one a ring sends over one card at a time."""
    shared_s, own_s = (forward_s(on_nodes(cp, tp, num_cards), kind) for num_cards in (1, 8))
    faster = ring_faster if kind is RING else all_faster
    assert shared_s / own_s == pytest.approx(faster, rel=1e-2)
    keys_bytes = 2 * TOKENS / 2 * 16 * 8 * 4  # of the tokens of a node, all heads of 8 in float32
    leaving = {
        KeyExchange.ALL_GATHER: keys_bytes,
        RING: keys_bytes * (cp - 1) / (cp / 2),  # a step brings one block, and the last is not passed on
        ALL_TO_ALL: 2 * keys_bytes / 2,  # queries and outputs too; half of the heads stay
    }
    assert shared_s >= leaving[kind] / 1e6


@pytest.mark.parametrize("kind", KeyExchange)
def test_keys_go_at_the_rate_of_collectives_inside_layers(kind: KeyExchange) -> None:
    """By which `explain` tells them from kernels, and an interval how far they are in doubt."""
    plan = on_nodes(2, 8, 1)
    twice = COST.executed(replace(COST.execution, collective_rate=2.0))
    assert forward_s(plan, kind) / forward_s(plan, kind, twice) == pytest.approx(2.0, rel=1e-2)
