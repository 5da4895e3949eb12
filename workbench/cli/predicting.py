"""The command that prices a table of language models: predict."""

import csv
import io
import sys
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer

from workbench.cli.console import emit_json, show, ticking
from workbench.cli.options import Json
from workbench.cost.execution import load_execution
from workbench.cost.profile import load_profile
from workbench.llm_table.columns import OUTPUTS, check_header, describe_columns, read_row
from workbench.llm_table.llm_row import LlmRow
from workbench.llm_table.predict import Prediction, RowPredictor
from workbench.plan.lowered import Lowered
from workbench.report.tables import titled
from workbench.timing.price import Price
from workbench.units import GB
from workbench.whole_file import check_writable, write_text

MOST_ROWS = 1_000_000
SEPARATOR = " | "  # between unmeasured costs

PREDICT_HELP = (
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
    """Price every row of a table; see `PREDICT_HELP`."""
    check_writable(output)
    machine = None if profile is None else load_profile(profile)
    header, cells = _table(rows)
    found = _rows(rows, cells)
    predictor = RowPredictor(
        time_of, profile=machine, execution=None if execution is None else load_execution(execution)
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
    write_text(_csv(header, cells, predictions), output)
    _tell(output, predictions, took_s, quiet=as_json)


def time_of(lowered: Lowered, prices: Price) -> float:
    """Seconds of an iteration by the fast engine."""
    from sim.step.deadlock import DeadlockError
    from sim.step.sweep import Sweep

    try:
        return Sweep(lowered).iteration_s(prices.duration_s, prices.step_s)
    except DeadlockError as error:
        raise ValueError(str(error)) from error


def _table(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The header and the cells of every row."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        lines = [line for line in csv.reader(io.StringIO(text), strict=True) if any(map(str.strip, line))]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: want a CSV file in UTF-8: {error}") from error
    if len(lines) < 2:
        raise ValueError(f"{path}: want a header and at least one row, got {len(lines)} lines")
    if len(lines) > MOST_ROWS + 1:
        raise ValueError(f"{path}: want at most {MOST_ROWS:,} rows, got {len(lines) - 1:,}")
    header = [name.strip() for name in lines[0]]
    try:
        check_header(header)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(header):
            raise ValueError(f"{path}: line {number}: want {len(header)} cells, got {len(line)}")
    return header, [dict(zip(header, line, strict=True)) for line in lines[1:]]


def _rows(path: Path, cells: list[dict[str, str]]) -> list[LlmRow]:
    """Every row, or one line on stderr for each bad one and ValueError."""
    found, bad = [], []
    for number, row in enumerate(cells, start=2):
        try:
            found.append(read_row(row))
        except ValueError as error:
            bad.append(f"{path}: line {number}: {error}")
    if not bad:
        return found
    for line in bad[:-1]:
        sys.stderr.write(f"workbench: error: {line}\n")
    raise ValueError(f"{bad[-1]} ({len(bad)} of {len(cells)} rows are bad, nothing was written)")


def _csv(header: list[str], cells: list[dict[str, str]], predictions: list[Prediction]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*header, *OUTPUTS])
    for row, found in zip(cells, predictions, strict=True):
        added = (repr(found.iteration_s), found.peak_bytes, SEPARATOR.join(found.unmeasured))
        writer.writerow([*(row[name] for name in header), *added])
    return out.getvalue()


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
