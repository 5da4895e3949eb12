"""The server's socket: bounded waits, CURVE if there are keys, and sends that never block."""

from collections.abc import Iterator
from ipaddress import ip_address

import zmq
from zmq.auth.thread import ThreadAuthenticator

from runtime.preprocess.example import Buffer
from runtime.preprocess.inbox import Letter
from runtime.preprocess.keys import ServerKeys
from runtime.preprocess.messages import Role

HEARTBEAT_MS = 2000
GONE_MS = 10_000  # until a vanished host is detected
MOST_PER_TURN = 256  # messages received before any is processed
MOST_FRAME_BYTES = 2**26
MOST_UNREAD = 64  # messages per peer
HANDSHAKE_MS = 2000  # limit of a silent connection, which occupies a descriptor


class Doorway:
    """A ROUTER socket in a context of its own.

    Args:
        port: 0: any free one.
        own_client: public key of the server's own producers, permitted besides those of `keys`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        keys: ServerKeys | None,
        *,
        own_client: str | None,
    ) -> None:
        self._context = zmq.Context()
        self._roles: dict[str, Role] = {} if keys is None else dict(keys.roles)
        if own_client is not None:
            self._roles[own_client] = Role.PRODUCER
        self._has_keys = keys is not None
        self._guard: ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 200
        self._socket.router_mandatory = True
        self._socket.maxmsgsize = MOST_FRAME_BYTES  # a peer that announces more is disconnected
        self._socket.rcvhwm = MOST_UNREAD
        self._socket.handshake_ivl = HANDSHAKE_MS
        self._socket.heartbeat_ivl, self._socket.heartbeat_timeout = HEARTBEAT_MS, GONE_MS
        if keys is not None:
            self._guard = ThreadAuthenticator(self._context)
            self._guard.start()
            self._guard.configure_curve_callback("*", _Allowed(frozenset(self._roles)))
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

    def received(self, wait_s: float) -> Iterator[Letter]:
        """Arrived messages, after waiting at most `wait_s` for the first; without keys peers have no role."""
        if not self._socket.poll(round(1000 * wait_s)):
            return
        for _ in range(MOST_PER_TURN):
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if frames:
                yield Letter(peer.bytes, self._role(frames[0]), frames)

    def _role(self, frame: zmq.Frame) -> Role | None:
        """Role of a message's sender; the authenticator permits only keys with a role."""
        return self._roles[str(frame.get("User-Id"))] if self._has_keys else None

    def send(self, peer: bytes, frames: list[Buffer]) -> bool:
        """Queue a message to a peer; returns whether the peer is still connected."""
        try:
            self._socket.send_multipart([peer, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def close(self) -> None:
        """Release the address; queued messages have 200 ms to be sent."""
        self._socket.close()
        if self._guard is not None:
            self._guard.stop()
        self._context.term()


class _Allowed:
    """The public keys that may connect."""

    def __init__(self, clients: frozenset[str]) -> None:
        self._clients = clients

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator for every connection."""
        del domain
        return key.decode() in self._clients


def refuse_open_address(host: str, *, has_keys: bool) -> None:
    """Raise ValueError where others could reach the address and there are no keys."""
    try:
        own = ip_address(host).is_loopback
    except ValueError:
        raise ValueError(f"host: want an address like 127.0.0.1, got {host!r}") from None
    if not own and not has_keys:
        raise ValueError(
            f"host {host}: others can reach it; want keys, see `workbench preprocess keys`, or 127.0.0.1"
        )
