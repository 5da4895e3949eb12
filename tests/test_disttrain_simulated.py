"""The study of the formula: errors and regret by hand, and one candidate that is simulated."""

import pytest

from experiments.disttrain.simulated import Candidate, add_model, candidates, job_of
from experiments.harness.outcome import Evidence
from workbench.balance.orchestration.exact import best_of_every_pace, orchestrate
from workbench.balance.orchestration.task import Degrees, Orchestration
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.strategies.disttrain import task_of


def candidate(pp: int, printed_s: float, whole_s: float, simulated_s: float | None) -> Candidate:
    found = Orchestration(degrees=(Degrees(tp=1, dp=1, pp=pp),), warmup_s=0.0, steady_s=1.0, reduction_s=0.0)
    return Candidate(orchestration=found, printed_s=printed_s, whole_s=whole_s, simulated_s=simulated_s)


def test_regret_is_over_what_fits():
    evidence = Evidence()
    add_model(
        evidence,
        "m",
        (candidate(1, 1.0, 3.0, None), candidate(2, 2.0, 3.0, 4.0), candidate(3, 3.0, 2.0, 2.5)),
    )
    ours = evidence.ours
    assert [claim.holds for claim in evidence.claims] == [False]  # the printed formula's choice does not fit
    assert (ours["modelled/m/candidates"], ours["modelled/m/that fit"]) == (3, 2)
    assert ours["modelled/m/printed/regret"] == pytest.approx(4.0 / 2.5 - 1)
    assert ours["modelled/m/whole layers/regret"] == 0.0
    assert ours["modelled/m/printed/tau"] == -1.0
    assert ours["modelled/m/whole layers/mean_error"] == pytest.approx((3 / 4 + 2 / 2.5) / 2 - 1)


def test_a_small_cluster_is_simulated():
    cost = CostModel(load_profile("A100-80GB"))
    job = job_of("MLLM-9B", nodes=2, batch=4)
    task = task_of(job, cost)
    by_pace = best_of_every_pace(task)
    assert by_pace[0] == orchestrate(task)
    assert len({each.degrees[1].dp for each in by_pace}) == len(by_pace)
    found = candidates(job, cost)
    assert any(each.simulated_s is not None for each in found)
    for each in found:
        assert each.printed_s <= each.whole_s
        assert each.simulated_s is None or each.simulated_s > 0.5 * each.printed_s
