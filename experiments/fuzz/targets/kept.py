"""Files that the program itself wrote earlier: stored search results, marks of exported folders."""

import hashlib
import json
from pathlib import Path
from typing import Any

from experiments.fuzz.target import Ready, Target
from experiments.fuzz.targets.writing import JSON, Form, folder_in, json_bytes, reading
from workbench.export.folder import FORMAT, MARK, check_folder
from workbench.model.checkpoint import missing_weights
from workbench.search.kept_results import Kept, KeptResults

KEY = "0" * 32


def _checked(tree: Any) -> bytes:
    """The content with a valid checksum, so that the reader proceeds."""
    body = json_bytes(tree)
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _below_checksum(content: bytes) -> object:
    return json.loads(content.partition(b"\n")[2])


def _result(folder: Path) -> Ready:
    warnings: list[str] = []
    results = KeptResults(folder_in(folder), warnings.append)
    results.put(KEY, Kept(record={"candidates": [{"strategy": "fsdp", "seconds": 1.5}]}, best_plan="{}"))
    path = next(results.folder.iterdir())

    def read(path: Path) -> None:
        del path
        warnings.clear()
        stored = results.get(KEY)
        if stored is None:
            raise ValueError(warnings[0])
        assert isinstance(stored.record, dict), "as it was kept"
        assert isinstance(stored.best_plan, str), "as it was kept"

    seeds = [json.loads(path.read_text(encoding="utf-8").partition("\n")[2])]
    return reading(Form(_checked, _below_checksum), path, seeds, read)


def _mark(folder: Path) -> Ready:
    mark = folder_in(folder, "exported") / MARK
    return reading(
        JSON,
        mark,
        [{"format": FORMAT, "to": "fsdp2"}],
        lambda path: path,
        lambda path: check_folder(path.parent),
    )


def _weights_there(folder: Path) -> Ready:
    index = folder_in(folder, "llm") / "model.safetensors.index.json"
    seed = {"metadata": {"total_size": 1}, "weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}
    return reading(JSON, index, [seed], lambda path: missing_weights(path.parent))


TARGETS = (
    Target(name="kept-result", make=_result, readers=("workbench.search.kept_results:get",)),
    Target(name="export-mark", make=_mark, readers=("workbench.export.folder:_is_ours",)),
    Target(name="weights-there", make=_weights_there, readers=("workbench.model.checkpoint:weight_map",)),
)
