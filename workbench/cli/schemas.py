"""The command that prints JSON Schemas of the workbench's files."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.console import show
from workbench.cost.profile import profile_schema
from workbench.job.job_file import job_schema
from workbench.plan.codec import plan_schema
from workbench.whole_file import write_text


class SchemaFile(StrEnum):
    """Kinds of files that have a schema."""

    JOB = "job"
    PROFILE = "profile"
    PLAN = "plan"


def schema_command(
    file: Annotated[SchemaFile, typer.Argument(help="kind of file: job, profile or plan", metavar="FILE")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="file to write; default: standard output")
    ] = None,
) -> None:
    """Print the JSON Schema of job, profile or plan files, for completion and checks in editors."""
    schemas = {
        SchemaFile.JOB: job_schema,
        SchemaFile.PROFILE: profile_schema,
        SchemaFile.PLAN: plan_schema,
    }
    text = json.dumps(schemas[file](), indent=1) + "\n"
    if output is None:
        typer.echo(text, nl=False)
        return
    write_text(text, output)
    show(f"written to {output}")
