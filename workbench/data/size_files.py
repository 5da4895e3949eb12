"""Read users' sample sizes: JSON lines, CSV, parquet, or a Hugging Face data set saved to disk."""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from workbench.bounded_file import entry_in, read_bounded
from workbench.data.sizes import Sizes
from workbench.on_demand import OnDemand

pa, pq = OnDemand("pyarrow"), OnDemand("pyarrow.parquet")
MOST = 1e15  # largest number: integers below are exact in a float
COLUMNS = (
    "image_width",
    "image_height",
    "video_width",
    "video_height",
    "video_seconds",
    "text_tokens",
    "audio_seconds",
)
SIZES_OF = {
    "image": ("image_width", "image_height"),
    "video": ("video_width", "video_height", "video_seconds"),
    "audio": ("audio_seconds",),
}
"""Columns that say how large the items of a column are, which may also have the plural's name."""


def read_sizes(path: str | Path) -> tuple[Sizes, ...]:
    """Sizes of every row, in order, from a file (.jsonl, .csv, .parquet) or a folder of `save_to_disk`.

    Columns: `text_tokens` in every row; `image_width` with `image_height`, `video_width` with
    `video_height` and `video_seconds`, and `audio_seconds`, each one number, a list of several, or null if
    a row has none. Other columns are ignored, so that sizes can be added to an existing data set, but not
    images, videos and clips without sizes. Text follows all of these. The first line of CSV names the
    columns; a cell is a number, a list of several such as "[640, 32]", or empty.

    Raises:
        ValueError: no rows, a missing column, images without sizes, or a row with missing or invalid sizes;
            names the file, the row (from 1) and the value.
        OSError: the file cannot be read.
    """
    file = Path(path)
    sizes = []
    for number, row in enumerate(_rows(file), 1):
        try:
            sizes.append(_sizes(row))
        except ValueError as error:
            raise ValueError(f"{file}, row {number}: {error}") from None
    if not sizes:
        raise ValueError(f"{file}: there are no rows")
    return tuple(sizes)


def _rows(file: Path) -> Iterator[Mapping[str, Any]]:
    if file.is_dir():
        yield from _saved_rows(file)
    elif file.suffix == ".parquet":
        try:
            table = pq.ParquetFile(file)
            columns = _known(file, table.schema_arrow.names)
            for batch in table.iter_batches(columns=columns):
                yield from batch.to_pylist()
        except (pa.ArrowException, UnicodeDecodeError, OSError, MemoryError) as error:
            if isinstance(error, FileNotFoundError | PermissionError):
                raise
            raise ValueError(f"{file}: not a parquet file: {_first_line(error)}") from None
    elif file.suffix in (".jsonl", ".json"):
        yield from _json_rows(file)
    elif file.suffix == ".csv":
        yield from _csv_rows(file)
    else:
        raise ValueError(
            f"{file}: want a .jsonl, .csv or .parquet file or a folder of a saved data set, "
            f"got {file.suffix!r}"
        )


def _json_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(read_bounded(file).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}, row {number}: not JSON: {_first_line(error)}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{file}, row {number}: want an object, got {type(row).__name__}")
        _known(file, [name for name in row if name in COLUMNS or row[name] not in (None, [], "")])
        yield row


def _csv_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    text = read_bounded(file, encoding="utf-8-sig")  # spreadsheets begin it with a byte order mark
    try:
        lines = filter(None, csv.reader(io.StringIO(text, newline=""), strict=True))
        names = [name.strip() for name in next(lines, [])]
        columns = _known(file, names)
        twice = next((name for name in columns if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"{file}: want each column once, {twice} is there {names.count(twice)} times")
        for number, cells in enumerate(lines, 1):
            if len(cells) != len(names):
                raise ValueError(
                    f"{file}, row {number}: want {len(names)} cells, as the header has, got {len(cells)}"
                )
            row = dict(zip(names, cells, strict=True))
            yield {
                column: _cell(f"{file}, row {number}: {column}", row[column].strip()) for column in columns
            }
    except csv.Error as error:
        raise ValueError(f"{file}: not CSV: {_first_line(error)}") from None


def _cell(where: str, text: str) -> object:
    """The value of a cell of sizes; None where it is empty."""
    if not text:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{where}: want a number or a list such as [640, 32], got {text!r:.60}") from None


def _saved_rows(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Rows of the arrow files in the order of the data set's state."""
    try:
        state = json.loads(read_bounded(folder / "state.json"))
        files = [entry_in(folder, entry["filename"]) for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder}: not a saved data set, its state.json: {_first_line(error)}") from None
    for file in files:
        try:
            # Not memory-mapped: lengths in a damaged file must not reach beyond what was read.
            with pa.OSFile(str(file)) as source, pa.ipc.open_stream(source) as reader:
                columns = _known(file, reader.schema.names)
                for batch in reader:
                    chosen = batch.select(columns)
                    chosen.validate(full=True)
                    yield from chosen.to_pylist()
        except (pa.ArrowException, UnicodeDecodeError, OSError, MemoryError) as error:
            raise ValueError(f"{file}: not an arrow file: {_first_line(error)}") from None


def _known(file: Path, names: list[str]) -> list[str]:
    columns = [name for name in names if name in COLUMNS]
    chats = [name for name in ("conversations", "messages") if name in names]
    if "text_tokens" not in columns and chats:
        raise ValueError(
            f"{file}: {chats[0]!r} is text, whose tokens only a tokenizer can count, and sizes of images "
            "are in the images: add columns text_tokens, image_width, image_height (docs/reference/data.md)"
        )
    if "text_tokens" not in columns:
        near = get_close_matches("text_tokens", names, n=1)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        raise ValueError(f"{file}: want a column text_tokens, got {', '.join(names) or 'none'}{hint}")
    for name in names:
        wanted = SIZES_OF.get(name.removesuffix("s"), ())
        if wanted and not any(column in columns for column in wanted):
            raise ValueError(
                f"{file}: {name!r} is not a size; want {', '.join(wanted)}, each a number or a list, or no "
                f"column {name!r} to plan without (docs/reference/data.md)"
            )
    return columns


def _sizes(row: Mapping[str, Any]) -> Sizes:
    widths, heights = (_whole(row, f"image_{side}") for side in ("width", "height"))
    if len(widths) != len(heights):
        raise ValueError(f"want as many widths as heights of images, got {len(widths)} and {len(heights)}")
    videos = *(_whole(row, f"video_{side}") for side in ("height", "width")), _numbers(row, "video_seconds")
    if len(set(map(len, videos))) != 1:
        raise ValueError(
            "want as many widths as heights and seconds of videos, "
            f"got {len(videos[1])}, {len(videos[0])} and {len(videos[2])}"
        )
    audio_s = tuple(float(seconds) for seconds in _numbers(row, "audio_seconds"))
    text = _whole(row, "text_tokens")
    if len(text) != 1:
        raise ValueError(f"text_tokens: want one number, got {row.get('text_tokens')!r:.60}")
    return Sizes(
        text_tokens=(0,) * (len(widths) + len(videos[0]) + len(audio_s)) + text,
        images=tuple(zip(heights, widths, strict=True)),
        videos=tuple(zip(*videos, strict=True)),
        audio_s=audio_s,
    )


def _whole(row: Mapping[str, Any], column: str) -> tuple[int, ...]:
    values = _numbers(row, column)
    for value in values:
        if value != int(value):
            raise ValueError(f"{column}: want whole numbers, got {value}")
    return tuple(int(value) for value in values)


def _numbers(row: Mapping[str, Any], column: str) -> list[float]:
    value = row.get(column)
    values = [] if value is None else value if isinstance(value, list) else [value]
    for each in values:
        if isinstance(each, bool) or not isinstance(each, int | float) or not -MOST < each < MOST:
            raise ValueError(f"{column}: want numbers, got {each!r:.60}")
    return values


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
