"""Records that users make in Python refuse values of another kind in one line."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.test_notations import tiny_job
from workbench.field_kinds import check_kinds
from workbench.job.module_layout import ModuleLayout
from workbench.job.run_options import RunOptions
from workbench.plan.plan import ModuleSettings, Recompute, Settings
from workbench.schedule.choice import Schedule


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ModuleLayout(module="llm", tp="2"),
            "layout of 'llm': tp must be a whole number, got '2'; nearest: 2",
        ),
        (
            lambda: ModuleLayout(module="llm", pp="two"),
            "layout of 'llm': pp must be a whole number or None, got 'two'",
        ),
        (
            lambda: ModuleLayout(module="llm", stage_layers=("2", "2")),
            "layout of 'llm': stage_layers must be a tuple, each a whole number, got ('2', '2')",
        ),
        (
            lambda: ModuleLayout(module="llm", stage_layers=4),
            "layout of 'llm': stage_layers must be a tuple, each a whole number, got 4",
        ),
        (lambda: ModuleLayout(module="llm", tp=True), "layout of 'llm': tp must be a whole number, got True"),
        (lambda: RunOptions(steps="3"), "steps must be a whole number, got '3'; nearest: 3"),
        (lambda: RunOptions(timeout_s="60"), "timeout_s must be a number, got '60'"),
        (lambda: RunOptions(trace="t.json"), "trace must be a Path or None, got 't.json'"),
        (lambda: RunOptions(resume="no"), "resume must be True or False, got 'no'"),
        (
            lambda: Schedule(kind="gpipe"),
            "schedule: kind must be a ScheduleKind, or a ScheduleSpec of your own, got 'gpipe'; "
            "nearest: ScheduleKind('gpipe')",
        ),
        (lambda: Schedule(run_ahead="1"), "schedule: run_ahead must be a whole number, got '1'; nearest: 1"),
        (
            lambda: ModuleSettings(module="llm", recompute="full"),
            "module 'llm': recompute must be a member of Recompute, got 'full'; nearest: Recompute.FULL",
        ),
        (
            lambda: Settings(precision="float16"),
            "settings: precision must be a member of Precision, got 'float16'",
        ),
        (
            lambda: tiny_job(schedule="gpipe"),
            "job 'tiny': schedule must be of kind Schedule, got 'gpipe'",
        ),
        (
            lambda: tiny_job(layouts=[]),
            "job 'tiny': layouts must be a tuple, each of kind ModuleLayout, got []",
        ),
        (
            lambda: tiny_job(layouts=("llm",)),
            "job 'tiny': layouts must be a tuple, each of kind ModuleLayout, got ('llm',)",
        ),
        (lambda: tiny_job(replicas="2"), "job 'tiny': replicas must be a whole number, got '2'; nearest: 2"),
    ],
)
def test_a_value_of_another_kind_is_refused_in_one_line(make, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()


def test_a_change_of_a_record_is_checked_too():
    with pytest.raises(ValueError, match="tp must be a whole number, got '4'"):
        replace(ModuleLayout(module="llm"), tp="4")


def test_values_of_the_kind_pass():
    """Numpy's numbers are numbers, and whole numbers are valid seconds."""
    assert ModuleLayout(module="llm", tp=np.int64(2), stage_layers=(np.int64(1),)).tp == 2
    assert RunOptions(timeout_s=60, trace=Path("t.json")).timeout_s == 60
    check_kinds(ModuleSettings(module="llm", recompute=Recompute.FULL))
