"""What has arrived at a server and was not heard yet: short messages first, then peers in turn; bounded."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from runtime.preprocess.messages import Role

SHORT_BYTES = 512  # of a message that is heard before others' long ones, as questions for the status are
MOST_OF_PEER = 64  # long messages
MOST_PEER_BYTES = 2**27
MOST_BYTES = 2**29  # of all peers


@dataclass(frozen=True, slots=True)
class Letter:
    """One message, unread.

    Args:
        peer: who sent it.
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
    """Letters by peer. Who sends more than may wait loses the letter, and nobody else does."""

    def __init__(self) -> None:
        self._short: OrderedDict[bytes, deque[Letter]] = OrderedDict()
        self._long: OrderedDict[bytes, deque[Letter]] = OrderedDict()
        self._bytes: dict[bytes, int] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return sum(len(letters) for held in (self._short, self._long) for letters in held.values())

    def add(self, letter: Letter) -> bool:
        """Whether there was room for it."""
        size = letter.num_bytes
        held = self._short if size <= SHORT_BYTES else self._long
        letters = held.get(letter.peer, deque())
        own_bytes = self._bytes.get(letter.peer, 0) + size
        is_over = own_bytes > MOST_PEER_BYTES or self._num_bytes + size > MOST_BYTES
        if is_over or (held is self._long and len(letters) >= MOST_OF_PEER):
            return False
        letters.append(letter)
        held[letter.peer] = letters
        self._bytes[letter.peer] = own_bytes
        self._num_bytes += size
        return True

    def short(self) -> Iterator[Letter]:
        """Short ones, a letter of each peer in turn."""
        while self._short:
            yield self._taken(self._short)

    def long(self) -> Iterator[Letter]:
        """The others, likewise."""
        while self._long:
            yield self._taken(self._long)

    def _taken(self, held: OrderedDict[bytes, deque[Letter]]) -> Letter:
        peer, letters = held.popitem(last=False)
        letter = letters.popleft()
        if letters:
            held[peer] = letters
        size = letter.num_bytes
        self._num_bytes -= size
        self._bytes[peer] -= size
        if not self._bytes[peer] and peer not in self._short and peer not in self._long:
            del self._bytes[peer]
        return letter
