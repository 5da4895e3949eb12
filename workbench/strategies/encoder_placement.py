"""Placement of encoders in layout files, and the strategies that produce it."""

from collections.abc import Mapping
from pathlib import Path

from workbench.job.job import Job
from workbench.job.notations.job_layouts import read_layouts
from workbench.job.notations.layout_file import content_of, placing_of
from workbench.job.other_layouts import with_layouts
from workbench.planner.strategy_spec import StrategySpec
from workbench.strategies.registry import STRATEGIES

MEANT: Mapping[str, StrategySpec] = {
    spec.placing: spec for spec in STRATEGIES if spec.placing is not None and spec.stands_for_placing
}
"""The strategy that a `modality_parallelism` means if none is named."""

PLACINGS: Mapping[str, tuple[str, ...]] = {
    placing: (meant.name, *(s.name for s in STRATEGIES if s.placing == placing and s is not meant))
    for placing, meant in MEANT.items()
}
"""Strategies that place encoders as a `modality_parallelism` says, the one that it means first."""


def with_layout_file(job: Job, path: Path, strategy: str | None = None) -> Job:
    """The job with the layouts of a file in any of the notations.

    Args:
        strategy: that will plan the job; None: several are tried, and each places encoders its own way.

    Raises:
        ValueError: what the notation's reader refuses, with the file's name, or a strategy that places
            encoders differently.
    """
    try:
        content = content_of(path)
        placing = placing_of(content)
        laid_out = with_layouts(job, read_layouts(content, job))
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith(f"{path}: ") else f"{path}: {message}") from None
    if placing is not None and strategy is not None and strategy not in PLACINGS[placing]:
        raise ValueError(
            f"{path}: modality_parallelism {placing!r} does not match strategy {strategy}; "
            f"nearest: --strategy {MEANT[placing].name}"
        )
    return laid_out
