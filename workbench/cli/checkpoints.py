"""The command that takes over saves of the earlier format."""

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.console import show

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Take over saves of the format before this one."
)
app.callback()(lambda: None)  # so that one command is still named


@app.command("import")
def import_command(
    old: Annotated[
        Path, typer.Argument(help="folder of a run's checkpoints, or one save of `elastic`", metavar="OLD")
    ],
    new: Annotated[Path, typer.Argument(help="folder to write them to, a new one", metavar="NEW")],
    trust: Annotated[
        bool, typer.Option("--trust", help="run the code that the old folder may hold: you know who wrote it")
    ] = False,
) -> None:
    """Rewrite torch's distributed checkpoints, which are programs, as tensors and JSON."""
    if not trust:
        raise ValueError(
            f"checkpoint import: reading {old} runs the code in it; want --trust if you know who wrote it"
        )
    from runtime.state.import_old import import_old

    show(*(f"written to {folder}" for folder in import_old(old, new)))
