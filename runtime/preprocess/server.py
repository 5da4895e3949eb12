"""The preprocessing server: leases examples to producers, and sends complete batches to trainers."""

import gc
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from runtime.data.records import IMAGE, read_records
from runtime.preprocess.answers import MOST_WINDOW
from runtime.preprocess.example import Buffer, example_of, packed, preprocess
from runtime.preprocess.images import MalformedImageError, Rule, rule_as_json
from runtime.preprocess.inbox import Inbox
from runtime.preprocess.keys import ClientKeys, ServerKeys, client_pair
from runtime.preprocess.leases import Task
from runtime.preprocess.local_producers import LocalProducers
from runtime.preprocess.messages import FIELDS, KINDS_OF, WITH_BUFFERS, Role, parse_message
from runtime.preprocess.order import OrderSettings
from runtime.preprocess.server_socket import Doorway, refuse_open_address
from runtime.preprocess.stream import Content, EncodedExample, Malformed, Skipped, Stream
from workbench.plain_text import plain
from workbench.units import S_PER_DAY

POLL_S = 0.1
HEAR_S = 0.02  # of processing long messages, before newly arrived ones
PRESENCE_S = 10.0  # between checks whether a trainer is still connected
RECORDS_PER_MESSAGE = 2000
MOST_PEERS = 4096  # producers and trainers, and peers whose bad messages are counted
BUFFERS = "buffers"  # key, besides a message's fields
MOST_BAD = 16  # refused messages before a peer is refused
STILL_S = 1.0  # between messages to an idle producer
MOST_PRODUCERS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of a server.

    Args:
        folder: with `data.jsonl`.
        rule: of its images.
        batch_size: examples.
        window: batches prepared ahead of each trainer, including the one that it works on.
        lease_s: time of a producer for one example, before another one gets it too.
        num_producers: on this host.
        host: address to listen on; all but this machine's own require keys.
        port: 0: any free one.
        silence_s: after which a producer without messages from the server ends.
    """

    folder: Path
    rule: Rule
    batch_size: int
    window: int = 3
    order: OrderSettings = field(default_factory=OrderSettings)
    malformed: Malformed = Malformed.FATAL
    lease_s: float = 60.0
    num_producers: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    silence_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.lease_s <= S_PER_DAY or not STILL_S < self.silence_s <= S_PER_DAY:
            raise ValueError(
                f"server: want 0 < lease_s and {STILL_S:g} < silence_s up to a day, "
                f"got {self.lease_s} and {self.silence_s}"
            )
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port: want 1 to {2**16 - 1}, or 0 for any free one, got {self.port}")
        if not 1 <= self.window <= MOST_WINDOW:
            raise ValueError(f"window: want >= 1 batch ahead, at most {MOST_WINDOW}, got {self.window}")
        if not 0 <= self.num_producers <= MOST_PRODUCERS:
            raise ValueError(f"producers: want 0 to {MOST_PRODUCERS} on a host, got {self.num_producers}")


@dataclass(frozen=True, slots=True)
class _Want:
    name: str
    group: int
    num_groups: int
    content: Content


class Server:
    """A server with one socket, one thread, and local producers.

    Peers are not trusted: messages outside a peer's role are refused, and a peer that repeats them is dropped
    and reported. Memory per peer is bounded, and so is the number of peers.

    Trainers can request all state again, so that a restarted server continues at their positions. Memory is
    bounded by `window` batches per trainer.

    Args:
        keys: None: any peer that reaches the address may connect.

    Raises:
        ValueError: an address that others can reach without keys, or that is not available.
    """

    def __init__(self, settings: ServerSettings, keys: ServerKeys | None = None) -> None:
        refuse_open_address(settings.host, has_keys=keys is not None)
        self._settings, self._rule = settings, rule_as_json(settings.rule)
        self._records = read_records(settings.folder)
        self._stream = Stream(
            self._records,
            batch_size=settings.batch_size,
            window=settings.window,
            lease_s=settings.lease_s,
            order=settings.order,
        )
        own = None if keys is None else client_pair()
        self._doorway = Doorway(settings.host, settings.port, keys, own_client=own and own[0])
        self._inbox = Inbox()
        self._bad: OrderedDict[bytes, int] = (
            OrderedDict()
        )  # number of bad messages; least recent peers are evicted
        self._dropped: list[str] = []
        self.address = self._doorway.address
        self._idle: list[bytes] = []
        self._producers: set[bytes] = set()
        self._trainers: dict[bytes, str] = {}
        self._wants: dict[tuple[bytes, int], _Want] = {}
        self._skipped: dict[int, Skipped] = {}
        self._num_done = 0
        self._next_still_s = self._next_presence_s = 0.0
        self._on = {kind: getattr(self, f"_on_{kind}") for kind in FIELDS}
        self._crew = LocalProducers(
            settings.num_producers,
            address=self.address,
            folder=settings.folder,
            keys=None
            if own is None or keys is None
            else ClientKeys(public=own[0], secret=own[1], server=keys.public),
            silence_s=settings.silence_s,
        )
        gc.freeze()  # otherwise a collection in a turn scans all imports: 0.1 s with torch

    def serve(self, until: Callable[[], bool]) -> None:
        """Run turns until `until()` is true; then close everything.

        Raises:
            ValueError: an image that must not be skipped is unreadable, or producers cannot work.
        """
        try:
            while not until():
                self.turn()
        except ValueError as error:
            for peer in (*self._producers, *self._trainers):
                self._send(peer, packed("fatal", reason=str(error)))
            raise
        finally:
            self.close()

    def turn(self) -> None:
        """Receive messages, process all short and some long ones, then send tasks and batches."""
        for letter in self._doorway.received(0.0 if len(self._inbox) else POLL_S):
            if not self._inbox.add(letter):
                self._refuse(letter.peer, "too many messages, or bytes, are queued")
        now_s = time.monotonic()
        for letter in self._inbox.short():
            self._hear(letter.peer, letter.role, letter.frames)
        for letter in self._inbox.long():
            self._hear(letter.peer, letter.role, letter.frames)
            if time.monotonic() > now_s + HEAR_S:
                break
        now_s = time.monotonic()
        for name in self._crew.replace_lost():
            self._forget_producer(name.encode())
        self._give_up(self._stream.leases.expire(now_s))
        self._speak(now_s)
        self._lend(now_s)
        self._answer()

    def close(self) -> None:
        """End local producers and release the address."""
        self._crew.end()
        self._doorway.close()
        gc.unfreeze()  # else objects of libraries outlive the interpreter, and triton lists them on stderr

    def _hear(self, peer: bytes, role: Role | None, frames: list[zmq.Frame]) -> None:
        """Process a peer's message; role None: without keys all peers have all roles."""
        if self._bad.get(peer, 0) >= MOST_BAD:
            return
        try:
            header = parse_message(frames[0].buffer)
            kind, buffers = header["kind"], tuple(frame.buffer for frame in frames[1:])
            if role is not None and kind not in KINDS_OF[role]:
                raise ValueError(f"a {role}'s key does not allow messages of kind {kind}")
            if buffers and kind not in WITH_BUFFERS:
                raise ValueError(f"{kind}: want no buffers, got {len(buffers)}")
            self._on[kind](peer, header | {BUFFERS: buffers})
        except _FatalImageError as error:
            raise ValueError(str(error)) from None
        except ValueError as error:
            self._refuse(peer, plain(str(error)))

    def _refuse(self, peer: bytes, reason: str) -> None:
        self._send(peer, packed("refused", reason=reason))
        self._bad[peer] = self._bad.pop(peer, 0) + 1
        while len(self._bad) > MOST_PEERS:
            self._bad.popitem(last=False)
        if self._bad[peer] == MOST_BAD:
            name = plain(peer.decode(errors="backslashreplace"), 80)
            self._dropped = [*self._dropped[-99:], name]
            sys.stderr.write(f"preprocess: peer {name!r} dropped after {MOST_BAD} bad messages: {reason}\n")
            self._forget_producer(peer)
            self._forget_trainer(peer)

    def _on_ready(self, peer: bytes, header: dict[str, Any]) -> None:
        del header
        if peer not in self._producers and len(self._producers) >= MOST_PEERS:
            raise ValueError(f"there are {MOST_PEERS} producers already")
        self._crew.heard_of(peer.decode(errors="replace"))
        self._producers.add(peer)
        if peer not in self._idle:
            self._idle.append(peer)

    def _on_done(self, peer: bytes, header: dict[str, Any]) -> None:
        result = EncodedExample(header["example"], header[BUFFERS])
        example_of(result.header, result.buffers)  # peers without valid examples do not become producers
        self._on_ready(peer, header)
        self._num_done += self._stream.put(header["task"], result)

    def _on_malformed(self, peer: bytes, header: dict[str, Any]) -> None:
        self._on_ready(peer, header)
        task = header["task"]
        if self._stream.leases.holder(task) != peer:
            return  # too late, or never leased to it
        record = self._stream.record(task)
        try:
            preprocess(record, self._settings.folder, self._settings.rule)
        except MalformedImageError as error:
            self._leave_out(task, str(error.path), plain(str(error)))
        else:
            raise ValueError(f"malformed: the images of example {record.id} can be read here")

    def _on_hello(self, peer: bytes, header: dict[str, Any]) -> None:
        stream = self._stream
        content = {
            "done": stream.done(header["name"]),
            "window": stream.window,
            "batch_size": stream.batch_size,
            "num_batches": stream.num_batches,
            "rule": self._rule,
        }
        self._send(peer, packed("welcome", **content))

    def _on_find(self, peer: bytes, header: dict[str, Any]) -> None:
        self._send(peer, packed("found", position=self._stream.batch_of(header["example"])))

    def _on_want(self, peer: bytes, header: dict[str, Any]) -> None:
        name, position, done = header["name"], header["position"], header["done"]
        group, num_groups = header["group"], header["num_groups"]
        if not done <= position < done + self._stream.window or not 0 <= group < num_groups:
            raise ValueError(
                f"trainer {name!r}: want positions from {done} to below {done + self._stream.window} and "
                f"groups below {num_groups}, got position {position} of group {group}"
            )
        self._know_trainer(peer, name)
        self._stream.progress(name, done)
        for key in [key for key in self._wants if key[0] == peer and key[1] < done]:
            del self._wants[key]
        if sum(key[0] == peer for key in self._wants) >= 2 * self._stream.window:
            raise ValueError(f"trainer {name!r} waits for {2 * self._stream.window} batches already")
        self._wants[peer, position] = _Want(name, group, num_groups, header["content"])

    def _on_finished(self, peer: bytes, header: dict[str, Any]) -> None:
        self._know_trainer(peer, header["name"])
        self._stream.progress(header["name"], header["done"])

    def _know_trainer(self, peer: bytes, name: str) -> None:
        """Register a peer as one trainer: with another name it would have further batches prepared."""
        if self._trainers.setdefault(peer, name) != name:
            raise ValueError(f"this peer is trainer {self._trainers[peer]!r}, and cannot be {name!r}")
        if len(self._trainers) > MOST_PEERS:
            del self._trainers[peer]
            raise ValueError(f"there are {MOST_PEERS} trainers already")

    def _on_leave(self, peer: bytes, header: dict[str, Any]) -> None:
        del header
        self._forget_trainer(peer)

    def _on_records(self, peer: bytes, header: dict[str, Any]) -> None:
        start = header["start"]
        chosen = self._records[start : start + RECORDS_PER_MESSAGE]
        lines = [[record.id, record.segments, record.mask] for record in chosen]
        self._send(peer, packed("records", start=start, total=len(self._records), records=lines))

    def _on_status(self, peer: bytes, header: dict[str, Any]) -> None:
        del header
        content = {
            "producers": len(self._producers),
            "local": self._crew.pids,
            "lost": self._crew.num_lost,
            "trainers": sorted(self._trainers.values()),
            "done": self._num_done,
            "skipped": [[skipped.id, skipped.path, skipped.reason] for skipped in self._skipped.values()],
            "batches": self._stream.num_open,
            "waiting": self._stream.leases.num_waiting,
            "lent": self._stream.leases.num_lent,
            "dropped": self._dropped,
        }
        self._send(peer, packed("status", **content))

    def _lend(self, now_s: float) -> None:
        """Lease tasks to idle producers while there are any."""
        leases = self._stream.leases
        while self._idle and (task := leases.lend(self._idle[0], now_s)) is not None:
            producer = self._idle.pop(0)
            record = self._stream.record(task)
            message = packed("task", task=task, id=record.id, segments=record.segments, rule=self._rule)
            if not self._send(producer, message):
                self._forget_producer(producer)

    def _answer(self) -> None:
        """Send every requested share that is complete."""
        for (peer, position), want in list(self._wants.items()):
            share = self._stream.share(position, want.group, want.num_groups)
            if share is None:
                continue
            del self._wants[peer, position]
            texts = want.content is Content.TEXTS
            microbatches = [
                [example.texts if texts else example for example in microbatch]
                for microbatch in share.microbatches
            ]
            header = packed(
                "batch",
                position=position,
                microbatches=[[example.header for example in microbatch] for microbatch in microbatches],
                skipped=[[example.id, example.path, example.reason] for example in share.skipped],
            )
            buffers = [
                buffer for microbatch in microbatches for example in microbatch for buffer in example.buffers
            ]
            if not self._send(peer, header, buffers):
                self._forget_trainer(peer)

    def _speak(self, now_s: float) -> None:
        """Send messages to idle producers, and detect lost peers."""
        if now_s >= self._next_still_s:
            self._next_still_s = now_s + STILL_S
            for peer in [peer for peer in self._producers if not self._send(peer, packed("still"))]:
                self._forget_producer(peer)
        if now_s >= self._next_presence_s:
            self._next_presence_s = now_s + PRESENCE_S
            for peer in [peer for peer in self._trainers if not self._send(peer, packed("still"))]:
                self._forget_trainer(peer)

    def _forget_producer(self, peer: bytes) -> None:
        self._producers.discard(peer)
        with suppress(ValueError):
            self._idle.remove(peer)
        self._give_up(self._stream.leases.release(peer))

    def _forget_trainer(self, peer: bytes) -> None:
        name = self._trainers.pop(peer, None)
        for key in [key for key in self._wants if key[0] == peer]:
            del self._wants[key]
        if name is not None and name not in self._trainers.values():
            self._stream.leave(name)

    def _give_up(self, tasks: tuple[Task, ...]) -> None:
        for task in tasks:
            record = self._stream.record(task)
            path = str(self._settings.folder / (record.of(IMAGE) or ("no image",))[0])
            self._leave_out(task, path, f"example {record.id}: no producer survived it or was in time")

    def _leave_out(self, task: Task, path: str, reason: str) -> None:
        record = self._stream.record(task)
        if self._settings.malformed is Malformed.FATAL:
            raise _FatalImageError(f"example {record.id}: {reason}")
        skipped = Skipped(record.id, path, reason)
        if self._stream.put(task, skipped):
            self._skipped[record.id] = skipped

    def _send(self, peer: bytes, header: bytes, buffers: list[Buffer] | None = None) -> bool:
        return self._doorway.send(peer, [header, *(buffers or [])])


class _FatalImageError(ValueError):
    """An unreadable image that stops the server."""
