"""Elastic stages whose ranks shard weights and optimizer state: parts are kept, moved, saved."""

from dataclasses import replace

import pytest

from experiments.oobleck.chaos_job import elastic_job
from runtime.elastic.history import Cause
from runtime.elastic.job import ElasticJob, Reduction, plan_step
from runtime.elastic.progress import read_progress
from runtime.elastic.training import ElasticTraining
from runtime.state.tensor_files import keys_in
from tests.test_elastic import FLOAT32, kill, matches_one_process, one_process
from workbench.elastic.layout import NodeLayout
from workbench.plan.lower import lower
from workbench.plan.parameter_shards import shard_units
from workbench.plan.plan import Sharding


def sharded_job(num_nodes: int, layers_per_rank: int = 4) -> ElasticJob:
    """Nodes of two ranks, which shard the weights of one stage."""
    whole = elastic_job(num_nodes, ranks_per_node=2, ranks_per_stage=2, layers_per_rank=layers_per_rank)
    return replace(whole, sharding=Sharding.PARAMETERS)


def test_nodes_that_share_out_weights_die_leave_and_join():
    job = sharded_job(6)
    with ElasticTraining(job, tuple("abcdef")) as training:
        training.train(2)
        kill(training, "c", rank=1)
        training.train(3)
        training.warn(("a",))
        training.train(4)
        training.join(("g", "h"))
        training.train(6)
        matches_one_process(training)
        causes = [change.cause for change in training.changes]
        assert causes == [Cause.START, Cause.LOSS, Cause.WARNING, Cause.JOIN]
        assert sum(change.num_bytes for change in training.changes) > 0


def test_a_save_holds_every_part_once_and_is_gone_on_from(tmp_path):
    job = sharded_job(4)
    with ElasticTraining(job, tuple("abcd")) as training:
        training.train(3)
        training.save(tmp_path / "whole")
        first = training.losses
    keys = [key for part in (tmp_path / "whole").iterdir() if part.is_dir() for key in keys_in(part)]
    assert len(set(keys)) == len(keys)
    first_parts, second_parts = (sum(f"part {n} of 2/weight" in key for key in keys) for n in (1, 2))
    assert first_parts == second_parts > 8
    progress = read_progress(job, tmp_path / "whole")
    with ElasticTraining(job, tuple("wxyz"), start=progress) as training:
        training.train(5)
        assert (*first, *training.losses) == pytest.approx(one_process(5), rel=FLOAT32)
    with pytest.raises(ValueError, match="holds weights in 2 parts, the job keeps them in 1"):
        read_progress(elastic_job(4, layers_per_rank=4), tmp_path / "whole")


def test_pipelines_are_instances_however_they_are_cut():
    """Of one node and of two: a layer's part is added up by the ranks at its place in both."""
    job = sharded_job(6, layers_per_rank=8)
    plan = plan_step(job, NodeLayout(pipelines=(("a",), ("b", "c"))), job.batch(0))
    assert {unit.ranks for unit in shard_units(plan)} == {(0, 1), (2, 3), (4, 5)}
    sums = {group.ranks for group in lower(plan).groups}
    assert sums == {(0, 2), (1, 3), (0, 4), (1, 5), (0, 2, 4), (1, 3, 5)}  # the last two of the tied table


def test_what_cannot_be_sharded_is_named():
    with pytest.raises(ValueError, match="stages have one rank; want templates of 2 or more GPUs a stage"):
        replace(elastic_job(4), sharding=Sharding.PARAMETERS)
    with pytest.raises(ValueError, match="got 'optimizer'; want 'none' or 'parameters'"):
        replace(sharded_job(4), sharding=Sharding.OPTIMIZER)
    with pytest.raises(ValueError, match="summed layerwise, got reduction 'after backward'"):
        replace(sharded_job(4), reduction=Reduction.AFTER_BACKWARD)
