"""Lowering: rows carry every item where it is needed, backward is the transpose, groups cover weights."""

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.plans import WIDTH, chain_module, disjoint_plan, finish, sample, two_encoders
from workbench.model.layer import Matmul
from workbench.model.model_graph import connect
from workbench.plan.build import with_programs
from workbench.plan.lower import lower
from workbench.plan.lowered import Direction, Route, Weights
from workbench.plan.stage import Stage
from workbench.schedule.action import Action, Pass

CUTS = {"vision": [2, 1], "audio": [2], "llm": [2, 2]}
BATCH = [sample(0), sample(1, images=0), sample(2, images=2, sounds=0), sample(3, images=0, sounds=0)]


def test_every_item_reaches_its_consumer_once():
    plan = disjoint_plan(two_encoders(), BATCH, CUTS)
    lowered = lower(plan)
    for edge, items in (("vision>llm", {(0, 0), (2, 0), (2, 1)}), ("audio>llm", {(0, 0), (1, 0)})):
        rows = [t for t in lowered.transfers if t.edge == edge and t.direction is Direction.FORWARD]
        assert sorted(tuple(s.item) for row in rows for s in row.slices) == sorted(items)
        for row in rows:
            assert row.num_tokens == sum(s.num_tokens for s in row.slices)
            assert row.num_bytes == row.num_tokens * WIDTH * 4


def test_slices_fill_the_consumer_tensor_without_gaps():
    plan = disjoint_plan(two_encoders(), BATCH, CUTS)
    filled: dict[tuple[Action, str], list[tuple[int, int]]] = {}
    for row in lower(plan).transfers:
        spans = filled.setdefault((row.consumer, row.edge), [])
        spans += [(s.destination_start, s.destination_start + s.num_tokens) for s in row.slices]
    for spans in filled.values():
        spans.sort()
        assert spans[0][0] == 0
        assert all(end == start for (_, end), (start, _) in pairwise(spans))


def test_backward_rows_are_the_transpose_of_the_forward_rows_that_carry_gradients():
    lowered = lower(disjoint_plan(two_encoders(), BATCH, CUTS))
    forward = [t for t in lowered.transfers if t.direction is Direction.FORWARD]
    backward = [t for t in lowered.transfers if t.direction is Direction.BACKWARD]
    transposed = {
        (t.edge, t.producer.stage, t.consumer.stage, t.producer.microbatch, t.consumer.microbatch): t
        for t in forward
    }
    assert backward
    for row in backward:
        key = (
            row.edge,
            row.consumer.stage,
            row.producer.stage,
            row.consumer.microbatch,
            row.producer.microbatch,
        )
        partner = transposed[key]
        assert (row.source_rank, row.destination_ranks) == (partner.destination_rank, (partner.source_rank,))
        assert [(s.item, s.destination_start, s.source_start) for s in row.slices] == [
            (s.item, s.source_start, s.destination_start) for s in partner.slices
        ]


def test_frozen_chain_sends_no_gradient_and_text_only_microbatch_has_no_backward():
    lowered = lower(disjoint_plan(two_encoders(), BATCH, CUTS))
    internal = [t for t in lowered.transfers if t.edge == "vision" and t.direction is Direction.BACKWARD]
    assert internal == []  # the first vision stage is frozen with nothing trainable upstream
    llm_backwards = [a for a in lowered.plan.program_actions if a.stage == 4 and a.kind is Pass.B]
    assert [a.microbatch for a in llm_backwards] == [0, 1, 2]  # sample 3 has no trainable part


def test_trainable_llm_has_all_backwards_but_asks_missing_encoders_for_nothing():
    lowered = lower(disjoint_plan(two_encoders(llm=(True,) * 4), BATCH, CUTS))
    backwards = [a.microbatch for a in lowered.plan.program_actions if a.stage == 4 and a.kind is Pass.B]
    assert backwards == [0, 1, 2, 3]
    rows = [t for t in lowered.transfers if t.edge == "vision>llm" and t.direction is Direction.BACKWARD]
    assert [t.producer.microbatch for t in rows] == [0, 2]


def test_inputs_and_outputs_index_all_rows():
    lowered = lower(disjoint_plan(two_encoders(), BATCH, CUTS))
    assert [t.row for t in lowered.transfers] == list(range(len(lowered.transfers)))
    assert sorted(r for rows in lowered.inputs.values() for r in rows) == list(range(len(lowered.transfers)))
    assert sorted(r for rows in lowered.outputs.values() for r in rows) == list(range(len(lowered.transfers)))


def test_rows_of_a_pair_stand_in_the_order_of_their_producers():
    """Numbering by tick: no row is numbered before one that must happen for it to exist."""
    lowered = lower(disjoint_plan(two_encoders(llm=(True,) * 4), BATCH, CUTS))
    position = {}
    for program in lowered.plan.programs:
        position |= {action: index for index, action in enumerate(program.actions)}
    for stage in lowered.plan.stage:
        sent = [t for t in lowered.transfers if t.producer.stage == stage]
        assert [position[t.producer] for t in sent] == sorted(position[t.producer] for t in sent)


def test_replicated_encoder_reads_the_copy_on_its_own_ranks():
    model = connect(
        "one-encoder", (chain_module("vision", "image", [True]), chain_module("llm", "text", [True] * 2))
    )
    stages = [
        Stage(id=0, module="vision", replica=0, layers=(0, 1), ranks=((1,),)),
        Stage(id=1, module="vision", replica=1, layers=(0, 1), ranks=((0,),)),
        Stage(id=2, module="llm", replica=0, layers=(0, 1), ranks=((0,),)),
        Stage(id=3, module="llm", replica=0, layers=(1, 2), ranks=((1,),)),
    ]
    plan = finish(model, [sample(0, sounds=0)], stages, replicas=1)
    copies = tuple(replace(m, replica=1) for m in plan.microbatches if m.module == "vision")
    plan = with_programs(replace(plan, microbatches=plan.microbatches + copies, programs=()))
    rows = [t for t in lower(plan).transfers if t.edge == "vision>llm"]
    assert {t.route for t in rows} == {Route.LOCAL}
    assert {t.producer.stage for t in rows if t.direction is Direction.FORWARD} == {1}
    assert Action(0, Pass.B, 0) not in plan.program_actions  # the copy nobody reads has no backward
    assert lower(plan).groups[-1].ranks == (0, 1)  # but its weights are the same weights


def test_tensor_parallel_boundary_between_modules_goes_leader_to_leader_then_broadcast():
    model = connect(
        "one-encoder", (chain_module("vision", "image", [True]), chain_module("llm", "text", [True] * 2))
    )
    cuts, grids = {"vision": (1,), "llm": (1, 1)}, {"vision": (1, 2), "llm": (1, 2)}
    rows = lower(disjoint_plan(model, [sample(0, sounds=0)], cuts, grids=grids)).transfers
    edge = [(t.route, t.source_rank, t.destination_ranks, t.after) for t in rows if t.edge == "vision>llm"]
    assert edge == [
        (Route.P2P, 0, (2,), None),
        (Route.BROADCAST, 2, (3,), 0),
        (Route.P2P, 2, (0,), None),
        (Route.BROADCAST, 0, (1,), rows[-2].row),
    ]
    inside = [(t.source_rank, t.destination_rank) for t in rows if t.edge == "llm"]
    assert inside == [(2, 4), (3, 5), (4, 2), (5, 3)]


def test_all_ranks_of_unequal_grids_send_and_every_token_still_crosses_once():
    """A replica of TP 2 to one of TP 4: through leaders one rank of each would send."""
    model = connect(
        "one-encoder", (chain_module("vision", "image", [True]), chain_module("llm", "text", [True]))
    )
    grids = {"vision": (1, 2), "llm": (1, 4)}
    rows = lower(disjoint_plan(model, [sample(0, images=1, sounds=0)], grids=grids)).transfers
    sent = [(t.direction, t.source_rank, t.destination_rank, t.num_tokens) for t in rows if t.after is None]
    assert sent == [
        (Direction.FORWARD, 0, 2, 2),
        (Direction.FORWARD, 1, 3, 2),
        *((Direction.BACKWARD, 2 + index, index % 2, 1) for index in range(4)),
    ]
    for rank in range(6):
        received = [row for row in rows if rank in row.destination_ranks]
        assert sum(row.num_tokens for row in received) == 4, "all of the image or of its gradient"


def test_gradient_groups_hold_every_trainable_weight_once_per_replica():
    plan = disjoint_plan(two_encoders(llm=(True, False, True, True)), BATCH[:2], CUTS, replicas=2)
    lowered = lower(plan)
    weights = [w for group in lowered.groups for w in group.weights]
    assert weights == [
        Weights("llm", 3),
        Weights("llm", 2),
        Weights("llm", 0),
        Weights("audio", 1),
        Weights("vision", 2),
    ]
    assert [group.ranks for group in lowered.groups] == [(4, 9), (4, 9), (3, 8), (2, 7), (1, 6)]
    assert all(group.num_elements == WIDTH * WIDTH for group in lowered.groups)


def test_tied_weight_on_two_stages_is_one_group_over_both():
    llm = chain_module("llm", "text", [True] * 3)
    first, middle, last = llm.layers
    shared = (("linear.weight", "embedding"),)
    extra = Matmul(name="own", in_features=WIDTH, out_features=2)
    tied = replace(
        llm,
        layers=(
            replace(first, tied=shared),
            middle,
            replace(last, tied=shared, operators=(*last.operators, extra)),
        ),
    )
    plan = disjoint_plan(connect("llm", (tied,)), [sample(0, images=0, sounds=0)], {"llm": [1, 1, 1]})
    lowered = lower(plan)
    group = next(g for g in lowered.groups if g.weights[0].shared == "embedding")
    assert group.ranks == (0, 2)
    assert group.num_elements == WIDTH * WIDTH
    assert lowered.reductions == {
        Action(0, Pass.REDUCE_GRAD): (group.index,),
        Action(2, Pass.REDUCE_GRAD): (group.index,),
    }
    own = next(g for g in lowered.groups if g.weights == (Weights("llm", 2),))
    assert own.num_elements == 2 * WIDTH


def test_replicas_with_different_tp_are_refused():
    model = connect("llm", (chain_module("llm", "text", [True]),))
    stages = [
        Stage(id=0, module="llm", replica=0, layers=(0, 1), ranks=((0,),)),
        Stage(id=1, module="llm", replica=1, layers=(0, 1), ranks=((1, 2),)),
    ]
    batch = [sample(0, images=0, sounds=0), sample(1, images=0, sounds=0)]
    with pytest.raises(ValueError, match=r"'llm': replicas with different tensor-parallel degrees \[1, 2\]"):
        finish(model, batch, stages, replicas=2)
