"""Groups of gloo are formed, waited for and left at once when that is interrupted, and formed again."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo

from runtime.elastic import interruptible
from runtime.elastic.interruptible import open_sockets, sever
from runtime.world.clock import Awaited
from runtime.world.failure import RankError
from runtime.world.local_world import join_here

PATIENCE = timedelta(seconds=120)  # only what hangs takes longer than a quarter of it
INTERRUPTED_S = 0.5
MANY = 1 << 24  # elements: more than sockets hold


@pytest.fixture
def creator(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[interruptible.InterruptibleGloo, Callable[..., ProcessGroupGloo]]:
    """What torch would call for every group."""
    found: dict[str, Any] = {}

    def register(name: str, create: Callable[..., ProcessGroupGloo], **settings: object) -> None:
        found[name] = create

    monkeypatch.setattr(interruptible.dist.Backend, "register_backend", register)
    made = interruptible.InterruptibleGloo()
    return made, found[interruptible.BACKEND]


def options(path: Path, rank: int) -> SimpleNamespace:
    store = FileStore(str(path), -1)
    return SimpleNamespace(store=store, group_rank=rank, group_size=2, timeout=PATIENCE, group_id="0")


def total(group: ProcessGroupGloo) -> float:
    summed = torch.ones(1)
    group.allreduce([summed]).wait()
    return float(summed)


def test_a_group_whose_peer_never_comes_is_given_up_at_once(creator, tmp_path):
    made, create = creator
    threading.Timer(0.1, made.interrupt).start()
    start_s = time.monotonic()
    with pytest.raises(RankError, match="group 0: interrupted"):
        create(options(tmp_path / "world1", 0), None)
    assert time.monotonic() - start_s < PATIENCE.total_seconds() / 4
    late = options(tmp_path / "world1", 1)  # lets the thread that was left behind end
    ProcessGroupGloo(late.store, 1, 2, PATIENCE)


def test_groups_can_be_formed_again_after_an_interruption(creator, tmp_path):
    made, create = creator
    made.interrupt()
    with pytest.raises(RankError, match="interrupted"):
        create(options(tmp_path / "world1", 0), None)
    ProcessGroupGloo(options(tmp_path / "world1", 1).store, 1, 2, PATIENCE)
    made.allow()
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: create(options(tmp_path / "world2", rank), None), range(2)))
        assert list(pool.map(total, groups)) == [2.0, 2.0]


def test_a_peer_that_does_not_come_in_time_is_an_error(creator, tmp_path):
    _, create = creator
    alone = options(tmp_path / "world1", 0)
    alone.timeout = timedelta(seconds=0.2)
    alone.store.set_timeout(alone.timeout)
    with pytest.raises(RuntimeError):
        create(alone, None)


def meet(file: Path, rank: int) -> None:
    join_here(file, rank=rank, size=2, wait_s=PATIENCE.total_seconds(), backend=interruptible.BACKEND)


def receive_nothing(file: Path) -> None:
    """Says that it can receive, and then reads nothing."""
    interruptible.InterruptibleGloo()
    meet(file, 1)
    dist.irecv(torch.empty(MANY), 0)
    os.kill(os.getpid(), signal.SIGSTOP)


def send_half(file: Path, pipe: Connection) -> None:
    """Tells how long it waited for the rest, and how long it took to be in the next world."""
    spared, gloo = open_sockets(), interruptible.InterruptibleGloo()
    meet(file, 0)
    pipe.recv()
    work = dist.isend(torch.ones(MANY), 1)
    start_s = time.monotonic()
    threading.Timer(0.1, sever, [spared]).start()
    threading.Timer(INTERRUPTED_S, gloo.interrupt).start()
    with suppress(RankError):
        gloo.clock(PATIENCE.total_seconds()).wait(work, Awaited("sending", (1,)))
    waited_s = time.monotonic() - start_s
    gloo.leave_world()
    gloo.allow()
    sum_with(file.with_name("next"), 0)
    pipe.send((waited_s, time.monotonic() - start_s - waited_s))
    os.kill(os.getpid(), signal.SIGKILL)  # threads were left behind


def sum_with(file: Path, rank: int) -> None:
    meet(file, rank)
    summed = torch.ones(1)
    dist.all_reduce(summed)
    assert float(summed) == 2.0


def join_next(file: Path) -> None:
    interruptible.InterruptibleGloo()
    sum_with(file.with_name("next"), 1)


def test_a_world_is_left_at_once_where_a_message_was_half_on_its_way(tmp_path):
    """gloo itself does not end such a wait when the connection breaks."""
    fork, file = multiprocessing.get_context("fork"), tmp_path / "world"
    here, there = fork.Pipe()
    sender = fork.Process(target=send_half, args=(file, there))
    others = [fork.Process(target=each, args=(file,)) for each in (receive_nothing, join_next)]
    for process in (sender, *others):
        process.start()
    try:
        os.waitpid(others[0].pid, os.WUNTRACED)
        here.send("it has stopped")
        assert here.poll(PATIENCE.total_seconds() / 2)
        waited_s, next_s = here.recv()
        assert waited_s >= INTERRUPTED_S  # the broken connection told it nothing
        assert next_s < PATIENCE.total_seconds() / 4
    finally:
        for process in (sender, *others):
            process.kill()
            process.join()
