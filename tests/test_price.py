"""Prices of actions: sums over layers by the exact frozen rule."""

from dataclasses import replace
from itertools import product

import pytest

from tests.plans import LINK, WIDTH, cluster, disjoint_plan, sample, two_encoders
from workbench.cost import nccl
from workbench.cost.collectives import all_gather_s, all_reduce_s
from workbench.cost.execution import Execution, GradientSum
from workbench.cost.group_link import group_link
from workbench.cost.hardware import Link, Node, uniform
from workbench.cost.layer_time import slowest
from workbench.cost.model import CostModel, LayerTime, RowWork, Work
from workbench.cost.profile import ideal_profile
from workbench.data.sample import Item, Sample, Segment
from workbench.model.frozen import Needs
from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import ModelGraph
from workbench.plan.flop import model_flop
from workbench.plan.lower import lower
from workbench.plan.narrow_products import multiplying
from workbench.plan.plan import (
    Microbatch,
    ModuleSettings,
    Plan,
    Precision,
    Program,
    Recompute,
    Settings,
    Sharding,
    TokenShard,
)
from workbench.plan.work import attention_area, work_of, works_of
from workbench.schedule.action import STEP, parse_action
from workbench.schedule.sharded import ReshardAfter
from workbench.timing.pass_times import pass_times
from workbench.timing.price import price, step_bytes

LAYER_FLOP = 2 * WIDTH * WIDTH  # per token
VISION, AUDIO, LLM = 8, 6, 5 + 4 + 3 + 2  # tokens of one sample
CUTS = {"vision": (1, 2), "audio": (2,), "llm": (2, 2)}


def plan_of(*, replicas: int = 1, batch=None, model=None, settings: Settings | None = None) -> Plan:
    plan = disjoint_plan(
        model or two_encoders(), batch or [sample(i) for i in range(2)], CUTS, replicas=replicas
    )
    return plan if settings is None else replace(plan, settings=settings)


def prices(plan: Plan, **profile) -> dict[str, float]:
    cost = CostModel(ideal_profile(flop_per_s=1.0, **profile))
    return {str(action): s for action, s in price(lower(plan), cost).durations_s.items()}


def test_passes_are_flop_over_peak():
    """Stages: vision 0 (frozen) and 1 (frozen, then trainable), audio 2, llm 3 and 4."""
    found = prices(plan_of())
    assert found["0F0"] == LAYER_FLOP * VISION
    assert found["1F0"] == 2 * LAYER_FLOP * VISION
    assert "0B0" not in found
    # Only the trainable last layer has a gradient, that of its weight: nothing upstream trains.
    assert found["1B0"] == LAYER_FLOP * VISION
    assert found["3F0"] == found["3B0"] == 2 * LAYER_FLOP * LLM


def test_every_action_of_the_programs_has_a_price():
    plan = plan_of(replicas=2, batch=[sample(i) for i in range(4)])
    priced = price(lower(plan), CostModel(ideal_profile()))
    for program in plan.programs:
        for action in program.actions:
            assert priced.duration_s(action) >= 0
    with pytest.raises(ValueError, match="action 9F9 has no price"):
        priced.duration_s(parse_action("9F9"))


def test_trainable_llm_costs_two_forwards_more():
    model = two_encoders(llm=(True,) * 4)
    found = prices(plan_of(model=model))
    assert found["4B0"] == 2 * found["4F0"]


ADDED = 2 * 4 - 2  # bytes a weight: float32 read and written, or two two-byte gradients read and one written
EACH = ModuleSettings(module="llm", sharding=Sharding.PARAMETERS)


@pytest.mark.parametrize(
    ("own", "wide", "stated", "added_bytes"),
    [
        (ModuleSettings(module="llm"), None, None, ADDED),
        (EACH, None, None, 0),
        (replace(EACH, reshard_after=ReshardAfter.STEP), None, None, ADDED),
        (EACH, Precision.FLOAT32, None, ADDED),
        (EACH, None, GradientSum.MAIN, ADDED),
        (EACH, Precision.FLOAT32, GradientSum.OWN, 0),
    ],
)
def test_gradients_are_added_to_earlier_ones_unless_each_microbatchs_are_reduced(
    own, wide, stated, added_bytes
):
    settings = Settings(precision=Precision.BFLOAT16, optimizer_precision=wide, modules=(own,))
    cost = CostModel(ideal_profile(flop_per_s=1e30, bytes_per_s=1.0), Execution(gradient_sum=stated))
    layer, work = two_encoders().llm.layers[1], Work((RowWork(8, 8, 64.0),))
    backward_s, least_s = (
        each.layer_time(layer, work, tp=1, cp=1, precision="bfloat16").weight_grad_s
        for each in (
            multiplying(cost, settings, "llm"),
            cost.executed(Execution(gradient_sum=GradientSum.OWN)),
        )
    )
    assert backward_s - least_s == pytest.approx(layer.num_parameters * added_bytes)


def test_a_microbatch_without_encoders_needs_fewer_gradients():
    """A frozen LLM behind trainable projectors: a text-only sample has no backward at all."""
    batch = [sample(0), sample(1, images=0, sounds=0)]
    found = prices(plan_of(batch=batch))
    assert "3B0" in found
    assert "3F1" in found
    assert "3B1" not in found
    trained = prices(plan_of(batch=batch, model=two_encoders(llm=(True,) * 4)))
    layer_s = LAYER_FLOP * (5 + 2)
    # The first of the two layers has nothing upstream: no input gradient.
    assert trained["3B1"] == 3 * layer_s
    assert trained["4B1"] == 4 * layer_s


def test_a_backward_without_gradients_is_refused():
    plan = plan_of()
    first, *others = plan.programs
    wrong = Program(ranks=first.ranks, actions=(*first.actions[:-1], parse_action("0B0"), STEP))
    with pytest.raises(ValueError, match="action 0B0: no gradient runs in stage 0"):
        price(lower(replace(plan, programs=(wrong, *others))), CostModel(ideal_profile()))


def test_split_backward_adds_up_and_recompute_belongs_to_the_input_gradient():
    times = [
        LayerTime(1.0, 2.0, 4.0, frozenset({"a"}), 1.5),
        LayerTime(8.0, 16.0, 32.0, frozenset({"b"}), 12.0),
    ]
    for recomputed in product((False, True), repeat=2):
        for needs in ((Needs(True, True),) * 2, (Needs(False, True), Needs(True, False))):
            found = pass_times(times, needs, recomputed)
            assert found.of("B") == found.of("I") + found.of("W")
    trained = pass_times(times, (Needs(False, True), Needs(True, True)), (True, True))
    assert (trained.of("F"), trained.of("I"), trained.of("W")) == (9.0, 9.0 + 1.5 + 16.0, 36.0)
    frozen = pass_times(times, (Needs(False, False), Needs(True, False)), (True, True))
    assert frozen.of("B") == 8.0 + 16.0
    assert frozen.unmeasured == {"a", "b"}


def test_recompute_is_one_forward_more_where_a_gradient_runs():
    settings = Settings(
        precision=Precision.FLOAT32,
        modules=tuple(ModuleSettings(module=name, recompute=Recompute.FULL) for name in ("vision", "llm")),
    )
    plain, again = prices(plan_of()), prices(plan_of(settings=settings))
    assert again["3B0"] == 2 * plain["3B0"]
    assert again["1B0"] == 2 * plain["1B0"]  # one of its two layers has a gradient
    assert again["2B0"] == plain["2B0"]


def test_reduction_is_a_ring_over_the_slowest_link_of_the_group():
    plan = plan_of(replicas=2, batch=[sample(i) for i in range(4)])
    num_bytes = WIDTH * WIDTH * 4
    assert prices(plan)["1REDUCE_GRAD"] == pytest.approx(all_reduce_s(num_bytes, 2, LINK))
    slow = Link(name="slow", bytes_per_s=1e6, latency_s=1e-3)
    node = Node(device="toy", num_ranks=5, memory_bytes=2**30, num_cards=5)
    two_nodes = uniform("two", node, num_nodes=2, intra=LINK, inter=slow)
    alone = group_link(two_nodes, num_ranks=2, stride=5)
    assert prices(replace(plan, cluster=two_nodes))["1REDUCE_GRAD"] == pytest.approx(
        nccl.all_reduce_s(num_bytes, nccl.Group(2, alone, LINK.bytes_per_s))
    )
    assert two_nodes.joining((3, 4)) == LINK
    assert two_nodes.joining((4, 5)) == slow


def test_step_is_optimizer_traffic_of_the_fullest_rank():
    model = two_encoders(llm=(True,) * 4)
    found = prices(plan_of(model=model), bytes_per_s=1e9)
    assert found["STEP"] == pytest.approx(2 * WIDTH * WIDTH * step_bytes(Precision.FLOAT32) / 1e9)
    assert [step_bytes(p) for p in (Precision.BFLOAT16, Precision.FLOAT32, Precision.FLOAT64)] == [28, 28, 56]


def test_a_sharded_step_updates_its_part_and_gathers_the_rest():
    settings = Settings(
        precision=Precision.FLOAT32,
        modules=(ModuleSettings(module="vision", sharding=Sharding.OPTIMIZER),),
    )
    model = two_encoders(audio=(False, False), llm=(False,) * 4)
    plan = plan_of(replicas=2, batch=[sample(i) for i in range(4)], settings=settings, model=model)
    elements = WIDTH * WIDTH
    expected = elements / 2 * 28 / 1e9 + all_gather_s(elements * 4, 2, LINK)
    assert prices(plan, bytes_per_s=1e9)["STEP"] == pytest.approx(expected)


def test_overheads_and_measured_optimizer_are_added():
    profile = replace(
        ideal_profile(flop_per_s=1.0),
        overheads_s=(("F", 0.5), ("STEP", 0.25)),
        optimizer_s_per_parameter=(("float32", 1e-3),),
    )
    priced = price(lower(plan_of()), CostModel(profile))
    assert priced.duration_s(parse_action("0F0")) == LAYER_FLOP * VISION + 0.5
    assert priced.duration_s(STEP) == pytest.approx(0.25 + WIDTH * WIDTH * 1e-3)
    assert not any("overhead" in reason or "optimizer" in reason for reason in priced.unmeasured)
    assert (
        "executor overhead per action: taken as 0"
        in price(lower(plan_of()), CostModel(ideal_profile())).unmeasured
    )


class CountingCost(CostModel):
    calls = 0

    def layer_time(self, layer, work, **grid):
        self.calls += 1
        return super().layer_time(layer, work, **grid)


def test_equal_work_is_priced_once():
    cost = CountingCost(ideal_profile())
    plan = plan_of(batch=[sample(i) for i in range(16)])
    price(lower(plan), cost)
    distinct = {
        (stage.id, replace(layer, name=""))
        for stage in plan.stages
        for layer in plan.model.module(stage.module).layers[slice(*stage.layers)]
    }
    assert cost.calls == len(distinct)


def test_work_of_microbatches():
    plan = plan_of(batch=[sample(0, images=2), sample(1)])
    encoder = Microbatch(module="vision", replica=0, index=0, rows=((Item(0, 0), Item(0, 1)), (Item(1, 0),)))
    assert work_of(plan, encoder) == Work((RowWork(16, 8, 2 * 64), RowWork(8, 4, 64)))
    llm = Microbatch(module="llm", replica=0, index=0, rows=((Item(1, 0),),))
    assert work_of(plan, llm) == Work((RowWork(LLM, LLM, LLM * (LLM + 1) // 2),))


def test_masks():
    text = Segment("text", 0, 10, 10)
    assert attention_area(Sample(0, (text,))) == 55
    assert attention_area(Sample(0, (text,), mask="full")) == 100
    with pytest.raises(ValueError, match="sample 0: mask 'moon': want one of causal, full"):
        attention_area(Sample(0, (text,), mask="moon"))


def test_unknown_items_are_refused():
    plan = plan_of()
    wrong = Microbatch(module="vision", replica=0, index=0, rows=((Item(0, 7),),))
    with pytest.raises(ValueError, match="sample 0 has no image item 7 for module 'vision'"):
        work_of(plan, wrong)


def over_two_ranks(*owners: int) -> Plan:
    """One sample of 20 tokens of the LLM, whose blocks of 4 belong to these of two ranks; zigzag: none."""
    plan = plan_of(batch=[Sample(0, (Segment("text", 0, 16, 16), Segment("image", 0, 8, 4)))])
    stages = tuple(
        replace(stage, ranks=((stage.flat_ranks[0],), (stage.flat_ranks[0] + 10,))) for stage in plan.stages
    )
    shard = TokenShard(module="llm", replica=0, microbatch=0, row=0, block_tokens=4, owners=owners)
    shards = (shard,) if owners else ()
    return replace(plan, stages=stages, cluster=cluster(16), token_shards=shards)


def llm_works(plan: Plan) -> tuple[Work, ...]:
    return works_of(plan, plan.microbatches_of["llm", 0][0])


def test_works_are_those_of_the_context_parallel_ranks_that_may_be_the_slowest():
    """20 causal tokens in blocks of 4: queries see 10, 26, 42, 58, 74 pairs."""
    most_pairs = Work((RowWork(16, 16, 2 * (58 + 74)),))
    most_tokens = Work((RowWork(24, 24, 2 * (10 + 26 + 42)),))
    assert llm_works(over_two_ranks(0, 0, 0, 1, 1)) == (most_pairs, most_tokens)
    (both,) = llm_works(over_two_ranks(0, 1, 0, 1, 0))
    assert both == Work((RowWork(24, 24, 2 * (10 + 42 + 74)),))
    assert llm_works(over_two_ranks()) == (Work((RowWork(20, 20, 210),)),)
    plan = over_two_ranks(0, 0, 0, 1, 1)
    assert work_of(plan, plan.microbatches_of["llm", 0][0]) == most_pairs


def test_a_layer_takes_as_long_as_its_slowest_context_parallel_rank():
    """Products alone, of 1 FLOP/s: a rank's tokens decide, whoever has the most query-key pairs."""
    few, many = (prices(over_two_ranks(*owners)) for owners in ((0, 0, 0, 0, 1), (0, 0, 0, 1, 1)))
    for name in ("3F0", "3B0", "4F0", "4B0"):
        assert many[name] == 12 / 16 * few[name]
    assert many["3F0"] == 2 * LAYER_FLOP * 12


def test_the_slowest_of_several_ranks_is_so_in_every_pass():
    one = LayerTime(1.0, 5.0, 2.0, frozenset({"a"}), 0.5, forward_only_s=0.9, split_input_s=6.0)
    other = LayerTime(2.0, 4.0, 1.0, frozenset({"b"}), 0.7, forward_only_s=1.9, split_input_s=4.5)
    found = slowest([one, other])
    assert found == LayerTime(
        2.0, 5.0, 2.0, frozenset({"a", "b"}), 0.7, forward_only_s=1.9, split_input_s=6.0
    )
    assert slowest([one]) is one


def test_useful_flop_is_the_same_whoever_owns_the_tokens():
    assert (
        model_flop(over_two_ranks(0, 0, 0, 1, 1))
        == model_flop(over_two_ranks())
        == model_flop(plan_of(batch=list(over_two_ranks().batch)))
    )


def test_useful_flop_end_at_the_window_of_a_layer():
    """Every second layer of Gemma 3 sees 8 of 100 tokens: all but 93 x 92 / 2 pairs; three forwards."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    batch = [Sample(0, (Segment("text", 0, 100, 100),))]

    def flop(**window: object) -> float:
        config = {"model_type": "gemma3_text", "sliding_window_pattern": 2} | sizes | heads | window
        module = module_from_config(config, name="llm", modality="text")
        return model_flop(disjoint_plan(ModelGraph(name="text", modules=(module,)), batch))

    hidden_pairs = 92 * 93 // 2
    assert flop(sliding_window=None) - flop(sliding_window=8) == 3 * 2 * 4 * 16 * 4 * hidden_pairs
    assert flop(sliding_window=None) == flop(sliding_window=100)


def test_passes_that_were_measured_apart_have_their_own_prices():
    whole = LayerTime(1.0, 2.0, 4.0, interior_grad_s=1.5)
    apart = LayerTime(
        1.0, 2.0, 4.0, interior_grad_s=1.5, forward_only_s=0.75, split_input_s=2.5, split_weight_s=4.5
    )
    both, weights, frozen, nothing = (Needs(bool(i), bool(w)) for i, w in ((1, 1), (0, 1), (1, 0), (0, 0)))
    for needs, expected in (
        (both, (1.0, 2.5, 4.5)),
        (weights, (1.0, 2.0, 4.5)),
        (frozen, (1.0, 2.0, 0.0)),
        (nothing, (0.75, 0.0, 0.0)),
    ):
        found = pass_times([apart], [needs], [False])
        assert (found.of("F"), found.of("I"), found.of("W")) == expected
        assert found.of("B") == pass_times([whole], [needs], [False]).of("B")
    again = pass_times([apart], [both], [True])
    assert (again.of("F"), again.of("I")) == (0.75, 1.0 + 2.5)
