"""A peer's connection to a preprocessing server, with bounded waits, and refusals as errors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from runtime.preprocess.answers import parse_answer
from runtime.preprocess.example import Buffer
from runtime.preprocess.keys import ClientKeys
from workbench.plain_text import plain

SILENT_S = 1.0  # a server answers within it


@dataclass(frozen=True, slots=True)
class Message:
    """A header and its buffers."""

    header: dict[str, Any]
    buffers: tuple[Buffer, ...]

    @property
    def kind(self) -> str:
        return str(self.header["kind"])


class Connection:
    """A DEALER socket in a context of its own, so that it may be opened after a fork.

    Args:
        address: `tcp://HOST:PORT` of the server.
        keys: None: the server has none.
        name: of the peer's socket on the server; None: the server assigns one.
        on_silence: called once if nothing arrives within the first `SILENT_S` of a longer wait.
    """

    def __init__(
        self,
        address: str,
        keys: ClientKeys | None,
        name: bytes | None = None,
        on_silence: Callable[[], None] | None = None,
    ) -> None:
        self.address = address
        self._on_silence = on_silence
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        if name is not None:
            self._socket.routing_id = name
        if keys is not None:
            self._socket.curve_publickey = keys.public.encode()
            self._socket.curve_secretkey = keys.secret.encode()
            self._socket.curve_serverkey = keys.server.encode()
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"address {address!r}: want tcp://HOST:PORT: {error}") from None

    def send(self, header: bytes, buffers: list[Buffer] | None = None) -> None:
        """Queue a message, to be sent in the background."""
        self._socket.send_multipart([header, *(buffers or [])], copy=False)

    def receive(self, wait_s: float) -> Message | None:
        """The next message, or None after `wait_s` seconds.

        Raises:
            ValueError: the server refuses this peer's key or message, or has stopped with an error.
        """
        ready = self._ready(wait_s)
        if self._monitor in ready:
            recv_monitor_message(self._monitor)
            raise ValueError(f"server {self.address} refuses this client's key")
        if self._socket not in ready:
            return None
        first, *rest = self._socket.recv_multipart(copy=False)
        try:
            message = Message(parse_answer(first.buffer), tuple(frame.buffer for frame in rest))
        except ValueError as error:
            raise ValueError(f"server {self.address} sent an invalid message: {plain(str(error))}") from None
        reason = plain(str(message.header.get("reason", "")))
        if message.kind == "fatal":
            raise ValueError(f"server {self.address} has given up: {reason}")
        if message.kind == "refused":
            raise ValueError(f"server {self.address} refuses a message: {reason}")
        return message

    def _ready(self, wait_s: float) -> dict[Any, int]:
        """What can be read after at most `wait_s` seconds; tells the first wait that is silent."""
        if self._on_silence is not None and wait_s > SILENT_S:
            ready = self._ready_within(SILENT_S)
            if not ready:
                self._on_silence()
                ready = self._ready_within(wait_s - SILENT_S)
            self._on_silence = None
            return ready
        return self._ready_within(wait_s)

    def _ready_within(self, wait_s: float) -> dict[Any, int]:
        return dict(self._poller.poll(max(0, round(1000 * wait_s))))

    def close(self) -> None:
        """Close the socket; queued messages have 200 ms to be sent."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=200)
        self._context.term()
