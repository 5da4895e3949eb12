"""Files with layouts in any of the notations, and job files with layouts put in."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.bounded_file import MOST_SETTINGS_BYTES, read_bounded
from workbench.job.module_layout import PLACES
from workbench.job.notations.cornstarch import read_spec
from workbench.job.notations.job_layouts import Notation, notation_of
from workbench.plain_yaml import parse_yaml


def content_of(path: Path) -> dict[str, Any]:
    """Keys and values of a YAML or JSON file; a bare layout string counts as Megatron's.

    Raises:
        ValueError: one line that names the file and what is wrong.
    """
    content = parse_yaml(read_bounded(path, MOST_SETTINGS_BYTES), where=str(path))
    if isinstance(content, str):
        return {"pipeline_model_parallel_layout": content}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        kind = "nothing" if content is None else type(content).__name__
        raise ValueError(f"{path}: want keys and values, or a layout string, got {kind}")
    return content


def placing_of(content: dict[str, Any]) -> str | None:
    """A file's `modality_parallelism`; None in notations without it."""
    if notation_of(content) is not Notation.CORNSTARCH:
        return None
    return read_spec(content).modality_parallelism


def job_with_layouts(job: Path, output: Path, layouts: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a job file with new layouts; other settings of modules are kept.

    Raises:
        ValueError: the output is in another folder, where the job's relative paths would mean other files.
    """
    if output.resolve().parent != job.resolve().parent:
        raise ValueError(f"{output}: a job's paths are relative to it; want it in {job.resolve().parent}")
    return content_of(job) | {"layouts": with_settings_of(job, layouts)}


def with_settings_of(job: Path, layouts: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of new layouts, with the settings that a job file's own have, such as sharding."""
    before = content_of(job).get("layouts") or {}
    kept = {name: {key: entry[key] for key in entry if key not in PLACES} for name, entry in before.items()}
    names = dict.fromkeys([*kept, *layouts])
    return {name: kept.get(name, {}) | layouts.get(name, {}) for name in names}
