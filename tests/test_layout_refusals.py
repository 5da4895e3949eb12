"""Layouts that do not exist are refused in one line, with why and what is nearest."""

import pickle
from dataclasses import replace

import pytest

from tests.test_layout_search import COST, LEAST, job_on
from tests.vlm_job import vlm_job
from workbench.explain.warnings import unlike_layouts
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.block_modules import BlockModule
from workbench.model.model_graph import connect
from workbench.plan.plan import ModuleSettings, Plan, Recompute, Settings
from workbench.planner import layout_plan
from workbench.planner.assembly import empty_draft
from workbench.planner.judged import MOST_JUDGED
from workbench.planner.layout_choice import LayoutChoice, Mode
from workbench.planner.layout_plan import searched_plans
from workbench.planner.layout_search import NoLayoutError, exhaustive_layout, fastest_layout
from workbench.planner.stage_counts import silent
from workbench.schedule.choice import Schedule, usual_in_phases
from workbench.strategies.registry import PLANNERS


@pytest.mark.parametrize("mode", list(Mode))
def test_what_fits_nowhere_is_refused_in_one_line(mode):
    with pytest.raises(ValueError, match=rf"{mode} layout") as error:
        fastest_layout(job_on(8, samples=8, memory_gb=1.0), COST, mode, freedom=LEAST)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        pytest.param(
            {"layouts": (ModuleLayout(module="llm", tp=2, cp=2, dp=3),)},
            "the layout of 'llm' takes a multiple of 12 ranks, got 8; nearest: 12 ranks",
            id="degrees",
        ),
        pytest.param(
            {"layouts": (ModuleLayout(module="llm", tp=2, pp=1, dp=2),)},
            "the layout of 'llm' takes 4 ranks, got 8; nearest: one without dp",
            id="all degrees",
        ),
        pytest.param(
            {"samples": 9, "microbatch_samples": 2},
            r"no dp of 'llm' among \[1, 2, 4, 8\] .* nearest: 8 samples",
            id="batch",
        ),
        pytest.param(
            {"layouts": (ModuleLayout(module="vision"), ModuleLayout(module="llm", tp=2))},
            "the grid of 'llm', tp 2 and cp 1, but the layout of 'vision' has tp 1 and cp 1; nearest: equal",
            id="grids",
        ),
        pytest.param(
            {"memory_gb": 0.1}, r"'llm' take 6.73 GiB a rank at least, of 0.0931 GiB; nearest", id="state"
        ),
    ],
)
def test_what_has_no_layout_is_told_why_and_what_is_nearest(changes, what):
    job = job_on(8, **({"samples": 8} | changes))
    with pytest.raises(ValueError, match=what):
        fastest_layout(job, COST, Mode.HOMOGENEOUS, freedom=LEAST)


def test_a_job_whose_layouts_fix_degrees_is_told_what_is_tried_without_them():
    job = job_on(8, samples=8, memory_gb=8.5)
    with pytest.raises(ValueError, match=r"the smallest, homogeneous: .* or more ranks$"):
        fastest_layout(job, COST, Mode.HOMOGENEOUS, freedom=LEAST)
    cut = replace(job, layouts=(ModuleLayout(module="llm", tp=2), ModuleLayout(module="vision", tp=2)))
    with pytest.raises(
        ValueError, match=r"llm tp 2 .* or more ranks, or no layouts of 'llm', 'vision', which"
    ):
        fastest_layout(cut, COST, Mode.HOMOGENEOUS, freedom=LEAST)


@pytest.mark.parametrize(
    ("num_ranks", "num_encoders", "what"),
    [
        (
            16,
            2,
            "3 modules on whole nodes of 8 ranks of their own take at least 24 ranks, got 16; nearest: 24",
        ),
        (1, 1, "2 modules on ranks of their own take at least 2 ranks, got 1; nearest: 2 ranks"),
    ],
)
def test_too_few_ranks_for_islands_are_told(num_ranks, num_encoders, what):
    job = job_on(num_ranks)
    vision, llm = job.model.modules
    towers = (vision, *(replace(vision, name=f"tower{index}") for index in range(1, num_encoders)))
    with pytest.raises(NoLayoutError, match=what):
        fastest_layout(
            replace(job, model=connect("towers", *((tower, llm) for tower in towers))), COST, Mode.APART
        )


def test_the_reason_for_no_layout_is_found_when_it_is_read():
    """Also in another process, where it arrives as text."""
    calls = []
    reason = NoLayoutError(lambda: calls.append(1) or "no room")
    assert not calls
    assert (str(reason), str(reason), calls) == ("no room", "no room", [1])
    assert str(pickle.loads(pickle.dumps(reason))) == "no room"


@pytest.mark.parametrize("mode", [Mode.COLOCATED, Mode.APART, Mode.HOMOGENEOUS])
def test_a_layout_that_one_estimate_has_had_refused_is_not_built_for_the_other(mode, monkeypatch):
    """The first ten are refused; the search by the second estimate comes upon most of them again."""
    built: list[LayoutChoice] = []

    def build(job: Job, choice: LayoutChoice) -> Plan:
        built.append(choice)
        if len(built) <= 10:
            raise ValueError(f"no plan of {choice}")
        return empty_draft(job, "any")

    monkeypatch.setattr(layout_plan, "lowered_that_fits", lambda plan: None)
    schedule = usual_in_phases() if mode is Mode.COLOCATED else Schedule()
    job = job_on(8, samples=8, schedule=schedule)
    assert searched_plans(job, COST, mode, build, silent, MOST_JUDGED)
    assert len(built) == len(set(built))


KEPT = {
    "full": ModuleSettings(module="llm", recompute=Recompute.FULL),
    "blocks": ModuleSettings(module="llm", recompute=Recompute.BLOCKS),
    "some": ModuleSettings(module="llm", recompute=Recompute.BLOCKS, recompute_layers=5),
    "parts": ModuleSettings(module="llm", computed_again=(BlockModule.MLP,)),
}


@pytest.mark.parametrize("stated", KEPT)
@pytest.mark.parametrize("strategy", sorted(PLANNERS))
def test_every_strategy_keeps_the_recomputation_that_a_job_states(strategy, stated):
    """Memory is ample, so nothing asks for it; of a module without a word the search decides."""
    own = KEPT[stated]
    job = replace(vlm_job(), layouts=())
    asked = replace(job, settings=replace(job.settings, modules=(own,)))
    plan = PLANNERS[strategy](asked, COST)
    found = plan.settings.of("llm")
    assert (found.recompute, found.recompute_layers) == (own.recompute, own.recompute_layers)
    assert found.computed_again == own.computed_again
    assert plan.settings.of("vision").recompute is Recompute.NONE
    assert not any("recompute" in line for line in unlike_layouts(plan, asked))


@pytest.mark.parametrize("mode", [Mode.COLOCATED, Mode.APART, Mode.HOMOGENEOUS, Mode.SHARDED])
def test_the_search_with_stated_recomputation_is_exact(mode):
    own = ModuleSettings(module="llm", recompute=Recompute.BLOCKS, recompute_layers=9)
    job = job_on(8, samples=8, settings=Settings(modules=(own,)))
    found = fastest_layout(job, COST, mode, freedom=LEAST)
    assert found.step == exhaustive_layout(job, COST, mode, freedom=LEAST).step
    assert (found.choice.llm.recompute, found.choice.llm.recompute_layers) == (Recompute.BLOCKS, 9)
