"""The command that converts checkpoints of the earlier format."""

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.console import show

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Convert checkpoints in the earlier format."
)
app.callback()(lambda: None)  # keeps `import` a subcommand although it is the only one


@app.command("import")
def import_command(
    old: Annotated[
        Path, typer.Argument(help="folder with checkpoints of a run, or one save of `elastic`", metavar="OLD")
    ],
    new: Annotated[Path, typer.Argument(help="new folder to write to", metavar="NEW")],
    trust: Annotated[
        bool,
        typer.Option("--trust", help="allow code in the old folder to run; only if you trust its author"),
    ] = False,
) -> None:
    """Convert torch's distributed checkpoints, which can contain code, to tensors and JSON."""
    if not trust:
        raise ValueError(
            f"checkpoint import: reading {old} runs code in it; want --trust if you trust its author"
        )
    from runtime.state.import_old import import_old

    show(*(f"written to {folder}" for folder in import_old(old, new)))
