"""Writes and first parses inputs, as JSON, YAML or CSV of any tree; and reads the file."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from experiments.fuzz.target import Ready, naming

T = TypeVar("T")

CORPUS = Path(__file__).parents[1] / "corpus"


def json_bytes(tree: Any) -> bytes:
    """JSON as Python writes it, including NaN and unpaired surrogates."""
    return json.dumps(tree, skipkeys=True).encode()


def json_lines(trees: Any) -> bytes:
    """JSON lines: one per item of a list, or a single one."""
    return b"\n".join(map(json_bytes, trees if isinstance(trees, list) else [trees])) + b"\n"


def yaml_bytes(tree: Any) -> bytes:
    """A YAML document in flow or block style, or JSON where that is impossible."""
    try:
        text: str = yaml.dump(tree, Dumper=yaml.CSafeDumper, sort_keys=False, default_flow_style=None)
    except (yaml.YAMLError, UnicodeError, RecursionError):
        return json_bytes(tree)
    return text.encode("utf-8", "surrogatepass")


def csv_bytes(rows: Any) -> bytes:
    """CSV with cells as text; a comma in a cell adds a cell."""
    lines = rows if isinstance(rows, list) else [rows]
    cells = [line if isinstance(line, list) else [line] for line in lines]
    text = "\n".join(",".join(map(str, line)) for line in cells) + "\n"
    return text.encode("utf-8", "surrogatepass")


def cells_of(path: Path) -> list[list[str]]:
    """The cells of a CSV file without quotes, as input of `csv_bytes`."""
    return [line.split(",") for line in path.read_text(encoding="utf-8").splitlines()]


def parse_json_lines(content: bytes) -> object:
    """Every line."""
    return [json.loads(line) for line in content.splitlines() if line.strip()]


def parse_yaml_document(content: bytes) -> object:
    """Parse any YAML with the fast parser."""
    return yaml.load(content, Loader=yaml.CSafeLoader)


def parse_csv(content: bytes) -> object:
    """All rows."""
    return list(csv.reader(io.StringIO(content.decode()), strict=True))


class Form(NamedTuple):
    """A kind of file: how it is written from a tree, if it is one, and first parsed."""

    render: Callable[[Any], bytes] | None
    parse: Callable[[bytes], object]


JSON = Form(json_bytes, json.loads)
JSON_LINES = Form(json_lines, parse_json_lines)
YAML = Form(yaml_bytes, parse_yaml_document)
CSV = Form(csv_bytes, parse_csv)


def reading(
    form: Form,
    path: Path,
    seeds: Sequence[Any],
    read: Callable[[Path], T],
    then: Callable[[T], object] = lambda parsed: None,
    *,
    called: str | None = None,
    out: Path | None = None,
) -> Ready:
    """A target that reads a file.

    Args:
        path: where the file is written.
        read: reads the path; its refusals name the file, or `called`.
        then: uses the result.
        out: folder that both may write to.
    """

    def take(content: bytes) -> None:
        path.write_bytes(content)
        with naming(path.name if called is None else called):
            result = read(path)
        then(result)

    return Ready(seeds=seeds, render=form.render, parse=form.parse, take=take, out=out)


def folder_in(folder: Path, name: str = "out") -> Path:
    """A new folder in the target's own."""
    new_folder = folder / name
    new_folder.mkdir()
    return new_folder
