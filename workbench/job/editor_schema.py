"""JSON Schema of a job file, for editors: completion, checks and what every field means."""

from typing import Any, get_args

from pydantic import BaseModel

from workbench.job.schema import JobSpec
from workbench.json_schema import DIALECT, Schema, describe


def job_schema() -> Schema:
    """JSON Schema of a job.yaml; which keys exclude each other is checked when the file is read."""
    found = JobSpec.model_json_schema()
    classes = {each.__name__: each for each in _models(JobSpec)}
    for name, definition in found["$defs"].items():
        if name in classes:
            describe(definition, classes[name])
    describe(found, JobSpec)
    return {"$schema": DIALECT, **found}


def _models(kind: Any) -> list[type[BaseModel]]:
    """A model and those in its fields, however deep."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        inner = (each for field in kind.model_fields.values() for each in _models(field.annotation))
        return [kind, *inner]
    return [each for member in get_args(kind) for each in _models(member)]
