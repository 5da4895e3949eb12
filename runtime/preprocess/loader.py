"""Loaders of a trainer's batches: from a server, or preprocessed on the trainer's own cores."""

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

ASK_AGAIN_S = 3.0  # a restarted server has lost requests


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
    """Index and number of data-parallel groups."""

    index: int = 0
    number: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.number:
            raise ValueError(f"data-parallel group: want 0 to {self.number - 1}, got {self.index}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """A trainer's subscription to a server.

    Args:
        name: under which the server keeps this trainer's progress; groups of one trainer share it. Empty: a
            unique one, from host and process.
        timeout_s: of each wait.
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
        """The name with the group."""
        name = self.name or f"{socket.gethostname()}-{os.getpid()}-{self.content}"
        return f"{name}/{self.group.index}/{self.group.number}"


class ServedLoader:
    """Batches of a server, received in the background, up to the server's window.

    Args:
        start: position of the first batch; None: the server's saved position of this name.
        on_silence: see `Connection`.

    Raises:
        ValueError: no answer in time, or the server refuses the key.
    """

    def __init__(
        self,
        subscription: Subscription,
        *,
        start: int | None = None,
        on_silence: Callable[[], None] | None = None,
    ) -> None:
        self._subscription = subscription
        self._name = subscription.full_name
        self._connection = Connection(subscription.address, subscription.keys, on_silence=on_silence)
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
        """Position of the batch that `next` returns."""
        return self._position

    @property
    def num_batches(self) -> int:
        """Number of batches of an epoch: position p is batch p modulo this."""
        return int(self.welcome["num_batches"])

    @property
    def rule(self) -> Rule:
        """Preprocessing rule of the images."""
        return rule_from_json(self.welcome["rule"])

    def seek(self, position: int) -> None:
        """Continue from another position; pending batches outside its window are dropped."""
        self._position = position

    def next(self) -> Batch:
        """The next batch, after a wait if it has not arrived; requests the following ones.

        Raises:
            ValueError: it does not arrive in time, or the server has stopped with an error.
        """
        position = self._position
        end_s = time.monotonic() + self._subscription.timeout_s
        reach = range(position, position + int(self.welcome["window"]))
        for batches in (self._arrived, self._asked):
            for other in [other for other in batches if other not in reach]:
                del batches[other]
        while True:
            self._ask(reach)
            now_s = time.monotonic()
            if position in self._arrived:
                break
            if now_s >= end_s:
                raise ValueError(
                    f"batch {position} of server {self._subscription.address}: did not arrive within "
                    f"{self._subscription.timeout_s:g} s"
                )
            self._take(self._connection.receive(min(ASK_AGAIN_S, end_s - now_s)))
        while (message := self._connection.receive(0.0)) is not None:
            self._take(message)
        self._position = position + 1
        return batch_of_message(self._arrived.pop(position))

    def finish(self) -> None:
        """Report all batches from `next` as finished: a trainer of this name resumes after them.

        Returns when the server has received it, since closing the connection drops queued messages.

        Raises:
            ValueError: the server does not answer in time.
        """
        self._connection.send(packed("finished", name=self._name, done=self._position))
        self._request("welcome", packed("hello", name=self._name))  # processed after it

    def find(self, example: int) -> int:
        """Position, in the first epoch, of the batch with an example; ValueError if there is none."""
        return int(self._request("found", packed("find", example=example)).header["position"])

    def status(self) -> Mapping[str, Any]:
        """Status of the server: producers, tasks, batches, skipped examples."""
        return self._request("status", packed("status")).header

    def records(self) -> tuple[Record, ...]:
        """The examples in the index of the server's folder, in order."""
        records: list[Record] = []
        while True:
            header = self._request("records", packed("records", start=len(records))).header
            records += records_of(header)
            if len(records) >= header["total"] or not header["records"]:
                return tuple(records)

    def close(self) -> None:
        """Unsubscribe from the server, and close the connection."""
        self._connection.send(packed("leave"))
        self._connection.close()

    def abandon(self) -> None:
        """Close without notice, as if the trainer died."""
        self._connection.close()

    def _ask(self, reach: range) -> None:
        """Request batches that have not arrived and were not requested recently."""
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
            if position in self._asked:  # answers to repeated requests are equal
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
    """Decode a message with some of the server's examples."""
    return [Record(number, tuple(segments), mask) for number, segments, mask in header["records"]]


def batch_of_message(message: Message) -> Batch:
    """Decode a batch; arrays are views of the message's buffers."""
    buffers = iter(message.buffers)

    wanted = sum(num_frames(header) for microbatch in message.header["microbatches"] for header in microbatch)
    if wanted != len(message.buffers):
        raise ValueError(f"batch: want {wanted} buffers, got {len(message.buffers)}")

    def one(header: Mapping[str, Any]) -> Example:
        own_buffers: list[Buffer] = [next(buffers) for _ in range(num_frames(header))]
        return example_of(header, own_buffers)

    microbatches = tuple(
        tuple(one(header) for header in microbatch) for microbatch in message.header["microbatches"]
    )
    skipped = tuple(Skipped(*entry) for entry in message.header["skipped"])
    return Batch(int(message.header["position"]), microbatches, skipped)


class ColocatedLoader:
    """The baseline: the trainer preprocesses its batches on its own cores, when it needs them.

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
        """The next batch. Decodes the batches of all groups, as the order depends on all sizes.

        Raises:
            MalformedImageError: an image that cannot be read.
        """
        num_batches = len(self._records) // self._batch_size
        first = self._position % num_batches * self._batch_size
        records = self._records[first : first + self._batch_size]
        examples = [preprocess(record, self._folder, self._rule) for record in records]
        sizes = [Size(example.tokens_in, example.tokens) for example in examples]
        chosen = ordered(sizes, self._group.number, self._order)[self._group.index]
        microbatches = tuple(tuple(examples[index] for index in indices) for indices in chosen)
        self._position += 1
        return Batch(self._position - 1, microbatches, ())

    def close(self) -> None:
        """Do nothing, as there is nothing to release."""


Loader = ServedLoader | ColocatedLoader  # yields batches


@dataclass(frozen=True, slots=True)
class Stalls:
    """Waits of a trainer for its batches, per iteration, with idle waits as steps; and their contents."""

    stall_s: tuple[float, ...]
    num_examples: int
    skipped: tuple[Skipped, ...]

    def quantile_s(self, share: float) -> float:
        """The smallest stall that at least this fraction of iterations does not exceed."""
        return sorted(self.stall_s)[max(0, math.ceil(share * len(self.stall_s)) - 1)]


def stalls_of(
    loader: Loader, num: int, *, step_s: float, on_batch: Callable[[], None] = lambda: None
) -> Stalls:
    """Take `num` batches, with an idle wait of `step_s` after each in place of a step.

    Raises:
        ValueError: num < 1 or step_s < 0, or as the loader.
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
        on_batch()
        time.sleep(step_s)
    return Stalls(tuple(stalls), num_examples, tuple(skipped))
