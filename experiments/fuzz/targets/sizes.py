"""Sizes of samples as JSON lines, CSV, parquet, and a saved data set."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from experiments.fuzz.target import Ready, Target
from experiments.fuzz.targets.writing import CORPUS, CSV, JSON, JSON_LINES, Form, json_bytes, reading
from workbench.data.size_files import read_sizes
from workbench.job.job import load_job
from workbench.job.sample_sizes import with_sizes

ROWS = [
    {
        "text_tokens": 40,
        "image_width": [640, 32],
        "image_height": [480, 32],
        "audio_seconds": None,
        "name": "a",
    },
    {"text_tokens": 12, "image_width": None, "image_height": None, "audio_seconds": [2.5], "name": "b"},
    {"text_tokens": 7, "image_width": [33], "image_height": [57], "audio_seconds": None, "name": None},
    {"text_tokens": 300, "image_width": [], "image_height": [], "audio_seconds": [0.1, 7.0], "name": "d"},
]


def _sizes(form: Form, path: Path, seeds: Sequence[Any], whole: Path | None = None) -> Ready:
    """Read sizes, then the corpus's job with them; `whole` is the folder that is read."""
    job, whole = load_job(CORPUS / "job.yaml"), path if whole is None else whole
    return reading(
        form,
        path,
        seeds,
        lambda path: read_sizes(whole),
        lambda sizes: with_sizes(job, str(whole), seed=0),
        called=whole.name,
    )


def _lines(folder: Path) -> Ready:
    return _sizes(JSON_LINES, folder / "sizes.jsonl", [ROWS])


CELLS = [
    ["text_tokens", "image_width", "image_height", "audio_seconds", "name"],
    ["40", "640", "480", "", "a"],
    ["12", "[32]", "[32]", "2.5", "b"],
    ["7", "33", "57", "", ""],
    ["300", "", "", "[7.0]", "d"],
]


def _cells(folder: Path) -> Ready:
    return _sizes(CSV, folder / "sizes.csv", [CELLS, [*CELLS, *CELLS[1:]]])


def _table(tree: Any) -> pa.Table:
    """Rows with values of any type; columns of mixed types become text."""
    rows = [row for row in (tree if isinstance(tree, list) else [tree]) if isinstance(row, dict)]
    columns = {}
    for name in dict.fromkeys(str(key) for row in rows for key in row):
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowException, OverflowError, UnicodeError):
            columns[name] = pa.array([ascii(value)[:100] for value in values])
    return pa.table(columns)


def _parquet_bytes(tree: Any) -> bytes:
    sink = BytesIO()
    try:
        pq.write_table(_table(tree), sink)
    except (pa.ArrowException, UnicodeError):
        return json_bytes(tree)
    return sink.getvalue()


def _arrow_bytes(tree: Any) -> bytes:
    sink = BytesIO()
    try:
        table = _table(tree)
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    except (pa.ArrowException, UnicodeError):
        return json_bytes(tree)
    return sink.getvalue()


def _parquet(folder: Path) -> Ready:
    form = Form(_parquet_bytes, lambda content: pq.ParquetFile(BytesIO(content)))
    return _sizes(form, folder / "sizes.parquet", [ROWS, ROWS * 20])


def _data_set(folder: Path, state: Any) -> Path:
    (folder / "data.arrow").write_bytes(_arrow_bytes(ROWS))
    (folder / "more.arrow").write_bytes(_arrow_bytes(ROWS * 10))
    (folder / "state.json").write_bytes(json_bytes(state))
    return folder


STATE = {
    "_data_files": [{"filename": "data.arrow"}, {"filename": "more.arrow"}],
    "_fingerprint": "0",
    "_format_type": None,
    "_split": "train",
}


def _arrow(folder: Path) -> Ready:
    data_set = _data_set(folder, STATE)
    form = Form(_arrow_bytes, lambda content: pa.ipc.open_stream(BytesIO(content)))
    return _sizes(form, data_set / "data.arrow", [ROWS, ROWS * 20], data_set)


def _state(folder: Path) -> Ready:
    data_set = _data_set(folder, STATE)
    return _sizes(JSON, data_set / "state.json", [STATE], data_set)


TARGETS = (
    Target(name="sizes-jsonl", make=_lines, readers=("workbench.data.size_files:_json_rows",)),
    Target(
        name="sizes-csv",
        make=_cells,
        readers=("workbench.data.size_files:_csv_rows", "workbench.data.size_files:_cell"),
    ),
    Target(name="sizes-parquet", make=_parquet, readers=("workbench.data.size_files:_rows",)),
    Target(name="sizes-arrow", make=_arrow, readers=("workbench.data.size_files:_saved_rows",)),
    Target(name="sizes-arrow-state", make=_state, readers=("workbench.data.size_files:_saved_rows",)),
)
