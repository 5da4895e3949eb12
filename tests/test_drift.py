"""Drift of a machine: how it is corrected, and how it is made."""

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.demo import DemoResult, PlanResult
from experiments.fidelity import run as suite
from experiments.fidelity.burner import burner_of
from experiments.fidelity.drift import goals, lines, run
from experiments.fidelity.in_pipeline import Rehearsal, with_pipeline_factors
from runtime.launch import run_local
from runtime.readings import Readings
from runtime.run_settings import RunSettings
from runtime.step.note_details import details_of
from runtime.step.timing import Notes
from runtime.world.busy_cores import process_seconds
from runtime.world.mesh import Mesh
from runtime.world.yardstick import LEAST_TURNS, MOST_S, Yardstick, yardstick_of
from sim.step.engine import simulate
from tests.test_fidelity import tiny_plan
from workbench.cost.model import CostModel
from workbench.cost.profile import Profile, dump_profile, ideal_profile, parse_profile
from workbench.drift import (
    YARDSTICK,
    Run,
    drift_of,
    drift_warning,
    drifted,
    is_beyond,
    smoothed,
    yardstick_s,
)
from workbench.plan.lower import lower
from workbench.report.compare import compare
from workbench.report.tables import noise_warning, rests_on_text
from workbench.timing.price import price
from workbench.timing.provenance import noise_of, with_provenance
from workbench.trace import Executor, Trace

SECONDS = st.floats(1e-3, 1e3)


def test_half_the_time_at_half_the_speed_is_a_third_longer() -> None:
    assert drift_of(1.0, [1.0, 2.0, 1.0, 2.0]) == pytest.approx(1 / 3)


def test_without_a_reading_there_is_no_drift() -> None:
    assert drift_of(None, [1.0]) is None
    assert drift_of(1.0, [None, None]) is None
    assert smoothed([1.0, None], [[None], [1.0]])[1] is None


@given(SECONDS, SECONDS, st.floats(-0.5, 2.0))
def test_a_prediction_corrected_by_its_own_error_is_exact(
    predicted_s: float, calibrated_s: float, drift: float
) -> None:
    read_s = calibrated_s * (1 + drift)
    found = drifted([Run(predicted_s, (predicted_s * (1 + drift),), drift_of(calibrated_s, [read_s]))])
    assert found.drift == pytest.approx(drift, abs=1e-9)
    assert found.error == pytest.approx(1 / (1 + drift) - 1)
    assert found.error_corrected == pytest.approx(0, abs=1e-9)


@given(SECONDS, st.lists(SECONDS, min_size=1, max_size=5), st.floats(0.1, 10))
def test_a_calibration_between_rounds_counts_as_if_it_had_held_before(
    predicted_s: float, steps_s: list[float], pace: float
) -> None:
    """A machine that runs at another pace in the second round, and was calibrated again for it."""
    paced = tuple(step_s * pace for step_s in steps_s)
    both = drifted([Run(predicted_s, tuple(steps_s)), Run(predicted_s * pace, paced)])
    assert both.error == pytest.approx(drifted([Run(predicted_s, tuple(steps_s))]).error)
    assert both.drift is None
    assert both.error_corrected is None


def test_nothing_executed_is_refused() -> None:
    for steps_s in ((), (0.0,)):
        with pytest.raises(ValueError, match="more than 0 s"):
            drifted([Run(1.0, steps_s)])


def test_readings_of_neighbours_count() -> None:
    found = smoothed([1.0] * 9, [[1.0]] * 8 + [[2.0]])
    assert found[:5] == [0.0] * 5  # too far from the last
    assert all(drift is not None and drift > 0 for drift in found[5:])


def test_beyond_a_tenth_it_is_said_first() -> None:
    assert not is_beyond(None)
    assert drift_warning(0.099) is drift_warning(-0.1) is drift_warning(None) is None
    assert "18.0% slower" in (drift_warning(0.18) or "")
    assert "18.0% faster" in (drift_warning(-0.18) or "")


def test_a_reading_keeps_to_its_budget_and_leaves_threads_and_seed_alone() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    assert len(Yardstick(torch.device("cpu")).turns_s(0.0)) == LEAST_TURNS
    turns_s = Yardstick(torch.device("cpu")).turns_s(10.0)
    assert sum(turns_s[:-1]) <= MOST_S
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_processes_beyond_the_cores_do_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    reads = [yardstick_of(process, torch.device("cpu")) is not None for process in range(4)]
    assert reads == [True, True, False, False]


def test_every_executed_step_carries_a_reading() -> None:
    result = run_local(tiny_plan(2), RunSettings(steps=2, repetitions=2))
    readings = [yardstick_s(trace) for trace in result.traces]
    assert len(readings) == 4
    assert all(reading is not None and reading > 0 for reading in readings)


class OfThreads:
    """As much of a mesh as readings need: ranks are threads of this process."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier = barrier

    def align(self, what: str) -> None:
        del what
        self._barrier.wait(10.0)


class Slow(Yardstick):
    """Notes when it is read."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(torch.device("cpu"))
        self._events = events

    def read(self, budget_s: float) -> float:
        self._events.append("reads")
        time.sleep(0.05)
        self._events.append("has read")
        return 1e-3


def read_by(rank: int, *yardstick_s: float) -> Notes:
    return Notes(
        rank=rank,
        start_s=0.0,
        spans=(),
        memory=(),
        sent_s={},
        delivered_s={},
        arrived_s={},
        loss_sum=0.0,
        yardstick_s=yardstick_s,
    )


def test_others_wait_for_the_slowest_rank_but_take_the_free_core_where_ranks_share_cores() -> None:
    fast, slow, silent = read_by(0, 1.0, 1.0), read_by(1, 3.0, 3.0), read_by(2)
    assert details_of([fast, slow]) == ((YARDSTICK, "3.0"),)
    assert details_of([fast, slow, silent, silent]) == ((YARDSTICK, "1.5"),)
    assert details_of([silent]) == ()


def test_ranks_that_do_not_read_do_nothing_until_all_have_read() -> None:
    """Else what they do between steps, on a core that they share, is taken for drift."""
    events: list[str] = []
    barrier = threading.Barrier(2)

    def work(step: int) -> Notes:
        events.append("works")
        return read_by(0)

    def run(yardstick: Yardstick | None) -> None:
        readings = Readings(cast(Mesh, OfThreads(barrier)), yardstick)
        for step in range(2):
            readings.beside(work, step)

    ranks = [threading.Thread(target=run, args=(one,)) for one in (Slow(events), None)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(20.0)
    once = ["reads", "has read"]
    assert events == [*once, "works", "works", *once, "works", "works", *once]


def profile_read(calibrated_s: float | None, noise: tuple[str, ...] = ()) -> Profile:
    return replace(ideal_profile("mine"), yardstick_s=calibrated_s, noise=noise)


def simulated_by(profile: Profile) -> Trace:
    plan = tiny_plan(2)
    prices = price(lower(plan), CostModel(profile))
    trace = simulate(lower(plan), prices.duration_s, step_s=prices.step_s)
    return with_provenance(trace, plan, profile, prices)


def executed_like(simulated: Trace, pace: float, read_s: float) -> Trace:
    spans = tuple(s._replace(start_s=s.start_s * pace, end_s=s.end_s * pace) for s in simulated.spans)
    return Trace(
        plan_hash=simulated.plan_hash,
        executor=Executor.EXECUTED,
        spans=spans,
        details=((YARDSTICK, repr(read_s)),),
    )


def test_profiles_without_drift_and_noise_are_written_as_before() -> None:
    text = dump_profile(ideal_profile())
    assert "noise" not in text
    assert "yardstick" not in text
    noisy = profile_read(1e-3, ("others were at work",))
    assert parse_profile(dump_profile(noisy)) == noisy


def test_comparison_says_error_with_drift_and_without() -> None:
    simulated = simulated_by(profile_read(1e-3))
    record = compare(simulated, [executed_like(simulated, 1.25, 1.25e-3)]).as_json()
    assert record["drift"] == pytest.approx(0.25)
    assert record["error"] == record["error_fraction"] == pytest.approx(-0.2)
    assert record["error_corrected"] == pytest.approx(0, abs=1e-9)
    old = compare(simulated_by(profile_read(None)), [executed_like(simulated, 1.25, 1.25e-3)]).as_json()
    assert (old["drift"], old["error_corrected"]) == (None, None)


def test_a_noisy_profile_is_not_called_measured() -> None:
    noisy = simulated_by(profile_read(1e-3, ("layers, forward: sizes left out are 31% off in the median",)))
    text = rests_on_text((), noise_of(noisy))
    assert "Every cost" not in text
    assert "31%" in text
    assert rests_on_text((), noise_of(simulated_by(profile_read(1e-3)))).startswith("Every cost")
    assert noise_warning(()) == ()
    assert noise_warning(("a", "b"))[0].startswith("NOISY: a; b")


def test_factors_of_a_running_pipeline_hold_for_the_pace_of_its_rehearsals() -> None:
    profile = profile_read(1e-3)
    simulated = simulated_by(profile)
    rehearsal = Rehearsal(simulated=simulated, executed=(executed_like(simulated, 2.0, 2e-3),))
    found = with_pipeline_factors(profile, [rehearsal])
    assert found.yardstick_s == pytest.approx(2e-3)
    assert found.pipeline_factor("F") == pytest.approx(2.0)
    alone = replace(rehearsal, executed=(replace(rehearsal.executed[0], details=()),))
    assert with_pipeline_factors(profile, [alone]).yardstick_s == profile.yardstick_s


def result(drift: float | None, corrected: float | None) -> DemoResult:
    row = PlanResult(
        plan="one",
        mix="projectors",
        num_ranks=2,
        plan_hash="a" * 64,
        predicted_s=1.0,
        predicted_again_s=None,
        executed_s=1.25,
        lowest_s=1.2,
        highest_s=1.3,
        drift=drift,
        error=-0.2,
        error_corrected=corrected,
        spread=0.08,
        loss=5.0,
    )
    return DemoResult(
        median_abs_error=0.2,
        worst_abs_error=0.2,
        drift=drift,
        error=-0.2,
        error_corrected=corrected,
        median_abs_error_corrected=None if corrected is None else abs(corrected),
        worst_abs_error_corrected=None if corrected is None else abs(corrected),
        spread=0.08,
        recalibrated=1,
        noise=(),
        machine="a machine",
        plans=(row,),
    )


def test_drift_stands_first_and_goals_are_of_the_corrected_error() -> None:
    drifting = result(0.25, 0.0)
    assert next(lines(drifting)).startswith("DRIFT: the machine ran 25.0% slower")
    assert list(goals(drifting).values()) == [True, True]
    assert list(goals(result(0.25, 0.12)).values()) == [True, False]
    assert list(goals(result(0.05, -0.16)).values()) == [False, False]
    assert list(goals(result(None, None)).values()) == [False, False]
    assert next(lines(result(None, None))).startswith("plan ")


def test_a_burner_takes_no_more_than_its_share_and_ends() -> None:
    with burner_of(0.5)() as burner:
        time.sleep(1.0)
        start_s = (
            time.monotonic()
        )  # first: whoever waits for a core here counts for longer, never for shorter
        before_s = process_seconds([burner])[burner]
        time.sleep(1.0)
        share = (process_seconds([burner])[burner] - before_s) / (time.monotonic() - start_s)
    assert 0 < share < 0.6  # on a busy machine it gets less
    assert not process_seconds([burner])


def test_errors_that_make_up_for_each_other_are_errors() -> None:
    """Half of the plans 30 % too fast and half 30 % too slow: signed, their median is 0."""
    mixed = replace(result(0.25, 0.0), median_abs_error_corrected=0.3)
    assert list(goals(mixed).values()) == [True, False]


def test_a_burner_that_ended_too_early_is_told() -> None:
    told = pytest.raises(ChildProcessError, match="burner: want it to work until it is stopped")
    with told, burner_of(0.5)() as burner:
        os.kill(burner, signal.SIGKILL)
        os.waitid(os.P_PID, burner, os.WEXITED | os.WNOWAIT)


def test_a_share_of_more_than_a_core_is_refused() -> None:
    assert run.main(["--burn", "1.5"]) == 2
    with pytest.raises(ValueError, match=r"share of a core in \(0, 1\], got 0"):
        burner_of(0.0)


def test_plans_that_calibrate_run_again_once_where_the_machine_has_drifted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all judged plans are predicted by what they show."""
    written: list[str] = []
    monkeypatch.setattr(suite, "rehearse", lambda measured, plans, judged, runs, at: f"{measured} as {runs}")
    monkeypatch.setattr(suite, "predict", lambda case, profile: f"{case} by {profile}")
    monkeypatch.setattr(suite, "write_predictions", lambda again, out, name: written.append(name))
    pace = suite.Pace(
        measured="layers",
        plans=(),
        judged=("one", "two", "three"),
        runs_in=lambda folder, steps: folder.name,
        out=tmp_path,
        is_quiet=True,
    )
    _, first = pace.predictions()
    assert first == tuple(f"{case} by layers as rehearsals" for case in pace.judged)
    assert pace.renewed(first, 0.05) is first
    assert pace.renewed(first, 0.2) == tuple(f"{case} by layers as 1" for case in pace.judged)
    assert pace.renewed(first, 0.2) == tuple(f"{case} by layers as 2" for case in pace.judged)
    assert written == ["predictions.2.json", "predictions.3.json"]
