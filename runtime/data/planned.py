"""Whether data are those that a plan was made for, and what a run reads of them."""

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

RANDOM = "random"  # what is read where no data are named; from the seed


def records_of(samples: Sequence[Sample], records: Mapping[int, Record], where: str) -> tuple[Record, ...]:
    """The records of samples; ValueError, which says where, for one that is not there."""
    missing = [sample.id for sample in samples if sample.id not in records]
    if missing:
        raise ValueError(f"{where}: no sample {missing[0]}, which the plan has")
    return tuple(records[sample.id] for sample in samples)


def refuse_others(plan: Plan, records: Mapping[int, Record], folder: Path, where: str) -> None:
    """Raise ValueError where data are not those of the plan's batch: in segments, their sizes or the mask.

    Args:
        records: by sample id.
        folder: that their files are in.
        where: the records are, for the error.
    """
    found = sizes_of(records_of(plan.batch, records, where), folder, plan.model)
    for planned, there in zip(plan.batch, found, strict=True):
        for said in _differences(planned, there):
            raise ValueError(
                f"{where}: sample {planned.id} {said}; want the data that the plan was made with"
            )


def data_read(plan: Plan, records: Mapping[int, Record] | None, following: NextBatches) -> str:
    """What tells the data of two runs of a plan apart, in words: examples, batches, and who groups them.

    Files of images and clips count by name.

    Args:
        records: by sample id, of all that is read; None: data are random.
        following: the batches behind the plan's own.
    """
    if records is None:
        return RANDOM
    batches = (plan.batch, *following.batches)
    read = examples_text([records[sample.id] for batch in batches for sample in batch], len(plan.batch))
    rule = following.rule
    grouped = f", grouped by job {digest_of(rule.job):.16}" if isinstance(rule, NextStep) else ""
    return f"{read}{grouped}"


def examples_text(records: Sequence[Record], size: int) -> str:
    """What tells examples in an order, so many a step, from others."""
    return f"examples {digest_of(tuple(records)):.16} in batches of {size}"


def _differences(planned: Sample, there: Sample) -> Iterator[str]:
    for mine, its in zip_longest(planned.segments, there.segments):
        if mine != its:
            yield f"has {_said(its)}, in the plan {_said(mine)}"
    if planned.mask != there.mask:
        yield f"has mask {there.mask!r:.60}, in the plan {planned.mask!r:.60}"


def _said(segment: Segment | None) -> str:
    if segment is None:
        return "no such segment"
    name = f"{segment.modality}[{segment.k}]"
    inside = "" if segment.tokens_in == segment.tokens_out else f" from {segment.tokens_in}"
    cut = "" if segment.grid is None else f" of {segment.grid[0]} x {segment.grid[1]}"
    filled = "" if segment.unpadded is None else f" filled by {segment.unpadded[0]} x {segment.unpadded[1]}"
    return f"{name} of {segment.tokens_out} tokens{inside}{cut}{filled}"
