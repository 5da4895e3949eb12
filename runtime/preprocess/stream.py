"""The endless stream of a folder's batches, as far as its consumers want it now."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from runtime.data.records import AUDIO, IMAGE, Record, text_tokens
from runtime.preprocess.example import Buffer, num_frames
from runtime.preprocess.leases import Leases, Task
from runtime.preprocess.order import OrderSettings, Size, ordered
from workbench.data.corpus import TEXT

MOST_SHARES = 8  # ways in which one batch is assigned to groups at a time
MOST_REMEMBERED = 4096  # consumers that have left


class Malformed(StrEnum):
    """What a file that holds no image does."""

    FATAL = "fatal"  # ends the server and its trainers by name
    SKIP = "skip"  # leaves its example out; trainers are told which and why


class Content(StrEnum):
    """What a trainer wants of every example."""

    ALL = "all"
    TEXTS = "texts"


@dataclass(frozen=True, slots=True)
class Held:
    """A preprocessed example as it came off the wire."""

    header: Mapping[str, Any]
    buffers: tuple[Buffer, ...]

    @property
    def size(self) -> Size:
        inside = sum(rows * columns for rows, columns, _, _ in self.header["images"])
        merged = sum(tokens for _, _, _, tokens in self.header["images"])
        return Size(inside, sum(self.header["texts"]) + merged)

    @property
    def texts(self) -> "Held":
        """The same example without its images."""
        num = len(self.header["texts"])
        return Held({**self.header, "images": []}, self.buffers[:num])


@dataclass(frozen=True, slots=True)
class Skipped:
    """An example without a place in its batch, and why."""

    id: int
    path: str
    reason: str


@dataclass(slots=True)
class _Batch:
    results: list[Held | Skipped | None]
    shares: dict[int, tuple[tuple[tuple[int, ...], ...], ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Share:
    """What one group gets of a batch."""

    microbatches: tuple[tuple[Held, ...], ...]
    skipped: tuple[Skipped, ...]


class Stream:
    """Batches by position; position p is batch p modulo their number, so a batch can be made again.

    A consumer has finished all positions below `done` and is owed the next `window` ones: the batches
    that exist at one moment are at most `window` per consumer, whatever producers and trainers do.

    Args:
        records: in the order of the stream; the last incomplete batch is left out.
        batch_size: examples.
        window: positions prepared ahead of each consumer, the one that it works on included.
        lease_s: that a producer has for one example.
    """

    def __init__(
        self,
        records: Sequence[Record],
        *,
        batch_size: int,
        window: int,
        lease_s: float,
        order: OrderSettings,
    ) -> None:
        if not 1 <= batch_size <= len(records):
            raise ValueError(f"batch size: want 1 to {len(records)}, the folder's examples, got {batch_size}")
        if window < 1:
            raise ValueError(f"window: want >= 1 batch prepared ahead, got {window}")
        clips = [record.id for record in records if record.of(AUDIO)]
        if clips:
            raise ValueError(
                f"example {clips[0]}: clips are not preprocessed here, only texts and images; "
                "want a folder without clips, or `workbench run --data FOLDER`, which reads clips itself"
            )
        self.batch_size, self.window, self._order = batch_size, window, order
        self._records = records
        self._index = {record.id: index for index, record in enumerate(records)}
        self._done: dict[str, int] = {}
        self._active: set[str] = set()
        self._batches: dict[int, _Batch] = {}
        self.leases = Leases(lease_s=lease_s)
        self._refresh()

    @property
    def num_batches(self) -> int:
        return len(self._records) // self.batch_size

    @property
    def num_open(self) -> int:
        """Batches that exist, whole or in the making."""
        return len(self._batches)

    def record(self, task: Task) -> Record:
        position, index = task
        return self._records[position % self.num_batches * self.batch_size + index]

    def batch_of(self, example: int) -> int:
        """Which batch of an epoch has the example; ValueError where none has."""
        index = self._index.get(example)
        if index is None or index >= self.num_batches * self.batch_size:
            raise ValueError(
                f"example {example}: in none of the {self.num_batches} whole batches of {self.batch_size}"
            )
        return index // self.batch_size

    def done(self, name: str) -> int:
        """The first position that the consumer has not finished."""
        return self._done.get(name, 0)

    def progress(self, name: str, done: int) -> None:
        """The consumer has finished all positions below `done`; it may also go back."""
        if done < 0:
            raise ValueError(f"consumer {name!r}: want a position >= 0, got {done}")
        if self._done.get(name) != done or name not in self._active:
            self._done.pop(name, None)
            self._done[name] = done
            self._active.add(name)
            for other in [other for other in self._done if other not in self._active][:-MOST_REMEMBERED]:
                del self._done[other]
            self._refresh()

    def leave(self, name: str) -> None:
        """Nothing more is prepared for the consumer; where it was is remembered."""
        self._active.discard(name)
        self._refresh()

    def put(self, task: Task, result: Held | Skipped) -> bool:
        """Keep a task's result; False: it had one, or nobody wants it any more.

        Raises:
            ValueError: the result is of another example, or not as the example's texts and images are.
        """
        if not self.leases.is_open(task):
            return False
        if isinstance(result, Held):
            if result.header["id"] != self.record(task).id:
                raise ValueError(
                    f"task {task}: want example {self.record(task).id}, got {result.header['id']}"
                )
            if len(result.buffers) != num_frames(result.header):
                raise ValueError(f"task {task}: {len(result.buffers)} buffers do not fit their description")
            self._check_parts(task, result.header)
        if not self.leases.complete(task):
            return False
        position, index = task
        self._batches[position].results[index] = result
        return True

    def _check_parts(self, task: Task, header: Mapping[str, Any]) -> None:
        """Texts are known before anybody tokenizes them; of images, their number."""
        record = self.record(task)
        lengths = [len(text_tokens(record, k)) for k in range(len(record.of(TEXT)))]
        if header["texts"] != lengths or len(header["images"]) != len(record.of(IMAGE)):
            raise ValueError(
                f"task {task}: want texts of {lengths} tokens and {len(record.of(IMAGE))} images of example "
                f"{record.id}, got {header['texts']} and {len(header['images'])}"
            )

    def share(self, position: int, group: int, num_groups: int) -> Share | None:
        """One group's part of a batch, in execution order; None: it is not whole yet, or out of reach."""
        batch = self._batches.get(position)
        if batch is None or any(result is None for result in batch.results):
            return None
        held = [result for result in batch.results if isinstance(result, Held)]
        if num_groups not in batch.shares:
            while len(batch.shares) >= MOST_SHARES:
                batch.shares.pop(next(iter(batch.shares)))
            batch.shares[num_groups] = ordered([each.size for each in held], num_groups, self._order)
        chosen = batch.shares[num_groups][group]
        return Share(
            tuple(tuple(held[index] for index in microbatch) for microbatch in chosen),
            tuple(result for result in batch.results if isinstance(result, Skipped)),
        )

    def _refresh(self) -> None:
        """Open what is wanted, drop what is not. Before anyone came, the start is wanted."""
        starts = {self._done[name] for name in self._active} or ({0} if not self._done else set())
        wanted = {start + ahead for start in starts for ahead in range(self.window)}
        for position in [position for position in self._batches if position not in wanted]:
            self.leases.drop(position)
            del self._batches[position]
        for position in sorted(wanted - self._batches.keys()):
            self._batches[position] = _Batch([None] * self.batch_size)
            for index in range(self.batch_size):
                self.leases.add((position, index))
