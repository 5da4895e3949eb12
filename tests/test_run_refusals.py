"""`init`, `plan` and `search` say when what they write can be simulated, not run."""

from pathlib import Path

import pytest

from tests.command_line import JOB, accept, answered
from workbench.plan.codec import read_plan
from workbench.plan.runnable import refusal_to_run

MODEL = "bert-large"  # in no configuration of transformers that the runtime reads
WARNING = "can be simulated, not run: "


def drafted(folder: Path, model: str) -> Path:
    job = folder / "job.yaml"
    accept("init", model, "--gpus", "8xH100", "-o", job)
    return job


def test_a_draft_of_a_model_without_layers_in_the_runtime_says_so(tmp_path: Path) -> None:
    words = ("init", MODEL, "--gpus", "8xH100", "-o", tmp_path / "job.yaml")
    assert f"plans of this job {WARNING}module" in accept(*words).output
    (refusal,) = answered(*words)["run_refusals"]
    assert refusal.startswith("module 'llm' has no source")


@pytest.mark.parametrize("command", ["plan", "search"])
def test_a_plan_that_cannot_run_says_why(tmp_path: Path, command: str) -> None:
    output = tmp_path / "plan.json"
    done = accept(command, drafted(tmp_path, MODEL), "-o", output)
    refusal = refusal_to_run(read_plan(output))
    assert refusal
    assert f"this plan {WARNING}{refusal}" in " ".join(done.output.split())


def test_plan_gives_machines_the_reason_or_none(tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    job = drafted(tmp_path, MODEL)
    assert "has no source" in answered("plan", job, "-o", output)["run_refusal"]
    job.write_text(JOB)
    runnable = answered("plan", job, "-o", output)
    assert runnable["run_refusal"] is None
    assert refusal_to_run(read_plan(output)) == ""
