"""The command that converts a job's layouts to or from the notation of another system."""

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from workbench.cli.console import emit_json, show
from workbench.cli.job_reading import read_job
from workbench.cli.options import Json
from workbench.job.notations.job_layouts import Notation, write_layouts
from workbench.job.notations.layout_file import content_of, job_with_layouts, placing_of, with_settings_of
from workbench.plan.codec import FORMAT
from workbench.strategies.encoder_placement import MEANT, with_layout_file
from workbench.whole_file import check_writable, write_text

_START_BYTES = 256  # enough of a plan file to contain its first key, the format


def layout_command(
    job: Annotated[Path, typer.Argument(help="job file", metavar="JOB")],
    notation: Annotated[
        Path | None,
        typer.Option("--from", help="file with layouts in any of the notations; replaces those in the job"),
    ] = None,
    to: Annotated[Notation, typer.Option(help="notation to show")] = Notation.JOB,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="file to write; with --to job, a complete job file")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the layouts of a job in the notation of another system, or read them from such a file.

    Notations: Megatron-Bridge, Megatron's layout string, torchtitan, Cornstarch.
    """
    _refuse_plan(job)
    loaded_job = read_job(job)
    strategy: dict[str, str] = {}
    if notation is not None:
        loaded_job = with_layout_file(loaded_job, notation)
        placing = placing_of(content_of(notation))
        strategy = {} if placing is None else {"strategy": MEANT[placing].name}
    layouts = write_layouts(loaded_job, to)
    if to is Notation.JOB:
        layouts = {"layouts": with_settings_of(job, layouts["layouts"])}
    if output is not None:
        check_writable(output, notation, *(() if to is Notation.JOB else (job,)))
        content = job_with_layouts(job, output, layouts["layouts"]) if to is Notation.JOB else layouts
        write_text(_yaml(content), output)
    if as_json:
        emit_json({"notation": to.value, **strategy, **layouts})
        return
    show(_yaml(layouts).rstrip(), *([] if output is None else [f"written to {output}"]))
    for name in strategy.values():
        show(f"a job file cannot express the placement of its modality_parallelism: use --strategy {name}")


def _refuse_plan(path: Path) -> None:
    """Raise ValueError for a plan file, whose keys would otherwise be reported as unknown keys of a job."""
    with path.open("rb") as file:
        start = file.read(_START_BYTES).decode(errors="replace")
    if FORMAT in start:
        raise ValueError(f"{path}: a plan, want a job; `workbench export {path} --to ...` exports plans")


def _yaml(content: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=100)
    return text
