"""Passes in a pipeline take a measured number of times as long as alone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.fidelity.in_pipeline import Rehearsal, with_pipeline_factors
from sim.step.engine import simulate
from tests.plans import disjoint_plan
from tests.tiny_valm import tiny_batch, tiny_valm
from workbench.cost.model import CostModel
from workbench.cost.profile import Profile, dump_profile, ideal_profile, parse_profile
from workbench.model.trainable import Trainable
from workbench.plan.lower import lower
from workbench.schedule.action import Action, Pass
from workbench.timing.pass_times import pace
from workbench.timing.price import price
from workbench.trace import Trace

CUTS = {"vision": [3, 2], "audio": [4], "llm": [3, 3]}
PLAN = disjoint_plan(tiny_valm(llm=Trainable.ALL), tiny_batch(), CUTS)
PROFILE = replace(ideal_profile(flop_per_s=1e9), overheads_s=(("B", 2e-4), ("F", 1e-4)))


def simulated(profile: Profile) -> Trace:
    lowered = lower(PLAN)
    prices = price(lowered, CostModel(profile))
    return simulate(lowered, prices.duration_s, step_s=prices.step_s)


def slower(profile: Profile, forward: float, backward: float) -> Profile:
    return replace(profile, in_pipeline=(("B", backward), ("F", forward)))


@given(st.floats(0.5, 3.0), st.floats(0.5, 3.0))
def test_factors_of_a_slower_machine_are_found_and_kept(forward: float, backward: float):
    run = simulated(slower(PROFILE, forward, backward))
    found = with_pipeline_factors(PROFILE, [Rehearsal(simulated=simulated(PROFILE), executed=(run,) * 3)] * 2)
    assert found.pipeline_factor("F") == pytest.approx(forward)
    assert found.pipeline_factor("B") == pytest.approx(backward)
    assert simulated(found).iteration_s == pytest.approx(run.iteration_s)
    assert parse_profile(dump_profile(found)) == found
    assert max(fit.p90 for fit in found.fits if "in a pipeline" in fit.table) < 1e-9


def test_a_profile_is_corrected_once():
    once = Rehearsal(simulated=simulated(PROFILE), executed=(simulated(PROFILE),))
    with pytest.raises(ValueError, match="has factors of passes in a pipeline already"):
        with_pipeline_factors(with_pipeline_factors(PROFILE, [once]), [once])
    with pytest.raises(ValueError, match="at least one executed step"):
        with_pipeline_factors(PROFILE, [replace(once, executed=())])


def test_ranks_that_nobody_hands_rows_to_have_factors_of_their_own():
    """What was rehearsed without messages says nothing of pipelines, nor the other way round."""
    pipeline = Rehearsal(simulated=simulated(PROFILE), executed=(simulated(slower(PROFILE, 1.2, 1.5)),))
    alone = Rehearsal(
        simulated=replace(pipeline.simulated, messages=()), executed=(simulated(slower(PROFILE, 0.9, 0.8)),)
    )
    found = with_pipeline_factors(PROFILE, [pipeline, alone])
    assert [found.pipeline_factor(kind) for kind in "FB"] == pytest.approx([1.2, 1.5])
    assert [found.alone_factor(kind) for kind in "FB"] == pytest.approx([0.9, 0.8])
    assert parse_profile(dump_profile(found)) == found
    stage = PLAN.stages[0]
    assert pace(PLAN, stage, found, Pass.F) == found.pipeline_factor("F")
    by_itself = replace(PLAN, stages=(stage,))
    assert pace(by_itself, stage, found, Pass.F) == found.alone_factor("F")
    assert pace(by_itself, stage, slower(PROFILE, 2.0, 3.0), Pass.F) == 2.0


def test_passes_beside_rounds_of_sharded_parameters_are_not_counted():
    pipeline = Rehearsal(simulated=simulated(PROFILE), executed=(simulated(slower(PROFILE, 1.2, 1.5)),))
    first = pipeline.simulated.spans[0]
    gather = first._replace(action=Action(0, Pass.ALL_GATHER, 0))
    beside = Rehearsal(
        simulated=replace(pipeline.simulated, spans=(gather, *pipeline.simulated.spans)),
        executed=(simulated(slower(PROFILE, 9.0, 9.0)),),
    )
    found = with_pipeline_factors(PROFILE, [pipeline, beside])
    assert dict(found.in_pipeline).keys() <= {"F", "B", "STEP"}
    assert found.pipeline_factor("B") == pytest.approx(1.5)
