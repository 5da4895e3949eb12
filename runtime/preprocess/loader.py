"""Where a trainer's batches come from: a server, or the trainer's own cores."""

import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.data.records import Record, read_records
from runtime.preprocess.connection import Connection, Message
from runtime.preprocess.example import Buffer, Example, example_of, num_frames, packed, preprocess
from runtime.preprocess.images import Rule, rule_from_json
from runtime.preprocess.keys import ClientKeys, key_hint
from runtime.preprocess.order import OrderSettings, Size, ordered
from runtime.preprocess.stream import Content, Skipped
from workbench.units import S_PER_DAY

ASK_AGAIN_S = 3.0  # a server that was started anew has forgotten what was asked


@dataclass(frozen=True, slots=True)
class Batch:
    """One data-parallel group's part of a batch, in execution order."""

    position: int
    microbatches: tuple[tuple[Example, ...], ...]
    skipped: tuple[Skipped, ...]

    @property
    def examples(self) -> tuple[Example, ...]:
        return tuple(example for microbatch in self.microbatches for example in microbatch)


@dataclass(frozen=True, slots=True)
class Group:
    """Which of how many data-parallel groups."""

    index: int = 0
    number: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.number:
            raise ValueError(f"data-parallel group: want 0 to {self.number - 1}, got {self.index}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """What a trainer asks a server for.

    Args:
        name: under which the server remembers how far this trainer is; groups of one trainer share it.
            Empty: nobody else's, made up of host and process.
        timeout_s: of any single wait.
    """

    address: str
    keys: ClientKeys | None = None
    name: str = ""
    group: Group = Group()
    content: Content = Content.ALL
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s <= S_PER_DAY:
            raise ValueError(f"timeout must be > 0 s and at most a day, got {self.timeout_s}")

    @property
    def full_name(self) -> str:
        """With the group."""
        name = self.name or f"{socket.gethostname()}-{os.getpid()}-{self.content}"
        return f"{name}/{self.group.index}/{self.group.number}"


class ServedLoader:
    """Batches of a server, received in the background up to the server's window.

    Args:
        start: position of the first batch; None: where the server remembers this name to be.

    Raises:
        ValueError: nobody answers in time, or the server refuses the key.
    """

    def __init__(self, subscription: Subscription, *, start: int | None = None) -> None:
        self._subscription = subscription
        self._name = subscription.full_name
        self._connection = Connection(subscription.address, subscription.keys)
        self._arrived: dict[int, Message] = {}
        self._asked: dict[int, float] = {}
        try:
            self.welcome = self._request("welcome", packed("hello", name=self._name)).header
        except ValueError:
            self._connection.close()
            raise
        self._position = int(self.welcome["done"]) if start is None else start

    @property
    def position(self) -> int:
        """Of the batch that `next` gives."""
        return self._position

    @property
    def num_batches(self) -> int:
        """Of an epoch: position p is batch p modulo this."""
        return int(self.welcome["num_batches"])

    @property
    def rule(self) -> Rule:
        """Of the images."""
        return rule_from_json(self.welcome["rule"])

    def seek(self, position: int) -> None:
        """Go on from another position; batches on their way that are not in reach of it are forgotten."""
        self._position = position

    def next(self) -> Batch:
        """Waits only where the batch is not here yet; asks for those that follow.

        Raises:
            ValueError: it is not here in time, or the server has given up.
        """
        position = self._position
        end_s = time.monotonic() + self._subscription.timeout_s
        reach = range(position, position + int(self.welcome["window"]))
        for held in (self._arrived, self._asked):
            for other in [other for other in held if other not in reach]:
                del held[other]
        while True:
            self._ask(reach)
            now_s = time.monotonic()
            if position in self._arrived:
                break
            if now_s >= end_s:
                raise ValueError(
                    f"batch {position} of server {self._subscription.address}: not there within "
                    f"{self._subscription.timeout_s:g} s"
                )
            self._take(self._connection.receive(min(ASK_AGAIN_S, end_s - now_s)))
        while (message := self._connection.receive(0.0)) is not None:
            self._take(message)
        self._position = position + 1
        return batch_of_message(self._arrived.pop(position))

    def finish(self) -> None:
        """Everything that `next` gave is finished: a trainer of this name goes on after it.

        Returns when the server has heard it: closing the connection drops what has not left yet.

        Raises:
            ValueError: the server does not answer in time.
        """
        self._connection.send(packed("finished", name=self._name, done=self._position))
        self._request("welcome", packed("hello", name=self._name))  # heard behind it

    def find(self, example: int) -> int:
        """Position, in the first epoch, of the batch that has the example; ValueError: none has."""
        return int(self._request("found", packed("find", example=example)).header["position"])

    def status(self) -> Mapping[str, Any]:
        """What the server says of itself: producers, tasks, batches, examples left out."""
        return self._request("status", packed("status")).header

    def records(self) -> tuple[Record, ...]:
        """The examples of the server's folder, in its order, as far as the index knows them."""
        found: list[Record] = []
        while True:
            header = self._request("records", packed("records", start=len(found))).header
            found += records_of(header)
            if len(found) >= header["total"] or not header["records"]:
                return tuple(found)

    def close(self) -> None:
        """Tell the server to prepare nothing more."""
        self._connection.send(packed("leave"))
        self._connection.close()

    def abandon(self) -> None:
        """Go without a word, as a trainer that dies: the server finds out by itself."""
        self._connection.close()

    def _ask(self, reach: range) -> None:
        """For what has not arrived and was not asked for lately."""
        now_s = time.monotonic()
        group = self._subscription.group
        for position in reach:
            asked_s = self._asked.get(position)
            if position in self._arrived or (asked_s is not None and now_s < asked_s + ASK_AGAIN_S):
                continue
            self._asked[position] = now_s
            message = packed(
                "want",
                name=self._name,
                done=reach.start,
                position=position,
                group=group.index,
                num_groups=group.number,
                content=self._subscription.content,
            )
            self._connection.send(message)

    def _take(self, message: Message | None) -> None:
        if message is not None and message.kind == "batch":
            position = int(message.header["position"])
            if position in self._asked:  # the second answer to a question asked twice is like the first
                self._arrived[position] = message

    def _request(self, answer: str, question: bytes) -> Message:
        end_s = time.monotonic() + self._subscription.timeout_s
        self._connection.send(question)
        while (left_s := end_s - time.monotonic()) > 0:
            message = self._connection.receive(left_s)
            if message is not None and message.kind == answer:
                return message
            self._take(message)
        raise ValueError(
            f"no server at {self._subscription.address}: no {answer!r} within "
            f"{self._subscription.timeout_s:g} s{key_hint(self._subscription.keys)}"
        )


def records_of(header: Mapping[str, Any]) -> list[Record]:
    """Some of the server's examples."""
    return [Record(number, tuple(segments), mask) for number, segments, mask in header["records"]]


def batch_of_message(message: Message) -> Batch:
    """The batch; arrays are views of what came off the wire."""
    buffers = iter(message.buffers)

    wanted = sum(num_frames(header) for held in message.header["microbatches"] for header in held)
    if wanted != len(message.buffers):
        raise ValueError(f"batch: want {wanted} buffers, got {len(message.buffers)}")

    def one(header: Mapping[str, Any]) -> Example:
        own: list[Buffer] = [next(buffers) for _ in range(num_frames(header))]
        return example_of(header, own)

    microbatches = tuple(tuple(one(header) for header in held) for held in message.header["microbatches"])
    skipped = tuple(Skipped(*each) for each in message.header["skipped"])
    return Batch(int(message.header["position"]), microbatches, skipped)


class ColocatedLoader:
    """The baseline: the trainer preprocesses its own batches, when it wants them, on its own cores.

    Args:
        folder, rule, batch_size, order: as a server's.
    """

    def __init__(
        self,
        folder: Path,
        rule: Rule,
        *,
        batch_size: int,
        order: OrderSettings | None = None,
        group: Group | None = None,
    ) -> None:
        self._folder, self._rule, self._batch_size = folder, rule, batch_size
        self._order, self._group = order or OrderSettings(), group or Group()
        self._records = read_records(folder)
        if not 1 <= batch_size <= len(self._records):
            raise ValueError(f"batch size: want 1 to {len(self._records)}, got {batch_size}")
        self._position = 0

    @property
    def position(self) -> int:
        return self._position

    def next(self) -> Batch:
        """Decodes the whole batch of all groups: its order depends on all sizes.

        Raises:
            MalformedImageError: an image that cannot be read.
        """
        num_batches = len(self._records) // self._batch_size
        first = self._position % num_batches * self._batch_size
        records = self._records[first : first + self._batch_size]
        examples = [preprocess(record, self._folder, self._rule) for record in records]
        sizes = [Size(example.tokens_in, example.tokens) for example in examples]
        chosen = ordered(sizes, self._group.number, self._order)[self._group.index]
        microbatches = tuple(tuple(examples[index] for index in held) for held in chosen)
        self._position += 1
        return Batch(self._position - 1, microbatches, ())

    def close(self) -> None:
        """Nothing to let go of."""


Loader = ServedLoader | ColocatedLoader  # batch after batch


@dataclass(frozen=True, slots=True)
class Stalls:
    """How long a trainer waits for its batches, its step an idle wait: by iteration; and what was in them."""

    stall_s: tuple[float, ...]
    num_examples: int
    skipped: tuple[Skipped, ...]

    def quantile_s(self, share: float) -> float:
        """The smallest stall that at least this share of the iterations does not exceed."""
        return sorted(self.stall_s)[max(0, math.ceil(share * len(self.stall_s)) - 1)]


def stalls_of(loader: Loader, num: int, *, step_s: float, told: Callable[[], None] = lambda: None) -> Stalls:
    """Take `num` batches, with an idle wait of `step_s` after each for the step on its device.

    Raises:
        ValueError: num < 1 or step_s < 0, or what the loader raises.
    """
    if num < 1 or not 0 <= step_s <= S_PER_DAY:
        raise ValueError(f"stalls: want >= 1 batch and a step of 0 s to a day, got {num} and {step_s}")
    stalls: list[float] = []
    num_examples = 0
    skipped: list[Skipped] = []
    for _ in range(num):
        start_s = time.perf_counter()
        batch = loader.next()
        stalls.append(time.perf_counter() - start_s)
        num_examples += len(batch.examples)
        skipped += batch.skipped
        told()
        time.sleep(step_s)
    return Stalls(tuple(stalls), num_examples, tuple(skipped))
