"""JSON Schemas for editors: they accept the files that are read, refuse others, and say what fields mean."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.command_line import accept
from tests.job_files import JOB
from workbench.cost.profile import PROFILES, known_profiles
from workbench.job.job_file import read_spec

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def validator(file: str) -> Draft202012Validator:
    done = accept("schema", file)
    schema = json.loads(done.stdout)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def test_every_example_is_a_job() -> None:
    jobs = validator("job")
    files = sorted(EXAMPLES.glob("**/*.yaml"))
    assert len(files) >= 5
    for file in files:
        assert [error.message for error in jobs.iter_errors(yaml.safe_load(file.read_text()))] == [], file


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda job: job["batch"].update(sample=4), "batch"),
        (lambda job: job["batch"].update(samples=0), "batch/samples"),
        (lambda job: job["layouts"]["llm"].update(recompute="some"), "layouts/llm/recompute"),
        (lambda job: job.pop("cluster"), ""),
        (
            lambda job: job["model"]["modules"]["llm"].update(trainable="none of it"),
            "model/modules/llm/trainable",
        ),
        (lambda job: job["cluster"].update(dollars_per_gpu_hour=-1), "cluster/dollars_per_gpu_hour"),
    ],
)
def test_what_the_reader_refuses_the_schema_of_jobs_refuses(
    change: Callable[[Any], object], path: str, tmp_path: Path
) -> None:
    """At the same place, where a schema can say it."""
    job = yaml.safe_load(JOB)
    jobs = validator("job")
    assert jobs.is_valid(job)
    changed = copy.deepcopy(job)
    change(changed)
    found = {"/".join(map(str, error.absolute_path)) for error in jobs.iter_errors(changed)}
    assert found == {path}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(changed))
    with pytest.raises(ValueError, match=r"job\.yaml"):
        read_spec(file)


def test_every_shipped_profile_and_the_example_are_profiles() -> None:
    profiles = validator("profile")
    files = [EXAMPLES / "elastic-cpu.json", *(PROFILES / f"{name}.json" for name in known_profiles())]
    for file in files:
        data = json.loads(file.read_text())
        assert [error.message for error in profiles.iter_errors(data)] == [], file
        assert not profiles.is_valid(data | {"memory": 1})
        assert not profiles.is_valid({key: value for key, value in data.items() if key != "device"})


def test_a_plan_that_is_written_is_a_plan(tmp_path: Path) -> None:
    plans = validator("plan")
    for strategy in ("cornstarch", "entrain", "megatron-homogeneous"):
        path = tmp_path / f"{strategy}.json"
        arguments = ["plan", str(EXAMPLES / "tiny.yaml"), "-o", str(path), "--strategy", strategy]
        accept(*arguments, "--profile", "A40")
        document = json.loads(path.read_text())
        assert [error.message for error in plans.iter_errors(document)] == []
        document["plan"]["stages"][0]["tp"] = 1
        del document["plan"]["strategy"]
        found = {"/".join(map(str, error.absolute_path)) for error in plans.iter_errors(document)}
        assert found == {"plan", "plan/stages/0"}


def test_editors_are_told_what_fields_mean(tmp_path: Path) -> None:
    schema = validator("job").schema
    layout = schema["$defs"]["LayoutSpec"]["properties"]
    assert layout["recompute"]["description"].startswith("what the backward recomputes: `none`, `blocks` as")
    undescribed = [
        f"{name}.{field}"
        for name, definition in schema["$defs"].items()
        for field, said in definition.get("properties", {}).items()
        if "description" not in said
    ]
    assert undescribed == []
    out = tmp_path / "job.schema.json"
    accept("schema", "job", "-o", str(out))
    assert json.loads(out.read_text()) == schema
