"""A proxy on loopback between two programs, which forwards, delays, drops or hangs up."""

import selectors
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

PIECE_BYTES = 2**16
TURN_S = 0.02


@dataclass(slots=True)
class Manners:
    """The proxy's present behaviour.

    Args:
        delay_s: delay of every piece.
        is_deaf: whether incoming data is dropped, and connections are closed when this ends, as by routers
            that have lost their tables: a stream with a hole is invalid.
        is_cut: whether connections are closed.
    """

    delay_s: float = 0.0
    is_deaf: bool = False
    is_cut: bool = False


@dataclass(slots=True)
class _Link:
    """A connection and its far end, with pieces waiting to be forwarded and their times."""

    near: socket.socket
    far: socket.socket
    delayed: list[tuple[float, socket.socket, bytes]] = field(default_factory=list)


class Proxy:
    """The proxy, with one thread for all connections."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)  # noqa: FBT003  (its only argument)
        self._links: list[_Link] = []
        self._over = threading.Event()
        self.manners = Manners()
        self._thread = threading.Thread(target=self._serve, name="proxy", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Close all connections."""
        self._over.set()
        self._thread.join()

    def _serve(self) -> None:
        was_deaf = self.manners.is_deaf
        while not self._over.is_set():
            manners = self.manners
            if manners.is_cut or (was_deaf and not manners.is_deaf):
                self._hang_up()
            was_deaf = manners.is_deaf
            self._turn(manners)
        self._hang_up()
        self._listener.close()

    def _turn(self, manners: Manners) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            for link in self._links:
                for end in (link.near, link.far):
                    selector.register(end, selectors.EVENT_READ, link)
            for key, _ in selector.select(TURN_S):
                if key.data is None:
                    self._accept(manners)
                elif key.data in self._links:
                    self._take(key.data, key.fileobj, manners)  # type: ignore[arg-type]
        for link in list(self._links):
            self._pass_on(link)

    def _accept(self, manners: Manners) -> None:
        near, _ = self._listener.accept()
        if manners.is_cut:
            near.close()
            return
        try:
            far = socket.create_connection(self._target, timeout=1.0)
        except OSError:  # nobody listens there at the moment
            near.close()
            return
        self._links.append(_Link(near, far))

    def _take(self, link: _Link, end: socket.socket, manners: Manners) -> None:
        try:
            piece = end.recv(PIECE_BYTES)
        except OSError:
            piece = b""
        if not piece:
            self._drop(link)
        elif not manners.is_deaf:
            other = link.far if end is link.near else link.near
            link.delayed.append((time.monotonic() + manners.delay_s, other, piece))

    def _pass_on(self, link: _Link) -> None:
        while link.delayed and link.delayed[0][0] <= time.monotonic():
            _, end, piece = link.delayed.pop(0)
            try:
                end.settimeout(1.0)
                end.sendall(piece)
            except OSError:
                self._drop(link)
                return

    def _drop(self, link: _Link) -> None:
        with suppress(ValueError):
            self._links.remove(link)
        link.near.close()
        link.far.close()

    def _hang_up(self) -> None:
        for link in list(self._links):
            self._drop(link)
