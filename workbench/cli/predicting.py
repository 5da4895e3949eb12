"""The command that prices a table of language models: predict."""

from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer

from workbench.cli.console import emit_json, print_error, show
from workbench.cli.options import Json
from workbench.cost.execution import load_execution
from workbench.cost.profile import load_profile
from workbench.llm_table.columns import describe_columns
from workbench.llm_table.csv_file import read_table
from workbench.llm_table.predict import Prediction, RowPredictor
from workbench.report.progress import ticking
from workbench.report.tables import titled
from workbench.units import GB
from workbench.whole_file import check_writable, write_text

HELP = (
    "Price text-only dense language models, one a row of a CSV file; nothing is fitted.\n\n"
    "The output has the input's columns and predicted_s, predicted_bytes (of the fullest GPU) and "
    "unmeasured (costs nobody measured, with | between). Columns:\n\n\b\n" + describe_columns()
)


def predict_command(
    rows: Annotated[Path, typer.Argument(help="CSV file with a header", metavar="ROWS")],
    output: Annotated[Path, typer.Option("-o", "--output", help="CSV file to write")],
    profile: Annotated[
        str | None, typer.Option(help="profile name or file instead of each row's gpu")
    ] = None,
    execution: Annotated[
        Path | None, typer.Option(help="JSON file of the training system's rates and host times")
    ] = None,
    as_json: Json = False,
) -> None:
    from sim.predict import iteration_s

    check_writable(output)
    machine = None if profile is None else load_profile(profile)
    table = read_table(rows)
    found = table.rows(print_error)
    predictor = RowPredictor(
        iteration_s, profile=machine, execution=None if execution is None else load_execution(execution)
    )
    began_s = perf_counter()
    predictions = []
    with ticking("predicting", len(found), quiet=as_json) as ticker:
        for number, row in enumerate(found, start=2):
            try:
                predictions.append(predictor.predict(row))
            except ValueError as error:
                raise ValueError(f"{rows}: line {number}: {error}; nothing was written") from error
            ticker.step()
    took_s = perf_counter() - began_s
    write_text(table.with_predictions(predictions), output)
    _tell(output, predictions, took_s, quiet=as_json)


predict_command.__doc__ = HELP


def _tell(output: Path, predictions: list[Prediction], took_s: float, *, quiet: bool) -> None:
    rate = len(predictions) / took_s
    too_large = sum(found.peak_bytes > found.memory_bytes for found in predictions)
    if quiet:
        emit_json(
            {
                "output": str(output),
                "num_rows": len(predictions),
                "rows_per_s": rate,
                "num_too_large": too_large,
            }
        )
        return
    seconds = sorted(found.iteration_s for found in predictions)
    table = titled("predictions", ("rows", "fastest", "median", "slowest", "most memory", "do not fit"))
    most = max(found.peak_bytes for found in predictions)
    table.add_row(
        str(len(predictions)),
        f"{seconds[0]:.4g} s",
        f"{seconds[len(seconds) // 2]:.4g} s",
        f"{seconds[-1]:.4g} s",
        f"{most / GB:.4g} GB",
        str(too_large),
    )
    show(table, f"written to {output}; {rate:.1f} rows/s")
