"""The joint search on a Ray cluster of two nodes: the same answer where workers die, addresses refused."""

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import pytest

from sim.predict import IterationJudge
from tests.test_joint_search import FEW, small
from tests.test_strategies import cost
from tests.waiting import eventually
from workbench.explain.timeline import Timeline
from workbench.plan.plan import Plan
from workbench.search.joint.drive import joint_search
from workbench.search.joint.evaluate import Judge
from workbench.search.joint.on_ray import join
from workbench.search.joint.result import SearchResult
from workbench.search.joint.terms import Scope, Stop
from workbench.search.joint.worker_pool import RayWorkers, WorkerSpec
from workbench.strategies.registry import PLANNERS

NODES = 2
OBJECTS_BYTES = 80 * 2**20  # the least that Ray takes


@pytest.fixture(scope="module")
def address():
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    utilities = pytest.importorskip("ray.cluster_utils")
    cluster = utilities.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": OBJECTS_BYTES}
    )
    try:
        for _ in range(NODES - 1):
            cluster.add_node(num_cpus=1, object_store_memory=OBJECTS_BYTES)
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


def searched(
    workers: WorkerSpec, judge: Judge, candidates: int = 8, progress=lambda state: None
) -> SearchResult:
    planners = {name: PLANNERS[name] for name in FEW[:2]}
    stop, scope = Stop(candidates=candidates), Scope(planners=planners)
    return joint_search(small(), cost(), judge, stop=stop, scope=scope, workers=workers, progress=progress)


@dataclass(frozen=True)
class Deadly:
    """A judge that ends the process that asks it for the n-th time, as often as there are files to remove."""

    judge: IterationJudge
    lives: Path
    home: int

    def value(self, plan: Plan) -> float:
        if os.getpid() != self.home and (life := next(self.lives.iterdir(), None)) is not None:
            life.unlink(missing_ok=True)
            os._exit(1)
        return self.judge.value(plan)

    def timeline(self, plan: Plan) -> Timeline:
        return self.judge.timeline(plan)


def test_the_same_answer_as_here_also_where_workers_die(address, tmp_path):
    here = searched(1, IterationJudge(cost()))
    for life in range(3):
        (tmp_path / str(life)).touch()
    deadly = Deadly(IterationJudge(cost()), tmp_path, os.getpid())
    told = []
    there = searched(RayWorkers(address=address, num=NODES), deadly, progress=told.append)
    assert not list(tmp_path.iterdir()), "three workers died"
    assert (there.log, there.value, there.plan) == (here.log, here.value, here.plan)
    assert [state.candidates for state in told] == sorted(state.candidates for state in told)
    assert told[-1].candidates == 8


def test_more_workers_than_cpus_are_refused(address):
    with pytest.raises(ValueError, match=f"has {NODES} CPUs.*nearest: {NODES}"):
        searched(RayWorkers(address=address, num=9), IterationJudge(cost()))


def test_who_stops_a_search_leaves_no_workers(address):
    ray = pytest.importorskip("ray")

    def stop(state) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        searched(RayWorkers(address=address, num=NODES), IterationJudge(cost()), progress=stop)
    assert not ray.is_initialized()
    ray.init(address=address, log_to_driver=False)
    try:
        assert eventually(lambda: ray.available_resources().get("CPU") == NODES)
    finally:
        ray.shutdown()


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("auto", "want HOST:PORT"),
        ("ray://head:10001", "want HOST:PORT"),
        ("127.0.0.1:99999", "want HOST:PORT"),
    ],
)
def test_what_is_no_address_is_refused(address, reason):
    with pytest.raises(ValueError, match=reason):
        join(address)


def test_where_nobody_answers_is_refused_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    began_s = monotonic()
    with pytest.raises(ValueError, match=re.escape(f"--ray 127.0.0.1:{port}: nobody answers there")):
        join(f"127.0.0.1:{port}")
    assert monotonic() - began_s < 15


def test_who_is_no_ray_is_refused_in_time():
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        began_s = monotonic()
        with pytest.raises(ValueError, match="takes in nobody of this machine"):
            join(f"127.0.0.1:{server.getsockname()[1]}")
        assert monotonic() - began_s < 15
