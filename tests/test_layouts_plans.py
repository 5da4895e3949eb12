"""Plans with a layout per module, from job files to simulated traces, and what is refused."""

from dataclasses import replace
from itertools import combinations, groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.step.engine import simulate
from sim.step.sweep import Sweep
from tests.job_files import write
from tests.layout_jobs import APART, layout_job, planned, three_phase, vision_language
from tests.tiny_valm import tiny_valm
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.job import Job, load_job
from workbench.job.module_layout import ModuleLayout
from workbench.memory.account import check_memory, memory_table, static_holders
from workbench.model.trainable import Trainable
from workbench.plan.check import check
from workbench.plan.codec import dumps, loads
from workbench.plan.deadlock import check_deadlock
from workbench.plan.lower import lower
from workbench.plan.microbatches import shared_microbatches
from workbench.planner.assembly import shared_draft
from workbench.planner.rank_spans import Placement, Span, placement_of
from workbench.schedule.action import MOVES, Action, Pass
from workbench.schedule.reductions import with_reductions
from workbench.strategies import megatron_heterogeneous
from workbench.timing.price import HOST_BYTES_PER_S, price

IMAGES = (1, 2, 0, 1, 1, 0, 2, 1)
GRIDS = {
    "apart": ({"vision": (2, 1, 1, 2), "llm": (1, 2, 2)}, APART),
    "same-ranks": ({"vision": (4, 1, 1), "llm": (2, 2, 1)}, three_phase(2)),
    "same-ranks-ahead": ({"vision": (8, 1, 1), "llm": (2, 2, 1, 2)}, three_phase(1, 1)),
    "same-ranks-cp": ({"vision": (4, 1, 1, 2), "llm": (1, 2, 2, 2)}, three_phase()),
}


@pytest.mark.parametrize("name", GRIDS)
def test_simulated_by_both_engines_and_safe(name):
    layouts, schedule = GRIDS[name]
    plan = planned(vision_language(), layouts, microbatch=1, images=IMAGES, schedule=schedule)
    lowered, cost = lower(plan), CostModel(load_profile("A40"))
    check_deadlock(lowered)
    table = memory_table(lowered)
    check_memory(lowered, table)
    prices = price(lowered, cost)
    trace = simulate(lowered, prices.duration_s, step_s=prices.step_s, memory=table)
    assert max(span.end_s for span in trace.spans) == Sweep(lowered).iteration_s(
        prices.duration_s, prices.step_s
    )
    assert loads(dumps(plan)) == plan


def test_three_phases_keep_encoders_out_of_the_pipeline():
    layouts, schedule = GRIDS["same-ranks"]
    plan = planned(vision_language(), layouts, microbatch=1, images=(1,) * 8, schedule=schedule)
    llm = {stage.id for stage in plan.stages if stage.module == "llm"}
    for actions in plan.program.values():
        phases = ["llm" if a.stage in llm else str(a.kind) for a in actions if a.kind in (Pass.F, Pass.B)]
        assert [phase for phase, _ in groupby(phases)] == ["F", "llm", "B"] * 2


def held_before(plan, table, rank, action):
    """Bytes between the action before and this one."""
    index = plan.program[rank].index(action)
    taken, given = (sum(moved[rank][:index]) for moved in (table.acquired_bytes, table.released_bytes))
    return table.static_bytes[rank] + taken - given


def test_offloaded_encoders_take_less_memory_and_more_time():
    """While the LLM runs, weights and optimizer state of the encoders are on the host."""
    layouts = {"vision": (4, 1, 1), "llm": (2, 2, 1)}
    cost = CostModel(load_profile("A40"))
    found = {}
    for offload in (False, True):
        schedule = replace(three_phase(), offload=offload)
        plan = planned(vision_language(), layouts, microbatch=1, images=(1,) * 8, schedule=schedule)
        lowered = lower(plan)
        check_deadlock(lowered)
        table, prices = memory_table(lowered), price(lowered, cost)
        trace = simulate(lowered, prices.duration_s, step_s=prices.step_s, memory=table)
        last = max(span.end_s for span in trace.spans)
        assert last == Sweep(lowered).iteration_s(prices.duration_s, prices.step_s)
        found[offload] = plan, table, lowered, last, prices
    plan, table, lowered, offloaded_s, prices = found[True]
    _, stays, _, kept_s, _ = found[False]
    assert table.static_bytes == stays.static_bytes
    for rank in plan.ranks:
        stage = next(stage for stage in plan.stages_on[rank] if stage.module == "vision")
        state = sum(
            size
            for name, size in static_holders(plan, rank).items()
            if name.endswith("vision") and "grad" not in name
        )
        away, back = Action(stage.id, Pass.OFFLOAD), Action(stage.id, Pass.ONLOAD)
        first = next(action for action in plan.program[rank] if plan.stage[action.stage].module == "llm")
        held, kept = (held_before(*found[offload][:2], rank, first) for offload in (True, False))
        assert held == kept - state < kept
        assert prices.duration_s(away) == prices.duration_s(back) >= state / HOST_BYTES_PER_S
    copies_s = 2 * max(prices.duration_s(Action(stage.id, Pass.OFFLOAD)) for stage in plan.chain["vision", 0])
    assert kept_s < offloaded_s <= kept_s + 2 * copies_s
    assert any("host" in note for note in prices.unmeasured)
    small = tuple(replace(node, memory_bytes=100_000) for node in plan.cluster.nodes)
    with pytest.raises(ValueError, match=r"during 0B0.* optimizer of llm .*optimizer of vision "):
        check_memory(replace(lowered, plan=replace(plan, cluster=replace(plan.cluster, nodes=small))), table)


def test_ranks_that_share_a_stage_reduce_it_at_the_same_pass():
    """The ranks of one encoder replica hold different stages of another, and reduce in one order."""
    layouts = {"vision": (4, 1, 2), "audio": (1, 2, 2, 2), "llm": (2, 2, 2)}
    model = tiny_valm(vision=Trainable.ALL, audio=Trainable.ALL)
    plan = planned(model, layouts, microbatch=1, images=IMAGES, schedule=three_phase(1))
    check_deadlock(lower(plan))
    kinds = {action.kind for action in plan.program_actions}
    assert Pass.REDUCE_GRAD in kinds


@given(st.data())
def test_reductions_stand_behind_their_passes_in_one_order(data):
    """Whatever the passes of ranks that share stages in part."""
    num_stages = data.draw(st.integers(1, 5))
    whole = data.draw(st.permutations([Action(s, Pass.F, m) for s in range(num_stages) for m in range(2)]))
    groups = data.draw(
        st.lists(st.sets(st.integers(0, num_stages - 1), min_size=1).map(sorted).map(tuple), unique=True)
    )
    reduced = data.draw(st.permutations(range(num_stages)))
    programs = {group: tuple(a for a in whole if a.stage in group) for group in groups}
    found = with_reductions(programs, reduced)
    for group, actions in found.items():
        assert tuple(a for a in actions if a.kind is Pass.F) == programs[group]
        order = [a.stage for a in actions if a.kind is Pass.REDUCE_GRAD]
        assert order == [stage for stage in reduced if stage in group]
        for stage in group:
            mine = [a.kind for a in actions if a.stage == stage]
            assert mine == [Pass.F, Pass.F, Pass.REDUCE_GRAD]
    for one, other in combinations(found, 2):
        both = set(one) & set(other)
        assert [a for a in found[one] if a.stage in both] == [a for a in found[other] if a.stage in both]


def test_a_pass_of_a_stage_that_is_away_is_refused():
    schedule = replace(three_phase(), offload=True)
    layouts = {"vision": (2, 1, 1), "llm": (1, 2, 1)}
    plan = planned(vision_language(), layouts, microbatch=1, images=(1,) * 8, schedule=schedule)
    first, *others = plan.programs
    stays = tuple(action for action in first.actions if action.kind is not Pass.ONLOAD)
    broken = replace(plan, programs=(replace(first, actions=stays), *others))
    with pytest.raises(ValueError, match="rank 0: action 0B0 stands after 0OFFLOAD, before 0ONLOAD"):
        check(broken)


def test_a_job_file_says_offload(tmp_path):
    def change(data):
        data["cluster"]["local"] = {"ranks": 2, "cores": 2}
        data["layouts"] = {"vision": {"dp": 2, "pp": 1, "rank_offset": 0}, "llm": {"pp": 2, "rank_offset": 0}}
        data["schedule"] = {"kind": "three-phase", "offload": True}
        data["profile"] = "A40"

    plan = megatron_heterogeneous.plan(load_job(write(tmp_path, change)), CostModel(load_profile("A40")))
    assert {str(action) for action in plan.program[0] if action.kind in MOVES} == {"0OFFLOAD", "0ONLOAD"}


def test_an_interval_of_a_window_feeds_as_few_replicas_as_can_be():
    """Two LLM replicas, four encoder replicas, windows of two rounds: each encoder replica feeds one."""
    job = layout_job(
        vision_language(),
        {"vision": (4, 1, 1), "llm": (2, 2, 1)},
        microbatch=1,
        images=(1,) * 8,
        schedule=three_phase(2),
    )
    draft = shared_draft(job, "test")
    reads = {
        m.replica: {i.sample for i in m.items}
        for m in draft.microbatches
        if m.module == "vision" and m.index == 0
    }
    of_llm = {
        r: {i.sample for m in draft.microbatches if (m.module, m.replica) == ("llm", r) for i in m.items}
        for r in (0, 1)
    }
    assert reads == {0: {0}, 1: {2}, 2: {1}, 3: {3}}
    assert reads[0] | reads[1] <= of_llm[0]
    assert reads[2] | reads[3] <= of_llm[1]


@pytest.mark.parametrize(("dp", "rounds"), [(1, 1), (3, 1), (4, 2), (5, None), (8, 1)])
def test_every_sample_has_one_replica(dp, rounds):
    job = layout_job(
        vision_language(), {"vision": (1, 1, 1), "llm": (2, 1, 1)}, microbatch=1, images=(1,) * 8
    )
    draft = shared_draft(job, "test")
    found = shared_microbatches(draft, samples_per_microbatch=1, dp={"vision": dp, "llm": 2}, rounds=rounds)
    vision = [item.sample for m in found if m.module == "vision" for item in m.items]
    assert sorted(vision) == list(range(8))
    held = [sum(len(m.items) for m in found if (m.module, m.replica) == ("vision", r)) for r in range(dp)]
    assert max(held) - min(held) <= 1


def test_a_job_file_says_grids_and_schedule(tmp_path):
    def change(data):
        data["cluster"]["local"] = {"ranks": 4, "cores": 4}
        data["layouts"] = {
            "vision": {"dp": 4, "pp": 1, "rank_offset": 0},
            "llm": {"dp": 2, "stage_layers": [1, 3], "rank_offset": 0},
        }
        data["batch"]["samples"] = 8
        data["schedule"] = {"kind": "three-phase", "window": 2, "run_ahead": 1}
        data["profile"] = "A40"

    job = load_job(write(tmp_path, change))
    plan = megatron_heterogeneous.plan(job, CostModel(load_profile("A40")))
    assert plan.ranks == (0, 1, 2, 3)
    assert [stage.layers for stage in plan.chain["llm", 1]] == [(0, 1), (1, 4)]
    first = [str(action) for action in plan.program[0][:5]]
    assert first == ["0F0", "4F0", "4F1", "0F1", "4B0"], "it would wait for its first backward"


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        (
            [("vision", 0, 4), ("llm", 2, 4)],
            r"ranks \[0, 4\) of 'vision' and \[2, 6\) of 'llm' overlap .*; nearest: rank_offset 4 for 'llm'",
        ),
        (
            [("vision", 0, 4), ("llm", 5, 2)],
            r"ranks \[4, 5\) in front of 'llm' .*; nearest: rank_offset 4 for 'llm'",
        ),
        ([("vision", 1, 4)], r"ranks \[0, 1\) in front of 'vision' .*; nearest: rank_offset 0 for 'vision'"),
    ],
)
def test_rank_sets_are_equal_or_disjoint_without_gaps(spans, message):
    with pytest.raises(ValueError, match=message):
        placement_of([Span(*span) for span in spans])


def test_rank_sets_that_are():
    assert placement_of([Span("a", 4, 2), Span("b", 0, 4)]) is Placement.APART
    assert placement_of([Span("a", 0, 4), Span("b", 0, 4)]) is Placement.SHARED
    assert placement_of([Span("a", 0, 4)]) is Placement.APART


def job(**changes) -> Job:
    defaults = {"vision": ModuleLayout(module="vision", pp=1), "llm": ModuleLayout(module="llm", pp=1)}
    base = layout_job(vision_language(), {"vision": (1, 1, 1), "llm": (1, 1, 1)}, microbatch=1, images=IMAGES)
    layouts = tuple(replace(defaults[name], **changes.pop(name, {})) for name in defaults)
    return replace(base, layouts=layouts, **changes)


SHARED = {"rank_offset": 0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llm": {"tp": 4}}, "tp of module 'llm' must divide its 2 key/value heads, got 4; nearest: 2"),
        ({"llm": {"dp": 3}}, "batch of 8 samples: .* got 1 x 3; nearest: 6 or 9 samples"),
        ({"microbatch_samples": 16}, "batch of 8 samples: .* got 16 x 1; nearest: 16 samples"),
        (
            {"vision": {"dp": 99}},
            "a batch of 8 samples with 8 items has none for some of 99 replicas; nearest: dp 8",
        ),
        (
            {"llm": {"stage_layers": (2, 2)}},
            "has 6 layers, got stage_layers .*nearest: 4 in place of the last 2",
        ),
        ({"llm": {"dp": 8, "tp": 2}}, "the layout needs 17 ranks, job 'layouts' may use 8"),
        ({"vision": SHARED | {"dp": 2}, "llm": SHARED | {"dp": 4}}, "nearest: dp 4 for 'vision'"),
        (
            {"vision": SHARED | {"dp": 2, "cp": 3}, "llm": SHARED | {"dp": 4, "cp": 2}},
            "'vision' has 6 ranks, 'llm' 8; no dp of 3 ranks each gives 8; nearest: 9 with dp 3",
        ),
        (
            {"vision": SHARED, "llm": SHARED | {"pp": None}},
            "on the same ranks need pp, module 'llm' has none",
        ),
        (
            {"vision": SHARED | {"dp": 2}, "llm": SHARED | {"tp": 2}},
            "share rank 0 but not all ranks: .*; schedule three-phase takes them",
        ),
    ],
)
def test_refuses_in_one_line_with_the_nearest_choice(changes, message):
    with pytest.raises(ValueError, match=message) as refusal:
        megatron_heterogeneous.plan(job(**changes), CostModel(load_profile("A40")))
    assert "\n" not in str(refusal.value)


def test_names_what_does_not_fit_on_shared_ranks():
    layouts, schedule = GRIDS["same-ranks"]
    plan = planned(vision_language(), layouts, microbatch=1, images=IMAGES, schedule=schedule)
    small = tuple(replace(node, memory_bytes=100_000) for node in plan.cluster.nodes)
    lowered = lower(replace(plan, cluster=replace(plan.cluster, nodes=small)))
    with pytest.raises(ValueError, match=r"rank .* does not fit: .* of llm .*want memory_gib >= ") as refusal:
        check_memory(lowered, memory_table(lowered))
    assert "vision" in str(refusal.value)
