"""How good inputs are written: JSON and YAML of any tree, and the corpus of small files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

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


def written(path: Path, reader: Callable[[Path], object]) -> Callable[[bytes], object]:
    """A reader of bytes: they are written to the path, which the reader gets."""

    def take(content: bytes) -> object:
        path.write_bytes(content)
        return reader(path)

    return take


def folder_in(folder: Path, name: str = "out") -> Path:
    """A new folder in the target's own."""
    made = folder / name
    made.mkdir()
    return made
