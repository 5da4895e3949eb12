"""A preprocessing server as the data of a run: ranks ask it for the samples that the plan names."""

import weakref
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from runtime.data.dataset import FolderSource, pixels_of, sizes_of
from runtime.data.planned import refuse_others
from runtime.data.records import VOCAB_SIZE, Record
from runtime.models.choose import adapter_of
from runtime.models.vision import VisionAdapter
from runtime.preprocess.example import Example
from runtime.preprocess.images import SquareRule, joined
from runtime.preprocess.keys import read_client_keys
from runtime.preprocess.loader import ServedLoader, Subscription
from runtime.preprocess.stream import Content, Skipped
from runtime.step_plans import NextBatches, batches_after
from workbench.data.sample import Segment
from workbench.model.item_tokens import packs_tiles
from workbench.model.model_graph import ModelGraph
from workbench.plan.plan import Plan

SCHEME = "tcp://"
MOST_HELD = 2  # batches: a plan's batch may lie across the border of two


def rule_of(model: ModelGraph) -> SquareRule:
    """How the model's image encoder wants its images; ValueError where it has none, or several."""
    found = [adapter_of(module) for module in model.modules]
    vision = [adapter for adapter in found if isinstance(adapter, VisionAdapter)]
    if len(vision) != 1:
        raise ValueError(f"model {model.name!r}: want one encoder of images, got {len(vision)}")
    _refuse_tiles(model)
    config = vision[0].config
    patch_px = int(config.patch_size)
    whole_px = int(config.image_size) // patch_px * patch_px  # the convolution reads no further
    return SquareRule(image_px=whole_px, patch_px=patch_px, channels=int(config.num_channels))


def _refuse_tiles(model: ModelGraph) -> None:
    for module in model.modules:
        if packs_tiles(module):
            raise ValueError(
                f"module {module.name!r} puts tiles of images together, which a preprocessing server does "
                "not make; want --data FOLDER"
            )


class ServedSource:
    """A `runtime.data.batches.DataSource` whose images and texts a server has prepared.

    Texts and images come over connections of their own, each opened by the first who asks, so a rank
    that needs texts alone is sent no image. Batches ahead are on their way while a step runs.

    Args:
        subscription: address, keys, waits.
    """

    def __init__(self, subscription: Subscription) -> None:
        self.subscription = subscription
        self.folder = Path()  # its files are the server's
        self._readers: dict[Content, _Reader] = {}
        weakref.finalize(self, _close, self._readers)

    def __reduce__(self) -> tuple[type["ServedSource"], tuple[Subscription]]:
        return ServedSource, (self.subscription,)

    @cached_property
    def records(self) -> Mapping[int, Record]:
        """By sample id, in the server's order: those of its whole batches."""
        with closing(ServedLoader(self.subscription)) as loader:
            whole = loader.num_batches * int(loader.welcome["batch_size"])
            return {record.id: record for record in loader.records()[:whole]}

    def raw(self, sample: int, segment: Segment, shape: tuple[int, ...]) -> Tensor:
        """Pixels [C, H, W] in [-1, 1], the very ones that the folder itself gives.

        Raises:
            ValueError: the server's rule makes images of another shape, or could not read this one.
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
        """As the folder's own."""
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
    """The examples of the batches that were asked for last."""

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
    """What `--data` names, which has the plan's batch: a folder or `tcp://HOST:PORT`; None: nothing is named.

    Raises:
        ValueError: keys for a folder, data or a server that cannot be read, data of another batch.
    """
    source = _named(data, keys, timeout_s)
    if isinstance(source, ServedSource):
        _refuse_tiles(plan.model)
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
    """What the plan's batch leaves of the data, as the batches of further steps; None: nothing."""
    if source is None:
        return NextBatches()
    return batches_after(plan.batch, sizes_of(tuple(source.records.values()), source.folder, plan.model))
