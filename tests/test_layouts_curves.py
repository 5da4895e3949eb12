"""The loss curves of printed layouts: which runs there are, how they are judged, one short run."""

from collections import Counter
from dataclasses import replace

import torch

from experiments.mimo import loss_curves, parity_grid_runs
from experiments.mimo.loss_curves_runs import Data, Run, one_process, plan_of, runs, train
from experiments.mimo.parity_grid_runs import Layout, gap
from runtime.launch import RunResult
from runtime.rank_report import RankState
from runtime.world.pool import Pool
from workbench.planner.rank_spans import Placement


def test_every_printed_configuration_is_run_apart_and_shared():
    found = Counter(run.figure for run in runs())
    assert found == {"6": 3, "10": 3, "12a": 10, "12b": 10, "13a": 8, "13b": 8}
    for run in runs():
        if run.figure[:2] in ("12", "13"):
            ranks = 4 if run.placement is Placement.APART else 8
            assert run.llm.num_ranks == run.vision.num_ranks == ranks, run.name
    sweep = {run.config: run for run in runs() if run.figure == "13b"}
    assert sweep["tp4_both"].llm == Layout(tp=4, dp=2, pp=1, cp=1)
    assert not any(run.trains_llm for run in runs() if run.figure in ("10", "12a", "12b"))


def test_every_run_has_a_plan_on_its_ranks():
    for run in runs():
        plan = plan_of(run)
        shared = len(plan.ranks) == run.llm.num_ranks
        assert shared is (run.placement is Placement.SHARED), run.name


def test_a_short_run_of_unequal_grids_on_the_same_ranks(pool: Pool) -> None:
    run = next(run for run in runs() if run.name == "figure 6: colocated_heterogeneous")
    run = replace(run, llm=Layout(tp=2, dp=1, pp=1, cp=1), vision=Layout(tp=1, dp=2, pp=1, cp=1))
    curve = train(run, 3, pool)
    losses, _, _ = one_process(run.trains_llm, 3)
    assert max(abs(a - b) for a, b in zip(curve.losses, losses, strict=True)) <= 1e-12
    assert losses[2] < losses[0]
    assert curve.state.worst <= 1e-12


def test_every_step_may_have_another_batch(pool: Pool) -> None:
    run = next(run for run in runs() if run.name == "figure 10: colocated_heterogeneous")
    run = replace(run, llm=Layout(tp=2, dp=1, pp=1, cp=1), vision=Layout(tp=1, dp=2, pp=1, cp=1))
    data = Data(num_samples=4, num_batches=2)
    curve = train(run, 3, pool, data)
    losses, _, _ = one_process(run.trains_llm, 3, data)
    assert max(abs(a - b) for a, b in zip(curve.losses, losses, strict=True)) <= 1e-12
    assert losses != one_process(run.trains_llm, 3, Data(num_samples=4))[0]
    assert curve.state.worst <= 1e-12


def test_a_state_that_differs_is_seen():
    run = next(run for run in runs() if not run.trains_llm)
    run = replace(run, llm=Layout(1, 1, 1, 1), vision=Layout(1, 1, 1, 1))
    losses, last, moments = one_process(run.trains_llm, 2)
    ours = {key: value.clone() for key, value in last.weights.items()}
    exact = RankState(rank=0, gradients=last.gradients, weights=ours, moments=moments)
    plan = plan_of(run)

    def judge(state: RankState) -> parity_grid_runs.Gap:
        return gap(plan, RunResult(traces=(), losses=losses, states=(state,)), last, moments)

    assert judge(exact).worst == 0.0
    key = next(iter(last.gradients))
    assert judge(replace(exact, moments={})).moment == float("inf")
    assert judge(replace(exact, gradients={})).gradient == float("inf")
    doubled = moments | {key: (moments[key][0], 2 * moments[key][1])}
    assert judge(replace(exact, moments=doubled)).moment == 1.0
    assert judge(replace(exact, weights=ours | {key: torch.zeros(1)})).weight == float("inf")


def test_judges_against_the_baseline_of_what_trains():
    base = Run(
        figure="6",
        config=loss_curves.BASELINE,
        placement=Placement.SHARED,
        llm=Layout(1, 1, 1, 1),
        vision=Layout(1, 1, 1, 1),
        trains_llm=True,
    )
    other = replace(base, figure="13a", config="other")
    fine = {"num_ranks": 1, "state": {"weight": 0.0}, "losses": [4.0, 3.0]}
    off = fine | {"losses": [4.0, 3.1]}
    assert loss_curves.summary_of([base, other], [fine, fine])["holds"]
    told = loss_curves.summary_of([base, other], [fine, off])
    assert [row["name"] for row in told["off"]] == ["figure 13a: other"]
    assert abs(told["step_range"]["13a"] - 0.1) < 1e-12
    assert not loss_curves.summary_of([base, other], [fine])["holds"], "a curve that is missing"
