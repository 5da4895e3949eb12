"""Frozen encoders run ahead of 1F1B: nothing but their forwards moves, as far as memory holds it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.step.engine import simulate
from tests.plans import cluster
from tests.test_parity import assert_same, mixed
from tests.tiny_valm import tiny_batch
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.memory.account import memory_table, peak_bytes
from workbench.plan.lower import lower
from workbench.plan.plan import Precision, Settings
from workbench.schedule.action import Action, Pass
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.strategies import cornstarch
from workbench.timing.accept import accept

COST = CostModel(load_profile("A40"))
ENCODERS = ("vision", "audio")


def job(run_ahead, images=(1, 2, 0, 3, 1, 2, 1, 2), clips=(1, 0, 1, 1, 0, 1, 1, 1), mix="projectors-and-llm"):
    return Job(
        name="ahead",
        model=mixed(mix),
        cluster=cluster(4),
        batch=tiny_batch(images, clips),
        layouts=(
            ModuleLayout(module="vision", pp=1),
            ModuleLayout(module="audio", pp=1),
            ModuleLayout(module="llm", pp=2),
        ),
        schedule=Schedule(run_ahead=run_ahead),
        settings=Settings(precision=Precision.FLOAT64),
        profile="A40",
    )


def without_encoder_forwards(plan):
    encoders = {stage.id for stage in plan.stages if stage.module in ENCODERS}
    return [
        [a for a in program.actions if not (a.kind is Pass.F and a.stage in encoders)]
        for program in plan.programs
    ]


def warmup(plan, module):
    """Forwards of a module's first stage before its first backward."""
    stage = plan.chain[module, 0][0]
    kinds = [a.kind for a in plan.program[stage.flat_ranks[0]] if a.stage == stage.id]
    return kinds.index(Pass.B)


@pytest.mark.parametrize("run_ahead", [1, 2, 3])
def test_only_forwards_of_frozen_encoders_move_and_by_so_many(run_ahead):
    plain, ahead = cornstarch.plan(job(0), COST), cornstarch.plan(job(run_ahead), COST)
    accept(ahead)
    assert without_encoder_forwards(ahead) == without_encoder_forwards(plain)
    for first, second in zip(plain.programs, ahead.programs, strict=True):
        assert sorted(first.actions, key=str) == sorted(second.actions, key=str)
    for module in ENCODERS:
        most = len(ahead.microbatches_of[module, 0])
        assert warmup(ahead, module) == min(most, warmup(plain, module) + run_ahead)
    assert ahead.chain["llm", 0] == plain.chain["llm", 0]


@settings(max_examples=12)
@given(
    st.lists(st.integers(0, 3), min_size=8, max_size=8).filter(any),
    st.lists(st.integers(0, 1), min_size=8, max_size=8).filter(any),
    st.integers(1, 9),
)
def test_on_ranks_of_their_own_nobody_waits_longer(images, clips, run_ahead):
    plans = [cornstarch.plan(job(each, images, clips), COST) for each in (0, run_ahead)]
    plain_s, ahead_s = (passes_s(plan) for plan in plans)
    assert ahead_s <= plain_s * (1 + 1e-9)


def passes_s(plan):
    """Until the last pass ends: vision microbatches take as long as they have images, messages nothing."""
    lowered, _ = accept(plan)
    items = {(m.module, m.index): len(m.items) for m in plan.microbatches}

    def duration_s(action: Action) -> float:
        if action.kind not in (Pass.F, Pass.B) or action.microbatch is None:
            return 0.0
        module = plan.stage[action.stage].module
        return items[module, action.microbatch] if action.kind is Pass.F or module == "llm" else 0.0

    trace = simulate(lowered, duration_s, step_s=lambda rank: 0.0)
    return max(span.end_s for span in trace.spans if span.action.kind in (Pass.F, Pass.B))


def test_uneven_images_are_encoded_behind_each_others_llm_passes():
    """Three images at once make the LLM wait; encoded early, they do not."""
    images = (1, 1, 1, 1, 6, 1, 1, 1)
    waits = [passes_s(cornstarch.plan(job(each, images, (1,) * 8), COST)) for each in (0, 3)]
    assert waits[1] < waits[0]


def test_no_further_than_memory_holds():
    wide = cornstarch.plan(job(7), COST)
    most, least = (peak(plan) for plan in (wide, cornstarch.plan(job(0), COST)))
    assert least < most
    tight = replace(job(7), cluster=with_memory((least + most) // 2))
    found = cornstarch.plan(tight, COST)
    accept(found)
    ahead = warmup(found, "vision") - warmup(cornstarch.plan(job(0), COST), "vision")
    assert 0 <= ahead < warmup(wide, "vision")
    further = replace(found, programs=cornstarch.plan(job(ahead + 1), COST).programs)
    assert peak(further) > (least + most) // 2


def peak(plan):
    lowered = lower(plan)
    return max(peak_bytes(lowered, memory_table(lowered)).values())


def with_memory(num_bytes):
    whole = cluster(4)
    return replace(whole, nodes=tuple(replace(node, memory_bytes=num_bytes) for node in whole.nodes))


def test_a_model_that_trains_its_encoders_is_refused():
    with pytest.raises(ValueError, match="nearest: trainable projector of an encoder, or run_ahead 0"):
        cornstarch.plan(job(1, mix="everything"), COST)


def test_schedules_without_encoders_in_front_are_refused():
    with pytest.raises(
        ValueError, match="schedule gpipe has no run_ahead, got 2; 1f1b, three-phase have one"
    ):
        Schedule(kind=ScheduleKind.GPIPE, run_ahead=2)


def test_executed_ahead_it_is_the_same_step(pool):
    assert_same(cornstarch.plan(job(3), COST), pool)
