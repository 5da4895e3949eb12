"""The batch of a drafted job: equal samples, or samples that a file of sizes gives."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workbench.data.sample import Sample
from workbench.job.batch_schema import BatchSpec
from workbench.job.drafted_layout import LEAST_MICROBATCHES, DraftedLayout
from workbench.job.drafted_microbatch import FULL_TOKENS, DraftedMicrobatch, drafted_microbatch
from workbench.job.packed_rows import check_packable, packed_rows
from workbench.job.parts import batch_of
from workbench.job.sample_sizes import Tiling, num_rows, sized_batch, sized_batches
from workbench.model.composites.composite import PAGE, TILES, Parts
from workbench.model.item_tokens import takes_any_size
from workbench.model.model_graph import ModelGraph

MOST_DRAWN = 1000  # rows whose lengths are looked at
USUAL_TEXT_TOKENS = 1024  # of a sample


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedBatch:
    """What a user says of the samples of a step; None: nothing.

    Args:
        text_tokens: text tokens of a sample; None: `USUAL_TEXT_TOKENS`.
        image_px: (height, width) of images, for encoders of any size; None: 448 x 448.
        data: a file or folder of sizes, as `plan --sizes` reads it, that gives the samples.
        samples: of a step, over all replicas; None: enough microbatches for each, see
            `DraftedLayout.num_microbatches`.
        pack_tokens: tokens of a row that packs samples of the data and is then a sample of the step; None:
            samples are not packed.
    """

    text_tokens: int | None = None
    image_px: tuple[int, int] | None = None
    data: Path | None = None
    samples: int | None = None
    pack_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.pack_tokens is not None and self.data is None:
            raise ValueError(f"--pack {self.pack_tokens} packs samples of --data; want both, or no --pack")
        if self.data is not None and self.image_px is not None:
            raise ValueError("--image: sizes of images are those of --data; want one of the two")
        if self.data is not None and self.text_tokens is not None:
            raise ValueError("--text-tokens: sizes of texts are those of --data; want one of the two")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedBatch:
    """The `batch` entry of a drafted job.

    Args:
        entries: of the job file.
        rule: how the samples of a microbatch were chosen; empty if it has one without a rule.
    """

    entries: dict[str, Any]
    rule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedRows:
    """The samples from which a step's are taken, as a job's batch names them.

    Args:
        entries: of the batch.
        num_rows: of the data, of packed ones about as many as they fill; of equal samples, those drawn.
        drawn: some of the samples, of data at most `MOST_DRAWN`, in random order.
        tiling: of the data's images.
    """

    entries: dict[str, Any]
    num_rows: int
    drawn: tuple[Sample, ...]
    tiling: Tiling = Tiling.NONE


def drafted_rows(wanted: WantedBatch, parts: Parts | None, graph: ModelGraph, folder: Path) -> DraftedRows:
    """The rows of the user's data, or equal samples.

    Args:
        folder: where the job file will be.

    Raises:
        ValueError: data that `samples_of_data` refuses, or an image size for a model without encoders of any
            size.
    """
    if wanted.data is not None:
        rows = samples_of_data(parts, graph, wanted.data, folder)
        return (
            rows if wanted.pack_tokens is None else packed_data(graph, rows, wanted.pack_tokens, wanted.data)
        )
    content = equal_samples(parts, graph, wanted.text_tokens or USUAL_TEXT_TOKENS, wanted.image_px)
    number = min(wanted.samples or 1, FULL_TOKENS)
    drawn = tuple(batch_of(BatchSpec(samples=number, **content), graph, folder=folder))
    return DraftedRows(entries=content, num_rows=number, drawn=drawn)


def drafted_batch(
    wanted: WantedBatch,
    rows: DraftedRows,
    graph: ModelGraph,
    cut: DraftedLayout,
    *,
    gpus: int,
    memory_bytes: int,
) -> DraftedBatch:
    """Samples of a step and of a microbatch: by `drafted_microbatch` if the user says samples or their sizes,
    otherwise one in a microbatch. Data with fewer rows than a step's microbatches gives the step fewer, and
    at least `LEAST_MICROBATCHES` a replica.

    Args:
        rows: see `drafted_rows`.
        memory_bytes: of a GPU.

    Raises:
        ValueError: too few rows of data, or samples that the replicas do not divide.
    """
    ranks = gpus // cut.replicas
    of_replica = cut.num_microbatches(gpus)
    fewest = _equally(LEAST_MICROBATCHES, ranks) * cut.replicas
    enough = _equally(of_replica, ranks) * cut.replicas
    if wanted.data is not None:
        enough = max(fewest, min(enough, rows.num_rows // (cut.replicas * ranks) * cut.replicas * ranks))
    num_samples = wanted.samples or enough
    if num_samples % cut.replicas:
        raise ValueError(
            f"--samples: want a multiple of the {cut.replicas} replicas that the GPUs have room for, got "
            f"{num_samples}; nearest: {max(1, round(num_samples / cut.replicas)) * cut.replicas}"
        )
    most, beyond = (
        _most(num_samples // cut.replicas, of_replica),
        f"{num_samples} samples a step are too few for {{}}",
    )
    if wanted.data is not None:
        sized_batch(graph, num_samples, str(wanted.data), tiling=rows.tiling, pack_tokens=wanted.pack_tokens)
        if wanted.samples is None:
            most, beyond = rows.num_rows // enough, "the data has no more rows for {}"
    microbatch = DraftedMicrobatch(samples=1, rule="")
    if wanted.samples is not None or wanted.data is not None:
        microbatch = drafted_microbatch(
            graph, cut, rows.drawn, most=most, memory_bytes=memory_bytes, beyond=beyond
        )
    sizes = {
        "samples": num_samples * (microbatch.samples if wanted.samples is None else 1),
        "microbatch_samples": microbatch.samples,
        "replicas": cut.replicas,
    }
    return DraftedBatch(entries=sizes | rows.entries, rule=microbatch.rule)


def _equally(number: int, ranks: int) -> int:
    """At least that number, and equally many for the ranks of a replica."""
    return ranks * -(-number // ranks)


def _most(samples: int, microbatches: int) -> int:
    """The largest power of two that cuts a replica's samples into so many microbatches or more, or 1."""
    power = 1
    while samples % (2 * power) == 0 and samples >= microbatches * 2 * power:
        power *= 2
    return power


def equal_samples(
    parts: Parts | None, graph: ModelGraph, text_tokens: int, image_px: tuple[int, int] | None
) -> dict[str, Any]:
    """The `fixed` entry of a job: one item of every encoder in each sample."""
    items: dict[str, Any] = {}
    for module in graph.encoders:
        assert parts is not None, "only composites have encoders"
        entry = dict(parts.modules[module.name].items)
        if not entry and takes_any_size(module):  # an encoder of any size whose family is usually of one size
            entry |= PAGE
        if "images" in entry and image_px is not None:
            entry["images"] = [list(image_px)]
        items[module.modality] = {"each": 1, **entry}
    if image_px is not None and not any("images" in entry for entry in items.values()):
        raise ValueError(
            "--image: want a model with an encoder for images of any size, this one has none; leave it out"
        )
    return {"fixed": {"text_tokens": text_tokens, **({"items": items} if items else {})}}


def samples_of_data(parts: Parts | None, graph: ModelGraph, data: Path, folder: Path) -> DraftedRows:
    """The data set from which a job's batch reads its samples, in the order of its rows.

    Args:
        data: a file or folder of sizes, as `read_sizes`.
        folder: where the job file will be, from which it names the data.

    Raises:
        ValueError: no sizes, or images, videos or clips that no encoder takes, as `sized_batch`.
    """
    tiling = Tiling.ANYRES if parts is not None and TILES in parts.notes else Tiling.NONE
    sized_batch(graph, 1, str(data), tiling=tiling)
    source = os.path.relpath(data, folder)
    rows = num_rows(data)
    (drawn,) = sized_batches(graph, min(rows, MOST_DRAWN), str(data), num_batches=1, tiling=tiling)
    entries = {"sizes": source} | ({"tiling": tiling.value} if tiling is not Tiling.NONE else {})
    return DraftedRows(entries=entries, num_rows=rows, drawn=drawn, tiling=tiling)


def packed_data(graph: ModelGraph, rows: DraftedRows, most: int, data: Path) -> DraftedRows:
    """Rows of at most so many tokens that pack samples of the data; ValueError as `packed_rows`."""
    check_packable(graph)
    filled = sum(sample.num_tokens for sample in rows.drawn) // most
    drawn = next(packed_rows(rows.drawn, most, max(1, filled), str(data)))
    return replace(
        rows,
        entries=rows.entries | {"pack_tokens": most},
        num_rows=max(1, filled * rows.num_rows // len(rows.drawn)),
        drawn=drawn,
    )
