"""Joint search as a command: its tables, and workers by Ray."""

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
from workbench.cli.joint_searching import JointFlags, SearchRequest, fixed_of, search_jointly, stop_of
from workbench.cli.searching import Criterion
from workbench.explain.timeline import Timeline
from workbench.plan.plan import Plan
from workbench.planner.judged import JudgedBy
from workbench.planner.stage_counts import OUT_OF_TIME
from workbench.report.joint_tables import joint_table
from workbench.search.joint.drive import joint_search
from workbench.search.joint.evaluate import Judge
from workbench.search.joint.on_ray import join
from workbench.search.joint.question import Question
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


def test_ends_are_read():
    assert stop_of(JointFlags()) == Stop(seconds=60.0)
    assert stop_of(JointFlags(budget="2m", gap="2.5%")) == Stop(seconds=120.0, gap=0.025)
    assert stop_of(JointFlags(budget="20")) == Stop(seconds=20.0)
    assert stop_of(JointFlags(candidates=7)) == Stop(candidates=7)


def test_fixed_questions_are_read():
    assert fixed_of(["layout=dip", "layout=dip"]) == {Question.LAYOUT: "dip"}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"budget": "0s"}, "--budget: want a duration > 0 such as 60s, .*got '0s'"),
        ({"budget": "soon"}, "--budget: want a duration > 0 such as 60s"),
        ({"gap": "2"}, "want --gap as a percentage"),
        ({"candidates": 0}, "want candidates > 0, got 0"),
        ({"fix": ["layout"]}, "want --fix QUESTION=STRATEGY"),
        ({"fix": ["colour=dip"]}, "want --fix QUESTION=STRATEGY"),
        ({"fix": ["layout=nobody"]}, "want --fix QUESTION=STRATEGY"),
        ({"fix": ["layout=dip", "layout=fsdp"]}, "--fix layout names both dip and fsdp"),
        ({"fix": [f"{question}=dip" for question in Question]}, "so there is nothing to search"),
        ({"replay": Path("a.jsonl"), "ablate": "dip"}, "got --replay and --ablate; want one of the two"),
        ({"replay": Path("a.jsonl"), "log": Path("b.jsonl")}, "--replay takes no --log"),
        ({"ablate": "dip", "fix": ["layout=dip"]}, "--ablate takes no --fix"),
    ],
)
def test_what_is_typed_wrong_is_refused_before_any_search(said, reason):
    request = SearchRequest(small(), None, Criterion(), {}, JudgedBy.SIMULATOR, 0)
    with pytest.raises(ValueError, match=reason):
        search_jointly(request, JointFlags(**said), None, None, as_json=True)


def test_flags_of_a_joint_search_want_it():
    JointFlags().check_absent()
    JointFlags(budget="3s").check_absent()
    for said in ({"gap": "3%"}, {"fix": ["layout=dip"]}, {"workers": 2}, {"ablate": "dip"}):
        with pytest.raises(ValueError, match="wants --joint"):
            JointFlags(**said).check_absent()


RECORD = {
    "job": "j",
    "objective": "time",
    "joint_s": 0.2,
    "gain": 1.5,
    "best_single": "fsdp",
    "best_single_s": 0.3,
    "best_from": "fsdp",
    "lower_bound_s": 0.1,
    "gap": 0.5,
    "candidates": 10,
    "seconds": 25.0,
    "search_s": 5.0,
    "candidates_per_s": 2.0,
    "path": [],
}


def test_starts_that_ran_out_of_time_are_told() -> None:
    starts = [{"strategy": "fsdp", "iteration_s": 0.3}, {"strategy": "hsdp", "refusal": "does not fit"}]
    first, _, _ = joint_table({**RECORD, "starts": starts})
    assert first == "200 ms a step, 1.500 times as fast as the best strategy, fsdp with 300 ms"
    late = {"strategy": "oobleck", "refusal": OUT_OF_TIME}
    stopped = {"strategy": "dip", "iteration_s": 0.4, "stopped": True}
    first, _, last, *unjudged = joint_table({**RECORD, "starts": [*starts, late, stopped]})
    assert first == "200 ms a step, 1.500 times as fast as the best start judged in time, fsdp with 300 ms"
    assert str(last).endswith("10 candidates in 5.0 s after 20.0 s of starts, 2 a second")
    assert unjudged == [
        "2 of 4 starts planned in full; a larger --budget plans the others:",
        "  stopped, with their best plans so far: dip",
        "  not judged, out of time: oobleck",
    ]
