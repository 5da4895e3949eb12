"""Parameters that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

PlanFile = Annotated[Path, typer.Argument(help="plan file", metavar="PLAN")]
ExecutionFile = Annotated[
    Path | None, typer.Option("--execution", help="JSON file of the training system's rates and host times")
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")]
