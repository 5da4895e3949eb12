"""Pools with profiles of a user's own: a plan of them is predicted by these profiles wherever it goes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import workbench
from sim.predict import candidate_s
from tests.command_line import workbench as command
from tests.job_files import write
from tests.test_disttrain_pools import POOLS
from workbench.cost.profile import load_profile, write_profile
from workbench.job.job import load_job
from workbench.job.machines import cost_of
from workbench.job.matching import cost_for
from workbench.plan.codec import planned_with, read_plan


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Half an A40 without a shipped name, and an L20 of half the rates beside the shipped ones."""
    write_profile(replace(_halved("A40"), device="half of an A40"), tmp_path / "own.json")
    write_profile(_halved("L20"), tmp_path / "slow.json")
    cheap, fast = (dict(pool, nodes=1) for pool in POOLS.values())

    def change(data):
        data["cluster"] = {"pools": {"cheap": cheap | {"profile": "slow.json"}}}
        data["cluster"]["pools"]["fast"] = fast | {"profile": "own.json"}
        data["profile"] = "own.json"

    return write(tmp_path, change)


def _halved(name: str):
    shipped = load_profile(name)
    points = tuple((*point[:-1], point[-1] / 2) for point in shipped.matmul.points)
    return replace(shipped, name=f"half-{name}", matmul=replace(shipped.matmul, points=points))


def test_a_plan_file_is_priced_by_all_profiles_that_it_was_made_with(job: Path):
    """Before, devices without a shipped profile were refused, and others got the shipped one unsaid."""
    file = job.parent / "plan.json"
    assert command("plan", job, "-o", file).exit_code == 0
    assert planned_with(file) == ("own.json", "slow.json")
    plan = read_plan(file)
    seconds = candidate_s(plan, cost_of(load_job(job), None, None))
    assert json.loads(command("simulate", file, "--json").stdout)["iteration_s"] == seconds
    profiles = [job.parent / name for name in planned_with(file)]
    assert workbench.simulate(plan, profile=profiles).iteration_s == seconds
    assert (
        workbench.simulate(plan, profile=profiles[0]).iteration_s < seconds
    )  # a shipped L20 is twice as fast


def test_a_given_profile_replaces_that_of_its_device_alone(job: Path):
    """As `plan --profile` prices pools."""
    file = job.parent / "plan.json"
    command("plan", job, "-o", file)
    for given in ("L20", str(job.parent / "slow.json"), str(job.parent / "own.json")):
        seconds = candidate_s(read_plan(file), cost_of(load_job(job), given, None))
        told = command("simulate", file, "--profile", given, "--json").stdout
        assert json.loads(told)["iteration_s"] == seconds
    (job.parent / "slow.json").unlink()  # is replaced, so that nobody needs it
    assert command("simulate", file, "--profile", "L20").exit_code == 0


def test_a_file_that_is_gone_is_named(job: Path):
    file = job.parent / "plan.json"
    command("plan", job, "-o", file)
    (job.parent / "slow.json").unlink()
    done = command("simulate", file)
    assert (done.exit_code, "made with, slow.json, is not there" in done.stderr) == (2, True)


def test_the_main_profile_is_taken_for_one_kind_of_device_whatever_its_own():
    plan = workbench.plan(load_job(Path(__file__).parents[1] / "examples" / "tiny.yaml"), profile="A40")
    assert cost_for(plan, [load_profile("H100")]).on("cpu").profile.name == "H100"


def test_two_profiles_of_one_device_are_refused(job: Path):
    """A plan knows machines by their devices, and took the first profile for both."""
    job.write_text(job.read_text().replace("profile: own.json", "profile: L20"))
    with pytest.raises(
        ValueError, match=r"profiles 'L20' here and 'half-L20' of .*cheap are both of device 'L20'"
    ):
        load_job(job)
