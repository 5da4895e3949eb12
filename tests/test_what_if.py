"""Neighbours of a job: which there are, what their job files say, and that none is made up."""

from pathlib import Path

import pytest
import yaml

from sim.predict import predict as simulated
from tests.command_line import accept, refuse
from workbench.cost.model import CostModel
from workbench.job.job import job_from_spec, load_job
from workbench.job.job_file import parse_spec
from workbench.job.machines import cost_of
from workbench.plan.plan import Plan
from workbench.report.folder import fastest_of, read_folder
from workbench.report.what_if import (
    WhatIf,
    axes_of,
    what_if,
    what_if_html,
    what_if_record,
    with_words,
    words_of,
)
from workbench.strategies import cornstarch
from workbench.timing.accept import accept as accepted
from workbench.trace import Trace

ROOT = Path(__file__).resolve().parent.parent
VALM = parse_spec((ROOT / "examples" / "valm.yaml").read_text())
TINY = parse_spec(
    yaml.safe_dump(
        yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())
        | {"profile": str(ROOT / "examples" / "elastic-cpu.json")}
    )
)


def predict(plan: Plan, cost: CostModel) -> Trace:
    """Without an interval, which takes six times as long."""
    return simulated(*accepted(plan), cost)


def neighbours(steps: int, strategy: str = "cornstarch") -> WhatIf:
    """As far as a clock gets that shows one more each time that somebody looks at it."""
    ticks = iter(range(10_000))
    return what_if(TINY, strategy, predict, folder=ROOT, seconds=steps, spent_s=lambda: next(ticks))


def test_neighbours_are_around_the_job():
    axes = axes_of(VALM)
    assert [axis.name for axis in axes] == [
        "ranks",
        "samples per step",
        "samples per microbatch",
        "link speed",
    ]
    assert [axis.values for axis in axes] == [(24, 12, 48), (24, 12, 48), (1, 2), (1.0, 0.5, 2.0, 4.0)]
    assert axes_of(TINY)[0].values == (4, 2)  # a machine's processes do not become more


def test_words_say_what_is_different_and_nothing_else():
    axes = axes_of(VALM)
    assert [dict(words) for words in words_of(VALM, axes, (0, 0, 0, 0), ROOT)] == [{}]
    more = {"cluster.nodes": 12, "max_ranks": 48}
    assert list(map(dict, words_of(VALM, axes, (2, 0, 0, 0), ROOT))) == [more, more | {"batch.replicas": 2}]
    fewer = {"cluster.nodes": 3, "max_ranks": 12}
    assert list(map(dict, words_of(VALM, axes, (1, 0, 0, 0), ROOT))) == [fewer]  # a replica has no half
    (links,) = words_of(VALM, axes, (0, 1, 1, 2), ROOT)
    changed = with_words(VALM, links)
    assert (changed.batch.samples, changed.batch.microbatch_samples) == (12, 2)
    assert (changed.cluster.intra.gb_per_s, changed.cluster.inter.gb_per_s) == (50.0, 50.0)
    assert changed.cluster.inter.latency_us == VALM.cluster.inter.latency_us
    assert changed.model == VALM.model


def test_links_that_a_job_on_processes_leaves_out_have_no_slider():
    bare = TINY.model_copy(update={"cluster": TINY.cluster.model_copy(update={"intra": None})})
    assert [axes_of(spec)[-1].values for spec in (TINY, bare)] == [(1.0, 0.5, 2.0, 4.0), (1.0,)]


def test_links_of_the_profile_get_faster_with_all_their_cards():
    spec = with_words(VALM, {})
    bare = spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"intra": None, "inter": None})})
    (words,) = words_of(bare, axes_of(bare), (0, 0, 0, 2), ROOT)
    own = job_from_spec(bare, folder=ROOT).cluster
    faster = job_from_spec(with_words(bare, words), folder=ROOT).cluster
    assert faster.intra.bytes_per_s == pytest.approx(2 * own.intra.bytes_per_s)
    assert faster.inter.bytes_per_s == pytest.approx(2 * own.inter.bytes_per_s)
    assert [node.num_cards for node in faster.nodes] == [node.num_cards for node in own.nodes]


def test_the_nearest_come_first_and_the_rest_is_left_out():
    found = neighbours(40)
    changed = [sum(step > 0 for step in point.at) for point in found.points]
    assert changed == sorted(changed)
    assert 1 < len(found.points) < found.num_neighbours
    assert neighbours(0).points == ()  # the time was over within the first one
    assert f"{len(found.points)} of {found.num_neighbours}" in what_if_html(found)
    assert len(what_if_record(found)["points"]) == len(found.points)


def test_every_point_is_what_its_words_say():
    planned = [point for point in neighbours(40).points if point.candidate.plan is not None]
    assert len(planned) > 3
    for point in planned:
        job = job_from_spec(with_words(TINY, point.words), folder=ROOT)
        cost = cost_of(job, None, None)
        plan = cornstarch.plan(job, cost)
        assert point.candidate.plan == plan
        assert point.candidate.trace == predict(plan, cost)


def test_a_neighbour_that_cannot_be_planned_says_why():
    tight = TINY.model_copy(update={"max_ranks": 2})  # three modules, each with ranks of its own
    found = what_if(tight, "cornstarch", predict, folder=ROOT, seconds=1, spent_s=lambda: 0.0)
    assert len(found.points) == found.num_neighbours
    assert all(point.candidate.plan is None for point in found.points)
    assert what_if_html(found).count(">no plan<") == len(found.points)
    for point in what_if_record(found)["points"]:
        assert "ranks" in point["refusal"]


def test_unknown_strategies_and_other_jobs_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="strategy 'no-such': want one of"):
        neighbours(1, "no-such")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(TINY.model_dump(mode="json", exclude_unset=True)))
    accept("plan", tmp_path / "job.yaml", "-o", tmp_path / "plan.json")
    found = read_folder(tmp_path)
    assert fastest_of(found, load_job(tmp_path / "job.yaml")).path.name == "plan.json"
    other = TINY.model_copy(update={"batch": TINY.batch.model_copy(update={"samples": 2})})
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(other.model_dump(mode="json", exclude_unset=True)))
    words = "no plan in the folder is of job 'tiny'"
    refuse("report", tmp_path, "--job", tmp_path / "other.yaml", words=words, folder=tmp_path)
    accept("report", tmp_path, "--job", tmp_path / "job.yaml", "--what-if", "0.0")
    assert "of 48 neighbours of job tiny" in (tmp_path / "report.html").read_text()


def test_neighbours_are_priced_by_the_profile_that_the_plan_was_made_with(tmp_path: Path):
    absent = TINY.model_copy(update={"profile": "gone.json"})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(absent.model_dump(mode="json", exclude_unset=True)))
    accept("plan", tmp_path / "job.yaml", "--profile", "A40", "-o", tmp_path / "plan.json")
    accept("report", tmp_path, "--job", tmp_path / "job.yaml", "--what-if", "60")
    assert "no profile &#x27;gone.json&#x27;" not in (tmp_path / "report.html").read_text()
    assert "no profile 'gone.json'" not in (tmp_path / "report.html").read_text()


def test_a_plan_without_its_profile_is_reported_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the refusal says; a path counts from where the command runs, not from the job."""
    jobs, plans = tmp_path / "jobs", tmp_path / "plans"
    jobs.mkdir()
    plans.mkdir()
    (tmp_path / "cpu.json").write_bytes((ROOT / "examples" / "elastic-cpu.json").read_bytes())
    spec = TINY.model_dump(mode="json", exclude_unset=True) | {"profile": str(tmp_path / "cpu.json")}
    (jobs / "job.yaml").write_text(yaml.safe_dump(spec))
    accept("plan", jobs / "job.yaml", "-o", plans / "plan.json")
    (tmp_path / "cpu.json").rename(tmp_path / "moved.json")
    report = ("report", plans, "--job", jobs / "job.yaml", "--what-if", "3")
    refuse(*report, words="is not there; want --profile", folder=tmp_path)
    monkeypatch.chdir(tmp_path)
    refuse(*report, "--profile", "no-such", words="no-such", folder=tmp_path)
    refuse(*report[:2], "--profile", "moved.json", words="want --job FILE, too", folder=tmp_path)
    accept(*report, "--profile", "moved.json")
    assert "no profile" not in (plans / "report.html").read_text()
