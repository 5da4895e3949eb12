"""The server's socket: bounded waits, CURVE where there are keys, and sends that never block."""

from collections.abc import Iterator

import zmq
from zmq.auth.thread import ThreadAuthenticator

from runtime.preprocess.example import Buffer
from runtime.preprocess.keys import ServerKeys

HEARTBEAT_MS = 2000
GONE_MS = 10_000  # a host that vanished without a word
MOST_PER_TURN = 256


class Doorway:
    """A ROUTER socket in a context of its own.

    Args:
        port: 0: any free one.
        own_client: public key of the server's own producers, let in beside those of `keys`.
    """

    def __init__(self, host: str, port: int, keys: ServerKeys | None, *, own_client: str | None) -> None:
        self._context = zmq.Context()
        self._guard: ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 200
        self._socket.router_mandatory = True
        self._socket.heartbeat_ivl, self._socket.heartbeat_timeout = HEARTBEAT_MS, GONE_MS
        if keys is not None:
            self._guard = ThreadAuthenticator(self._context)
            self._guard.start()
            allowed = frozenset({*keys.clients, *([own_client] if own_client else [])})
            self._guard.configure_curve_callback("*", _Allowed(allowed))
            self._socket.curve_server = True
            self._socket.curve_secretkey = keys.secret.encode()
        bracketed = f"[{host}]" if ":" in host else host
        self._socket.ipv6 = ":" in host
        try:
            self._socket.bind(f"tcp://{bracketed}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"address tcp://{bracketed}:{port}: cannot listen there: {error}") from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def received(self, wait_s: float) -> Iterator[tuple[bytes, list[zmq.Frame]]]:
        """(peer, frames) of what has arrived, after waiting at most `wait_s` for the first."""
        if not self._socket.poll(round(1000 * wait_s)):
            return
        for _ in range(MOST_PER_TURN):
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if frames:
                yield peer.bytes, frames

    def send(self, peer: bytes, frames: list[Buffer]) -> bool:
        """Whether the peer is still there; it leaves in the background."""
        try:
            self._socket.send_multipart([peer, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def close(self) -> None:
        """Let go of the address; what has not left yet has 200 ms for it."""
        self._socket.close()
        if self._guard is not None:
            self._guard.stop()
        self._context.term()


class _Allowed:
    """Which public keys may connect."""

    def __init__(self, clients: frozenset[str]) -> None:
        self._clients = clients

    def callback(self, domain: str, key: bytes) -> bool:
        """Asked by the authenticator for every connection."""
        del domain
        return key.decode() in self._clients
