"""Preprocessing apart from training: every example once, whoever dies, waits, restarts or lies."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.data.records import read_records
from runtime.data.scenes import make
from runtime.preprocess.keys import (
    ClientKeys,
    client_pair,
    make_keys,
    read_client_keys,
    read_server_keys,
    write_keys,
)
from runtime.preprocess.loader import Batch, ColocatedLoader, Group, ServedLoader, Subscription
from runtime.preprocess.messages import Role
from runtime.preprocess.order import OrderSettings
from runtime.preprocess.producer import produce
from runtime.preprocess.server import Server, ServerSettings
from runtime.preprocess.stream import Content, Malformed
from tests.preprocess_service import RULE, WAIT_S, break_image, loading, serving

NUM = 24


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make(tmp_path / "data", num_samples=NUM, seed=3, kinds=("image",))
    return tmp_path / "data"


def ids(batch: Batch) -> list[int]:
    return [example.id for example in batch.examples]


def assert_same(one: Batch, other: Batch) -> None:
    assert [[e.id for e in held] for held in one.microbatches] == [
        [e.id for e in held] for held in other.microbatches
    ]
    for mine, theirs in zip(one.examples, other.examples, strict=True):
        for text, same in zip(mine.texts, theirs.texts, strict=True):
            np.testing.assert_array_equal(text, same)
        for image, same_image in zip(mine.images, theirs.images, strict=True):
            np.testing.assert_array_equal(image.values, same_image.values)
            assert image.grid == same_image.grid
            assert image.tokens == same_image.tokens


def test_a_server_gives_what_the_trainer_would_make_itself(folder: Path) -> None:
    """Two epochs, two groups, reordered, with keys; the groups together have the batch once."""
    server_keys, clients = make_keys()
    order = OrderSettings(microbatch=2)
    with serving(folder, keys=server_keys, batch_size=8, order=order, num_producers=2) as server:
        for index in range(2):
            group = Group(index, 2)
            mine = ColocatedLoader(folder, RULE, batch_size=8, order=order, group=group)
            with loading(server, keys=clients[Role.TRAINER], name="t", group=group) as theirs:
                for _ in range(6 if index == 0 else 1):
                    assert_same(theirs.next(), mine.next())
    both = [ColocatedLoader(folder, RULE, batch_size=8, group=Group(index, 2)).next() for index in range(2)]
    assert sorted(ids(both[0]) + ids(both[1])) == list(range(8))


def test_a_trainer_goes_on_where_it_was_and_the_server_too(folder: Path) -> None:
    with serving(folder) as server:
        with loading(server, name="job") as first:
            seen = [ids(first.next()) for _ in range(3)]  # and ends in the middle of batch 2
        with loading(server, name="job") as second:
            assert ids(second.next()) == seen[2]
            second.next()
            second.finish()
        with loading(server, name="job") as third:
            assert third.position == 4
            port = int(server.address.rsplit(":", 1)[1])
            assert sorted(seen[0] + seen[1] + seen[2] + ids(third.next())) == [*range(12), *range(16, 20)]
            server.stop()
            with serving(folder, port=port):  # knows nothing, and is told
                assert sorted(ids(third.next())) == [20, 21, 22, 23]
                assert sorted(ids(third.next())) == [0, 1, 2, 3]


def test_a_trainer_has_finished_when_the_server_has_heard_it(folder: Path) -> None:
    """A server without a thread hears only while the test lets it."""
    server = Server(ServerSettings(folder=folder, rule=RULE, batch_size=4, num_producers=0))

    def heard(answer: Future[Any]) -> Any:
        while not answer.done():
            server.turn()
        return answer.result()

    def come() -> ServedLoader:
        return ServedLoader(Subscription(address=server.address, name="job", timeout_s=WAIT_S))

    with closing(server), ThreadPoolExecutor(1) as other, closing(heard(other.submit(come))) as first:
        first.seek(3)
        finished = other.submit(first.finish)
        time.sleep(0.2)
        assert not finished.done()
        heard(finished)
        with closing(heard(other.submit(come))) as second:
            assert second.position == 3


def test_killed_producers_lose_nothing(folder: Path) -> None:
    with serving(folder, num_producers=2) as server, loading(server) as loader:
        seen: list[int] = []
        killed: set[int] = set()  # may be listed until the server looks again
        for step in range(12):
            seen += ids(loader.next())
            if step % 3 == 0:
                status = until(loader, lambda found: set(found["local"].values()) - killed)
                victim = min(set(status["local"].values()) - killed)
                killed.add(victim)
                os.kill(victim, signal.SIGKILL)
        assert sorted(seen) == sorted([*range(NUM), *range(NUM)])
        status = until(loader, lambda found: found["lost"] >= 4)
        assert status["lost"] >= 4


def test_nothing_is_prepared_beyond_the_window(folder: Path) -> None:
    with serving(folder, window=2) as server, loading(server) as loader:
        loader.next()
        until(loader, lambda found: found["done"] == 8)
        time.sleep(0.3)
        status = loader.status()
        assert (status["done"], status["batches"], status["waiting"], status["lent"]) == (8, 2, 0, 0)


@pytest.mark.parametrize("malformed", Malformed)
def test_a_torn_image_is_named(folder: Path, malformed: Malformed) -> None:
    example = next(n for n in range(4) if (folder / "images" / f"{n:05d}-0.png").exists())
    path = break_image(folder, example)
    with serving(folder, malformed=malformed) as server, loading(server) as loader:
        if malformed is Malformed.FATAL:
            with pytest.raises(
                ValueError, match=f"given up: example {example}: image {path}: cannot be read"
            ):
                loader.next()
        else:
            batch = loader.next()
            assert sorted(ids(batch)) == [n for n in range(4) if n != example]
            assert [(each.id, each.path) for each in batch.skipped] == [(example, str(path))]
            assert list(loader.status()["skipped"][0][:2]) == [example, str(path)]
    assert (server.failure is not None) is (malformed is Malformed.FATAL)


def test_keys_keep_others_out(folder: Path, tmp_path: Path) -> None:
    paths = write_keys(tmp_path / "keys")
    assert [path.name for path in paths] == ["server.json", "producer.json", "trainer.json", "reader.json"]
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    server_path, _, client_path, _ = paths
    with pytest.raises(ValueError, match="exists already"):
        write_keys(tmp_path / "keys")
    keys = read_client_keys(client_path)
    public, secret = client_pair()
    stranger = ClientKeys(public=public, secret=secret, server=keys.server)
    with serving(folder, keys=read_server_keys(server_path)) as server:
        with pytest.raises(ValueError, match="refuses this client's key"), loading(server, keys=stranger):
            pass
        with (
            pytest.raises(ValueError, match=r"no server at .*: no 'welcome' within 0.3 s; .* without --keys"),
            loading(server, timeout_s=0.3),
        ):
            pass
        with loading(server, keys=keys) as loader:
            assert sorted(ids(loader.next())) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="no JSON object"):
        read_client_keys(folder / "data.jsonl")
    with pytest.raises(ValueError, match="want public, secret, server, got producers, public, readers, "):
        read_client_keys(server_path)


def test_addresses_that_others_reach_want_keys(folder: Path) -> None:
    for host, words in (("0.0.0.0", "others can reach it; want keys"), ("nowhere", "want an address like")):
        with pytest.raises(ValueError, match=words):
            Server(ServerSettings(folder=folder, rule=RULE, batch_size=4, host=host))


def test_texts_alone_come_without_images(folder: Path) -> None:
    with serving(folder) as server, loading(server, content=Content.TEXTS) as loader:
        mine = ColocatedLoader(folder, RULE, batch_size=4).next()
        batch = loader.next()
        assert ids(batch) == ids(mine)
        assert not any(example.images for example in batch.examples)
        assert [len(t) for e in batch.examples for t in e.texts] == [
            len(t) for e in mine.examples for t in e.texts
        ]
        assert loader.records() == read_records(folder)
        assert loader.find(9) == 2
        with pytest.raises(
            ValueError, match=r"refuses a message.*example 99: in none of the 6 whole batches"
        ):
            loader.find(99)


def test_waits_end_by_name(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"data folder .*nowhere: does not exist; want the path of the server"
    ):
        produce("tcp://127.0.0.1:9", folder / "nowhere", keys=None, name=None, silence_s=0.2)
    with pytest.raises(ValueError, match=r"no server at tcp://127.0.0.1:9: waited 0.2 s"):
        produce("tcp://127.0.0.1:9", folder, keys=None, name=None, silence_s=0.2)
    with (
        serving(folder, num_producers=0) as server,
        loading(server) as loader,
    ):
        loader._subscription = replace(loader._subscription, timeout_s=0.3)  # the welcome may take longer
        with pytest.raises(ValueError, match=r"batch 0 of server tcp://.*: did not arrive within 0.3 s"):
            loader.next()


def test_producers_that_cannot_start_end_the_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.preprocess.local_producers.sys.executable", "/bin/false")
    with serving(folder) as server:
        server.ended()
    assert "3 in a row ended before their first word, the last with exit code 1" in str(server.failure)


def test_producers_do_not_import_from_the_folder_that_the_user_is_in(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the commit before, a user's own module of a name that is imported ended them."""
    (tmp_path / "pickle.py").write_text("raise ImportError('the user's')")
    monkeypatch.chdir(tmp_path)
    with serving(folder) as server, loading(server) as loader:
        assert sorted(ids(loader.next())) == [0, 1, 2, 3]


def until(loader: ServedLoader, holds: Callable[[Mapping[str, Any]], object]) -> Mapping[str, Any]:
    """The server's status as soon as it is so, or as it is when that took too long."""
    end_s = time.monotonic() + WAIT_S
    while not holds(status := loader.status()) and time.monotonic() < end_s:
        time.sleep(0.02)
    return status
