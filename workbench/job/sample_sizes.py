"""Samples of a job from a user's sizes or a corpus, by the rules of its encoders."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.data.corpora import CORPORA, corpus
from workbench.data.corpus import ItemTokens
from workbench.data.sample import Sample
from workbench.data.size_files import read_sizes
from workbench.data.sizes import ImageRule, Rules, Sizes, samples_of
from workbench.job.packed_rows import check_packable, check_unmasked, packed_rows
from workbench.masks.patterns import document_lengths
from workbench.model.item_tokens import (
    clip_tokens,
    ends_lone_tiles,
    family_of,
    image_tokens,
    lone_tile,
    native_tokens,
    packs_tiles,
    source_config,
    split_px,
    takes_any_size,
    tile_tokens,
    video_of,
)
from workbench.model.model_graph import ModelGraph, Module

if TYPE_CHECKING:
    from workbench.job.job import Job


CHUNK = 1024  # rows that are made samples at a time


class Tiling(StrEnum):
    """How an encoder of one image size takes an image: at that size, or as tiles by its model's rule.

    An encoder whose model puts tiles together takes tiles either way.
    """

    NONE = "none"
    ANYRES = "anyres"


def with_sizes(
    job: "Job",
    source: str,
    *,
    seed: int = 0,
    tiling: Tiling = Tiling.NONE,
    pack_tokens: int | None = None,
) -> "Job":
    """The job with as many samples, drawn by `sized_batch`; ValueError as there, or for masks of packed rows.

    Masks are kept by position: the first sample has the mask that the first one had.
    """
    batch = sized_batch(job.model, len(job.batch), source, seed=seed, tiling=tiling, pack_tokens=pack_tokens)
    if pack_tokens is not None:
        check_unmasked(sample.mask for sample in job.batch if len(document_lengths(sample)) == 1)
        return replace(job, batch=batch)
    masked = (replace(new, mask=old.mask) for new, old in zip(batch, job.batch, strict=True))
    return replace(job, batch=tuple(masked))


def sized_batch(
    model: ModelGraph,
    num_samples: int,
    source: str,
    *,
    seed: int = 0,
    tiling: Tiling = Tiling.NONE,
    pack_tokens: int | None = None,
) -> tuple[Sample, ...]:
    """Samples drawn from a corpus or read from a file in order, through the rules of the model's encoders.

    Args:
        source: the name of a corpus, a .jsonl, .csv or .parquet file, or the folder of a saved data set.
        seed: seed of a corpus.
        tiling: for encoders of one image size.
        pack_tokens: tokens of a row that packs several of them; each sample is then such a row, see
            `packed_rows`. None: rows are not packed.

    Raises:
        ValueError: no such corpus or file, a row without sizes, fewer rows than the job has samples, images
            or clips that the model has no single encoder for; what `packed_rows` and `check_packable` refuse.
    """
    if pack_tokens is not None:
        sizes = _rows(Path(source)) if _is_file(source) else corpus(source).stream(seed)
        return next(_packed(model, sizes, tiling, (pack_tokens, num_samples), source))
    return _samples(model, _sizes(source, num_samples, seed), tiling)


def sized_batches(
    model: ModelGraph,
    num_samples: int,
    source: str,
    *,
    num_batches: int,
    seed: int = 0,
    tiling: Tiling = Tiling.NONE,
    pack_tokens: int | None = None,
) -> tuple[tuple[Sample, ...], ...]:
    """Batches drawn from a corpus, or from all rows of a file without repetition inside a batch.

    Equal seeds give equal batches, and longer draws begin like shorter ones. Arguments and errors as
    `sized_batch`.
    """
    if pack_tokens is not None:
        return _packed_batches(
            model, source, num_batches, seed, tiling=tiling, packing=(pack_tokens, num_samples)
        )
    if Path(source).exists():
        rows, rng = _rows(Path(source)), random.Random(seed)
        _check_rows(source, rows, num_samples)
        sizes = tuple(row for _ in range(num_batches) for row in rng.sample(rows, num_samples))
    else:
        sizes = _sizes(source, num_batches * num_samples, seed)
    samples = _samples(model, sizes, tiling)
    return tuple(samples[first : first + num_samples] for first in range(0, len(samples), num_samples))


_Packing = tuple[int, int]  # tokens of a row, and rows of a step


def _packed(
    model: ModelGraph, sizes: Iterable[Sizes], tiling: Tiling, packing: _Packing, where: str
) -> Iterator[tuple[Sample, ...]]:
    """Yield steps of packed rows, of sizes that are read as far as the steps need them."""
    check_packable(model)
    rest = iter(sizes)
    chunks = iter(lambda: tuple(islice(rest, CHUNK)), ())
    samples = chain.from_iterable(_samples(model, chunk, tiling) for chunk in chunks)
    return packed_rows(samples, *packing, where)


def _packed_batches(
    model: ModelGraph, source: str, num_batches: int, seed: int, *, tiling: Tiling, packing: _Packing
) -> tuple[tuple[Sample, ...], ...]:
    if not _is_file(source):
        return tuple(
            islice(_packed(model, corpus(source).stream(seed), tiling, packing, source), num_batches)
        )
    rows, rng = _rows(Path(source)), random.Random(seed)
    batches = [
        next(_packed(model, rng.sample(rows, len(rows)), tiling, packing, source)) for _ in range(num_batches)
    ]
    num = packing[1]
    return tuple(
        tuple(replace(row, id=row.id + index * num) for row in batch) for index, batch in enumerate(batches)
    )


def _samples(model: ModelGraph, sizes: Sequence[Sizes], tiling: Tiling) -> tuple[Sample, ...]:
    vision, audio = _encoder(model, "image", sizes), _encoder(model, "audio", sizes)
    rules = Rules(
        image=_image_rule(vision, tiling) if vision else None,
        beside=_beside_rule(vision) if vision else None,
        video=partial(video_of, vision) if vision else None,
        audio=partial(clip_tokens, audio) if audio else None,
    )
    return samples_of(
        sizes,
        rules,
        vision=vision.modality if vision else "image",
        audio=audio.modality if audio else "audio",
    )


def _sizes(source: str, num: int, seed: int) -> tuple[Sizes, ...]:
    if not _is_file(source):
        return corpus(source).draw(num, seed)
    rows = _rows(Path(source))
    _check_rows(source, rows, num)
    return rows[:num]


def _is_file(source: str) -> bool:
    """Whether the source is a file or folder, not a corpus; ValueError where it is neither."""
    path = Path(source)
    if path.exists():
        return True
    if path.suffix or len(path.parts) > 1:
        raise ValueError(f"sizes: there is no file {source}")
    if source not in {known.name for known in CORPORA}:
        names = ", ".join(sorted(known.name for known in CORPORA))
        raise ValueError(f"sizes: {source!r} is no file and no corpus; the corpora are {names}")
    return False


def named_sizes(name: str, folder: Path) -> str:
    """What a job file in the folder names as its sizes: a path from there, or a corpus."""
    file = folder / name
    return str(file) if file.exists() else name


def num_rows(path: Path) -> int:
    """The number of rows of a file or folder of sizes; errors as `read_sizes`."""
    return len(_rows(path))


def _rows(path: Path) -> tuple[Sizes, ...]:
    """The rows of a file, which is read once as long as it is not written; a folder is read each time."""
    if path.is_dir():
        return read_sizes(path)
    written = path.stat()
    return _read_once(path, written.st_mtime_ns, written.st_size)


@lru_cache(maxsize=1)
def _read_once(path: Path, written_ns: int, num_bytes: int) -> tuple[Sizes, ...]:
    return read_sizes(path)


def _check_rows(source: str, rows: Sequence[Sizes], num: int) -> None:
    if len(rows) < num:
        raise ValueError(
            f"sizes: {source} has {len(rows)} rows, the job wants {num} samples; repeat the rows"
        )


def _encoder(model: ModelGraph, kind: str, sizes: Sequence[Sizes]) -> Module | None:
    """The model's encoder of images or of clips; None where it has none and none is needed."""
    encoders = [module for module in model.encoders if _kind(module) == kind]
    has_any = any(size.images or size.videos if kind == "image" else size.audio_s for size in sizes)
    if len(encoders) > 1 or (has_any and not encoders):
        names = ", ".join(module.name for module in encoders) or "none"
        raise ValueError(
            f"sizes: rows have {'images' if kind == 'image' else 'clips'}; want one encoder of them in model "
            f"{model.name!r}, got {names}"
        )
    return encoders[0] if encoders else None


def _kind(module: Module) -> str:
    """The kind of an encoder's items, by its config or else by its modality."""
    family = family_of(module)
    if family is not None and family.role == "audio":
        return "audio"
    return "image" if "patch_size" in source_config(module) else module.modality.replace("vision", "image")


def _image_rule(module: Module, tiling: Tiling) -> ImageRule:
    if takes_any_size(module) or packs_tiles(module):
        if tiling is Tiling.NONE:
            return lambda height_px, width_px: (image_tokens(module, height_px, width_px),)
        return lambda *image: tuple(image_tokens(module, *part) for part in split_px(module, *image))
    native = native_tokens(module)
    assert native is not None, "else it takes any size"
    if tiling is Tiling.NONE:
        return lambda height_px, width_px: (ItemTokens(*native),)
    return lambda height_px, width_px: tile_tokens(module, height_px, width_px)


def _beside_rule(module: Module) -> ImageRule | None:
    """Of images that share a sample, where it is another: each a tile, with the token that ends a row."""
    if not ends_lone_tiles(module):
        return None
    return lambda height_px, width_px: (lone_tile(module),)
