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
