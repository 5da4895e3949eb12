"""What users hand to long commands: numbers, places to write to, weights to go on from."""

import json
from pathlib import Path

import pytest

from tests.test_cli import JOB, accept, refuse


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


@pytest.fixture
def plan(job: Path) -> Path:
    path = job.with_name("plan.json")
    accept("plan", job, "-o", path)
    return path


def test_training_goes_on_from_exported_weights(plan: Path):
    folder = plan.parent
    run = ("run", plan, "--local", "--warmup", 0)
    first = accept(*run, "--steps", 3, "--export", folder / "trained")
    assert "step 3" in first.stdout
    assert "loss by step  1: " in first.stdout
    straight = json.loads(accept(*run, "--steps", 4, "--json").stdout.splitlines()[-1])["losses"]
    assert sorted(straight, reverse=True) == straight
    on = json.loads(accept(*run, "--weights", folder / "trained", "--json").stdout.splitlines()[-1])["losses"]
    assert on == straight[3:]
    words = "trained exists already"
    refuse(*run, "--export", folder / "trained", words=words, folder=folder)


def test_places_that_cannot_be_written_are_refused_before_the_work(plan: Path, job: Path):
    folder = plan.parent
    (folder / "file").touch()
    for place, words in ((folder, "this is a folder"), (folder / "file" / "x.json", "no folder")):
        refuse("run", plan, "--local", "--trace", place, words=words, folder=folder)
        refuse("simulate", plan, "--trace", place, words=words, folder=folder)
        refuse("plan", job, "-o", place, words=words, folder=folder)
        refuse("calibrate", job, "-o", place, words=words, folder=folder)
        refuse("calibrate", job, "-o", folder / "p.json", "--rows", place, words=words, folder=folder)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--steps", 10**30),
        ("--steps", 0),
        ("--warmup", 10**18),
        ("--warmup", -1),
        ("--repetitions", 10**9),
        ("--timeout", 1e300),
        ("--timeout", "nan"),
        ("--timeout", "inf"),
        ("--timeout", 0),
    ],
)
def test_numbers_out_of_bounds(plan: Path, option: str, value: object):
    words = f"{option.removeprefix('--')} must be"
    refuse("run", plan, "--local", option, value, words=words, folder=plan.parent)
