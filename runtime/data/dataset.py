"""A folder of texts, PNG images and WAV clips as samples for a plan and as tensors for its ranks."""

import argparse
import sys
import wave
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from runtime.data.image_tiles import tiles_of
from runtime.data.mel import HOP, SAMPLE_HZ, log_mel
from runtime.data.records import AUDIO, IMAGE, INDEX, VOCAB_SIZE, Record, read_records, text_tokens
from runtime.data.scenes import make
from runtime.models.audio import WhisperAdapter
from runtime.models.choose import adapter_of
from runtime.models.encoder import EncoderAdapter
from runtime.models.vision import VisionAdapter
from runtime.models.vision_rotary import GridAdapter
from workbench.data.corpus import Tiled
from workbench.data.sample import Sample, Segment
from workbench.job.job import Job
from workbench.masks.patterns import CAUSAL
from workbench.model.item_tokens import (
    ends_lone_tiles,
    image_tokens,
    lone_tile,
    native_tokens,
    packs_tiles,
    patch_grid,
    takes_any_size,
)
from workbench.model.model_graph import TEXT, ModelGraph, Module

_A = TypeVar("_A", bound=EncoderAdapter)

BAD_INPUT = 2  # exit code


class FolderSource:
    """The data of a folder, by sample id; a `runtime.data.batches.DataSource`.

    Images are resized to the encoder's size, or to the grid of patches in the plan, or cut into tiles if the
    plan says so, and scaled to [-1, 1]; clips become log-mel frames, trimmed or padded with silence to the
    length in the plan.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records = {record.id: record for record in read_records(folder)}

    def raw(self, sample: int, segment: Segment, shape: tuple[int, ...]) -> Tensor:
        """Pixels for a shape of three dims, of tiles for one of four, mel frames for one of two."""
        kind = AUDIO if len(shape) == 2 else IMAGE
        path = self.folder / self._content(sample, kind, segment)
        if segment.grid is not None and segment.num_tiles > 1:
            return read_tiles(path, shape, segment.grid)
        if kind == IMAGE:
            return read_image(path, shape)
        return _trimmed_or_padded(log_mel(read_wave(path), shape[0]), shape)

    def token_ids(self, sample: int, segment: Segment, vocab_size: int) -> Tensor:
        """The bytes of a text; the first of a sample starts with BOS, the last ends with EOS."""
        if vocab_size < VOCAB_SIZE:
            raise ValueError(f"bytes need a vocabulary of {VOCAB_SIZE}, the model has {vocab_size}")
        self._content(sample, TEXT, segment)
        return torch.tensor(text_tokens(self.records[sample], segment.k))

    def _content(self, sample: int, kind: str, segment: Segment) -> str:
        if sample not in self.records:
            raise ValueError(f"data folder {self.folder}: no sample {sample}")
        contents = self.records[sample].of(kind)
        if segment.k >= len(contents):
            raise ValueError(
                f"data folder {self.folder}: sample {sample} has {len(contents)} segments of {kind}, "
                f"want number {segment.k}"
            )
        return contents[segment.k]


def samples_of(folder: Path, model: ModelGraph) -> tuple[Sample, ...]:
    """Samples of a folder as plans need them: the sizes of every example in the model's encoders.

    Images have the encoder's size; before an encoder of any size, the one to which the model's processor
    brings them; or they are cut into tiles that the projector puts together. A clip has the tokens that its
    encoder makes of its mel frames, up to the encoder's last position; one of several windows of Qwen's Omni
    models is refused.

    Raises:
        ValueError: a kind of data for which the model has no encoder, or several.
    """
    return sizes_of(read_records(folder), folder, model)


def sizes_of(records: Sequence[Record], folder: Path, model: ModelGraph) -> tuple[Sample, ...]:
    """As `samples_of`, for records that are already read."""
    sizes = _Sizes(folder, model)
    return tuple(sizes.sample(record) for record in records)


def with_data(job: Job, folder: Path) -> Job:
    """The job with the folder's first samples as its batch.

    Raises:
        ValueError: too few samples, or a job with masks: those of a folder are in its index.
    """
    masks = {sample.mask for sample in job.batch} - {CAUSAL}
    if masks:
        raise ValueError(
            f"data folder {folder}: its {INDEX} sets the masks; remove mask {min(masks)!r:.60} from job "
            f"{job.name!r}"
        )
    samples = samples_of(folder, job.model)
    if len(samples) < len(job.batch):
        raise ValueError(
            f"data folder {folder}: job {job.name!r} wants {len(job.batch)} samples, got {len(samples)}"
        )
    return replace(job, batch=samples[: len(job.batch)])


@dataclass(frozen=True)
class _Sizes:
    folder: Path
    model: ModelGraph

    def sample(self, record: Record) -> Sample:
        segments: list[Segment] = []
        count: dict[str, int] = {}
        for kind, content in record.segments:
            k = count.get(kind, 0)
            count[kind] = k + 1
            if kind == TEXT:
                num = len(text_tokens(record, k))
                segments.append(Segment(TEXT, k, num, num))
            elif kind == IMAGE:
                segments.append(self._image(record, k, content))
            else:
                modality, audio = self._audio
                clip = self.folder / content
                frames = _num_frames(clip)
                try:
                    size = audio.clip_size(frames)
                except ValueError as error:
                    raise ValueError(f"clip {clip}: {error}") from None
                segments.append(Segment(modality, k, size.tokens_in, size.tokens_out))
        return Sample(record.id, tuple(segments), record.mask)

    def _image(self, record: Record, k: int, content: str) -> Segment:
        module = self._vision
        if len(record.of(IMAGE)) > 1 and ends_lone_tiles(module):
            return Segment(module.modality, k, *lone_tile(module))
        if not packs_tiles(module) and not takes_any_size(module):
            native = native_tokens(module)
            assert native is not None, "else it takes any size"
            return Segment(module.modality, k, *native)
        path = self.folder / content
        with opened_image(path) as image:
            size_px = image.height, image.width
        try:
            size = image_tokens(module, *size_px)
        except ValueError as error:
            raise ValueError(f"image {path}: {error}") from None
        if isinstance(size, Tiled):
            return Segment(module.modality, k, *size.tokens, grid=size.grid, unpadded=size.unpadded)
        return Segment(module.modality, k, *size, grid=patch_grid(size, *size_px))

    @cached_property
    def _vision(self) -> Module:
        return image_encoder(self.model, f"data folder {self.folder} has {IMAGE} segments").module

    @cached_property
    def _audio(self) -> tuple[str, WhisperAdapter]:
        audio = _only(self.model, (WhisperAdapter,), f"data folder {self.folder} has {AUDIO} segments")
        return audio.module.modality, audio


def image_encoder(model: ModelGraph, why: str) -> EncoderAdapter:
    """The adapter of the encoder of images; ValueError where a model has none, or several."""
    return _only(model, (VisionAdapter, GridAdapter), why)


def _only(model: ModelGraph, kinds: tuple[type[_A], ...], why: str) -> _A:
    fitting = [adapter for adapter in map(adapter_of, model.modules) if isinstance(adapter, kinds)]
    if len(fitting) != 1:
        found = ", ".join(f"{adapter.module.name!r}" for adapter in fitting) or "none"
        raise ValueError(f"{why}: want one encoder for them in model {model.name!r}, got {found}")
    return fitting[0]


def read_image(path: Path, shape: tuple[int, ...]) -> Tensor:
    """[C, H, W] in [-1, 1], resized bilinearly; grey for one channel, colour for three."""
    channels, height, width = shape
    resized = _converted(path, channels).resize((width, height), Image.Resampling.BILINEAR)
    return _pixels_of_image(resized, channels)


def read_tiles(path: Path, shape: tuple[int, ...], grid: tuple[int, int]) -> Tensor:
    """[tiles, C, H, W] in [-1, 1]: an overview, then a grid of tiles, as `tiles_of` cuts them."""
    _, channels, side, _ = shape
    tiles = tiles_of(_converted(path, channels), grid, side)
    return torch.stack([_pixels_of_image(tile, channels) for tile in tiles])


@contextmanager
def opened_image(path: Path) -> Iterator[Image.Image]:
    """An image whose pixels are read when they are asked for; ValueError where it cannot be read."""
    try:
        with Image.open(path) as image:
            yield image
    except OSError as error:
        raise ValueError(f"image {path}: cannot be read: {error}") from None


def _converted(path: Path, channels: int) -> Image.Image:
    if channels not in (1, 3):
        raise ValueError(f"image {path}: can be read with 1 or 3 channels, want {channels}")
    with opened_image(path) as image:
        return image.convert("L" if channels == 1 else "RGB")


def _pixels_of_image(image: Image.Image, channels: int) -> Tensor:
    return pixels_of(np.array(image).reshape(image.height, image.width, channels).transpose(2, 0, 1))


def pixels_of(bytes_CHW: NDArray[np.uint8]) -> Tensor:
    """[C, H, W] in [-1, 1]."""
    return torch.from_numpy(bytes_CHW.astype(np.float32, order="C")) / 127.5 - 1.0


def read_wave(path: Path) -> Tensor:
    """[samples] in [-1, 1] of a mono 16-bit WAV file at 16 kHz; ValueError for any other."""
    with _open_wave(path) as file:
        format_ = (file.getnchannels(), 8 * file.getsampwidth(), file.getframerate())
        if format_ != (1, 16, SAMPLE_HZ):
            raise ValueError(
                f"clip {path}: want 1 channel of 16 bits at {SAMPLE_HZ} Hz, got {format_[0]} of {format_[1]} "
                f"bits at {format_[2]} Hz"
            )
        frames = file.readframes(file.getnframes())
    data = np.frombuffer(frames[: len(frames) // 2 * 2], dtype="<i2")
    return torch.from_numpy(data.astype(np.float32) / 32768.0)


def _num_frames(path: Path) -> int:
    with _open_wave(path) as file:
        return file.getnframes() // HOP


def _open_wave(path: Path) -> wave.Wave_read:
    try:
        return wave.open(str(path), "rb")
    except (OSError, EOFError, RuntimeError, wave.Error) as error:
        raise ValueError(f"clip {path}: cannot be read: {error}") from None


def _trimmed_or_padded(mel: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Mel frames trimmed to `shape`, or padded with the clip's minimum."""
    bins, frames = shape
    missing = frames - mel.shape[1]
    if missing > 0:
        mel = torch.cat([mel, mel.min().expand(bins, missing)], dim=1)
    return mel[:, :frames].contiguous()


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m runtime.data.dataset make FOLDER`."""
    parser = argparse.ArgumentParser(prog="runtime.data.dataset", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("make", help="draw a small data set from a seed")
    verb.add_argument("folder", type=Path)
    verb.add_argument("--samples", type=int, default=64)
    verb.add_argument("--seed", type=int, default=0)
    verb.add_argument(
        "--kinds", nargs="*", default=[IMAGE, AUDIO], help="which of image and audio may appear"
    )
    chosen = parser.parse_args(arguments)
    try:
        made = make(chosen.folder, num_samples=chosen.samples, seed=chosen.seed, kinds=tuple(chosen.kinds))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return BAD_INPUT
    sys.stdout.write(
        f"{chosen.folder}: {made.num_samples} samples, {made.num_images} images, {made.num_clips} clips\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
