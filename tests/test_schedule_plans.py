"""Schedules on whole plans: every kind on random DAGs is sound, free of deadlock and runs."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sim.step.engine import simulate
from tests.examples import examples
from tests.job_files import write
from tests.strategies import plans
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.job import load_job
from workbench.job.module_layout import ModuleLayout
from workbench.plan.build import with_programs
from workbench.plan.check import check
from workbench.plan.deadlock import check_deadlock
from workbench.plan.lower import lower
from workbench.schedule.action import Pass
from workbench.schedule.choice import ScheduleKind, rank_block, usual
from workbench.search.drive import search, with_schedules
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept


def laid_out(plan, schedule):
    """The LLM's stages on fewer ranks, as the schedule wants them; None where their number does not fit."""
    moved = {}
    for (module, _), chain in plan.chain.items():
        if module != "llm":
            continue
        if len(chain) % schedule.virtual_stages:
            return None
        for index, stage in enumerate(chain):
            home = chain[rank_block(schedule, index, len(chain))]
            moved[stage.id] = replace(stage, ranks=home.ranks)
    return replace(plan, programs=(), stages=tuple(moved.get(s.id, s) for s in plan.stages))


@examples(80)
@given(plan=plans(), kind=st.sampled_from(ScheduleKind))
def test_any_plan_with_any_schedule_is_accepted_and_runs(plan, kind):
    schedule = usual(kind)
    draft = laid_out(plan, schedule)
    assume(draft is not None)
    made = with_programs(draft, schedule)
    check(made)
    lowered = lower(made)
    check_deadlock(lowered)
    simulate(lowered, lambda action: 1.0)
    if kind.spec.takes("memory_limit"):
        assert Pass.B not in {action.kind for action in made.program_actions}


@pytest.fixture(scope="module")
def cost():
    return CostModel(load_profile("A40"))


def job_with(tmp_path, kind, **batch):
    def change(data):
        data["cluster"] = {"device": "A40", "nodes": 2, "ranks_per_node": 4, "memory_gib": 40}
        data["cluster"] |= {scope: {"gb_per_s": 20.0, "latency_us": 5} for scope in ("intra", "inter")}
        data["profile"] = "A40"
        data["batch"]["samples"] = 8
        data["batch"] |= batch
        data["model"]["modules"]["llm"]["trainable"] = "all"
        data["model"]["modules"]["llm"]["config"]["num_hidden_layers"] = 6
        data["layouts"] = {"vision": {"pp": 1}, "llm": {"pp": 2}}
        data["schedule"] = {"kind": kind.value}

    return load_job(write(tmp_path, change))


def test_open_stage_counts_leave_out_what_a_schedule_cannot_do(tmp_path, cost):
    job = job_with(tmp_path, ScheduleKind.ZB_V)
    layers = len(job.model.module("llm").layers)
    job = replace(job, layouts=())
    plan = PLANNERS["cornstarch"](job, cost, lambda *_: None)
    assert len(plan.chain["llm", 0]) % 2 == 0
    assert len(plan.chain["llm", 0]) <= layers


def test_search_tries_each_strategy_with_each_schedule(tmp_path, cost):
    kinds = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB_H1)
    planners = with_schedules({"cornstarch": PLANNERS["cornstarch"]}, [usual(kind) for kind in kinds])
    assert list(planners) == ["cornstarch 1f1b", "cornstarch zb-h1"]

    def predict(plan):
        lowered, _ = accept(plan)
        return simulate(lowered, lambda action: float(action.kind is not Pass.STEP) + (action.kind is Pass.B))

    found = search(job_with(tmp_path, ScheduleKind.GPIPE), cost, planners, predict)
    assert [candidate.refusal for candidate in found] == ["", ""]
    assert found[0].strategy == "cornstarch zb-h1"
    assert found[0].trace.iteration_s < found[1].trace.iteration_s


def test_a_schedule_that_does_not_fit_the_layers_is_one_line(tmp_path, cost):
    job = job_with(tmp_path, ScheduleKind.ZB_V)
    layers = len(job.model.module("llm").layers)
    too_many = layers // 2 + 1
    wide = replace(job, layouts=(ModuleLayout(module="llm", pp=too_many),))
    with pytest.raises(ValueError, match="module 'llm'") as raised:
        PLANNERS["cornstarch"](wide, cost, lambda *_: None)
    assert "\n" not in str(raised.value)
