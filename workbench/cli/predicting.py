"""The command that predicts runs of language models in a table: predict."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated

import typer

from workbench.cli.console import emit_json, print_error, show
from workbench.cli.options import Json
from workbench.cost.execution import load_execution
from workbench.cost.profile import load_profile
from workbench.llm_table.columns import describe_columns, read_row
from workbench.llm_table.csv_file import CsvTable, read_table
from workbench.llm_table.predict import Prediction, RowPredictor
from workbench.llm_table.row_interval import unsaid_of
from workbench.report.figure import Figure
from workbench.report.progress import ticking
from workbench.report.tables import mebibytes, titled
from workbench.whole_file import check_writable, write_text

HELP = (
    "Predict time and memory of language-model runs, one per row of a CSV file.\n\n"
    "The output has the columns of the input and, among others, predicted_s, predicted_bytes (of the "
    "fullest GPU), fits, shares of the time, and unmeasured (costs that were not measured). An invalid row "
    "has an error instead; the others are predicted, and the exit code is 2. Columns:\n\n\b\n"
    + describe_columns()
)


def predict_command(
    rows: Annotated[Path, typer.Argument(help="CSV file with a header", metavar="ROWS")],
    output: Annotated[Path, typer.Option("-o", "--output", help="CSV file to write")],
    profile: Annotated[
        str | None, typer.Option(help="profile name or file; replaces gpu in all rows")
    ] = None,
    execution: Annotated[
        Path | None, typer.Option(help="execution file: kernels, rates and host times of the training system")
    ] = None,
    as_json: Json = False,
) -> None:
    from sim.predict import iteration_s

    check_writable(output, rows, profile, execution)
    machine = None if profile is None else load_profile(profile)
    table = read_table(rows)
    predictor = RowPredictor(
        iteration_s, profile=machine, execution=None if execution is None else load_execution(execution)
    )
    began_s = perf_counter()
    outcomes = _predict_rows(table, predictor, quiet=as_json)
    elapsed_s = perf_counter() - began_s
    write_text(table.with_predictions(outcomes), output)
    _print_summary(output, outcomes, elapsed_s, quiet=as_json)
    if any(isinstance(outcome, str) for outcome in outcomes):
        raise typer.Exit(2)


predict_command.__doc__ = HELP


def _predict_rows(table: CsvTable, predictor: RowPredictor, *, quiet: bool) -> list[Prediction | str]:
    """Per row its prediction, or its error text, which is also printed."""
    outcomes: list[Prediction | str] = []
    with ticking("predicting", len(table.cells), quiet=quiet) as ticker:
        for index, cells in enumerate(table.cells):
            try:
                outcomes.append(predictor.predict(read_row(cells), unsaid_of(cells)))
            except ValueError as error:
                print_error(f"{table.where(index)}: {error}")
                outcomes.append(str(error))
            ticker.step()
    return outcomes


def _print_summary(
    output: Path, outcomes: Sequence[Prediction | str], elapsed_s: float, *, quiet: bool
) -> None:
    predictions = [outcome for outcome in outcomes if isinstance(outcome, Prediction)]
    num_bad = len(outcomes) - len(predictions)
    rate = len(predictions) / elapsed_s
    too_large = sum(prediction.spare_bytes < 0 for prediction in predictions)
    if quiet:
        emit_json(
            {
                "output": str(output),
                "num_rows": len(predictions),
                "num_bad": num_bad,
                "rows_per_s": rate,
                "num_too_large": too_large,
            }
        )
        return
    if not predictions:
        return
    seconds = sorted(prediction.iteration_s for prediction in predictions)
    table = titled(
        "predictions", ("rows", "fastest", "median", "slowest", "most memory", "do not fit", "bad")
    )
    max_bytes = max(prediction.peak_bytes for prediction in predictions)
    table.add_row(
        str(len(predictions)),
        *(Figure(f"{time_s:.4g} s", {"s": time_s}) for time_s in (seconds[0], median(seconds), seconds[-1])),
        mebibytes(max_bytes),
        str(too_large),
        str(num_bad),
    )
    show(table, f"written to {output}; {rate:.1f} rows/s")
