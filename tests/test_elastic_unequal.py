"""Elastic pipelines whose stages have unequally many ranks: planned, run, recovered, against one process."""

from dataclasses import replace

import pytest

from experiments.oobleck.chaos_job import batch, elastic_job, one_process
from runtime.elastic.history import Cause
from runtime.elastic.job import ElasticJob, held_by, plan_step
from runtime.elastic.layerwise import last_backwards
from runtime.elastic.replan import start_layout
from runtime.elastic.training import ElasticTraining
from sim.predict import predict
from tests.test_elastic import kill
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile
from workbench.data.sample import Sample
from workbench.elastic.layout import NodeLayout
from workbench.memory.stage import state_of
from workbench.plan.plan import Precision, Sharding
from workbench.plan.tied import equal_stages
from workbench.timing.accept import accept

PARITY = 1e-9


def unequal_job(num_nodes: int) -> ElasticJob:
    """Nodes of three ranks; stages of one rank and of two."""
    job = elastic_job(num_nodes, ranks_per_node=3, ranks_per_stage=(1, 2), layers_per_rank=4)
    return replace(job, precision=Precision.FLOAT64, batch=four)


def four(step: int) -> tuple[Sample, ...]:
    """Two microbatches, so that three nodes make two pipelines."""
    return batch(step)[:4]


def widths(job: ElasticJob) -> dict[int, list[int]]:
    return {t.num_nodes: [stage.num_gpus for stage in t.stages] for t in job.templates.templates}


def test_templates_choose_unequal_stages_and_plans_follow_them():
    job = unequal_job(3)
    assert widths(job) == {1: [1, 2], 2: [1, 2, 2, 1]}
    assert job.lanes == 2
    plan = plan_step(job, NodeLayout(pipelines=(("a",), ("b", "c"))), job.batch(0))
    ranks = {stage.layers: [] for stage in plan.stages}
    for stage in plan.stages:
        ranks[stage.layers].append(stage.ranks[0][0])
    assert ranks == {
        (0, 4): [0, 0],
        (4, 8): [1, 2],
        (0, 1): [3, 3],
        (1, 4): [4, 5],
        (4, 7): [6, 7],
        (7, 8): [8, 8],
    }
    layers = [list(held) for held in held_by(job, NodeLayout(pipelines=(("a",), ("b", "c")))).values()]
    assert layers[:3] == [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]


def test_a_rank_of_a_narrow_stage_holds_its_weights_once_and_sums_them_once():
    job = unequal_job(3)
    lowered, _ = accept(plan_step(job, start_layout(job, tuple("abc")), job.batch(0)))
    plan = lowered.plan
    narrow = [stage for stage in plan.stages if len(equal_stages(plan, stage)) > 1]
    assert narrow
    for stage in narrow:
        rank = stage.flat_ranks[0]
        assert {held.id for held, _, _ in state_of(plan, rank)} == {equal_stages(plan, stage)[0]}
        summed = [a.stage for a in lowered.reductions if a.stage in equal_stages(plan, stage)]
        assert len(summed) == 1
        backwards = last_backwards(plan.program[rank], {s: equal_stages(plan, stage) for s in summed})
        (position,) = {at for at, stage_id in backwards.items() if stage_id in summed}
        later = plan.program[rank][position + 1 :]
        assert not any(action.kind.name == "B" for action in later)


def test_the_simulator_predicts_such_a_step():
    job = unequal_job(3)
    lowered, memory = accept(plan_step(job, start_layout(job, tuple("abc")), job.batch(0)))
    trace = predict(lowered, memory, CostModel(ideal_profile()))
    assert len({span.rank for span in trace.spans}) == 9


def test_nodes_with_unequal_stages_die_and_join():
    job = unequal_job(3)
    with ElasticTraining(job, tuple("abc")) as training:
        training.train(2)
        assert sorted(training.layout.sizes) == [1, 2]
        kill(training, training.layout.pipelines[1][0], rank=1)  # of the longer one
        training.train(3)
        assert training.layout.sizes == (1, 1)
        training.join(("d",))
        training.train(4)
        assert training.losses == pytest.approx(one_process(4, four), rel=PARITY)
        assert [change.cause for change in training.changes] == [Cause.START, Cause.LOSS, Cause.JOIN]
        assert sum(change.num_bytes for change in training.changes) > 0


def test_what_unequal_stages_cannot_do_is_named():
    with pytest.raises(ValueError, match=r"stages have \[1, 2\]; want templates of one width, or 'none'"):
        replace(unequal_job(3), sharding=Sharding.PARAMETERS)
    with pytest.raises(ValueError, match=r"among the 1 or 2 ranks of a stage: want a multiple of 2"):
        replace(unequal_job(3), samples_per_microbatch=3)
