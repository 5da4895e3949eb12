"""Parameters that several commands share."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Device(StrEnum):
    """What a rank works on."""

    CPU = "cpu"
    CUDA = "cuda"


PlanFile = Annotated[Path, typer.Argument(help="plan file", metavar="PLAN")]
ExecutionFile = Annotated[
    Path | None, typer.Option("--execution", help="JSON file of the training system's rates and host times")
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")]
JobFile = Annotated[Path, typer.Argument(help="job file", metavar="JOB")]
Faults = Annotated[int, typer.Option("--faults", help="nodes that may fail at the same moment")]
Profile = Annotated[str | None, typer.Option(help="profile name or file instead of the job's")]
