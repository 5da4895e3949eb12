"""A preprocessing server as data source of a run: ranks request the samples of the plan."""

import weakref
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from runtime.data.dataset import FolderSource, image_encoder, pixels_of, sizes_of
from runtime.data.planned import refuse_others
from runtime.data.records import VOCAB_SIZE, Record
from runtime.models.choose import adapter_of
from runtime.models.vision import VisionAdapter
from runtime.models.vision_rotary import GridAdapter
from runtime.preprocess.example import Example
from runtime.preprocess.images import SquareRule, joined
from runtime.preprocess.keys import read_client_keys
from runtime.preprocess.loader import ServedLoader, Subscription
from runtime.preprocess.stream import Content, Skipped
from runtime.step_plans import NextBatches, batches_after
from workbench.data.sample import Segment
from workbench.model.item_tokens import packs_tiles, takes_any_size
from workbench.model.model_graph import ModelGraph, Module
from workbench.plan.plan import Plan

SCHEME = "tcp://"
MOST_HELD = 2  # cached batches: a plan's batch may span two


def rule_of(model: ModelGraph) -> SquareRule:
    """Preprocessing rule of the model's image encoder; ValueError where no server prepares its images."""
    vision = image_encoder(model, "a preprocessing server prepares images")
    _refuse_other_sizes(vision.module)
    assert isinstance(vision, VisionAdapter), "its images have one size"
    whole_px = vision.side * vision.patch_px  # the convolution ignores the rest
    return SquareRule(image_px=whole_px, patch_px=vision.patch_px, channels=int(vision.config.num_channels))


def _refuse_other_sizes(module: Module) -> None:
    if packs_tiles(module):
        raise ValueError(
            f"module {module.name!r} puts tiles of images together, which a preprocessing server does "
            "not make; want --data FOLDER"
        )
    if takes_any_size(module):
        raise ValueError(
            f"module {module.name!r} takes images of any size, and a preprocessing server makes them of one; "
            "want --data FOLDER"
        )


class ServedSource:
    """A `runtime.data.batches.DataSource` of images and texts that a server has prepared.

    Texts and images use separate connections, each opened on first use, so a rank that needs only texts
    receives no images. Later batches are received while a step runs.

    Args:
        subscription: address, keys, waits.
    """

    def __init__(self, subscription: Subscription) -> None:
        self.subscription = subscription
        self.folder = Path()  # files are on the server
        self._readers: dict[Content, _Reader] = {}
        weakref.finalize(self, _close, self._readers)

    def __reduce__(self) -> tuple[type["ServedSource"], tuple[Subscription]]:
        return ServedSource, (self.subscription,)

    @cached_property
    def records(self) -> Mapping[int, Record]:
        """Sample id -> record, in the server's order, of its complete batches."""
        with closing(ServedLoader(self.subscription)) as loader:
            num_records = loader.num_batches * int(loader.welcome["batch_size"])
            return {record.id: record for record in loader.records()[:num_records]}

    def raw(self, sample: int, segment: Segment, shape: tuple[int, ...]) -> Tensor:
        """Pixels [C, H, W] in [-1, 1], equal to those of the folder itself.

        Raises:
            ValueError: the server's rule gives another shape, or it could not read this image.
        """
        reader = self._reader(Content.ALL)
        rule = reader.loader.rule
        images = reader.example(sample).images
        if segment.k >= len(images):
            raise ValueError(f"sample {sample}: the server has {len(images)} images of it, want {segment.k}")
        image = images[segment.k]
        pixels_CHW = joined(image.values, image.grid, rule.patch_px, rule.merge_side)
        if pixels_CHW.shape != shape or not isinstance(rule, SquareRule):
            raise ValueError(
                f"sample {sample}: the encoder reads images of {shape}, the server makes {pixels_CHW.shape} "
                f"by its {rule.kind} rule; serve with --job"
            )
        return pixels_of(pixels_CHW)

    def token_ids(self, sample: int, segment: Segment, vocab_size: int) -> Tensor:
        """Tokens of a text, as of the folder itself."""
        if vocab_size < VOCAB_SIZE:
            raise ValueError(f"bytes need a vocabulary of {VOCAB_SIZE}, the model has {vocab_size}")
        texts = self._reader(Content.TEXTS).example(sample).texts
        if segment.k >= len(texts):
            raise ValueError(f"sample {sample}: the server has {len(texts)} texts of it, want {segment.k}")
        return torch.from_numpy(texts[segment.k].astype("int64"))

    def _reader(self, content: Content) -> "_Reader":
        if content not in self._readers:
            self._readers[content] = _Reader(replace(self.subscription, content=content))
        return self._readers[content]


class _Reader:
    """The examples of the most recent batches."""

    def __init__(self, subscription: Subscription) -> None:
        self.loader = ServedLoader(subscription, start=0)
        self._held: list[tuple[dict[int, Example], tuple[Skipped, ...]]] = []

    def example(self, sample: int) -> Example:
        for examples, skipped in self._held:
            if sample in examples:
                return examples[sample]
            for each in skipped:
                if each.id == sample:
                    raise ValueError(f"sample {sample} was left out by the server: {each.reason}")
        position = self.loader.find(sample)
        if position != self.loader.position % self.loader.num_batches:
            self.loader.seek(position)
        batch = self.loader.next()
        self._held = [
            *self._held[1 - MOST_HELD :],
            ({example.id: example for example in batch.examples}, batch.skipped),
        ]
        return self.example(sample)


def _close(readers: dict[Content, _Reader]) -> None:
    for reader in readers.values():
        with suppress(ValueError):
            reader.loader.close()
    readers.clear()


Source = FolderSource | ServedSource


def source_of(data: str | None, keys: Path | None, plan: Plan, *, timeout_s: float) -> Source | None:
    """The data of `--data`, a folder or `tcp://HOST:PORT`, checked against the plan's batch; None without it.

    Raises:
        ValueError: keys for a folder, data or a server that cannot be read, data of another batch.
    """
    source = _named(data, keys, timeout_s)
    if isinstance(source, ServedSource):
        for module in plan.model.encoders:
            if isinstance(adapter_of(module), VisionAdapter | GridAdapter):
                _refuse_other_sizes(module)
    if source is not None:
        refuse_others(plan, source.records, source.folder, f"--data {data}")
    return source


def _named(data: str | None, keys: Path | None, timeout_s: float) -> Source | None:
    if data is not None and data.startswith(SCHEME):
        client = None if keys is None else read_client_keys(keys)
        return ServedSource(Subscription(address=data, keys=client, timeout_s=timeout_s))
    if keys is not None:
        raise ValueError("--data-keys are for a preprocessing server; want --data tcp://HOST:PORT")
    return None if data is None else FolderSource(Path(data))


def following_of(source: Source | None, plan: Plan) -> NextBatches:
    """The data after the plan's batch, as batches of further steps; none without a source."""
    if source is None:
        return NextBatches()
    return batches_after(plan.batch, sizes_of(tuple(source.records.values()), source.folder, plan.model))
