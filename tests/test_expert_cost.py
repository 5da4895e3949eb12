"""What distributed experts cost: rows by the stated assumption, products, exchanges, their part of a plan."""

import random
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.data.batches import SyntheticSource, microbatch_data
from runtime.emulation.peak_memory import WARMUP
from runtime.launch import run_lowered
from runtime.parallel.context.group import Pending
from runtime.parallel.expert.group import ExpertGroup
from runtime.parallel.tensor.group import TensorGroup
from runtime.run_settings import Collect, RunSettings
from runtime.step.stage_module import StageInput, build_stage_module
from runtime.world.pool import Pool
from tests import tiny_models
from tests.forced_routes import build_in_turn
from tests.test_adapters_llama4 import LLAMA4
from tests.test_expert_plan import MIXTRAL, moe_plan
from tests.tiny_models import whole_batch
from workbench.cost.collectives import Collective, all_to_all_s
from workbench.cost.expert_load import busiest_share
from workbench.cost.expert_parallel import (
    ExpertExchanges,
    copies_share,
    exchanges_of,
    in_turn_share,
    on_rank,
)
from workbench.cost.hardware import Link
from workbench.cost.layer_table import LayerPoint, LayerTable
from workbench.cost.model import CostModel
from workbench.cost.operator_passes import OperatorPasses
from workbench.cost.profile import ideal_profile, load_profile
from workbench.cost.roofline import Grid, RowWork, Work, forward_flop, layer_flop
from workbench.cost.signature import signature
from workbench.memory.account import peak_bytes as planned_peak_bytes
from workbench.metrics import peak_bytes as traced_peak_bytes
from workbench.model.experts import EXPERT
from workbench.model.layer import Layer
from workbench.plan.kernels import Kernels
from workbench.plan.lower import lower
from workbench.plan.work import work_of
from workbench.timing.accept import accept
from workbench.timing.price import price

WORK = Work((RowWork(4096, 4096, 4096 * 4097 // 2),))
GRIDS = [Grid(1, 2, 2), Grid(2, 1, 2), Grid(2, 2, 4), Grid(2, 2, 2), Grid(4, 2, 2)]
CONFIGS = {"mixtral": MIXTRAL, "llama4": LLAMA4 | {"num_local_experts": 4, "num_key_value_heads": 4}}


def block(config: dict[str, Any] = MIXTRAL) -> Layer:
    return tiny_models.llm(config).layers[1]


def routed_flop(layer: Layer, grid: Grid) -> float:
    return sum(forward_flop(each, WORK, grid) for each in layer.operators if each.name.startswith(EXPERT))


@pytest.mark.parametrize(("num_ranks", "num_rows"), [(2, 100), (4, 200), (8, 400), (16, 2000)])
def test_the_busiest_rank_is_that_of_random_choices(num_ranks: int, num_rows: int) -> None:
    """Against draws: the excess over the mean within 10 %."""
    rng = random.Random(0)
    most, rounds = 0, 150_000 // num_rows
    for _ in range(rounds):
        drawn = [0] * num_ranks
        for _ in range(num_rows):
            drawn[rng.randrange(num_ranks)] += 1
        most += max(drawn)
    excess = most / rounds / (num_rows / num_ranks) - 1
    assert busiest_share(num_rows, num_ranks) - 1 == pytest.approx(excess, rel=0.1)


def test_the_busiest_share_has_its_limits() -> None:
    assert busiest_share(1000, 1) == 1.0
    assert busiest_share(1e-6, 8) == 8.0  # never more than all rows
    assert busiest_share(0, 8) == 1.0


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_work_is_divided_whole(grid: Grid, name: str) -> None:
    """Experts' products: the busiest rank's over its share, times the ranks, is the whole layer's."""
    layer = block(CONFIGS[name])
    split = on_rank(layer, WORK, grid)
    chosen = 2  # experts of a token, in both
    rows = WORK.tokens(split.operators[0].tokens) * chosen * grid.ep / (grid.tp * grid.cp)
    share = busiest_share(rows, grid.ep)
    whole = routed_flop(layer, Grid())
    assert routed_flop(split, grid) * grid.tp * grid.cp == pytest.approx(whole * share)
    even = layer_flop(split, WORK, grid) + routed_flop(split, grid) * (1 / share - 1)
    assert even * grid.tp * grid.cp == pytest.approx(layer_flop(layer, WORK))


def test_products_are_of_whole_experts() -> None:
    layer = block()
    split = on_rank(layer, WORK, Grid(2, 2, 4))
    (gate,) = (each for each in split.operators if each.name == f"{EXPERT}0.gate_up")
    assert (
        sum(each.name.startswith(EXPERT) and each.name.endswith("gate_up") for each in split.operators) == 1
    )
    assert forward_flop(gate, WORK, Grid(2, 2, 4)) == pytest.approx(
        2 * 4096 * 2 / 4 * busiest_share(4096 * 2, 4) * 32 * 96
    )
    assert on_rank(layer, WORK, Grid(2, 2)) is layer
    plain = tiny_models.llm().layers[1]
    assert on_rank(plain, WORK, Grid(2, 2, 4)) is plain


class Talking(ExpertGroup):
    """One of several members, alone: everybody sends it what it sends."""

    __slots__ = ("seen",)
    seen: list[int]

    def exchange(self, received: Tensor, sent: Tensor, counts: tuple[list[int], list[int]]) -> Pending:
        self.seen.append(sent.nbytes)
        received.copy_(sent if received.shape == sent.shape else sent.new_zeros(received.shape))
        return Pending(self, None, "")


class Alone(TensorGroup):
    """One of two members, alone: what it would add up or gather is its own."""

    __slots__ = ()

    def _reduce(self, x: Tensor, operation: object, what: str) -> None:
        del x, operation, what

    def gather(self, gathered: Tensor, own: Tensor) -> Pending:
        gathered.zero_()
        return Pending(self, None, "")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (2, 1)])
def test_exchanges_are_those_that_are_priced(name: str, tp: int, cp: int) -> None:
    """Their number and, with everybody as busy as the mean, their bytes; forward and backward."""
    plan = moe_plan(tp=tp, cp=cp, ep=2, config=CONFIGS[name])
    group = Talking((0, 1), 0, None)
    object.__setattr__(group, "seen", [])
    tensor = Alone((0, 1), 0, None) if tp > 1 else None
    alone = replace(plan, stages=(replace(plan.stages[0], ranks=((0, 1),)),)) if tp > 1 else plan
    module = build_stage_module(
        alone, alone.stages[0], seed=0, dtype=torch.float64, tensor=tensor, experts=group
    )
    microbatch = whole_batch(plan.model.module("llm"), plan.batch[:1])
    whole = replace(plan, stages=(replace(plan.stages[0], ranks=((0,),), ep=1),))
    data = microbatch_data(
        whole,
        whole.stages[0],
        microbatch,
        SyntheticSource(0),
        dtype=torch.float64,
        device="cpu",
        context=None,
    )
    tokens = sum(data.tokens_in)
    loss = module(StageInput(None, data))
    grid = Grid(tp, 1, 2)  # this rank holds all tokens of the row
    work = work_of(whole, microbatch)
    wanted = []
    for layer in plan.model.module("llm").layers:
        split = on_rank(layer, work, grid)
        share = busiest_share(tokens * 2 * 2 / tp, 2)
        found = exchanges_of(split, work, grid, 8, divided=False)
        sizes = [e.num_bytes for e in found.forward if e.kind is Collective.ALL_TO_ALL]
        wanted += [sizes[0], *(size / share for size in sizes[1:])] if sizes else []
        assert len(found.backward) == (0 if not sizes else 2 + (tp > 1))
    own = -(-tokens // tp)
    assert group.seen == pytest.approx([size * own * tp / tokens if size > 64 else size for size in wanted])
    group.seen.clear()
    loss.backward()
    assert len(group.seen) == len(wanted) * 2 // 3


def test_a_layer_pays_for_its_exchanges_on_their_own_link() -> None:
    cost = CostModel(ideal_profile())
    fast = Link(name="fast", bytes_per_s=1e18, latency_s=0.0)
    slow = Link(name="slow", bytes_per_s=1e9, latency_s=1e-5)
    layer, grid = block(), Grid(2, 2, 4)

    def seconds(expert_link: Link) -> tuple[float, float]:
        time = cost.with_expert_parallel(4, expert_link).layer_time(
            layer, WORK, tp=2, cp=2, precision="float32", link=fast
        )
        return time.forward_s, time.input_grad_s

    found = exchanges(on_rank(layer, WORK, grid), grid)
    forward, backward = (
        sum(
            all_to_all_s(e.num_bytes, 4, slow) - all_to_all_s(e.num_bytes, 4, fast)
            for e in some
            if e.kind is Collective.ALL_TO_ALL
        )
        for some in (found.forward, [exchange for _, exchange in found.backward])
    )
    added = [ours - theirs for ours, theirs in zip(seconds(slow), seconds(fast), strict=True)]
    assert added == pytest.approx([forward, backward])
    split = cost.with_expert_parallel(4).layer_time(layer, WORK, tp=2, cp=2, precision="float32", link=fast)
    assert any("at random" in reason for reason in split.unmeasured)
    plain = tiny_models.llm().layers[1]
    times = [
        cost.with_expert_parallel(ep).layer_time(plain, WORK, tp=2, cp=2, precision="float32", link=fast)
        for ep in (1, 4)
    ]
    assert times[0] == times[1]  # nothing to distribute


WIRE = Link(name="wire", bytes_per_s=1e9, latency_s=1e-5)
MEASURED: dict[str, Any] = {"tp": 1, "cp": 2, "precision": "float32", "link": WIRE}


def measured(layer: Layer, ep: int) -> CostModel:
    """The layer measured over two context-parallel ranks: 2 s a forward."""
    point = LayerPoint(
        rows=1,
        tokens_in=4096,
        attention_area=WORK.attention_area,
        forward_s=2.0,
        input_grad_s=3.0,
        weight_grad_s=1.0,
    )
    table = LayerTable(signature=signature(layer), precision="float32", cp=2, ep=ep, points=(point,))
    return CostModel(replace(ideal_profile(), layers=(table,)))


def test_a_layer_measured_with_all_experts_is_scaled_by_its_products() -> None:
    """And pays for exchanges alone on top: keys were part of what was measured."""
    layer, grid = block(), Grid(1, 2, 2)
    cost = measured(layer, 1)
    assert cost.layer_time(layer, WORK, **MEASURED).forward_s == 2.0
    split = on_rank(layer, WORK, grid)
    share = layer_flop(split, WORK, grid) / layer_flop(layer, WORK, Grid(1, 2))
    assert 1.0 < share < busiest_share(4096 * 2, 2)
    exchanged_s = sum(all_to_all_s(e.num_bytes, 2, WIRE) for e in exchanges(split, grid).forward)
    found = cost.with_expert_parallel(2).layer_time(layer, WORK, **MEASURED)
    assert found.forward_s == pytest.approx(2.0 * share + exchanged_s)
    assert found.weight_grad_s == pytest.approx(1.0 * share)


def exchanges(split: Layer, grid: Grid) -> ExpertExchanges:
    return exchanges_of(split, WORK, grid, 4, divided=False)


def test_a_plan_is_priced_with_its_degree() -> None:
    """All else equal; and a slower wire shows in the passes of the plan that exchanges over it."""
    cost = CostModel(load_profile("A40"))
    cut, split = (moe_plan(tp=2, cp=2, ep=ep) for ep in (1, 4))
    times = [price(lower(plan), cost) for plan in (cut, split)]
    action = next(action for action in split.program_actions if str(action) == "0F0")
    assert times[0].duration_s(action) != times[1].duration_s(action)
    link = replace(split.cluster.intra, latency_s=1.0)
    slower = price(lower(replace(split, cluster=replace(split.cluster, intra=link, inter=link))), cost)
    exchanges = 2 * 3 * 3  # blocks x exchanges of a forward x steps of each
    assert slower.duration_s(action) - times[1].duration_s(action) >= exchanges * 0.99


def test_a_run_with_even_routes_holds_no_more_than_the_busiest_rank_is_said_to(pool: Pool) -> None:
    """Weights of its own experts, rows that arrive and what is kept of them: measured on gloo."""
    config = MIXTRAL | {"hidden_size": 128, "intermediate_size": 192, "max_position_embeddings": 512}
    plan = moe_plan(cp=2, ep=2, config=config, kernels=Kernels.EAGER, tokens=256)
    predicted = planned_peak_bytes(*accept(plan))
    settings = RunSettings(
        steps=1, warmup=WARMUP, precision=plan.settings.precision, collect=Collect.MEMORY, timeout_s=30.0
    )
    result = run_lowered(lower(plan), settings, pool=pool, build=build_in_turn)
    shares = [measured / predicted[rank] for rank, measured in traced_peak_bytes(result.trace).items()]
    assert 0.95 <= min(shares) <= max(shares) <= 1.0


@pytest.mark.parametrize(
    ("num_places", "num_experts", "num_chosen"), [(2, 4, 2), (3, 6, 3), (4, 4, 1), (1, 4, 2)]
)
def test_copies_are_the_mean_over_all_choices(num_places, num_experts, num_chosen):
    """Brute force over every set of chosen experts."""
    share = num_experts // num_places
    places = [{each // share for each in chosen} for chosen in combinations(range(num_experts), num_chosen)]
    expected = sum(map(len, places)) / len(places) / num_chosen
    assert copies_share(num_places, num_experts, num_chosen) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("num_places", "num_experts", "num_chosen"),
    [(16, 128, 8), (2, 128, 8), (64, 256, 8), (8, 384, 8), (3, 6, 4), (4, 4, 3)],
)
def test_copies_in_turn_are_those_of_many_tokens(num_places, num_experts, num_chosen):
    """A router that counts: token t takes experts t k to t k + k - 1, modulo their number."""
    share, tokens = num_experts // num_places, 12 * num_experts
    chosen = [
        [(token * num_chosen + each) % num_experts for each in range(num_chosen)] for token in range(tokens)
    ]
    copies = sum(len({each // share for each in experts}) for experts in chosen)
    assert in_turn_share(num_places, num_experts, num_chosen) == pytest.approx(copies / tokens / num_chosen)


def test_a_router_in_turn_sends_each_token_to_one_rank_where_that_holds_all_its_experts():
    assert in_turn_share(16, 128, 8) == 1 / 8
    assert in_turn_share(16, 128, 8) < copies_share(16, 128, 8) < 1


@pytest.mark.parametrize(("num_experts", "num_sorts"), [(4, 2), (2, 0)])
def test_rows_of_several_experts_are_sorted_behind_an_exchange_and_in_front_of_one(
    num_experts: int, num_sorts: int
) -> None:
    """Read and written once more; a rank with one expert has nothing to sort."""
    grid, link = Grid(1, 1, 2), Link(name="wire", bytes_per_s=1e9, latency_s=0.0)
    cost, layer = (
        CostModel(ideal_profile(bytes_per_s=1e9)),
        block(MIXTRAL | {"num_local_experts": num_experts}),
    )
    time = cost.with_expert_parallel(2, link).layer_time(
        layer, WORK, tp=1, cp=1, precision="float32", link=link
    )
    split = on_rank(layer, WORK, grid)
    found = exchanges_of(split, WORK, grid, 4, divided=False)
    passes = OperatorPasses(cost, grid, "float32").of_layer(split, WORK)
    sent_s = sum(all_to_all_s(each.num_bytes, 2, link) for each in found.forward)
    rows = max(each.num_bytes for each in found.forward)
    expected_s = sum(each.forward_s for each in passes) + sent_s + num_sorts * 2 * rows / 1e9
    assert time.forward_s == pytest.approx(expected_s)
