"""Attention within a layer's own window or chunk: its pairs, and prices where kernels end there or do not."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.attention.price import SimulatedAttention, rank_tiles, row_tiles
from sim.predict import prices_of
from tests.examples import examples
from tests.plans import disjoint_plan
from tests.test_predict import row
from workbench.cost.execution import AttentionKernel, Execution
from workbench.cost.flash import FlashKernel, flash_share
from workbench.cost.hardware import Link, Node, uniform
from workbench.cost.layer_table import LayerPoint, LayerTable
from workbench.cost.least_time import LeastTimes
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile, load_profile
from workbench.cost.roofline import Grid, Work, attention_flop
from workbench.cost.signature import signature
from workbench.data.sample import Sample, Segment
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.llm_table.row_plan import plan_of as plan_of_row
from workbench.masks.bitfield import dense
from workbench.masks.builders import causal
from workbench.masks.patterns import sample_bitfield
from workbench.model.frozen import FrozenRule, Needs
from workbench.model.hf_config import module_from_config
from workbench.model.layer import Attention, Layer, LayerKind
from workbench.model.model_graph import ModelGraph
from workbench.model.reach import Reach
from workbench.plan.flop import model_flop
from workbench.plan.lower import lower
from workbench.plan.plan import KeyExchange, ModuleSettings, Plan, Precision
from workbench.plan.token_owners import zigzag_blocks
from workbench.plan.work import attention_area, even_work_of, work_of, works_of
from workbench.planner.assembly import shared_draft
from workbench.planner.layer_cost import layer_costs
from workbench.planner.layout_choice import ModuleChoice
from workbench.planner.module_price import ModulePrices
from workbench.planner.sample_work import sample_work
from workbench.strategies import megatron_heterogeneous
from workbench.timing.attention import AttentionCall
from workbench.timing.price import price
from workbench.timing.stage_seconds import StageSeconds
from workbench.units import GB

WINDOW, LENGTH, LONG = 512, 8192, 32768
NODE = Node(device="H100", num_ranks=8, memory_bytes=round(80 * GB))
WIRE = Link(name="nvlink", bytes_per_s=300 * GB, latency_s=2e-6)
CLUSTER = uniform("c", NODE, num_nodes=1, intra=WIRE, inter=WIRE)
BOTH = Needs(input_grad=True, weight_grad=True)
GEMMA = {
    "model_type": "gemma3_text",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "vocab_size": 1000,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "sliding_window_pattern": 3,
}
MISTRAL = {key: value for key, value in GEMMA.items() if key != "sliding_window_pattern"} | {
    "model_type": "mistral",
    "tie_word_embeddings": False,
}


machine = cache(lambda profile: CostModel(load_profile(profile)))


@cache
def model(window: int | None = WINDOW) -> ModelGraph:
    """Layers 1, 2, 4 and 5 of Gemma 3 have the window; 0 is the embedding."""
    config = GEMMA | {"sliding_window": window}
    return ModelGraph(name="text", modules=(module_from_config(config, name="llm", modality="text"),))


def text(index: int, length: int, mask: str = "causal") -> Sample:
    return Sample(index, (Segment("text", 0, length, length),), mask=mask)


def pairs(length: int, window: int) -> int:
    return length * window - window * (window - 1) // 2


def plan_of(
    window: int | None = WINDOW, *, cp: int = 1, lengths: tuple[int, ...] = (LENGTH,), **settings
) -> Plan:
    batch = [text(index, length) for index, length in enumerate(lengths)]
    plan = disjoint_plan(model(window), batch, grids={"llm": (cp, 1)})
    modules = (ModuleSettings(module="llm", **settings),)
    found = replace(plan.settings, precision=Precision.BFLOAT16, modules=modules)
    return replace(plan, cluster=CLUSTER, settings=found)


def with_kernel(generation: int | None, **execution: object) -> CostModel:
    """A FLOP takes a second, and nothing else any time."""
    profile = replace(ideal_profile(flop_per_s=1.0, bytes_per_s=1e300), flash_generation=generation)
    return CostModel(profile, Execution(**execution))  # type: ignore[arg-type]


def seconds(plan: Plan, cost: CostModel) -> dict[str, float]:
    return {str(action): s for action, s in prices_of(lower(plan), cost).durations_s.items()}


@pytest.mark.parametrize("window", [None, 1, 5, 24, 60, 100])
@pytest.mark.parametrize("chunk", [None, 1, 7, 20, 60, 100])
@pytest.mark.parametrize("mask", ["causal", "full", "gemma", "causal_document(lengths=[40, 20])"])
def test_pairs_within_a_reach_are_those_of_a_matrix(mask: str, window: int | None, chunk: int | None) -> None:
    """Documents fall into chunks from their start; an image sees itself in a window, and not over a chunk."""
    segments = (Segment("text", 0, 20, 20), Segment("image", 0, 8, 8), Segment("text", 1, 32, 32))
    field = sample_bitfield([[Sample(0, segments, mask)]])
    start = np.array([0] * 40 + [40] * 20) if "document" in mask else np.zeros(60, int)
    place = field.position - start
    seen = dense(field, field)
    if window is not None:
        seen &= (place[:, None] - place < window) | (field.start[:, None] <= field.position)
    if chunk is not None:
        seen &= place >= (place // chunk * chunk)[:, None]
    assert attention_area(Sample(0, segments, mask), Reach(window, chunk)) == seen.sum()


def test_a_long_row_has_as_many_pairs_as_tokens_in_windows() -> None:
    plan = plan_of()
    work = even_work_of(plan, plan.microbatches[0])
    assert work.rows[0].reached == ((Reach(WINDOW), pairs(LENGTH, WINDOW)),)
    assert work.attention_area == LENGTH * (LENGTH + 1) // 2
    assert work.whole == even_work_of(plan_of(None), plan_of(None).microbatches[0])


@pytest.mark.parametrize(
    ("cost", "ends"),
    [
        pytest.param(with_kernel(2), True, id="flash2"),
        pytest.param(with_kernel(3, flash=FlashKernel.FLASH2), True, id="flash2-on-hopper"),
        pytest.param(with_kernel(3, flash=FlashKernel.FLASH1), False, id="flash1"),
        pytest.param(with_kernel(None), False, id="unknown"),
        pytest.param(with_kernel(None, flash=FlashKernel.FLASH2), False, id="unknown-flash2"),
        pytest.param(with_kernel(2, attention=AttentionKernel.STORED), False, id="stored"),
    ],
)
def test_a_window_saves_what_kernels_pass_by(cost: CostModel, ends: bool) -> None:
    """Four layers of six: a forward's two products and a backward's five, for every pair that is hidden."""
    windowed, whole = seconds(plan_of(), cost), seconds(plan_of(None), cost)
    hidden = LENGTH * (LENGTH + 1) // 2 - pairs(LENGTH, WINDOW)
    if not ends:
        assert windowed == whole
        return
    forward = 4 * 4 * 128 * 8 * hidden
    share = flash_share(cost.execution.flash, cost.profile.flash_generation)
    assert whole["0F0"] - windowed["0F0"] == pytest.approx(forward / share)
    assert whole["0B0"] - windowed["0B0"] == pytest.approx(2.5 * forward / share)
    assert model_flop(plan_of(None)) - model_flop(plan_of()) == pytest.approx(3 * forward)


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("exchange", KeyExchange)
def test_a_window_as_long_as_the_rows_has_the_price_of_none(cp: int, exchange: KeyExchange) -> None:
    cost = CostModel(load_profile("H100"))
    first, *others, shorter = (
        seconds(plan_of(window, cp=cp, lengths=(3000, LONG), key_exchange=exchange), cost)
        for window in (LONG, 2 * LONG, None, LONG // 16)
    )
    assert all(other == first for other in others)
    assert shorter["0F1"] < 0.9 * first["0F1"]
    assert shorter["0B1"] < 0.9 * first["0B1"]


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("exchange", KeyExchange)
def test_machines_that_compute_what_a_window_hides_take_as_long_with_it(
    cp: int, exchange: KeyExchange
) -> None:
    cost = CostModel(replace(load_profile("H100"), flash_generation=None))
    lengths = (3000, LENGTH)
    windowed, whole = (plan_of(w, cp=cp, lengths=lengths, key_exchange=exchange) for w in (WINDOW, None))
    assert seconds(windowed, cost) == seconds(whole, cost)


def test_a_layer_measured_whole_keeps_its_seconds() -> None:
    """It was measured under the row's mask: the table holds for as many pairs, whatever the window hides."""
    layer, plan = model().module("llm").layers[1], plan_of()
    point = LayerPoint(
        rows=1,
        tokens_in=LENGTH,
        attention_area=LENGTH * (LENGTH + 1) // 2,
        forward_s=1.0,
        input_grad_s=2.0,
        weight_grad_s=3.0,
    )
    table = LayerTable(signature=signature(layer), precision="bfloat16", points=(point,))
    cost = CostModel(replace(load_profile("H100"), layers=(table,)))
    time = cost.layer_time(layer, even_work_of(plan, plan.microbatches[0]), tp=1, cp=1, precision="bfloat16")
    assert (time.forward_s, time.input_grad_s, time.weight_grad_s) == (1.0, 2.0, 3.0)
    assert not time.unmeasured


def attentions(plan: Plan) -> list[Attention]:
    layers = plan.model.modules[0].layers
    return [op for layer in layers for op in layer.operators if isinstance(op, Attention)]


@pytest.mark.parametrize("window", [100, 1000, 4096, 5000])
def test_a_row_and_a_job_of_one_model_have_one_attention(window: int) -> None:
    cells = {"architecture": "llama", "hidden": 1024, "layers": 6, "heads": 8, "kv_heads": 4, "head_dim": 128}
    llm = row(**cells, ffn=4096, vocab=1000, sequence=4096, window=window, global_batch=1, gpu="H100")
    cost = CostModel(load_profile("H100"))
    predicted = plan_of_row(llm, cost.profile)
    module = module_from_config(MISTRAL | {"sliding_window": window}, name="llm", modality="text")
    planned = disjoint_plan(ModelGraph(name="text", modules=(module,)), [text(0, 4096)])
    found = []
    for plan in (predicted, planned):
        work = work_of(plan, plan.microbatches[0])
        flop = [attention_flop(each, work, Grid()) for each in attentions(plan)]
        alone = [
            Layer(name="a", kind=LayerKind.BLOCK, operators=(each,), out_width=1024)
            for each in attentions(plan)
        ]
        times = [cost.layer_time(each, work, tp=1, cp=1, precision="bfloat16") for each in alone]
        found.append((flop, [(time.forward_s, time.input_grad_s) for time in times]))
    assert found[0] == found[1]
    assert sum(found[0][0]) == 6 * 4 * 128 * 8 * pairs(4096, min(window, 4096))


def job_of(lengths: tuple[int, ...], pp: int) -> Job:
    return Job(
        name="gemma",
        model=model(),
        cluster=CLUSTER,
        batch=tuple(text(index, length) for index, length in enumerate(lengths)),
        layouts=(ModuleLayout(module="llm", pp=pp),),
    )


@pytest.mark.parametrize("profile", ["H100", "A40"])
def test_planners_price_layers_as_the_simulation_does(profile: str) -> None:
    cost = CostModel(load_profile(profile))
    job = job_of((LONG,), 8)
    job = replace(job, cluster=replace(job.cluster, nodes=(replace(NODE, device=profile),)))
    by_layer = disjoint_plan(job.model, job.batch, {"llm": [1] * 8})
    by_layer = replace(by_layer, settings=job.settings)
    simulated = seconds(by_layer, cost)
    layout = job.layouts[0]
    believed = layer_costs(job, shared_draft(job, "test"), layout, cost, FrozenRule.EXACT)
    choice = ModuleChoice(module="llm", dp=1, tp=1, cp=1, instances=1)
    searched = ModulePrices(job, cost).layers(choice, 1)
    swept = StageSeconds(by_layer, cost)
    for stage in by_layer.stages:
        wanted = simulated[f"{stage.id}F0"], simulated[f"{stage.id}B0"]
        layer, total, passes = believed[stage.id], searched[stage.id], swept.passes(by_layer, stage)
        assert (layer.forward_s, layer.backward_s) == pytest.approx(wanted)
        assert (total.forward_s, total.backward_s) == pytest.approx(wanted)
        assert (passes.forward_s[0], passes.whole_s[0]) == pytest.approx(wanted)
    assert believed[3].total_s > 1.5 * believed[2].total_s  # a global layer and one with the window


@pytest.mark.parametrize("window", [WINDOW, None])
def test_stages_are_cut_by_what_windows_leave(window: int | None) -> None:
    """Of all cuts in two, that whose slower stage is the fastest: four local layers are lighter than two."""
    cost, kinds = CostModel(load_profile("A40")), ["full_attention"] * 2 + ["sliding_attention"] * 4
    config = GEMMA | {"sliding_window": window, "layer_types": kinds}
    module = module_from_config(config, name="llm", modality="text")
    job = replace(job_of((LONG,) * 8, 2), model=ModelGraph(name="text", modules=(module,)))
    num_layers = len(job.model.module("llm").layers)

    def slowest_s(first: int) -> float:
        plan = disjoint_plan(job.model, job.batch, {"llm": (first, num_layers - first)})
        times = seconds(replace(plan, settings=job.settings, cluster=CLUSTER), cost)
        return max(times[f"{stage}F0"] + times[f"{stage}B0"] for stage in (0, 1))

    planned = megatron_heterogeneous.plan(job, cost).stages[0].layers[1]
    assert planned == min(range(1, num_layers), key=slowest_s)
    assert planned == (3 if window else 4)


def zigzag_owners(length: int, num_ranks: int) -> np.ndarray:
    """[token] rank."""
    block_tokens, owner_of = zigzag_blocks(length, num_ranks)
    return np.repeat(owner_of, block_tokens)[:length]


def seen_by(length: int, window: int) -> np.ndarray:
    """[query, key] of a causal row."""
    back = np.arange(length)[:, None] - np.arange(length)
    seen: np.ndarray = (back >= 0) & (back < window)
    return seen


@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallel_ranks_wait_for_the_one_with_most_pairs_in_the_window(cp: int) -> None:
    """Zigzag is even under a causal mask; in a window the rank with the first tokens has fewer pairs."""
    length, window = 1024, 100
    plan = plan_of(window, cp=cp, lengths=(length,))
    owners, seen = zigzag_owners(length, cp), seen_by(length, window)
    wanted = [int(seen[owners == rank].sum()) for rank in range(cp)]
    assert wanted[0] < min(wanted[1:])
    works = works_of(plan, plan.microbatches[0])
    assert {(work.attention_area, work.rows[0].tokens_in) for work in works} == {
        (length * (length + 1) // 2, length)
    }
    assert [dict(work.sums.reached)[Reach(window)] for work in works] == [cp * max(wanted)]


def test_a_ring_takes_the_pairs_of_the_window() -> None:
    """Step after step the slower rank's block of pairs, in four layers of six; a FLOP takes a second."""
    length, window, cost = 1024, 100, with_kernel(2)
    owners = zigzag_owners(length, 2)

    def steps(seen: np.ndarray) -> int:
        blocks = [[int(seen[owners == q][:, owners == k].sum()) for k in range(2)] for q in range(2)]
        return max(blocks[0][0], blocks[1][1]) + max(blocks[0][1], blocks[1][0])

    windowed, whole = (
        seconds(plan_of(w, cp=2, lengths=(length,), key_exchange=KeyExchange.RING), cost)
        for w in (window, None)
    )
    saved = 4 * 4 * 128 * 8 * (steps(seen_by(length, length)) - steps(seen_by(length, window)))
    assert whole["0F0"] - windowed["0F0"] == pytest.approx(saved)
    assert whole["0B0"] - windowed["0B0"] == pytest.approx(2.5 * saved)


@pytest.mark.parametrize("reach", [Reach(), Reach(1), Reach(300), Reach(None, 200), Reach(100, 512)])
def test_ranks_attend_to_the_tiles_within_a_reach(reach: Reach) -> None:
    length, block = 1024, 128
    owners, field = zigzag_owners(length, 2), causal(length)
    owned = [np.flatnonzero(owners == rank) for rank in range(2)]
    seen = seen_by(length, reach.window or length)
    if reach.chunk is not None:
        seen &= np.equal.outer(np.arange(length) // reach.chunk, np.arange(length) // reach.chunk)
    for own, tiles in zip(owned, rank_tiles(field, owned, reach), strict=True):
        wanted = seen[own].reshape(-1, block, length // block, block).any(axis=(1, 3))
        assert row_tiles(tiles)[:, 0].tolist() == wanted.sum(axis=1).tolist()


def test_shared_attention_is_simulated_within_the_window() -> None:
    """Whole tiles, keys that travel and idle units: longer than its share of the pairs, and far shorter."""
    cost, plan = CostModel(load_profile("H100")), plan_of(WINDOW, cp=2)
    (stage,), (microbatch,) = plan.stages, plan.microbatches
    local, everywhere = (
        SimulatedAttention(cost)(
            AttentionCall(plan=plan, stage=stage, microbatch=microbatch, operator=operator)
        )
        for operator in attentions(plan)[1:3]
    )
    assert local is not None
    assert everywhere is not None
    least = pairs(LENGTH, WINDOW) / (LENGTH * (LENGTH + 1) / 2)
    assert least < local.forward_s / everywhere.forward_s < 4 * least
    assert least < local.backward_s / everywhere.backward_s < 4 * least


@examples(60)
@given(
    lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=4),
    others=st.lists(st.integers(1, 20_000), max_size=2),
    window=st.sampled_from([1, 100, 1000, 10_000]),
    tp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    profile=st.sampled_from(["A40", "H100"]),
)
def test_no_bound_is_above_the_price_of_a_layer_with_a_window(
    *, lengths: list[int], others: list[int], window: int, tp: int, cp: int, profile: str
) -> None:
    def work_over(of: list[int]) -> Work:
        plan = plan_of(window, lengths=tuple(of))
        return Work(tuple(row for each in plan.microbatches for row in even_work_of(plan, each).rows))

    cost, layer = machine(profile), model(window).module("llm").layers[1]
    stock = work_over([*lengths, *others])
    least = LeastTimes(cost, "bfloat16", stock, degrees=(1, 2, 4), cuts_tokens=cp > 1)
    time = cost.layer_time(layer, work_over(lengths), tp=tp, cp=cp, precision="bfloat16")
    bound = least.of(layer, work_over(lengths), BOTH)
    assert tp * cp * (time.forward_s + time.input_grad_s) >= bound.way_s * (1 - 1e-9)
    assert bound.all_s <= least.of(layer, work_over(lengths).whole, BOTH).all_s


def test_entrain_weighs_samples_by_what_a_window_leaves() -> None:
    """All blocks of Mistral have the window; what is fitted is the embedding and the head."""
    cost = CostModel(load_profile("A40"))
    module = module_from_config(MISTRAL | {"sliding_window": WINDOW}, name="llm", modality="text")
    job = replace(job_of((LONG, LENGTH), 1), model=ModelGraph(name="text", modules=(module,)))
    long_s, short_s = sample_work(job, cost).llm_s
    planned = price(lower(megatron_heterogeneous.plan(job, cost)), cost)
    durations_s = {str(action): s for action, s in planned.durations_s.items()}
    planned_s = [durations_s[f"0F{index}"] + durations_s[f"0B{index}"] for index in (0, 1)]
    assert long_s - short_s == pytest.approx(planned_s[0] - planned_s[1], rel=0.03)
