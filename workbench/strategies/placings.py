"""What a file with layouts says of strategies: where encoders are, and which of them put them there."""

from dataclasses import replace
from pathlib import Path

from workbench.job.job import Job
from workbench.job.notations.job_layouts import read_layouts
from workbench.job.notations.layout_file import content_of, placing_of
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
