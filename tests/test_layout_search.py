"""The search over layouts: exact, within its space, and refused in one line."""

from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plans import finish
from workbench.balance.microbatches.pipeline_time import least_pipeline_s, pipeline_s
from workbench.cost.hardware import Link, Node, uniform
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.data.corpus import ItemTokens, fixed_samples
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.memory.account import memory_table, static_holders
from workbench.model.model_graph import connect
from workbench.model.zoo import from_shape
from workbench.plan.kernels import Kernels
from workbench.plan.lower import lower
from workbench.plan.plan import ModuleSettings, Precision, Recompute, Settings, Sharding
from workbench.plan.stage import Stage
from workbench.planner.layer_totals import Elements
from workbench.planner.layout_choice import LayoutChoice, Mode, ModuleChoice
from workbench.planner.layout_search import best_first, exhaustive_layout, fastest_by, fastest_layout
from workbench.planner.layout_space import Freedom, LayoutSpace
from workbench.planner.layout_step import LayoutSteps, moves_s, steps_of
from workbench.planner.module_price import ModulePrices
from workbench.planner.sharded_step import sharded_step
from workbench.schedule.action import Pass
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.strategies.megatron_heterogeneous import plan_colocated
from workbench.units import GB

COST = CostModel(load_profile("H100"))
QUICK = Freedom(instances=(1, 2))
LEAST = Freedom(instances=(1,))
INTRA = Link(name="nvlink", bytes_per_s=300 * GB, latency_s=2e-6)
INTER = Link(name="card", bytes_per_s=50 * GB, latency_s=5e-6)


def job_on(num_ranks, *, memory_gb=80.0, samples=16, **changes):
    node = Node(device="H100", num_ranks=min(8, num_ranks), memory_bytes=round(memory_gb * GB), num_cards=8)
    cluster = uniform("c", node, num_nodes=-(-num_ranks // 8), intra=INTRA, inter=INTER)
    llm = from_shape("llama-3.2-3b", module="llm")
    vision = from_shape("siglip-so400m-14-384", module="vision", llm_width=llm.layers[0].out_width)
    image = ItemTokens(729, 729)
    job = Job(
        name="vlm",
        model=connect("vlm", (vision, llm)),
        cluster=cluster,
        batch=fixed_samples(samples, text_tokens=2048, items={"vision": (image,) * 2}),
        settings=Settings(kernels=Kernels.MEGATRON_SEQUENCE),
    )
    return replace(job, **changes)


def test_context_parallel_ranks_count_as_the_busiest_of_zigzag():
    """Documents of 1,536, 256 and 256 tokens: of 8 blocks of 256, two ranks have 3 and 4 of the longest."""
    mask = "causal_document(lengths=[1536, 256, 256])"
    llm = from_shape("llama-3.2-3b", module="llm")
    batch = fixed_samples(4, text_tokens=2048, items={})
    job = job_on(8, model=connect("llm", (llm,)), batch=tuple(replace(each, mask=mask) for each in batch))
    (found,), (even,) = ((work for work, _ in ModulePrices(job, COST).shapes("llm", 2, cp)) for cp in (4, 1))
    pairs = [sum(range(256 * block + 1, 256 * block + 257)) for block in range(6)] + [256 * 257 // 2] * 2
    busiest = max(pairs[rank] + pairs[7 - rank] for rank in range(4))
    assert even.attention_area == 2 * sum(pairs)
    assert found.attention_area == 2 * 4 * busiest > 1.5 * even.attention_area
    assert found.rows[0].tokens_in == even.rows[0].tokens_in == 2048


def test_jobs_that_share_prices_have_the_steps_that_they_have_alone():
    job = job_on(8, samples=8)
    settings = replace(
        job.settings,
        modules=tuple(ModuleSettings(module=m, sequence_parallel=True) for m in ("vision", "llm")),
    )
    three_phase = Schedule(kind=ScheduleKind.THREE_PHASE)
    jobs = [
        job,
        replace(job, schedule=three_phase),
        replace(job, schedule=replace(three_phase, window=1)),
        replace(job, schedule=Schedule(kind=ScheduleKind.ZB_H1)),
        replace(job, microbatch_samples=2),
        replace(job, settings=settings),
        replace(job, batch=job.batch[:4]),
        replace(job, layouts=(ModuleLayout(module="llm", tp=2),)),
    ]
    vision = ModuleChoice(module="vision", tp=2, dp=4)
    choice = LayoutChoice(mode=Mode.COLOCATED, encoders=(vision,), llm=replace(vision, module="llm"))
    shared = [steps_of(each, COST) for each in jobs]
    assert [steps.job for steps in shared] == jobs
    assert shared[0].prices is shared[3].prices is shared[4].prices is shared[7].prices
    for steps, each in zip(shared, jobs, strict=True):
        assert steps.step(choice) == LayoutSteps(each, COST).step(choice)
    assert len({steps.step(choice).step_s for steps in shared[:3]}) > 1


def test_an_exchange_that_no_pass_hides_comes_behind_all_of_them():
    """All else is equal; the search is exact under either estimate."""
    job = job_on(8, samples=8)
    hiding, behind = LayoutSteps(job, COST), LayoutSteps(job, COST, hides_exchange=False)
    assert steps_of(job, COST, hides_exchange=False) is not steps_of(job, COST)
    whole = replace(job, layouts=(ModuleLayout(module="llm", tp=1),))
    layouts = [
        choice for _, choice in LayoutSpace(LayoutSteps(whole, COST), 8, LEAST).layouts(Mode.COLOCATED)
    ]
    differ = 0
    for choice in layouts:
        hidden, exposed = hiding.step(choice), behind.step(choice)
        assert replace(exposed, exchange_s=hidden.exchange_s) == hidden
        assert exposed.exchange_s >= hidden.exchange_s
        differ += exposed.exchange_s > hidden.exchange_s
    assert differ
    found = fastest_by(behind, Mode.COLOCATED, freedom=LEAST)
    all_layouts = LayoutSpace(LayoutSteps(job, COST), 8, LEAST).layouts(Mode.COLOCATED)
    steps = [behind.step(choice) for _, choice in all_layouts]
    assert found.step.step_s == min(step.step_s for step in steps if step.fits)


def test_replicas_of_a_colocated_encoder_share_its_samples():
    three_phase = Schedule(kind=ScheduleKind.THREE_PHASE)
    llm, alone = ModuleChoice(module="llm", dp=4), ModuleChoice(module="vision")
    steps = LayoutSteps(job_on(8, samples=8, schedule=three_phase), COST)
    assert steps.phases_s(alone, llm) == steps.prices.passes_s(alone, 8)
    assert steps.phases_s(replace(alone, dp=4), llm) == steps.prices.passes_s(alone, 2)
    windows = LayoutSteps(job_on(8, samples=8, schedule=replace(three_phase, window=1)), COST)
    assert windows.phases_s(replace(alone, dp=4), llm) == 2 * steps.prices.passes_s(alone, 1)
    assert windows.phases_s(alone, llm) == 2 * steps.prices.passes_s(alone, 4)


@pytest.mark.parametrize("mode", list(Mode))
def test_equal_to_pricing_every_layout_on_16_ranks(mode):
    job = job_on(16, memory_gb=24.0)
    found = fastest_layout(job, COST, mode, freedom=LEAST)
    oracle = exhaustive_layout(job, COST, mode, freedom=LEAST)
    assert found.step.step_s == oracle.step.step_s
    assert oracle.num_priced == oracle.num_layouts
    assert found.num_priced <= oracle.num_priced
    assert found.step.fits


@pytest.mark.parametrize("mode", list(Mode))
def test_no_step_beats_its_bound(mode):
    steps = LayoutSteps(job_on(8, samples=8), COST)
    pairs = list(LayoutSpace(steps, 8, LEAST).layouts(mode))
    assert pairs
    for bound_s, choice in pairs:
        assert steps.step(choice).step_s >= bound_s * (1 - 1e-9), choice
        assert choice.num_ranks == 8


@pytest.mark.parametrize("mode", list(Mode))
def test_a_familys_bounds_hold_for_all_its_layouts_and_the_closer_one_is_closer(mode):
    steps = LayoutSteps(job_on(8, samples=8), COST)
    for family in LayoutSpace(steps, 8, LEAST).families(mode):
        bounds_s, at = family.layouts()
        layouts = list(map(at, range(len(bounds_s))))
        closer_s = family.closer_s()
        assert 0 < len(layouts) <= family.most
        assert family.bound_s <= closer_s * (1 + 1e-9)
        assert all(closer_s <= steps.step(choice).step_s * (1 + 1e-9) for choice in layouts)


def in_order(families):
    """Layouts by ascending bound, by a heap of all layouts of all families that were opened: the oracle."""
    waiting = [(family.bound_s, number, family, False) for number, family in enumerate(families)]
    heapify(waiting)
    numbers = count(len(waiting))
    while waiting:
        bound_s, number, found, is_close = heappop(waiting)
        if isinstance(found, LayoutChoice):
            yield bound_s, found
        elif not is_close:
            heappush(waiting, (max(found.closer_s(), bound_s), number, found, True))
        else:
            bounds_s, at = found.layouts()
            for place, own_s in enumerate(bounds_s.tolist()):
                heappush(waiting, (max(own_s, bound_s), next(numbers), at(place), True))


@pytest.mark.parametrize("mode", list(Mode))
def test_layouts_come_by_their_bounds_and_of_equal_ones_by_their_families(mode):
    space = LayoutSpace(LayoutSteps(job_on(8, samples=8), COST), 8, QUICK)
    found = list(best_first(list(space.families(mode))))
    assert found == list(in_order(space.families(mode)))
    assert len(found) == len({choice for _, choice in found}) == len(list(space.layouts(mode)))


@pytest.mark.parametrize("mode", list(Mode))
def test_bounds_of_layouts_are_those_of_each_alone(mode):
    """By hand, layout by layout."""
    steps = LayoutSteps(job_on(8, samples=8), COST)
    for bound_s, choice in LayoutSpace(steps, 8, QUICK).layouts(mode):
        assert bound_s == bound_of(steps, choice), choice


def bound_of(steps, choice):
    encoders, llm = choice.encoders, choice.llm
    if choice.mode is Mode.HOMOGENEOUS:
        passes_s = sum(map(steps.passes_s, (*encoders, llm)))
        return len(steps.job.batch) // llm.dp * passes_s / llm.pp
    if choice.mode is Mode.COLOCATED:
        moved = moves_s(sum(map(steps.prices.moved_bytes, encoders))) if choice.offload else 0.0
        return steps.llm_s(llm) + sum(steps.phases_s(encoder, llm) for encoder in encoders) + moved
    if choice.mode is Mode.APART:
        in_turn_s = steps.llm_s(llm) + max(steps.round_s(encoder, llm) for encoder in encoders)
        return max(in_turn_s, *(steps.busy_s(encoder, llm) for encoder in encoders))
    return steps.step(choice).step_s


@given(
    st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)), min_size=1, max_size=6), st.integers(1, 9)
)
def test_no_cut_of_a_pipeline_beats_the_bound_on_all_cuts(stages, rounds):
    forward_s, backward_s = zip(*stages, strict=True)
    total_s = sum(forward_s) + sum(backward_s)
    bound_s = least_pipeline_s(total_s, len(stages), rounds)
    assert pipeline_s(forward_s, backward_s, rounds) >= bound_s * (1 - 1e-9)


def test_the_bound_on_all_cuts_is_met_by_stages_that_shrink():
    rounds, depth = 4, 3
    each = [(1 - 1 / rounds) ** index for index in range(depth)]
    prefix_s = max(sum(each[:index]) + rounds * each[index] for index in range(depth))
    assert least_pipeline_s(sum(each), depth, rounds) == pytest.approx(prefix_s)


def test_the_bounds_leave_most_layouts_unpriced():
    found = fastest_layout(job_on(16), COST, Mode.COLOCATED, freedom=LEAST)
    assert found.num_priced < found.num_layouts / 10


def test_islands_that_the_llm_outlasts_are_not_all_priced():
    """The encoder's first and last passes count: without them all its faster choices have the LLM's bound."""
    found = fastest_layout(job_on(64, samples=64), COST, Mode.APART)
    assert found.num_priced < found.num_layouts / 300


def test_given_degrees_are_kept():
    job = job_on(8, samples=8, layouts=(ModuleLayout(module="llm", tp=2, cp=1, pp=2),))
    for mode in (Mode.HOMOGENEOUS, Mode.COLOCATED, Mode.APART):
        llm = fastest_layout(job, COST, mode, freedom=QUICK).choice.llm
        assert (llm.tp, llm.cp, llm.pp) == (2, 1, 2)


def test_tight_memory_forces_recomputation_or_shards():
    wide = fastest_layout(job_on(8, samples=8), COST, Mode.HOMOGENEOUS, freedom=QUICK)
    tight_gb = 0.6 * wide.step.peak_bytes / GB
    tight = fastest_layout(job_on(8, samples=8, memory_gb=tight_gb), COST, Mode.HOMOGENEOUS, freedom=QUICK)
    assert tight.step.peak_bytes <= tight_gb * GB < wide.step.peak_bytes
    assert tight.step.step_s > wide.step.step_s


def test_optimizer_instances_trade_memory_for_exchange():
    steps = LayoutSteps(job_on(32, samples=32), COST)

    def step(instances):
        llm = ModuleChoice(module="llm", dp=32, instances=instances)
        vision = ModuleChoice(module="vision", dp=32, instances=instances)
        choice = LayoutChoice(mode=Mode.COLOCATED, encoders=(vision,), llm=llm)
        return steps.step(choice)

    one, four = step(1), step(4)
    assert four.peak_bytes > one.peak_bytes
    assert four.update_s > one.update_s


def test_instances_must_divide_the_holders():
    with pytest.raises(ValueError, match="must divide dp x cp = 4, got 3"):
        ModuleChoice(module="llm", dp=4, instances=3)


def test_recomputation_costs_time_and_saves_memory():
    steps = LayoutSteps(job_on(8, samples=8), COST)

    def step(recompute):
        llm = ModuleChoice(module="llm", tp=2, pp=2, dp=2, recompute=recompute)
        vision = ModuleChoice(module="vision", dp=8)
        return steps.step(LayoutChoice(mode=Mode.COLOCATED, encoders=(vision,), llm=llm))

    none, full = step(Recompute.NONE), step(Recompute.FULL)
    assert full.peak_bytes < none.peak_bytes
    assert full.passes_s > none.passes_s


def test_offload_makes_room_for_colocated_encoders():
    """Memory between what the smallest layouts hold with and without: only offloaded ones are left."""
    job = job_on(8, samples=8)
    steps = LayoutSteps(job, COST)
    peaks = {offload: [] for offload in (False, True)}
    for _, choice in LayoutSpace(steps, 8, LEAST).layouts(Mode.COLOCATED):
        peaks[choice.offload].append(steps.step(choice).peak_bytes)
    assert min(peaks[True]) < min(peaks[False])
    tight = job_on(8, samples=8, memory_gb=(min(peaks[True]) + min(peaks[False])) / 2 / GB)
    found = fastest_layout(tight, COST, Mode.COLOCATED, freedom=LEAST)
    assert found.choice.offload
    assert found.step.step_s == exhaustive_layout(tight, COST, Mode.COLOCATED, freedom=LEAST).step.step_s


def test_offload_costs_its_moves_and_a_job_may_insist_on_it():
    job = job_on(8, samples=8)
    steps = LayoutSteps(job, COST)
    choice = fastest_layout(job, COST, Mode.COLOCATED, freedom=LEAST).choice
    assert not choice.offload
    apart_s = steps.step(replace(choice, offload=True)).step_s - steps.step(choice).step_s
    assert apart_s == pytest.approx(moves_s(sum(map(steps.prices.moved_bytes, choice.encoders))))
    asked = replace(job, schedule=Schedule(kind=ScheduleKind.THREE_PHASE, offload=True))
    plan = plan_colocated(asked, COST)
    assert {Pass.OFFLOAD, Pass.ONLOAD} <= {action.kind for action in plan.program_actions}
    with pytest.raises(ValueError, match="apart layout has no offload; nearest: colocated"):
        replace(choice, mode=Mode.APART, offload=True)


def text_job(wide):
    """A language model with untied tables on four ranks, whose weights are bfloat16."""
    llm = from_shape("llama-3.1-8b", module="llm")
    settings = Settings(precision=Precision.BFLOAT16, optimizer_precision=wide)
    batch = fixed_samples(4, text_tokens=64, items={})
    return replace(job_on(4), model=connect("text", (llm,)), batch=batch, settings=settings)


WIDE = [None, Precision.FLOAT32, Precision.BFLOAT16]


@pytest.mark.parametrize("wide", WIDE)
def test_state_of_a_layout_is_that_of_its_plan(wide):
    assert_state_is_that_of_its_plan(text_job(wide))


def assert_state_is_that_of_its_plan(job: Job) -> None:
    """Four replicas that shard the optimizer, whatever that works in and by whatever rule."""
    choice = ModuleChoice(module="llm", dp=4)
    num_layers = len(job.model.llm.layers)
    stages = [
        Stage(id=d, module="llm", replica=d, layers=(0, num_layers), ranks=((d,),)) for d in range(choice.dp)
    ]
    sharded = (ModuleSettings(module="llm", sharding=Sharding.OPTIMIZER),)
    plan = finish(job.model, job.batch, stages, replicas=choice.dp)
    plan = replace(plan, settings=replace(job.settings, modules=sharded))
    prices = ModulePrices(job, COST)
    believed = prices.state_bytes(choice, prices.total(choice, 1).held)
    assert believed == pytest.approx(sum(static_holders(plan, 0).values()), rel=1e-9)
    assert LayoutSteps(job, COST).state_bytes(choice) == believed
    assert prices.moved_bytes(choice) == pytest.approx(memory_table(lower(plan)).static_bytes[0], rel=1e-9)


@pytest.mark.parametrize("wide", WIDE)
def test_gradients_travel_and_are_applied_as_wide_as_the_optimizer(wide):
    """The update reads gradient, copy and moments, and writes all but the gradient; weights beside a copy."""
    choice, num = ModuleChoice(module="llm", dp=4), 1e9
    prices, narrow = ModulePrices(text_job(wide), COST), ModulePrices(text_job(None), COST)
    times = 2 if wide is Precision.FLOAT32 else 1
    moved = prices.exchange(choice, num)
    assert moved.scatter_s == narrow.exchange(choice, times * num).scatter_s
    assert moved.gather_s == narrow.exchange(choice, num).gather_s
    num_bytes = {None: 2 + 12 + 12 + 2, Precision.FLOAT32: 4 + 12 + 12 + 2, Precision.BFLOAT16: 2 * 7}[wide]
    held = Elements(weights=num, trained=num, of_experts=0.0, expert_weights=0.0)
    assert prices.update_s(choice, held) == COST.update_s(num / 4 * num_bytes)


@pytest.mark.parametrize("wide", WIDE)
def test_sharded_parameters_take_their_state_along(wide):
    """A fourth of all, and two layers' weights and gradients whole: the largest is a table."""
    job, llm = text_job(wide), ModuleChoice(module="llm", dp=4)
    step = sharded_step(ModulePrices(job, COST), LayoutChoice(mode=Mode.COLOCATED, encoders=(), llm=llm), 1)
    layers = job.model.module("llm").layers
    sizes = [sum(p.num_elements for p in layer.parameters()) for layer in layers]
    state, whole = {None: (16, 4), Precision.FLOAT32: (18, 6), Precision.BFLOAT16: (8, 4)}[wide]
    prices = ModulePrices(text_job(None), COST).layers(llm, 1)
    passes = sum(layer.kept_bytes for layer in prices) + max(layer.working_bytes for layer in prices)
    expected = sum(sizes) * state / 4 + 2 * max(sizes) * whole + passes
    assert step.peak_bytes == pytest.approx(expected, rel=1e-9)
