"""Checks that data match those of a plan, and describes what a run reads of them."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from runtime.data.dataset import sizes_of
from runtime.data.records import Record
from runtime.step_plans import NextBatches
from workbench.data.sample import Sample, Segment
from workbench.plan.codec import digest_of
from workbench.plan.plan import Plan
from workbench.strategies.next_step import NextStep

RANDOM = "random"  # data of runs without a data folder, drawn from the seed


def records_of(samples: Sequence[Sample], records: Mapping[int, Record], where: str) -> tuple[Record, ...]:
    """The records of samples; ValueError for a missing one, with `where` in its message."""
    missing = [sample.id for sample in samples if sample.id not in records]
    if missing:
        raise ValueError(f"{where}: no sample {missing[0]}, which the plan has")
    return tuple(records[sample.id] for sample in samples)


def refuse_others(plan: Plan, records: Mapping[int, Record], folder: Path, where: str) -> None:
    """Raise ValueError where data differ from the plan's batch: in segments, their sizes or the mask.

    Args:
        records: by sample id.
        folder: of their files.
        where: name of the records' origin, for the error.
    """
    samples = sizes_of(records_of(plan.batch, records, where), folder, plan.model)
    for planned, actual in zip(plan.batch, samples, strict=True):
        for difference in _differences(planned, actual):
            raise ValueError(
                f"{where}: sample {planned.id} {difference}; want the data that the plan was made with"
            )


def data_read(plan: Plan, records: Mapping[int, Record] | None, following: NextBatches) -> str:
    """A text that identifies the data of a run of a plan: examples, batches, and how they are grouped.

    Files of images and clips are identified by name.

    Args:
        records: by sample id, of all data that are read; None: random data.
        following: the batches after the plan's own.
    """
    if records is None:
        return RANDOM
    batches = (plan.batch, *following.batches)
    read = examples_text([records[sample.id] for batch in batches for sample in batch], len(plan.batch))
    rule = following.rule
    grouped = f", grouped by job {digest_of(rule.job):.16}" if isinstance(rule, NextStep) else ""
    return f"{read}{grouped}"


def examples_text(records: Sequence[Record], size: int) -> str:
    """A text that identifies examples, their order and the number per step."""
    return f"examples {digest_of(tuple(records)):.16} in batches of {size}"


def _differences(planned: Sample, actual: Sample) -> Iterator[str]:
    for mine, its in zip_longest(planned.segments, actual.segments):
        if mine != its:
            yield f"has {_describe(its)}, in the plan {_describe(mine)}"
    if planned.mask != actual.mask:
        yield f"has mask {actual.mask!r:.60}, in the plan {planned.mask!r:.60}"


def _describe(segment: Segment | None) -> str:
    if segment is None:
        return "no such segment"
    name = f"{segment.modality}[{segment.k}]"
    inside = "" if segment.tokens_in == segment.tokens_out else f" from {segment.tokens_in}"
    cut = "" if segment.grid is None else f" of {segment.grid[0]} x {segment.grid[1]}"
    filled = "" if segment.unpadded is None else f" filled by {segment.unpadded[0]} x {segment.unpadded[1]}"
    return f"{name} of {segment.tokens_out} tokens{inside}{cut}{filled}"
