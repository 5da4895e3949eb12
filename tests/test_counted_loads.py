"""Loads of experts that a run counts: on the device, over ranks, in its trace and beside what is assumed."""

from dataclasses import replace
from math import sqrt

import pytest
import torch

from runtime.launch import run_lowered
from runtime.models.expert_tally import CountedLoad, ExpertTally
from runtime.rank_job import Build
from runtime.run_settings import RunSettings
from runtime.step.note_details import details_of
from runtime.step.stage_module import build_stage_module
from runtime.world.pool import Pool
from sim.predict import predict
from tests import tiny_models
from tests.forced_routes import build_in_turn, build_with_last
from tests.test_drift import read_by
from tests.test_expert_load import loaded
from tests.test_expert_plan import moe_plan
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.model.expert_load import counted_load_cv, stated_loads
from workbench.plan.lower import lower
from workbench.plan.plan import ModuleSettings, Plan, Sharding
from workbench.report.expert_loads import ComparedLoad, compared_loads, loads_text
from workbench.timing.accept import accept
from workbench.timing.provenance import expert_loads, load_detail
from workbench.trace import Executor, Trace

TOKENS = 64


def test_a_tally_counts_what_the_formula_says_and_starts_anew() -> None:
    """Of several forwards the sum; no tokens are no forward."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.tensor([8.0, 4, 2, 2, 1, 1])
    chosen = [weights.expand(tokens, 6).multinomial(2, generator=generator) for tokens in (500, 700)]
    tally = ExpertTally()
    for expert_SK in (*chosen, chosen[0][:0]):
        tally.add(expert_SK, 6)
    load = tally.take("llm")
    rows = [torch.bincount(each.reshape(-1), minlength=6).tolist() for each in chosen]
    assert (load.module, load.num_forwards) == ("llm", 2)
    assert load.excess == pytest.approx(sum(counted_load_cv(each) ** 2 for each in rows), rel=1e-5)
    assert tally.take("llm") == CountedLoad("llm", 0.0, 0)


def run(pool: Pool, plan: Plan, build: Build) -> Trace:
    settings = RunSettings(steps=1, precision=plan.settings.precision, timeout_s=30.0)
    return run_lowered(lower(plan), settings, pool=pool, build=build).trace


GRIDS = [{"cp": 2, "ep": 2}, {"tp": 2, "ep": 2}, {"tp": 2}, {"cp": 2}, {}]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_run_counts_all_tokens_at_the_same_experts(grid: dict[str, int], pool: Pool) -> None:
    """Two of four experts have all rows: squared CV 4 / 2 - 1, less what random choices of a part make."""
    found = expert_loads(run(pool, moe_plan(tokens=TOKENS, **grid), build_with_last))
    assert list(found) == ["llm"]
    fewest = TOKENS // 2 - 1  # tokens of a rank of two
    assert sqrt(1 - 3 / (2 * fewest)) <= found["llm"] <= 1.0


def test_a_run_with_sharded_weights_counts_too(pool: Pool) -> None:
    plan = moe_plan(
        dp=2,
        tokens=TOKENS,
        modules=(ModuleSettings(module="llm", sharding=Sharding.PARAMETERS),),
    )
    assert expert_loads(run(pool, plan, build_with_last))["llm"] > 0.9


def test_a_run_whose_experts_take_turns_counts_no_spread(pool: Pool) -> None:
    assert expert_loads(run(pool, moe_plan(cp=2, ep=2, tokens=TOKENS), build_in_turn)) == {"llm": 0.0}


def test_a_model_without_experts_has_no_loads(pool: Pool) -> None:
    plan = moe_plan(config=tiny_models.LLAMA, tokens=TOKENS)
    assert stated_loads(plan.model) == {}
    trace = run(pool, plan, build_stage_module)
    assert expert_loads(trace) == {}
    assert loads_text(compared_loads([trace], {})) == ()


def test_ranks_and_stages_of_a_module_have_one_load() -> None:
    """The root of the mean square of all forwards; below chance it is 0."""
    loads = [(CountedLoad("llm", 1.0, 2), CountedLoad("llm", 0.5, 1)), (CountedLoad("llm", 0.5, 1),)]
    notes = [read_by(rank) for rank in range(2)]
    counted = [replace(note, expert_loads=load) for note, load in zip(notes, loads, strict=True)]
    assert details_of(counted) == (load_detail("llm", sqrt(0.5)),)
    assert details_of([replace(notes[0], expert_loads=(CountedLoad("llm", -0.1, 1),))]) == (
        load_detail("llm", 0.0),
    )
    assert details_of([replace(notes[0], expert_loads=(CountedLoad("llm", 0.0, 0),))]) == ()


def test_a_prediction_says_which_loads_it_assumes_only_where_they_are_stated() -> None:
    cost, plan = CostModel(load_profile("A40")), moe_plan(cp=2, ep=2)
    traces = [predict(*accept(each), cost) for each in (plan, loaded(plan, 0.5))]
    assert [expert_loads(trace) for trace in traces] == [{}, {"llm": 0.5}]
    assert stated_loads(loaded(plan, 0.5).model) == {"llm": 0.5}


def test_counted_loads_stand_beside_assumed_ones() -> None:
    traces = [
        Trace(plan_hash="x", executor=Executor.EXECUTED, spans=(), details=(load_detail("llm", cv),))
        for cv in (0.3, 0.4)
    ]
    found = compared_loads(traces, {"llm": 0.25})
    assert found == (ComparedLoad("llm", pytest.approx(sqrt(0.125)), 0.25),)
    assert loads_text(found) == (
        "loads of experts beyond random choices (expert_load_cv): llm 0.35 counted, 0.25 assumed",
    )
