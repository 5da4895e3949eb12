"""How good inputs are written and first read, as JSON, YAML or CSV of any tree; and who reads the file."""

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
    """Whatever Python would write, numbers that are none and halves of surrogate pairs too."""
    return json.dumps(tree, skipkeys=True).encode()


def json_lines(trees: Any) -> bytes:
    """One line per item of a list; what is no list is one line."""
    return b"\n".join(map(json_bytes, trees if isinstance(trees, list) else [trees])) + b"\n"


def yaml_bytes(tree: Any) -> bytes:
    """A document in flow or block style; what cannot be written so is JSON."""
    try:
        text: str = yaml.dump(tree, Dumper=yaml.CSafeDumper, sort_keys=False, default_flow_style=None)
    except (yaml.YAMLError, UnicodeError, RecursionError):
        return json_bytes(tree)
    return text.encode("utf-8", "surrogatepass")


def csv_bytes(rows: Any) -> bytes:
    """Cells as their texts; a comma in one of them is one more cell."""
    lines = rows if isinstance(rows, list) else [rows]
    cells = [line if isinstance(line, list) else [line] for line in lines]
    text = "\n".join(",".join(map(str, line)) for line in cells) + "\n"
    return text.encode("utf-8", "surrogatepass")


def cells_of(path: Path) -> list[list[str]]:
    """Of a CSV file without quotes, as `csv_bytes` takes them."""
    return [line.split(",") for line in path.read_text(encoding="utf-8").splitlines()]


def parse_json_lines(content: bytes) -> object:
    """Every line."""
    return [json.loads(line) for line in content.splitlines() if line.strip()]


def parse_yaml_document(content: bytes) -> object:
    """As YAML has it, whatever it holds; the quick parser."""
    return yaml.load(content, Loader=yaml.CSafeLoader)


def parse_csv(content: bytes) -> object:
    """All rows."""
    return list(csv.reader(io.StringIO(content.decode()), strict=True))


class Form(NamedTuple):
    """How a kind of file is written of a tree, if it is of trees, and first parsed."""

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
    then: Callable[[T], object] = lambda found: None,
    *,
    called: str | None = None,
    out: Path | None = None,
) -> Ready:
    """A file that is read.

    Args:
        path: where it is written.
        read: gets the path; what it refuses, it refuses by the file's name, or as `called`.
        then: gets what was read.
        out: folder that both may write to.
    """

    def take(content: bytes) -> None:
        path.write_bytes(content)
        with naming(path.name if called is None else called):
            found = read(path)
        then(found)

    return Ready(seeds=seeds, render=form.render, parse=form.parse, take=take, out=out)


def folder_in(folder: Path, name: str = "out") -> Path:
    """A new folder in the target's own."""
    made = folder / name
    made.mkdir()
    return made
