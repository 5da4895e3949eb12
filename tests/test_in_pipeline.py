"""Passes in a pipeline take a measured number of times as long as alone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.step.engine import simulate
from tests.plans import disjoint_plan
from tests.tiny_valm import tiny_batch, tiny_valm
from workbench.calibrate.in_pipeline import Rehearsal, with_pipeline_factors
from workbench.cost.model import CostModel
from workbench.cost.profile import Profile, dump_profile, ideal_profile, parse_profile
from workbench.model.trainable import Trainable
from workbench.plan.lower import lower
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
