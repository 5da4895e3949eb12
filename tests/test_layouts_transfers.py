"""Boundary transfers between unequal layouts: backward is the exact adjoint of forward."""

from collections import defaultdict

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from runtime.step.transfers import accumulate, join, pack
from tests.layout_jobs import APART, planned, three_phase
from tests.tiny_valm import tiny_valm
from workbench.model.trainable import Trainable
from workbench.plan.deadlock import check_deadlock
from workbench.plan.lower import lower
from workbench.plan.lowered import Direction, Route
from workbench.plan.routing import routing_of
from workbench.plan.token_owners import held_runs

EVERYTHING = tiny_valm(vision=Trainable.ALL, audio=Trainable.ALL)
IMAGES = (1, 2, 0, 1, 1, 0, 2, 1, 3, 0, 1, 1)


class Boundaries:
    """All rows of a plan, carried in one process; tensors hold small integers, so sums are exact.

    A key is (edge, stage, microbatch, context-parallel place): what the ranks of that place hold.
    """

    def __init__(self, plan):
        self.lowered, self.plan = lower(plan), plan
        self.routing = routing_of(plan)
        self.random = torch.Generator().manual_seed(7)

    def integers(self, tokens, width):
        return torch.randint(-9, 10, (tokens, width), generator=self.random).to(torch.float64)

    def key(self, edge, action, rank):
        ranks = self.plan.stage[action.stage].ranks
        index = next(index for index, row in enumerate(ranks) if rank in row)
        return edge, action.stage, action.microbatch, index

    def first_rows(self, direction):
        """Rows that their producer itself sends."""
        rows = (row for row in self.lowered.transfers if row.direction is direction)
        return [row for row in rows if row.route is not Route.BROADCAST]

    def carry(self, direction, tensors):
        """Key of a consumer -> rows with their packed tensors; equal on all tensor-parallel ranks."""
        arrived, at = {}, defaultdict(list)
        for row in (row for row in self.lowered.transfers if row.direction is direction):
            if row.route is Route.BROADCAST:
                packed = arrived[row.after, row.source_rank]
            else:
                packed = pack(tensors[self.key(row.edge, row.producer, row.source_rank)], row.slices)
            for rank in row.destination_ranks:
                arrived[row.row, rank] = packed
                at[(*self.key(row.edge, row.consumer, rank), rank)].append((row, packed))
        for rank_key, pieces in at.items():
            same = next(pieces for key, pieces in at.items() if key[:4] == rank_key[:4])
            for (row, packed), (other, theirs) in zip(pieces, same, strict=True):
                assert row.slices == other.slices
                assert torch.equal(packed, theirs)
        return {key[:4]: pieces for key, pieces in at.items()}

    def given(self, stage, microbatch):
        """Runs by place."""
        held = self.plan.stage[stage]
        batch = self.plan.microbatches_of[held.module, held.replica][microbatch]
        module = self.plan.model.module(held.module)
        return held_runs(self.routing, batch, module.layers[held.layers[1] - 1].emits)


def assert_adjoint(plan):
    """<forward(x), y> = <x, backward(y)>, where y lives on what each place of a consumer receives."""
    boundaries = Boundaries(plan)
    x = _outputs(boundaries)
    z = {key: join(pieces) for key, pieces in boundaries.carry(Direction.FORWARD, x).items()}
    _assert_all_returned(boundaries, z)
    y = {key: boundaries.integers(*tensor.shape) for key, tensor in z.items()}
    gradients = boundaries.carry(Direction.BACKWARD, y)
    left = sum(float((z[key] * y[key]).sum()) for key in z)
    right = sum(float((x[key] * accumulate(gradients[key], x[key])).sum()) for key in x)
    assert left == right
    assert left != 0.0
    check_deadlock(boundaries.lowered)


def _outputs(boundaries):
    """What every place holds of what it gives."""
    x = {}
    for row in boundaries.first_rows(Direction.FORWARD):
        _, stage, microbatch, index = key = boundaries.key(row.edge, row.producer, row.source_rank)
        if key not in x:
            runs = boundaries.given(stage, microbatch)[index]
            x[key] = boundaries.integers(sum(run.num_tokens for run in runs), row.width)
    return x


def _assert_all_returned(boundaries, z):
    """A place sends the gradient of everything back that it has received."""
    returned = {key: torch.zeros(len(tensor), dtype=torch.int64) for key, tensor in z.items()}
    for row in boundaries.first_rows(Direction.BACKWARD):
        count = returned[boundaries.key(row.edge, row.producer, row.source_rank)]
        for piece in row.slices:
            count[piece.source_start : piece.source_start + piece.num_tokens] = 1
    assert all(count.all() for count in returned.values())


KINDS = {
    "equal": ((2, 1, 1), (2, 1, 1), (2, 1, 1)),
    "fan-in": ((4, 1, 1), (2, 1, 1), (1, 1, 1)),
    "fan-out": ((1, 1, 1), (1, 2, 1), (4, 1, 1)),
    "non-divisible": ((3, 1, 1), (4, 1, 1), (2, 1, 1)),
    "unequal-tp": ((1, 1, 1, 2), (2, 1, 1, 1), (1, 1, 1, 2)),
    "unequal-cp": ((1, 1, 2), (2, 1, 1), (1, 1, 3)),
    "cp-to-tp": ((2, 1, 2, 1), (1, 2, 1, 2), (1, 1, 2, 2)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_on_ranks_of_their_own(kind):
    vision, audio, llm = KINDS[kind]
    layouts = {"vision": vision, "audio": audio, "llm": llm}
    assert_adjoint(planned(EVERYTHING, layouts, microbatch=1, images=IMAGES, num_ranks=24))


SHARED = {
    "equal": ((2, 1, 1, 2), (2, 1, 1, 2), (2, 1, 1, 2)),
    "fan-in": ((4, 1, 1), (4, 1, 1), (2, 1, 1, 2)),
    "fan-out": ((1, 2, 1, 2), (2, 1, 1, 2), (4, 1, 1)),
    "non-divisible": ((3, 2, 1), (6, 1, 1), (2, 3, 1)),
    "unequal-cp": ((1, 1, 4), (2, 1, 2), (1, 1, 4)),
    "into-a-pipeline": ((8, 1, 1), (4, 1, 2), (2, 2, 1, 2)),
}


@pytest.mark.parametrize("window", [1, 2, None])
@pytest.mark.parametrize("kind", SHARED)
def test_on_the_same_ranks(kind, window):
    vision, audio, llm = SHARED[kind]
    layouts = {"vision": vision, "audio": audio, "llm": llm}
    plan = planned(
        EVERYTHING, layouts, microbatch=1, images=IMAGES, num_ranks=8, schedule=three_phase(window)
    )
    assert_adjoint(plan)


degrees = st.tuples(st.integers(1, 4), st.integers(1, 2), st.integers(1, 3), st.integers(1, 2))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(degrees, degrees, degrees, st.sampled_from([APART, three_phase(), three_phase(2)]))
def test_whatever_the_layouts(vision, audio, llm, schedule):
    """Apart, or the LLM's grid under the encoders' where the numbers of ranks are equal."""
    sizes = {dp * pp * cp * tp for dp, pp, cp, tp in (vision, audio, llm)}
    assume(schedule == APART or len(sizes) == 1)
    assume(12 % llm[0] == 0)
    layouts = {"vision": vision, "audio": audio, "llm": llm}
    assert_adjoint(
        planned(EVERYTHING, layouts, microbatch=1, images=IMAGES, num_ranks=144, schedule=schedule)
    )


def test_equal_replicas_on_the_same_ranks_send_nothing():
    layouts = dict.fromkeys(("vision", "audio", "llm"), (2, 1, 1, 2))
    plan = planned(EVERYTHING, layouts, microbatch=1, images=IMAGES, schedule=three_phase(1))
    assert {row.route for row in lower(plan).transfers} == {Route.LOCAL}


def test_fan_in_gathers_forward_and_selects_backward():
    layouts = {"vision": (4, 1, 1), "audio": (4, 1, 1), "llm": (2, 1, 1, 2)}
    plan = planned(EVERYTHING, layouts, microbatch=1, images=IMAGES, schedule=three_phase(2))
    rows = [row for row in lower(plan).transfers if ">" in row.edge]
    sent = {row.direction for row in rows if row.route is not Route.LOCAL}
    assert sent == {Direction.FORWARD}
    pairs = {(row.source_rank, *row.destination_ranks) for row in rows if row.route is Route.BROADCAST}
    assert pairs == {(0, 1), (1, 0), (2, 3), (3, 2)}, "each of two ranks gives the other its half"
