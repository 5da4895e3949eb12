"""The batch of a drafted job: equal samples, or samples that a file of sizes gives."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.data.sample import Sample
from workbench.job.sample_sizes import Tiling, num_rows, sized_batch, sized_batches
from workbench.model.composites.composite import PAGE, TILES, Parts
from workbench.model.item_tokens import takes_any_size
from workbench.model.model_graph import ModelGraph

MOST_DRAWN = 1000  # rows whose lengths are looked at


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRows:
    """A data set as a job's batch names it.

    Args:
        entries: of the batch.
        num_rows: of the data.
        drawn: at most `MOST_DRAWN` of its samples, in random order.
    """

    entries: dict[str, Any]
    num_rows: int
    drawn: tuple[Sample, ...]


def samples_of_data(
    parts: Parts | None, graph: ModelGraph, num_samples: int, data: Path, folder: Path
) -> DataRows:
    """The data set from which a job's batch reads its samples, in the order of its rows.

    Args:
        num_samples: the fewest rows that it must have.
        data: a file or folder of sizes, as `read_sizes`.
        folder: where the job file will be, from which it names the data.

    Raises:
        ValueError: no or too few sizes, or images, videos or clips that no encoder takes, as `sized_batch`.
    """
    tiling = Tiling.ANYRES if parts is not None and TILES in parts.notes else Tiling.NONE
    sized_batch(graph, num_samples, str(data), tiling=tiling)
    source = os.path.relpath(data, folder)
    rows = num_rows(data)
    (drawn,) = sized_batches(graph, min(rows, MOST_DRAWN), str(data), num_batches=1, tiling=tiling)
    entries = {"sizes": source} | ({"tiling": tiling.value} if tiling is not Tiling.NONE else {})
    return DataRows(entries=entries, num_rows=rows, drawn=drawn)
