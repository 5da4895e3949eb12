"""Forming of process groups: given up at once, whoever is waited for, and possible again afterwards."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo

from runtime.elastic import forming
from runtime.world.failure import RankError

PATIENCE = timedelta(seconds=20)


@pytest.fixture
def creator(monkeypatch: pytest.MonkeyPatch) -> tuple[forming.Forming, Callable[..., ProcessGroupGloo]]:
    """What torch would call for every group."""
    found: dict[str, Any] = {}

    def register(name: str, create: Callable[..., ProcessGroupGloo], **settings: object) -> None:
        found[name] = create

    monkeypatch.setattr(forming.dist.Backend, "register_backend", register)
    made = forming.Forming()
    return made, found[forming.BACKEND]


def options(path: Path, rank: int) -> SimpleNamespace:
    store = FileStore(str(path), -1)
    return SimpleNamespace(store=store, group_rank=rank, group_size=2, timeout=PATIENCE, group_id="0")


def total(group: ProcessGroupGloo) -> float:
    summed = torch.ones(1)
    group.allreduce([summed]).wait()
    return float(summed)


def test_a_group_whose_peer_never_comes_is_given_up_at_once(creator, tmp_path):
    made, create = creator
    threading.Timer(0.1, made.give_up).start()
    start_s = time.monotonic()
    with pytest.raises(RankError, match="group 0 was given up"):
        create(options(tmp_path / "world1", 0), None)
    assert time.monotonic() - start_s < PATIENCE.total_seconds() / 4
    late = options(tmp_path / "world1", 1)  # lets the thread that was left behind end
    ProcessGroupGloo(late.store, 1, 2, PATIENCE)


def test_groups_can_be_formed_again_after_giving_up(creator, tmp_path):
    made, create = creator
    made.give_up()
    with pytest.raises(RankError, match="given up"):
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
