"""A preprocessing server under peers that lie: they are refused, dropped and named, and it goes on."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import zmq

from experiments.bench.preprocess_status import NOISES, shout
from runtime.data.records import IMAGE, read_records
from runtime.data.scenes import make
from runtime.preprocess.example import example_frames, packed, preprocess
from runtime.preprocess.inbox import MOST_OF_PEER, Inbox, Letter
from runtime.preprocess.keys import ClientKeys, make_keys, read_client_keys, write_keys
from runtime.preprocess.messages import MOST_HEADER_BYTES, Role, parse_message
from runtime.preprocess.server import MOST_BAD, Server, ServerSettings
from runtime.preprocess.server_socket import HANDSHAKE_MS
from runtime.preprocess.stream import Malformed
from tests.preprocess_service import RULE, WAIT_S, Running, loading, serving
from tests.test_checkpoint_attacks import files_of_at_most
from tests.waiting import eventually

STATUS_S = 0.1  # what is promised; alone it takes about a millisecond


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make(tmp_path / "data", num_samples=8, seed=3, kinds=("image",))
    return tmp_path / "data"


@contextmanager
def peer(server: Running | Server, keys: ClientKeys | None = None) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        if keys is not None:
            socket.curve_publickey = keys.public.encode()
            socket.curve_secretkey = keys.secret.encode()
            socket.curve_serverkey = keys.server.encode()
        socket.connect(server.address)
        yield socket


def answer(socket: "zmq.Socket[bytes]", *frames: bytes) -> dict[str, object]:
    """What comes first after a message, but for words to an idle producer."""
    socket.send_multipart(frames)
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s and socket.poll(1000 * WAIT_S):
        found: dict[str, object] = json.loads(socket.recv_multipart()[0])
        if found["kind"] not in ("still", "task"):
            return found
    raise AssertionError("no answer")


def message(**fields: object) -> bytes:
    return json.dumps(fields).encode()


EXAMPLE = {"id": 0, "texts": [], "images": []}
WANT = {"kind": "want", "name": "a", "done": 0, "position": 0, "group": 0, "num_groups": 1, "content": "all"}
ATTACKS = {
    "task-out-of-batch": message(kind="done", task=[0, 99_999], example=EXAMPLE),
    "malformed-out-of-stream": message(kind="malformed", task=[0, 10**9], path="x", reason="\x1b[2J"),
    "side-that-is-no-number": message(
        kind="done", task=[0, 0], example={"id": 0, "texts": [], "images": [[1, 1, 1, "x"]]}
    ),
    "infinite": message(**WANT).replace(b'"done": 0', b'"done": 1e400'),
    "billion-groups": message(**WANT | {"num_groups": 10**9}),
    "escape-in-a-name": message(**WANT | {"name": "\x1b]0;owned\x07"}),
    "long-name": message(**WANT | {"name": "a" * 10**5}),
    "deep": b'{"kind":"hello","name":' + b"[" * 10**5,
    "twice": b'{"kind":"status","kind":"status"}',
    "wide": message(kind="done", task=[0, 0], example=EXAMPLE | {"images": [[1, 1, 1, 1]] * 5000}),
    "unknown": message(kind="\x1b[31mexec"),
    "extra": message(kind="status", more=1),
    "no-object": b"[1]",
    "nothing": b"",
    "cut-off": b"[",
    "a-kind-alone": b'{"kind": "want"}',
    "a-task-of-no-batch": b'{"kind": "done", "task": 3}',
}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for all attacks, one after the other."""
    folder = tmp_path_factory.mktemp("attacked") / "data"
    make(folder, num_samples=8, seed=3, kinds=("image",))
    with serving(folder, num_producers=1, malformed=Malformed.FATAL) as server:
        yield server


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_one_message_never_ends_the_server(attacked, attack):
    """Of no attack anything of the peer's stands unescaped in an answer."""
    with peer(attacked) as socket:
        socket.send_multipart([attack])
        found = answer(socket, message(kind="status"))
        text = json.dumps(found, ensure_ascii=False)
        assert "\x1b" not in text
        assert len(text) < 2000
    with loading(attacked) as loader:
        assert len(loader.next().examples) == 4
    assert attacked.failure is None


def test_a_peer_that_goes_on_is_dropped_and_named(folder, capfd):
    with serving(folder) as server:
        with peer(server) as socket:
            for _ in range(MOST_BAD):
                assert answer(socket, b"{")["kind"] == "refused"
            socket.send_multipart([message(kind="status")])
            assert not socket.poll(500)
        with loading(server) as loader:
            assert len(loader.status()["dropped"]) == 1
            assert len(loader.next().examples) == 4
    assert f"dropped after {MOST_BAD} bad messages" in capfd.readouterr().err


def test_a_peer_is_one_trainer_and_waits_for_no_more_than_it_may(folder):
    with serving(folder, num_producers=0, window=2) as server, peer(server) as socket:
        for position in range(2):
            socket.send_multipart([message(**WANT | {"position": position})])
        socket.send_multipart([message(**WANT | {"done": 1, "position": 2})])  # the first is given up
        other = answer(socket, message(**WANT | {"name": "b"}))
        assert "is trainer 'a', and cannot be 'b'" in str(other["reason"])
        with loading(server) as loader:
            assert loader.status()["batches"] <= 2 * 2


def test_an_image_that_can_be_read_is_not_left_out_on_a_peers_word(folder):
    with serving(folder, num_producers=0, malformed=Malformed.FATAL) as server, peer(server) as socket:
        socket.send_multipart([message(kind="ready")])
        while (found := json.loads(socket.recv_multipart()[0]))["kind"] != "task":
            pass
        task = found["task"]
        found = answer(socket, message(kind="malformed", task=task, path="/etc", reason="because"))
        assert "can be read here" in str(found["reason"])
        assert server.failure is None


def test_what_is_torn_or_too_long_is_refused_in_a_line_and_pixels_stay_the_producers_own(folder):
    """A buffer that lacks a byte, one that is missing, one too many; a header of too many bytes."""
    record = next(each for each in read_records(folder)[:4] if each.of(IMAGE))
    example = preprocess(record, folder, RULE)
    header, buffers = example_frames(example)
    done = packed("done", task=(0, record.id), example=header)
    *others, last = map(bytes, buffers)
    bad = {
        "want buffers of": [(done, *others, last[:-1]), (done, *others), (done, *others, last, b"")],
        f"at most {MOST_HEADER_BYTES} bytes": [(done + b" " * MOST_HEADER_BYTES, *others, last)],
    }
    with serving(folder, num_producers=1) as server, loading(server) as loader:
        with peer(server) as socket:
            for words, messages in bad.items():
                for frames in messages:
                    reason = str(answer(socket, *frames)["reason"])
                    assert words in reason
                    assert len(reason.splitlines()) == 1
        found = next(each for each in loader.next().examples if each.id == record.id)
        for one, other in zip(found.images, example.images, strict=True):
            np.testing.assert_array_equal(one.values, other.values)


def test_keys_have_roles(folder):
    server_keys, clients = make_keys()
    with serving(folder, keys=server_keys) as server:
        for role, refused in ((Role.PRODUCER, WANT), (Role.TRAINER, {"kind": "ready"}), (Role.READER, WANT)):
            with peer(server, clients[role]) as socket:
                reason = str(answer(socket, message(**refused))["reason"])
                assert f"a {role}'s key does not allow messages of kind {refused['kind']}" in reason
        with loading(server, keys=clients[Role.READER]) as reader:
            assert reader.status()["kind"] == "status"


def test_key_files_that_others_can_read_are_refused(tmp_path):
    path = write_keys(tmp_path / "keys")[2]
    assert read_client_keys(path).public
    path.chmod(0o644)
    with pytest.raises(ValueError, match=r"others can read it; want .* chmod 600"):
        read_client_keys(path)


@pytest.fixture
def still(folder: Path) -> Iterator[Server]:
    """A server that does a turn when it is told to."""
    server = Server(ServerSettings(folder=folder, rule=RULE, batch_size=4, num_producers=0))
    yield server
    server.close()


def test_a_question_for_the_status_waits_for_two_turns_which_are_short_while_others_shout(still):
    """That in which it arrives and that in which it is answered, by the server's own work."""
    work_s, noise = [], NOISES["long headers"]
    with zmq.Context() as context, peer(still) as asking:
        for _ in range(40):
            shouting = shout(context, still.address, noise)
            asking.send(message(kind="status"))
            while not asking.poll(0):
                start_s = time.thread_time()
                still.turn()
                work_s.append(time.thread_time() - start_s)
            assert json.loads(asking.recv_multipart()[0])["kind"] == "status"
            for each in shouting:
                each.close(linger=0)
    work_s.sort()
    assert 2 * work_s[len(work_s) * 99 // 100] < STATUS_S


def test_the_status_is_told_before_what_came_earlier_and_is_long(still, monkeypatch):
    heard: list[int] = []
    hear = still._hear
    monkeypatch.setattr(
        still, "_hear", lambda peer, role, frames: heard.append(len(frames[0])) or hear(peer, role, frames)
    )
    with zmq.Context() as context, peer(still) as asking:
        shouting = shout(context, still.address, NOISES["long headers"])
        asking.send(message(kind="status"))
        received, letters = still._doorway.received, list[Letter]()

        def have_arrived() -> bool:
            letters.extend(received(0.1))
            return len(letters) == 1 + len(shouting) * (MOST_BAD - 1)

        assert eventually(have_arrived)
        monkeypatch.setattr(still._doorway, "received", lambda wait_s: iter(letters))
        still.turn()
        assert heard[0] < 100 < heard[1]
        for each in shouting:
            each.close(linger=0)


def test_who_sends_no_example_is_no_producer_and_ends_nothing_by_going(folder):
    """On the commit before, their leaving was taken for the fault of an image that they were lent."""
    with serving(folder, num_producers=0, malformed=Malformed.FATAL) as server, loading(server) as loader:
        with peer(server) as trainer:
            trainer.send_multipart([message(**WANT)])
            wrong = EXAMPLE | {"texts": [4]}
            for _ in range(8):
                with peer(server) as liar:
                    found = answer(liar, message(kind="done", task=[0, 0], example=wrong))
                    assert "want buffers of" in str(found["reason"])
                    assert loader.status()["producers"] == 0
        assert server.failure is None


def letter(peer: bytes, num_bytes: int) -> Letter:
    return Letter(peer, None, [zmq.Frame(bytes(num_bytes))])


def test_short_messages_are_heard_before_long_ones_and_peers_in_turn():
    inbox = Inbox()
    for name, size in ((b"a", 10_000), (b"a", 10_000), (b"b", 10_000), (b"c", 20), (b"a", 20)):
        assert inbox.add(letter(name, size))
    assert [each.peer for each in inbox.short()] == [b"c", b"a"]
    assert [each.peer for each in inbox.long()] == [b"a", b"b", b"a"]
    assert len(inbox) == 0


def test_what_waits_of_one_peer_is_bounded_and_others_keep_their_room(monkeypatch):
    inbox = Inbox()
    taken = [inbox.add(letter(b"a", 1000)) for _ in range(MOST_OF_PEER + 5)]
    assert (taken.count(True), taken[-5:]) == (MOST_OF_PEER, [False] * 5)
    assert inbox.add(letter(b"b", 1000))
    monkeypatch.setattr("runtime.preprocess.inbox.MOST_PEER_BYTES", 3000)
    assert [inbox.add(letter(b"c", 1000)) for _ in range(4)] == [True, True, True, False]
    monkeypatch.setattr("runtime.preprocess.inbox.MOST_BYTES", 1000 * len(inbox))
    assert not inbox.add(letter(b"d", 1000))
    assert len(list(inbox.long())) == MOST_OF_PEER + 4
    assert inbox.add(letter(b"d", 1000))


def test_frames_are_bounded(folder):
    with pytest.raises(ValueError, match=f"at most {MOST_HEADER_BYTES} bytes"):
        parse_message(b" " * (MOST_HEADER_BYTES + 1))
    with serving(folder) as server:
        with peer(server) as socket:
            socket.send_multipart([message(kind="done", task=[0, 0], example=EXAMPLE), bytes(2**27)])
            time.sleep(0.5)
        with loading(server) as loader:
            assert len(loader.next().examples) == 4


ECHO = """
import resource
from runtime.preprocess.server_socket import Doorway
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
door = Doorway("127.0.0.1", 0, None, own_client=None)
print(door.address, flush=True)
while True:
    for letter in door.received(0.2):
        door.send(letter.peer, [frame.bytes for frame in letter.frames])
"""


def test_sockets_that_say_nothing_take_all_descriptors_for_a_while_only():
    """150 of them against 64 descriptors; without a bound on handshakes nobody is heard while they stay."""
    with subprocess.Popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True) as server:
        try:
            address = server.stdout.readline().strip()
            host, port = address.removeprefix("tcp://").split(":")
            with ExitStack() as held, zmq.Context() as context, context.socket(zmq.DEALER) as asking:
                for _ in range(150):
                    held.enter_context(socket.create_connection((host, int(port)), timeout=WAIT_S))
                asking.linger = 0
                asking.connect(address)
                asking.send(b"are you there?")
                assert asking.poll(10 * HANDSHAKE_MS)
                assert asking.recv() == b"are you there?"
        finally:
            server.kill()


def test_keys_on_a_full_disk_are_named_and_none_is_left(tmp_path):
    with files_of_at_most(300), pytest.raises(OSError, match="File too large") as raised:
        write_keys(tmp_path / "keys")
    assert raised.value.filename == str(tmp_path / "keys" / "server.json")
    assert not list((tmp_path / "keys").iterdir())
    assert len(write_keys(tmp_path / "keys")) == 4
