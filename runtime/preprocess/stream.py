"""The endless stream of a folder's batches, prepared in a window for each consumer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from runtime.data.records import AUDIO, IMAGE, Record, text_tokens
from runtime.preprocess.example import Buffer, num_frames
from runtime.preprocess.leases import Leases, Task
from runtime.preprocess.order import OrderSettings, Size, ordered
from workbench.data.corpus import TEXT

MOST_SHARES = 8  # cached assignments of one batch to groups
MOST_REMEMBERED = 4096  # remembered consumers that have left


class Malformed(StrEnum):
    """Treatment of unreadable images."""

    FATAL = "fatal"  # ends the server and its trainers with an error
    SKIP = "skip"  # skips its example; trainers are told which and why


class Content(StrEnum):
    """Content of examples that a trainer requests."""

    ALL = "all"
    TEXTS = "texts"


@dataclass(frozen=True, slots=True)
class EncodedExample:
    """A preprocessed example in encoded form, as received."""

    header: Mapping[str, Any]
    buffers: tuple[Buffer, ...]

    @property
    def size(self) -> Size:
        inside = sum(rows * columns for rows, columns, _, _ in self.header["images"])
        merged = sum(tokens for _, _, _, tokens in self.header["images"])
        return Size(inside, sum(self.header["texts"]) + merged)

    @property
    def texts(self) -> "EncodedExample":
        """The same example without its images."""
        num = len(self.header["texts"])
        return EncodedExample({**self.header, "images": []}, self.buffers[:num])


@dataclass(frozen=True, slots=True)
class Skipped:
    """An example that was left out of its batch, and why."""

    id: int
    path: str
    reason: str


@dataclass(slots=True)
class _Batch:
    results: list[EncodedExample | Skipped | None]
    shares: dict[int, tuple[tuple[tuple[int, ...], ...], ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Share:
    """One group's part of a batch."""

    microbatches: tuple[tuple[EncodedExample, ...], ...]
    skipped: tuple[Skipped, ...]


class Stream:
    """Batches by position; position p is batch p modulo their number, so a batch can be repeated.

    A consumer has finished all positions below `done`, and the next `window` ones are prepared for it, so at
    most `window` batches per consumer exist at a time.

    Args:
        records: in the order of the stream; the last incomplete batch is dropped.
        batch_size: number of examples.
        window: positions prepared ahead of each consumer, including the one that it works on.
        lease_s: time of a producer for one example.
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
        """Number of batches that exist, complete or not."""
        return len(self._batches)

    def record(self, task: Task) -> Record:
        position, index = task
        return self._records[position % self.num_batches * self.batch_size + index]

    def batch_of(self, example: int) -> int:
        """Index of the batch of an epoch with an example; ValueError where none has it."""
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
        """Record that the consumer has finished all positions below `done`; may also go back."""
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
        """Stop preparing batches for the consumer; its position is remembered."""
        self._active.discard(name)
        self._refresh()

    def put(self, task: Task, result: EncodedExample | Skipped) -> bool:
        """Store a task's result; False where it has one already, or is no longer needed.

        Raises:
            ValueError: the result is of another example, or differs from the example's texts and images.
        """
        if not self.leases.is_open(task):
            return False
        if isinstance(result, EncodedExample):
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
        """Raise ValueError where texts differ from the record's, or the number of images."""
        record = self.record(task)
        lengths = [len(text_tokens(record, k)) for k in range(len(record.of(TEXT)))]
        if header["texts"] != lengths or len(header["images"]) != len(record.of(IMAGE)):
            raise ValueError(
                f"task {task}: want texts of {lengths} tokens and {len(record.of(IMAGE))} images of example "
                f"{record.id}, got {header['texts']} and {len(header['images'])}"
            )

    def share(self, position: int, group: int, num_groups: int) -> Share | None:
        """One group's part of a batch, in execution order; None if incomplete, or outside the window."""
        batch = self._batches.get(position)
        if batch is None or any(result is None for result in batch.results):
            return None
        examples = [result for result in batch.results if isinstance(result, EncodedExample)]
        if num_groups not in batch.shares:
            while len(batch.shares) >= MOST_SHARES:
                batch.shares.pop(next(iter(batch.shares)))
            batch.shares[num_groups] = ordered(
                [example.size for example in examples], num_groups, self._order
            )
        chosen = batch.shares[num_groups][group]
        return Share(
            tuple(tuple(examples[index] for index in microbatch) for microbatch in chosen),
            tuple(result for result in batch.results if isinstance(result, Skipped)),
        )

    def _refresh(self) -> None:
        """Open the batches in consumers' windows, or at the start without consumers; drop others."""
        starts = {self._done[name] for name in self._active} or ({0} if not self._done else set())
        wanted = {start + ahead for start in starts for ahead in range(self.window)}
        for position in [position for position in self._batches if position not in wanted]:
            self.leases.drop(position)
            del self._batches[position]
        for position in sorted(wanted - self._batches.keys()):
            self._batches[position] = _Batch([None] * self.batch_size)
            for index in range(self.batch_size):
                self.leases.add((position, index))
