"""Plans of elastic steps: stages of several ranks lie in one node and split every microbatch."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.oobleck.chaos_job import batch, elastic_job
from runtime.elastic.job import Reduction, held_by, members_of, plan_step
from runtime.elastic.moves import moves_between
from runtime.elastic.replan import after_loss, start_layout
from workbench.timing.accept import accept

NODES = tuple("abcdef")
JOBS = {
    (ranks, width): elastic_job(
        6, ranks_per_node=ranks, ranks_per_stage=width, layers_per_rank=8 // (ranks // width)
    )
    for ranks, width in ((1, 1), (2, 1), (2, 2), (4, 2), (3, 3))
}


@settings(max_examples=25)
@given(st.sampled_from(sorted(JOBS)), st.integers(2, 6), st.integers(0, 3))
def test_the_ranks_of_a_stage_hold_the_same_layers_of_one_node_and_share_out_samples(shape, num_nodes, step):
    ranks, width = shape
    job = JOBS[shape]
    layout = start_layout(job, NODES[:num_nodes])
    samples = batch(step)
    plan = plan_step(job, layout, samples)
    accept(plan)
    members, held = members_of(layout, ranks), held_by(job, layout)
    assert sorted(plan.ranks) == list(range(num_nodes * ranks))
    for rank, member in enumerate(members):
        layers = {layer for stage in plan.stages_on[rank] for layer in range(*stage.layers)}
        assert layers == set(held[member])
    for first in range(0, len(members), width):
        stage = members[first : first + width]
        assert len({member.node for member in stage}) == 1
        assert len({held[member] for member in stage}) == 1
    used = Counter(item.sample for m in plan.microbatches for row in m.rows for item in row)
    assert used == Counter({sample.id: 1 for sample in samples})
    sizes = {len(microbatch.rows) for microbatch in plan.microbatches}
    assert sizes == {job.samples_per_microbatch // width}


@settings(max_examples=25)
@given(st.sampled_from(sorted(JOBS)), st.data())
def test_after_a_loss_every_rank_gets_what_it_misses_from_one_that_has_it(shape, data):
    job = JOBS[shape]
    layout = start_layout(job, NODES)
    lost = data.draw(st.sampled_from(NODES))
    replanned = after_loss(job, layout, [lost], [])
    members = members_of(replanned.layout, job.ranks_per_node)
    had, needs = held_by(job, layout), held_by(job, replanned.layout)
    arriving: Counter[tuple[int, tuple[str, int]]] = Counter()
    for move in replanned.moves:
        span = move.span(1001)
        assert span.start == arriving[move.destination_rank, move.owner]  # parts meet
        arriving[move.destination_rank, move.owner] = span.stop
        layer = job.chain.owners.index(move.owner)
        assert layer in had[members[move.source_rank]]
        assert members[move.source_rank].node != lost
        assert (move.source_rank - move.destination_rank) % job.lanes == 0  # the same part
    for rank, member in enumerate(members):
        for layer in set(needs[member]) - set(had.get(member, ())):
            assert arriving.pop((rank, job.chain.owners[layer])) == 1001
    assert not arriving


def test_ranks_of_a_stage_take_turns_to_give_a_layer():
    job = JOBS[2, 2]
    layout = start_layout(job, NODES[:4])
    assert moves_between(job, layout, layout, (), layout) == ()
    moves = after_loss(job, layout, [], ["e"]).moves
    assert {move.source_rank % 2 for move in moves} == {0, 1}


def test_what_cannot_be_sharded_is_named():
    job = JOBS[2, 2]
    with pytest.raises(ValueError, match="split among the 2 ranks of a stage: want a multiple of 2"):
        replace(job, samples_per_microbatch=3)
    assert job.reduction is Reduction.LAYERWISE
