"""The first rows of a file of sizes, a job's batch: whether they are like others, and serve all encoders."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from workbench.data.sample import Sample
from workbench.float_sum import float_sum
from workbench.job.job_file import read_spec
from workbench.job.sample_sizes import Tiling, named_sizes, sized_batches
from workbench.masks.patterns import document_lengths
from workbench.model.model_graph import ModelGraph

UNLIKE = 1.5  # times the mean tokens of the file, or the file's of theirs
MOST_COMPARED = 1000  # rows drawn at random, or as many as a batch has


class SizesRead(NamedTuple):
    """Where a batch's sizes are read, and how they become samples; see `sized_batch`."""

    source: str
    tiling: Tiling
    pack_tokens: int | None = None


def sizes_of(path: Path) -> SizesRead | None:
    """The sizes that a job file names, and how it reads them; None: its samples come from elsewhere."""
    spec = read_spec(path).batch
    if spec.sizes is None:
        return None
    return SizesRead(named_sizes(spec.sizes, path.parent), spec.tiling, spec.pack_tokens)


def unlike_rows(model: ModelGraph, batch: Sequence[Sample], read: SizesRead) -> str:
    """One line if the samples of the file's first rows are much longer or shorter than others; else "".

    Lengths are tokens of the LLM's sequence, in packed rows of every sample by itself. `batch` is compared
    with batches of its size, drawn from the whole file, always the same: it is unlike if its mean is `UNLIKE`
    times theirs, and beyond each of them. A corpus is drawn at random itself.

    Complexity: reads the file; O(batch + `MOST_COMPARED`).
    """
    source, tiling, pack_tokens = read
    if not Path(source).exists():
        return ""
    num_batches = max(1, MOST_COMPARED // len(batch))
    drawn = sized_batches(
        model, len(batch), source, num_batches=num_batches, tiling=tiling, pack_tokens=pack_tokens
    )
    first, others = _mean_tokens(batch), [_mean_tokens(each) for each in drawn]
    whole = float_sum(others) / len(others)
    if max(first, whole) < UNLIKE * min(first, whole) or min(others) <= first <= max(others):
        return ""
    return (
        f"the batch is the first {len(batch)} rows of {source}, which have {first:,.0f} tokens on average, "
        f"rows drawn from the whole file {whole:,.0f}; want rows in random order"
    )


def without_items(model: ModelGraph, batch: Sequence[Sample], source: str) -> str:
    """One line that names the encoders for which no sample of the batch has an item; "" if there are none."""
    present = {segment.modality for sample in batch for segment in sample.segments}
    idle = [module.name for module in model.encoders if module.modality not in present]
    if not idle:
        return ""
    return (
        f"no sample of {source} in the batch has an item for {', '.join(idle)}, so no work for its ranks; "
        "want sizes of such items (docs/reference/data.md)"
    )


def _mean_tokens(batch: Sequence[Sample]) -> float:
    lengths = [length for sample in batch for length in document_lengths(sample)]
    return sum(lengths) / len(lengths)
