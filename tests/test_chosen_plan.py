"""No search answers with degrees that its model is not run with, unless the job asks for them."""

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml

from experiments.doors.whole_configs import CONFIGS
from sim.predict import IterationJudge, step_s
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.explain.changes import Judge, Origin, try_changes
from workbench.explain.neighbours import neighbours
from workbench.job.job import Job, load_job
from workbench.job.module_layout import ModuleLayout
from workbench.plan.plan import Plan
from workbench.plan.runnable import check_runnable
from workbench.plan.runnable_degrees import check_degrees, may_divide
from workbench.planner.chosen_plan import check_chosen
from workbench.planner.layout_choice import Mode
from workbench.planner.layout_space import Freedom, LayoutSpace
from workbench.planner.layout_step import LayoutSteps
from workbench.planner.stage_counts import silent
from workbench.search.joint.drive import joint_search
from workbench.search.joint.own_spaces import OWN_SPACES, Draws
from workbench.search.joint.terms import Scope, Stop
from workbench.strategies.registry import PLANNERS

COST = CostModel(load_profile("H100"))
UNSHARED = "module 'vision': qwen2_5_vl_vision does not share tokens over ranks; want cp 1, got 2"


@cache
def job() -> Job:
    """Qwen2.5-VL in small on four GPUs, with images that are long against its texts."""
    said = {
        "name": "qwen",
        "model": {
            "modules": {
                "vision": {"config": "config.json", "modality": "vision"},
                "llm": {"config": "config.json", "modality": "text"},
            }
        },
        "cluster": {"device": "H100", "nodes": 1, "ranks_per_node": 4},
        "batch": {
            "samples": 4,
            "fixed": {"text_tokens": 64, "items": {"vision": {"videos": [[720, 1280, 8.0]]}}},
        },
        "profile": "H100",
    }
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIGS["qwen2_5_vl"]))
        (Path(folder) / "job.yaml").write_text(yaml.safe_dump(said))
        return load_job(Path(folder) / "job.yaml")


def with_cp(vision: int, llm: int) -> Job:
    layouts = (ModuleLayout(module="vision", cp=vision, pp=1), ModuleLayout(module="llm", cp=llm, pp=1))
    return replace(job(), layouts=layouts)


def planned(of: Job, strategy: str = "cornstarch") -> Plan:
    return PLANNERS[strategy](of, COST, silent)


def test_a_plan_that_was_asked_for_is_taken_and_one_that_was_not_is_refused() -> None:
    shared = planned(with_cp(2, 2))
    check_chosen(with_cp(2, 2), shared)
    with pytest.raises(ValueError, match=UNSHARED):
        check_chosen(with_cp(1, 2), shared)
    with pytest.raises(ValueError, match=UNSHARED):
        check_chosen(job(), shared)
    check_chosen(job(), planned(with_cp(1, 2)))
    with pytest.raises(ValueError, match=UNSHARED):
        check_runnable(shared)


def test_what_cannot_run_at_all_may_be_divided_in_any_way() -> None:
    vision = job().model.module("vision")
    assert not may_divide(vision, tp=1, cp=2)
    assert may_divide(vision, tp=2, cp=1)
    assert may_divide(replace(vision, source=None), tp=1, cp=2)
    with pytest.raises(ValueError, match=UNSHARED):
        check_degrees(vision, tp=1, cp=2)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_joint_search_answers_with_what_runs(seed: int) -> None:
    names = ("cornstarch", "disttrain", "megatron-colocated", "encoders-colocated")
    scope = Scope(seed=seed, planners={name: PLANNERS[name] for name in names})
    found = joint_search(job(), COST, IterationJudge(COST), stop=Stop(candidates=60), scope=scope)
    check_runnable(found.plan)


@pytest.mark.parametrize("mode", list(Mode))
def test_layouts_that_are_searched_are_those_that_run(mode: Mode) -> None:
    space = LayoutSpace(LayoutSteps(job(), COST), 4, Freedom())
    found = [choice for _, choice in space.layouts(mode)]
    assert found
    assert {encoder.cp for choice in found for encoder in choice.encoders} == {1}


def test_no_change_is_suggested_that_would_not_run() -> None:
    base = with_cp(1, 1)
    judge = Judge(planners=PLANNERS, cost=COST, step_s=step_s)
    origin = Origin(base, "cornstarch", is_exact=True)
    changes = tuple(neighbours(base))
    found = try_changes(
        judge.judged(planned(base)), changes, lambda change: judge.planned(change, origin), judge
    )
    tried = (*found.helping, *found.slower)
    assert any("llm cp 1 -> 2" in each.change.about for each in tried)
    assert not any("vision cp 1 -> 2" in each.change.about for each in tried)


@pytest.mark.parametrize("strategy", ["cornstarch", "megatron-homogeneous", "fsdp"])
def test_what_is_drawn_of_a_papers_own_space_runs(strategy: str) -> None:
    draws, rng = Draws(job=job(), space=OWN_SPACES[strategy]), random.Random(0)
    drawn = [draws.fresh(rng) for _ in range(100)]
    drawn += [draws.near(each, rng) for each in drawn]
    cps = {(layout.module, layout.cp) for each in drawn for layout in each.layouts}
    assert {cp for module, cp in cps if module == "vision"} <= {1}
    assert strategy != "cornstarch" or {cp for module, cp in cps if module == "llm"} == {1, 2, 4}
