"""Elastic training of a DAG of modules, some of them frozen: a template spans all of them."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.data.batches import SyntheticSource
from runtime.elastic.job import ElasticJob, held_by, plan_step
from runtime.elastic.replan import start_layout
from runtime.elastic.training import ElasticTraining
from runtime.reference import Reference
from tests.command_line import JOB
from workbench.data.sample import Sample
from workbench.elastic.model_chain import model_chain
from workbench.elastic.node_specification import plan_templates
from workbench.job.job import Job, load_job
from workbench.plan.plan import Sharding


@pytest.fixture
def found(tmp_path: Path) -> Job:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return load_job(path)


def elastic(found: Job, width: int = 1) -> ElasticJob:
    """At most nine layers on a rank, so that every pipeline has two nodes or more."""

    def batch(step: int) -> tuple[Sample, ...]:
        return tuple(replace(sample, id=len(found.batch) * step + sample.id) for sample in found.batch)

    chain = model_chain(found.model, (width,), lambda *_: 1.0, lambda *_: 1, 9)
    return ElasticJob(
        model=found.model,
        chain=chain,
        templates=plan_templates(chain.chain, width, 5, 1),
        batch=batch,
        samples_per_microbatch=width,
        sharding=Sharding.NONE if width == 1 else Sharding.PARAMETERS,
        source=SyntheticSource(0),
        wait_s=30.0,
        step_s=30.0,
    )


def one_process(job: ElasticJob, steps: int) -> list[float]:
    def plan(step: int):
        return plan_step(job, start_layout(job, tuple("abcde")), job.batch(step))

    reference = Reference(plan(0), seed=job.seed, dtype=torch.float64, optimizer=job.optimizer)
    losses = []
    for step in range(steps):
        reference.plan = plan(step)
        losses.append(reference.step(job.source).loss)
    return losses


@pytest.mark.parametrize("width", [1, 2])
def test_a_node_with_layers_of_several_modules_is_lost_and_nothing_changes(found, width):
    job = elastic(found, width)
    with ElasticTraining(job, tuple("abcde")) as training:
        training.train(1)
        victim, modules = next(
            (member.node, {job.chain.owners[layer][0] for layer in layers})
            for member, layers in held_by(job, training.layout).items()
            if len({job.chain.owners[layer][0] for layer in layers}) > 1
        )
        assert len(modules) > 1
        os.kill(training.nodes.process_ids(victim)[0], signal.SIGKILL)
        training.train(3)
        assert training.changes[-1].lost == (victim,)
        assert training.layout.num_nodes == 4
        assert training.losses == pytest.approx(one_process(job, 3), rel=2e-6)
