"""Bounded queue of a server's unprocessed messages: short ones first, peers in turn."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from runtime.preprocess.messages import Role

SHORT_BYTES = 512  # limit of messages that precede long ones, such as status requests
MOST_OF_PEER = 64  # long messages per peer
MOST_PEER_BYTES = 2**27
MOST_BYTES = 2**29  # of all peers


@dataclass(frozen=True, slots=True)
class Letter:
    """One unprocessed message.

    Args:
        peer: the sender.
        role: of the peer's key; None: the server has no keys.
        frames: header and buffers.
    """

    peer: bytes
    role: Role | None
    frames: list[zmq.Frame]

    @property
    def num_bytes(self) -> int:
        return sum(len(frame) for frame in self.frames)


class Inbox:
    """Letters by peer. Letters beyond a peer's limit are dropped, without effect on other peers."""

    def __init__(self) -> None:
        self._short: OrderedDict[bytes, deque[Letter]] = OrderedDict()
        self._long: OrderedDict[bytes, deque[Letter]] = OrderedDict()
        self._bytes: dict[bytes, int] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return sum(len(letters) for queues in (self._short, self._long) for letters in queues.values())

    def add(self, letter: Letter) -> bool:
        """Queue a letter; returns whether there was room for it."""
        size = letter.num_bytes
        queues = self._short if size <= SHORT_BYTES else self._long
        letters = queues.get(letter.peer, deque())
        own_bytes = self._bytes.get(letter.peer, 0) + size
        is_over = own_bytes > MOST_PEER_BYTES or self._num_bytes + size > MOST_BYTES
        if is_over or (queues is self._long and len(letters) >= MOST_OF_PEER):
            return False
        letters.append(letter)
        queues[letter.peer] = letters
        self._bytes[letter.peer] = own_bytes
        self._num_bytes += size
        return True

    def short(self) -> Iterator[Letter]:
        """Take short letters, one of each peer in turn."""
        while self._short:
            yield self._taken(self._short)

    def long(self) -> Iterator[Letter]:
        """Take the other letters, likewise."""
        while self._long:
            yield self._taken(self._long)

    def _taken(self, queues: OrderedDict[bytes, deque[Letter]]) -> Letter:
        peer, letters = queues.popitem(last=False)
        letter = letters.popleft()
        if letters:
            queues[peer] = letters
        size = letter.num_bytes
        self._num_bytes -= size
        self._bytes[peer] -= size
        if not self._bytes[peer] and peer not in self._short and peer not in self._long:
            del self._bytes[peer]
        return letter
