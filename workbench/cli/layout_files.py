"""Files with layouts in another system's words, and what they say to the commands that take them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from workbench.job.job import Job
from workbench.job.notations.cornstarch import read_spec
from workbench.job.notations.job_layouts import Notation, notation_of, read_layouts
from workbench.strategies import (
    colocated,
    cornstarch,
    dip,
    encoders_colocated,
    encoders_replicated,
    fsdp,
    megatron_homogeneous,
)
from workbench.strategies.registry import STRATEGIES

_COLOCATED = (encoders_colocated.SPEC_FROZEN_AWARE, encoders_colocated.SPEC)
_ON_SHARED_RANKS = (dip.SPEC, colocated.SPEC, megatron_homogeneous.SPEC, fsdp.SPEC)
_OTHERWISE = (*_COLOCATED, *_ON_SHARED_RANKS, encoders_replicated.SPEC)
_APART = (cornstarch.SPEC, *(s for s in STRATEGIES if s not in (*_OTHERWISE, cornstarch.SPEC)))
PLACINGS: dict[str, tuple[str, ...]] = {
    "parallel": tuple(spec.name for spec in _APART),
    "colocated": tuple(spec.name for spec in _COLOCATED),
    "replicated": (encoders_replicated.SPEC.name,),
}
"""Strategies that put encoders where a `modality_parallelism` says, the nearest to it first."""


def content_of(path: Path) -> dict[str, Any]:
    """Keys and values of a YAML or JSON file; a bare layout string counts as Megatron's.

    Raises:
        ValueError: one line that names the file and what is wrong.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if isinstance(content, str):
        return {"pipeline_model_parallel_layout": content}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(f"{path}: want keys and values, or a layout string, got {type(content).__name__}")
    return content


def placing_of(content: dict[str, Any]) -> str | None:
    """Where a file puts encoders; None where that is not its to say."""
    if notation_of(content) is not Notation.CORNSTARCH:
        return None
    return read_spec(content).modality_parallelism


def with_layout_file(job: Job, path: Path, strategy: str | None = None) -> Job:
    """The job with the layouts of a file in any of the notations.

    Args:
        strategy: that is to plan it. None: several are tried, each puts encoders where it does.

    Raises:
        ValueError: what the notation's reader refuses, with the file's name; a strategy that puts
            encoders elsewhere than the file says.
    """
    try:
        content = content_of(path)
        placing = placing_of(content)
        found = replace(job, layouts=read_layouts(content, job))
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith(f"{path}: ") else f"{path}: {message}") from None
    if placing is not None and strategy is not None and strategy not in PLACINGS[placing]:
        raise ValueError(
            f"{path}: modality_parallelism {placing!r} is not what strategy {strategy} does; "
            f"nearest: --strategy {PLACINGS[placing][0]}"
        )
    return found
