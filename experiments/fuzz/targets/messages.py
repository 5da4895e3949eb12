"""Messages between the preprocessing server and its peers, over sockets and under keys of every role."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from experiments.fuzz.target import Ready, Target, TargetKind
from experiments.fuzz.targets.data import NATIVE, SQUARE
from experiments.fuzz.targets.writing import json_bytes
from runtime.data.records import read_records
from runtime.data.scenes import make
from runtime.preprocess.answers import ANSWERS
from runtime.preprocess.connection import Connection, Message
from runtime.preprocess.example import example_frames, packed, preprocess
from runtime.preprocess.images import rule_as_json
from runtime.preprocess.keys import ClientKeys, make_keys
from runtime.preprocess.loader import batch_of_message, records_of
from runtime.preprocess.messages import FIELDS, KINDS_OF, Role
from runtime.preprocess.producer import answer_to
from runtime.preprocess.server import MOST_BAD, Server, ServerSettings
from runtime.preprocess.stream import Malformed

NUM_SAMPLES = 8
ANSWER_S = 5.0
TURNS = 100  # of the server, each up to 0.1 s
PER_PEER = MOST_BAD // 2  # messages, so that it is not dropped


def framed(tree: Any) -> bytes:
    """A header and buffers, a line each; buffers in hexadecimal digits."""
    if not isinstance(tree, dict) or not isinstance(tree.get("buffers"), list):
        return json_bytes(tree)
    lines = (buffer if isinstance(buffer, str) else str(buffer) for buffer in tree["buffers"])
    texts = (line.replace("\n", " ").encode("utf-8", "surrogatepass") for line in lines)
    return b"\n".join((json_bytes(tree.get("header")), *texts))


def frames_of(content: bytes) -> list[bytes]:
    """The bytes on the wire; a line that is not hexadecimal is sent as it is."""
    header, *lines = content.split(b"\n")
    return [header, *map(_buffer, lines)]


def _buffer(line: bytes) -> bytes:
    try:
        return bytes.fromhex(line.decode("ascii"))
    except ValueError:
        return line


def _parse(content: bytes) -> object:
    return json.loads(frames_of(content)[0])


def _example(folder: Path, number: int = 0) -> Mapping[str, Any]:
    header, buffers = example_frames(preprocess(read_records(folder)[number], folder, SQUARE))
    return {"example": header, "buffers": [bytes(buffer).hex() for buffer in buffers]}


def _to_server(kind: str, folder: Path) -> list[Any]:
    """Good messages of a kind."""
    examples = [_example(folder, number) for number in range(2)]
    contents: dict[str, list[dict[str, Any]]] = {
        "done": [{"task": [0, n], "example": each["example"]} for n, each in enumerate(examples)],
        "malformed": [{"task": [0, 0], "path": "images/0.png", "reason": "cannot be read"}],
        "hello": [{"name": "a"}],
        "find": [{"example": 3}],
        "want": [
            {"name": "a", "done": 0, "position": 1, "group": 0, "num_groups": 2, "content": content}
            for content in ("all", "texts")
        ],
        "finished": [{"name": "a", "done": 1}],
        "records": [{"start": 2}],
    }
    buffers = [each["buffers"] for each in examples] if kind == "done" else [[]]
    return [
        {"header": {"kind": kind, **content}, "buffers": buffers[index % len(buffers)]}
        for index, content in enumerate(contents.get(kind, [{}]))
    ]


class _Peers:
    """A server in this thread, with changing peers."""

    def __init__(self, folder: Path, role: Role) -> None:
        server_keys, clients = make_keys()
        settings = ServerSettings(
            folder=folder, rule=SQUARE, batch_size=4, num_producers=0, malformed=Malformed.SKIP
        )
        self._server = Server(settings, server_keys)
        self._context = zmq.Context()
        self._keys = clients
        self._trainer = self._connected(clients[Role.TRAINER])
        self._role = role
        self._said = PER_PEER
        self._peer: zmq.Socket[bytes] | None = None

    def _connected(self, keys: ClientKeys) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        socket.curve_serverkey = keys.server.encode()
        socket.connect(self._server.address)
        return socket

    def say(self, frames: list[bytes]) -> str | None:
        """Let a peer send a message to the server; returns why it was refused."""
        if self._said >= PER_PEER:
            if self._peer is not None:
                self._peer.close()
            self._peer, self._said = self._connected(self._keys[self._role]), 0
            if self._role is Role.PRODUCER:
                self._peer.send(packed("ready"))
        assert self._peer is not None
        self._said += 1
        self._peer.send_multipart(frames)
        self._peer.send(packed("ready" if self._role is Role.PRODUCER else "status"))
        self._trainer.send(packed("status"))
        reason: str | None = None
        for _ in range(TURNS):
            self._turn()
            for answer in _waiting(self._peer):
                reason = answer["reason"] if answer["kind"] == "refused" else reason
            if any(answer["kind"] == "status" for answer in _waiting(self._trainer)):
                return reason
        raise AssertionError("the server no longer answers")

    def _turn(self) -> None:
        try:
            self._server.turn()
        except ValueError as error:
            raise AssertionError(f"a message ended the server: {error}") from error


def _waiting(socket: "zmq.Socket[bytes]") -> Iterator[dict[str, Any]]:
    with suppress(zmq.Again):
        while True:
            yield json.loads(socket.recv_multipart(zmq.NOBLOCK)[0])


def _served(role: Role, kind: str, folder: Path) -> Ready:
    data_folder = folder / "data"
    make(data_folder, num_samples=NUM_SAMPLES, seed=0, kinds=("image",))
    peers = _Peers(data_folder, role)

    def take(content: bytes) -> None:
        reason = peers.say(frames_of(content))
        if reason is not None:
            raise ValueError(reason)

    return Ready(seeds=_to_server(kind, data_folder), render=framed, parse=_parse, take=take)


def _from_server(kind: str, folder: Path) -> list[Any]:
    """Good messages of a kind."""
    example = _example(folder)
    record = read_records(folder)[0]
    segments = [list(segment) for segment in record.segments]
    contents: dict[str, dict[str, Any]] = {
        "task": {"task": [0, 0], "id": record.id, "segments": segments, "rule": rule_as_json(SQUARE)},
        "welcome": {"done": 0, "window": 3, "batch_size": 4, "num_batches": 2, "rule": rule_as_json(NATIVE)},
        "found": {"position": 1},
        "records": {"start": 0, "total": 8, "records": [[record.id, segments, record.mask]]},
        "batch": {"position": 0, "microbatches": [[example["example"]]], "skipped": [[7, "a.png", "torn"]]},
        "status": {
            "producers": 1,
            "local": {"local-0": 77},
            "lost": 0,
            "trainers": ["a"],
            "done": 3,
            "skipped": [[7, "a.png", "torn"]],
            "batches": 2,
            "waiting": 1,
            "lent": 1,
            "dropped": ["b"],
        },
        "refused": {"reason": "no"},
        "fatal": {"reason": "an image"},
    }
    buffers = example["buffers"] if kind == "batch" else []
    return [{"header": {"kind": kind, **contents.get(kind, {})}, "buffers": buffers}]


def _heard(kind: str, folder: Path) -> Ready:
    """A peer that receives a message from a server."""
    data_folder = folder / "data"
    make(data_folder, num_samples=NUM_SAMPLES, seed=0, kinds=("image",))
    context = zmq.Context()
    server = context.socket(zmq.ROUTER)
    server.linger = 0
    port = server.bind_to_random_port("tcp://127.0.0.1")
    address = f"tcp://127.0.0.1:{port}"
    connection = Connection(address, None)
    connection.send(packed("ready"))
    peer = server.recv_multipart()[0]
    uses: Mapping[str, Callable[[Message], object]] = {
        "batch": batch_of_message,
        "records": lambda message: records_of(message.header),
        "task": lambda message: answer_to(message, data_folder),
    }

    def take(content: bytes) -> None:
        server.send_multipart([peer, *frames_of(content)])
        message = connection.receive(ANSWER_S)
        assert message is not None, "nothing arrived"
        uses.get(message.kind, lambda message: None)(message)

    return Ready(seeds=_from_server(kind, data_folder), render=framed, parse=_parse, take=take)


TARGETS = (
    *(
        Target(
            name=f"served-{role}-{kind}",
            kind=TargetKind.MESSAGE,
            make=partial(_served, role, kind),
            readers=("runtime.preprocess.server_socket:received", "runtime.preprocess.fields:parse_header"),
        )
        for role in Role
        for kind in FIELDS
        if kind in KINDS_OF[role]
    ),
    *(
        Target(
            name=f"heard-{kind}",
            kind=TargetKind.MESSAGE,
            make=partial(_heard, kind),
            readers=("runtime.preprocess.connection:receive", "runtime.preprocess.example:example_of"),
        )
        for kind in ANSWERS
    ),
)
