"""Executing the joint search's plan: searched plans are kept, emulated ones take turns, gains are said."""

from dataclasses import replace

import pytest

from experiments.fidelity import plan_runs
from experiments.fidelity.cases import Part
from experiments.search import executed
from tests.test_next_batches import job_of
from tests.test_strategies import cost
from workbench.planner.stage_counts import silent
from workbench.strategies import cornstarch

PLAN = cornstarch.plan(job_of(0), cost(), silent)


def test_what_was_searched_is_not_searched_again(tmp_path, monkeypatch):
    """So that predictions stay as they were written, which came before any run."""
    plans = {executed.WINNER: PLAN, executed.SINGLE: replace(PLAN, strategy="another")}
    once = executed.Searched(best_single="cornstarch", candidates=7, seconds=1.5, plans=plans)
    monkeypatch.setattr(executed, "searched", lambda *_: once)
    first = executed.kept(Part.CROWDED, cost().profile, tmp_path, 7, 1.0)
    monkeypatch.delattr(executed, "searched")
    assert executed.kept(Part.CROWDED, cost().profile, tmp_path, 7, 1.0) == first == once
    assert list(first.plans) == list(plans)


@pytest.mark.parametrize(("rounds", "blocks"), [(30, [5] * 6), (7, [5, 2])])
def test_emulated_plans_take_turns(tmp_path, monkeypatch, rounds, blocks):
    monkeypatch.setattr(plan_runs, "Runs", lambda folder, **said: (folder, said["rounds"], said["steps"]))
    turns = list(executed._turns(Part.EMULATED, tmp_path, None, rounds))
    assert [steps for _, _, steps in turns] == blocks
    assert all(num == 1 for _, num, _ in turns)
    assert len({folder for folder, _, _ in turns}) == len(blocks)
    assert list(executed._turns(Part.CROWDED, tmp_path, None, rounds)) == [(tmp_path, rounds, 1)]


def test_both_gains_are_said():
    part = {"ranks": 4, "best_single": "hsdp", "plans": {}, "predicted_gain": 1.25}
    part |= {"executed_gain": 1.2, "interval_95": [1.1, 1.3]}
    *_, line = executed.lines({"parts": {"crowded": part}})
    assert "predicted_gain 1.250" in line
    assert all(word in line for word in ("executed_gain", "1.1", "1.3"))
