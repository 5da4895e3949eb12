"""Searches of one job share the plans of strategies: none is planned twice, and no answer changes."""

import json
from collections import Counter
from math import inf
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import accept
from workbench.cli import judging
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.job import Job, load_job
from workbench.plan.plan import Plan
from workbench.planner.stage_counts import PlannerStopped, Progress, StopWatch, silent
from workbench.search.joint.replan import MOST_CANDIDATES
from workbench.search.kept_plans import KeptPlanner
from workbench.search.kept_results import KeptResults
from workbench.strategies import cornstarch

ROOT = Path(__file__).parents[1]
TIMES = {"seconds", "search_s", "candidates_per_s"}  # of a search, by the clock


class Counted:
    """A planner that counts its calls, and gives or raises what it is told to."""

    def __init__(self, result: Plan | Exception | None = None) -> None:
        self.result, self.calls = result, 0

    def __call__(self, job: Job, cost: CostModel, progress: Progress) -> Plan:
        self.calls += 1
        if isinstance(self.result, Exception):
            raise self.result
        try:
            progress(0, 1, inf)
        except PlannerStopped:
            assert self.result is not None
        return self.result or cornstarch.plan(job, cost, silent)


@pytest.fixture(scope="module")
def job() -> Job:
    return load_job(ROOT / "examples/tiny.yaml")


@pytest.fixture(scope="module")
def cost() -> CostModel:
    return CostModel(load_profile(str(ROOT / "examples/elastic-cpu.json")))


def kept(planner: Counted, folder: Path, name: str = "mine") -> KeptPlanner:
    return KeptPlanner(name, planner, KeptResults(folder, pytest.fail))


def test_a_plan_is_made_once(job: Job, cost: CostModel, tmp_path: Path) -> None:
    first, second, other = Counted(), Counted(), Counted()
    plan = kept(first, tmp_path)(job, cost, silent)
    again = kept(second, tmp_path)(job, cost, StopWatch())
    assert again == plan == cornstarch.plan(job, cost, silent)
    assert again.model is job.model
    kept(other, tmp_path, "other")(job, cost, silent)
    assert (first.calls, second.calls, other.calls) == (1, 0, 1)


def test_a_refusal_is_kept_word_for_word(job: Job, cost: CostModel, tmp_path: Path) -> None:
    planner = Counted(ValueError("mine: no plan of this job"))
    for _ in range(3):
        with pytest.raises(ValueError, match=r"^mine: no plan of this job$"):
            kept(planner, tmp_path)(job, cost, silent)
    assert planner.calls == 1


def test_other_errors_and_stopped_planners_are_not_kept(job: Job, cost: CostModel, tmp_path: Path) -> None:
    class OtherError(ValueError):
        """A refusal that says more than its text."""

    planner = Counted(OtherError("limit"))
    for _ in range(2):
        with pytest.raises(OtherError):
            kept(planner, tmp_path)(job, cost, silent)
    assert planner.calls == 2
    stopped = Counted(cornstarch.plan(job, cost, silent))
    for _ in range(2):
        watch = StopWatch(clock=lambda: 1.0, end_s=0.0)
        assert kept(stopped, tmp_path)(job, cost, watch) == stopped.result
        assert watch.stopped_at == 1
    assert stopped.calls == 2


def test_moves_of_a_joint_search_do_not_fill_the_folder(job: Job, cost: CostModel, tmp_path: Path) -> None:
    planner = Counted()
    for _ in range(2):
        kept(planner, tmp_path)(job, cost, StopWatch(most=MOST_CANDIDATES + 1))
    assert planner.calls == 2
    assert not list(tmp_path.iterdir())


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(each) for key, each in value.items() if key not in TIMES}
    return [without_times(each) for each in value] if isinstance(value, list) else value


def test_a_joint_search_starts_from_what_a_search_has_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planner calls of a search, of a joint one after it, and of a longer joint one after that."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    planned: Counter[tuple[str, Job]] = Counter()
    judged = judging.judged

    def counting(spec, judge):
        planner = judged(spec, judge)

        def plan(job: Job, cost: CostModel, progress: Progress) -> Plan:
            assert isinstance(progress, StopWatch)
            if not progress.counts_reports:
                planned[spec.name, job] += 1
            return planner(job, cost, progress)

        return plan

    monkeypatch.setattr(judging, "judged", counting)
    profile = str(ROOT / "examples/elastic-cpu.json")
    arguments = ("search", str(ROOT / "examples/tiny.yaml"), "--profile", profile, "--json")
    uncached = accept(*arguments, "--joint", "--candidates", "30", "--no-cache", "-o", str(tmp_path / "a"))
    starts = set(planned)
    planned.clear()
    accept(*arguments)
    searched = set(planned)
    joint = accept(*arguments, "--joint", "--candidates", "30", "-o", str(tmp_path / "b"))
    assert max(planned.values()) == 1  # by one of the two
    assert set(planned) == starts
    assert len(searched) >= 15
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    before, after = (without_times(json.loads(each.stdout)) for each in (uncached, joint))
    assert before == after
    planned.clear()
    accept(*arguments, "--joint", "--candidates", "31")
    assert not planned
