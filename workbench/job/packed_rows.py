"""Rows that pack several samples, of which none sees another: each row is one sample of a job's batch."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from workbench.data.packing import packed_steps
from workbench.data.sample import Sample, Segment
from workbench.masks.patterns import CAUSAL, CAUSAL_DOCUMENT, mask
from workbench.model.model_graph import ModelGraph

MOST_STEP_TOKENS = 10**8  # of the rows of a step


def packed_rows(
    samples: Iterable[Sample], most: int, num_rows: int, where: str
) -> Iterator[tuple[Sample, ...]]:
    """Yield the rows of one step after the other as samples, with ids from 0, until `samples` end.

    Args:
        samples: under a causal mask.
        most: tokens of a row.
        num_rows: rows of a step.
        where: name of the samples' origin, for errors.

    Raises:
        ValueError: a sample longer than a row, or fewer samples than fill every row of the first step; a step
            of more than `MOST_STEP_TOKENS`.
    """
    if most * num_rows > MOST_STEP_TOKENS:
        raise ValueError(
            f"pack_tokens: want at most {MOST_STEP_TOKENS:,} tokens a step, got {num_rows:,} rows of "
            f"{most:,}; nearest: {max(1, MOST_STEP_TOKENS // most):,} rows"
        )
    seen: list[Sample] = []
    steps = packed_steps(_lengths(samples, seen, most, where), most, num_rows)
    for index, step in enumerate(steps):
        filled = sum(map(bool, step))
        if filled == num_rows:
            first = index * num_rows
            yield tuple(
                row_of(number, [seen[each] for each in row]) for number, row in enumerate(step, first)
            )
        elif index == 0:
            raise ValueError(
                f"sizes: the {len(seen)} rows of {where} pack into {filled} rows of {most:,} tokens, the job "
                f"wants {num_rows}; repeat the rows"
            )


def _lengths(samples: Iterable[Sample], seen: list[Sample], most: int, where: str) -> Iterator[int]:
    for sample in samples:
        if sample.num_tokens > most:
            raise ValueError(
                f"sizes: sample {len(seen) + 1} of {where} has {sample.num_tokens:,} tokens, more than a "
                f"packed row; want pack_tokens of at least as many, got {most:,}"
            )
        seen.append(sample)
        yield sample.num_tokens


def row_of(number: int, samples: Sequence[Sample]) -> Sample:
    """Pack samples one behind the other into one, whose mask keeps them apart."""
    if len(samples) == 1:
        return replace(samples[0], id=number)
    counts: dict[str, int] = {}
    segments = list[Segment]()
    for segment in (segment for sample in samples for segment in sample.segments):
        counts[segment.modality] = counts.get(segment.modality, -1) + 1
        segments.append(replace(segment, k=counts[segment.modality]))
    lengths = [sample.num_tokens for sample in samples]
    return Sample(number, tuple(segments), mask(CAUSAL_DOCUMENT, lengths=lengths))


def check_packable(model: ModelGraph) -> None:
    """Raise ValueError where samples of a row would see each other in spite of the mask."""
    readers = [edge.name for edge in model.edges if model.is_context(edge)]
    if readers:
        raise ValueError(
            f"pack_tokens: model {model.name!r} reads images by cross-attention (edge {readers[0]}), in "
            "which a packed sample would see the images of those in front of it; want no pack_tokens"
        )


def check_unmasked(masks: Iterable[str]) -> None:
    """Raise ValueError for a mask other than the causal one, in which packed samples are."""
    other = next((each for each in masks if each != CAUSAL), None)
    if other is not None:
        raise ValueError(f"pack_tokens: packed samples have mask {CAUSAL}, got {other!r:.60}; leave one out")
