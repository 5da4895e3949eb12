"""Changes that were planned before they came: the same as planned anew, and training that takes them up."""

import os
import pickle
import signal
from collections import Counter
from dataclasses import replace

import pytest

from experiments.bench import replanning
from experiments.oobleck.chaos_job import elastic_job, one_process
from runtime.elastic.history import Cause
from runtime.elastic.prepared import prepare, read_prepared
from runtime.elastic.replan import after_loss, start_layout, write_plan
from runtime.elastic.training import ElasticTraining
from tests.waiting import eventually
from workbench.plan.plan import Precision

REL_TOL_64 = 1e-11


@pytest.mark.parametrize("name", ["whole", "sharded"])
def test_what_is_looked_up_is_what_would_be_planned(tmp_path, name):
    job = replanning.jobs()[name]
    for number, (layout, lost, joining) in enumerate(list(replanning.changes(job))[-3:]):
        prepare(job, layout, 2, tmp_path / str(number), lambda: True)
        found = read_prepared(tmp_path / str(number), layout, lost, joining)
        assert found is not None
        anew = after_loss(job, layout, lost, joining)
        assert found.replanned == anew
        write_plan(job, anew.layout, 2, tmp_path / "anew")
        assert pickle.loads(found.plan.read_bytes()) == pickle.loads((tmp_path / "anew").read_bytes())


def test_what_stops_training_and_what_was_given_up_is_not_there(tmp_path):
    job = elastic_job(2)
    layout = start_layout(job, ("a", "b"))
    prepare(job, layout, 0, tmp_path / "few", lambda: True)  # one node is not enough, three are too many
    assert read_prepared(tmp_path / "few", layout, ("a",), ()) is None
    assert read_prepared(tmp_path / "few", layout, (), ("c",)) is None
    prepare(job, layout, 0, tmp_path / "stopped", lambda: False)
    assert list((tmp_path / "stopped").iterdir()) == []


def test_training_goes_on_with_prepared_plans_and_the_losses_of_one_process():
    job = replace(elastic_job(4, ranks_per_node=2, layers_per_rank=4), precision=Precision.FLOAT64)
    with ElasticTraining(job, tuple("abcd")) as training:
        training.train(2)
        wait_until_prepared(training)
        os.kill(training.nodes.process_ids("b")[1], signal.SIGKILL)
        training.train(4)
        wait_until_prepared(training)
        training.join(("e",))
        training.train(5)
        assert [(each.cause, each.is_prepared) for each in training.changes] == [
            (Cause.START, False),
            (Cause.LOSS, True),
            (Cause.JOIN, True),
        ]
        assert "e" in [node for pipeline in training.layout.pipelines for node in pipeline]
        assert training.losses == pytest.approx(one_process(5), rel=REL_TOL_64)


def test_a_layer_comes_in_parts_from_all_pipelines_that_hold_it_and_is_the_same():
    job = replace(elastic_job(6, layers_per_rank=4), precision=Precision.FLOAT64)
    with ElasticTraining(job, tuple("abcdef")) as training:
        training.train(2)
        lost = training.layout.pipelines[0][1]
        moves = after_loss(job, training.layout, (lost,), ()).moves
        parts = Counter((move.owner, move.destination_rank) for move in moves)
        assert min(parts.values()) >= 2
        os.kill(training.nodes.process_ids(lost)[0], signal.SIGKILL)
        training.train(5)
        assert training.changes[-1].lost == (lost,)
        assert training.losses == pytest.approx(one_process(5), rel=REL_TOL_64)


def wait_until_prepared(training: ElasticTraining) -> None:
    assert eventually(lambda: training.is_prepared)
