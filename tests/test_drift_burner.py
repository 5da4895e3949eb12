"""The burner takes what it says, what a drifting demo prints, and how often a suite calibrates again."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.demo import DemoResult, PlanResult
from experiments.fidelity import run as suite
from experiments.fidelity.burner import burner_of
from experiments.fidelity.drift import goals, lines, run
from runtime.world.busy_cores import process_seconds


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
