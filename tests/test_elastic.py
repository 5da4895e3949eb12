"""Elastic training on gloo: nodes die, hang, leave with a warning and join; no step is lost or repeated."""

import json
import multiprocessing
import multiprocessing.connection as mpc
import os
import random
import signal
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch.distributed import Work

from experiments.oobleck.chaos import Chaos, chaos_evidence, undisturbed
from experiments.oobleck.chaos_job import LLAMA, elastic_job, one_process
from runtime.elastic import nodes
from runtime.elastic.history import Cause, ElasticFailed
from runtime.elastic.interruptible import _InterruptibleClock
from runtime.elastic.job import Member, held_by
from runtime.elastic.progress import STAMP, read_progress
from runtime.elastic.training import ElasticTraining
from runtime.world.clock import Awaited, Clock
from tests.waiting import PATIENCE_S, eventually
from workbench.elastic.reconfigure import CannotContinueError
from workbench.plan.plan import Precision
from workbench.stopped import is_stopped

HUNG_S = 0.5  # a wait for a rank that hangs
FLOAT32 = 2e-6  # relative, of a loss after a few steps


def matches_one_process(training: ElasticTraining) -> None:
    """Every step once, in order, with the loss that one process computes in float64."""
    assert [done.step for done in training.steps] == list(range(training.step))
    assert training.losses == pytest.approx(one_process(training.step), rel=FLOAT32)


def kill(training: ElasticTraining, node: str, number: int = signal.SIGKILL, rank: int = 0) -> None:
    os.kill(training.nodes.process_ids(node)[rank], number)


def test_a_killed_node_is_survived_and_nobody_is_restarted():
    job = elastic_job(4, ranks_per_node=2, layers_per_rank=4)
    with ElasticTraining(job, ("a", "b", "c", "d")) as training:
        training.train(2)
        before = {node: training.nodes.process_ids(node) for node in "acd"}
        kill(training, "b", rank=1)  # its other rank lives on, and is ended with it
        training.train(4)
        assert training.nodes.process_ids("b") == ()
        assert {node: training.nodes.process_ids(node) for node in "acd"} == before
        training.join(("e",))
        training.train(6)
        matches_one_process(training)
        assert [change.cause for change in training.changes] == [Cause.START, Cause.LOSS, Cause.JOIN]
        loss = training.changes[1]
        assert (loss.lost, loss.sizes) == (("b",), (1, 2))
        assert loss.num_bytes > 0
        assert loss.noticed_s <= loss.stopped_s <= loss.ready_s
        assert training.layout.num_nodes == 4


def test_a_rank_that_hangs_is_found_and_its_node_left_out(monkeypatch, capsys):
    """By waits that end: those for it, which are short; all others are patient."""
    hung = multiprocessing.get_context("fork").RawValue("i", 0)
    wait = _InterruptibleClock.wait

    def wait_for_it_in_short(clock: Clock, work: Work, awaited: Awaited) -> None:
        if is_stopped(hung.value):
            clock._timeout = timedelta(seconds=HUNG_S)
        wait(clock, work, awaited)

    monkeypatch.setattr(_InterruptibleClock, "wait", wait_for_it_in_short)
    with ElasticTraining(elastic_job(3), ("a", "b", "c")) as training:
        training.train(1)
        its = training.nodes._processes[Member(node="c", slot=0)]

        def wait_for_others_first(pipes: list[mpc.Connection], timeout: float) -> list[object]:
            others = [pipe for pipe in pipes if pipe is not its.pipe]
            return mpc.wait(others, PATIENCE_S) if others else mpc.wait(pipes, timeout)

        supervisors = SimpleNamespace(wait=wait_for_others_first, Connection=mpc.Connection)
        monkeypatch.setattr(nodes, "mpc", supervisors)
        hung.value = its.process.pid
        kill(training, "c", signal.SIGSTOP)
        assert eventually(lambda: is_stopped(hung.value))
        training.job = replace(training.job, wait_s=HUNG_S)  # the supervisor's
        training.train(2)
        matches_one_process(training)
        assert training.changes[-1].lost == ("c",)
    assert "stopped by a signal" not in capsys.readouterr().err  # its silence told


def test_warned_nodes_give_what_they_hold_before_they_go():
    job = elastic_job(4, num_faults=0, layers_per_rank=4)
    with ElasticTraining(job, ("a", "b", "c", "d")) as training:
        training.train(1)
        training.warn(("a", "d"))  # more than f at once: no copy may be left without them
        training.train(3)
        matches_one_process(training)
        assert training.changes[-1].cause is Cause.WARNING
        assert training.layout.num_nodes == 2
        with pytest.raises(ValueError, match="node 'a' was warned but is not training; nodes are c, b"):
            training.warn(("a",))


def test_a_node_that_waits_takes_the_place_of_one_that_training_cannot_do_without():
    job = elastic_job(4, layers_per_rank=4)
    with ElasticTraining(job, tuple("abcd")) as training:
        training.join(("e",))
        training.train(1)
        assert training.layout.num_nodes == 4  # e waits: templates are planned for four nodes
        kill(training, "b")
        training.train(2)
        matches_one_process(training)
        assert (training.changes[-1].lost, training.changes[-1].joined) == (("b",), ("e",))


def test_below_the_threshold_progress_is_saved_and_training_goes_on_from_it(tmp_path):
    job = elastic_job(2)
    with ElasticTraining(job, ("a", "b")) as training:
        training.train(3)
        kill(training, "a")
        with pytest.raises(CannotContinueError, match="1 nodes are left"):
            training.train(5)
        assert training.save(tmp_path / "saved").step == 3
        first = training.losses
    progress = read_progress(job, tmp_path / "saved")
    with ElasticTraining(job, ("x", "y"), start=progress) as training:
        training.train(5)
        assert (*first, *training.losses) == pytest.approx(one_process(5), rel=FLOAT32)
    others = {
        "seed 0, this training of 7": replace(job, seed=7),
        "precision float32, this training of float64": replace(job, precision=Precision.FLOAT64),
        "graph": replace(job, model=elastic_job(2, config=LLAMA | {"rope_theta": 500.0}).model),
    }
    for words, other in others.items():
        with pytest.raises(ValueError, match=f"saved is of {words}"):
            read_progress(other, tmp_path / "saved")
    stamp = json.loads((tmp_path / "saved" / STAMP).read_text())
    told = {name: stamp.pop(name) for name in ("seed", "precision", "graph")}
    (tmp_path / "saved" / STAMP).write_text(json.dumps(stamp))  # as earlier versions write it
    assert [read_progress(other, tmp_path / "saved").step for other in others.values()] == [3, 3, 3]
    (tmp_path / "saved" / STAMP).write_text(json.dumps(stamp | told | {"data": "random samples 12"}))
    assert read_progress(job, tmp_path / "saved").step == 3
    with pytest.raises(ValueError, match="saved is of data random samples 12, this training of examples 34"):
        read_progress(replace(job, data="examples 34"), tmp_path / "saved")
    (tmp_path / "saved" / STAMP).write_text(
        '{"step": 3, "model": "other", "owners": [["llm", 0]], "parts": 1}'
    )
    with pytest.raises(ValueError, match="is of model 'other' with 1 layers, want 'six-blocks' with 8"):
        read_progress(job, tmp_path / "saved")


def test_a_model_whose_last_copies_are_lost_is_refused_by_name(tmp_path):
    job = elastic_job(4, num_faults=0, layers_per_rank=4)
    with ElasticTraining(job, tuple("abcd")) as training:
        training.train(1)
        for pipeline in training.layout.pipelines:
            kill(training, pipeline[-1])  # every holder of the last layer
        with pytest.raises(
            CannotContinueError, match=r"all nodes that held layer .* go back to a checkpoint"
        ):
            training.train(2)
        with pytest.raises(ElasticFailed, match="no process holds layer"):
            training.save(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()


def test_chaos_leaves_the_losses_what_they_are(tmp_path):
    job = elastic_job(5)
    ordeal = Chaos(job, 3, random.Random(2), tmp_path).run()
    last = max(session.first + len(session.steps) for session in ordeal.sessions)
    evidence = chaos_evidence(ordeal, undisturbed(job, last))
    assert len(ordeal.kills) >= 3
    failed = [claim.text for claim in evidence.claims if not claim.holds]
    assert [text for text in failed if "replanning takes" not in text] == []  # seconds are the command's


def test_stages_of_two_ranks_share_out_samples_and_outlive_a_node():
    job = elastic_job(5, ranks_per_node=2, ranks_per_stage=2, layers_per_rank=4)
    with ElasticTraining(job, tuple("abcde")) as training:
        training.train(1)
        held = held_by(job, training.layout)
        assert all(len({held[m] for m in held if m.node == node}) == 1 for node in "abcde")
        kill(training, "c", rank=1)
        training.train(2)
        training.join(("f",))
        training.train(3)
        matches_one_process(training)
        assert [change.cause for change in training.changes] == [Cause.START, Cause.LOSS, Cause.JOIN]
