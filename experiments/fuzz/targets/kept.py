"""What the program wrote earlier and finds again: kept results of searches, marks of exported folders."""

import hashlib
import json
from pathlib import Path
from typing import Any

from experiments.fuzz.target import Ready, Target, naming
from experiments.fuzz.targets.writing import folder_in, json_bytes, written
from workbench.export.folder import FORMAT, MARK, check_folder
from workbench.model.checkpoint import missing_weights
from workbench.search.kept_results import Kept, KeptResults

KEY = "0" * 32


def _checked(tree: Any) -> bytes:
    """Below its checksum, so that what is behind it is reached."""
    body = json_bytes(tree)
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _below_checksum(content: bytes) -> object:
    return json.loads(content.partition(b"\n")[2])


def _result(folder: Path) -> Ready:
    said: list[str] = []
    results = KeptResults(folder_in(folder), said.append)
    results.put(KEY, Kept(record={"candidates": [{"strategy": "fsdp", "seconds": 1.5}]}, best_plan="{}"))
    path = next(results.folder.iterdir())

    def read(path: Path) -> None:
        said.clear()
        found = results.get(KEY)
        if found is None:
            with naming(path.name):
                raise ValueError(said[0])
        assert isinstance(found.record, dict), "as it was kept"
        assert isinstance(found.best_plan, str), "as it was kept"

    return Ready(
        seeds=[json.loads(path.read_text(encoding="utf-8").partition("\n")[2])],
        render=_checked,
        parse=_below_checksum,
        take=written(path, read),
    )


def _mark(folder: Path) -> Ready:
    held = folder_in(folder, "exported")
    return Ready(
        seeds=[{"format": FORMAT, "to": "fsdp2"}],
        render=json_bytes,
        parse=json.loads,
        take=written(held / MARK, lambda path: check_folder(path.parent)),
    )


def _weights_there(folder: Path) -> Ready:
    held = folder_in(folder, "llm")

    def read(path: Path) -> None:
        with naming(path.name):
            missing_weights(path.parent)

    return Ready(
        seeds=[{"metadata": {"total_size": 1}, "weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}],
        render=json_bytes,
        parse=json.loads,
        take=written(held / "model.safetensors.index.json", read),
    )


TARGETS = (
    Target(name="kept-result", make=_result, readers=("workbench.search.kept_results:get",)),
    Target(name="export-mark", make=_mark, readers=("workbench.export.folder:_is_ours",)),
    Target(name="weights-there", make=_weights_there, readers=("workbench.model.checkpoint:weight_map",)),
)
