"""What a job may ask of its schedule."""

import pytest

from tests.command_line import accept, workbench
from tests.job_files import put, write
from workbench.job.job import load_job
from workbench.plan.codec import read_plan
from workbench.schedule.action import Pass
from workbench.schedule.choice import Schedule, ScheduleKind


@pytest.mark.parametrize("kind", ScheduleKind)
def test_a_job_names_its_schedule(tmp_path, kind):
    job = load_job(write(tmp_path, put("schedule", value={"kind": kind.value})))
    assert job.schedule == Schedule(kind=kind, virtual_stages=kind.usual_virtual_stages)


def test_without_a_word_it_is_1f1b(tmp_path):
    assert load_job(write(tmp_path)).schedule == Schedule()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"kind": "zb-h3"}, "zb-h2"),
        ({"kind": "1f1b", "virtual_stages": 2}, "virtual_stages 1, got 2"),
        ({"kind": "gpipe", "memory_limit": 4}, "gpipe has no memory_limit"),
        ({"kind": "zb-h1", "memory_limit": 0}, "memory_limit"),
        ({"kinds": "zb-h1"}, "did you mean 'kind'"),
    ],
)
def test_what_a_kind_cannot_have_is_refused_in_one_line(tmp_path, spec, message):
    with pytest.raises(ValueError, match=message) as raised:
        load_job(write(tmp_path, put("schedule", value=spec)))
    assert "\n" not in str(raised.value)


def test_the_command_line_overrides_the_jobs_schedule(tmp_path):
    job, plan = write(tmp_path), tmp_path / "plan.json"
    arguments = ["plan", job, "--schedule", "zb-h1", "--profile", "A40", "-o", plan, "--json"]
    result = accept(*arguments)
    assert {action.kind for action in read_plan(plan).program_actions} >= {Pass.F, Pass.I}
    result = workbench("plan", str(job), "--schedule", "zb-h3", "-o", str(plan))
    assert result.exit_code == 2
    assert "zb-h2" in result.output
