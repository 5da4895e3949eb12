"""Named ways to group a batch: all samples once, equal counts, and the same way after moves of a search."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.test_next_batches import NUM_SAMPLES, in_a_search, job_of
from tests.test_strategies import cost
from workbench.planner.groupings import Grouping, grouped, groups_of, way_of
from workbench.planner.sample_work import sample_work
from workbench.search.joint.choice import choice_of
from workbench.search.joint.evaluate import changed
from workbench.search.joint.grouping_moves import Exchange, Regroup, Reorder, Resize
from workbench.search.joint.layout_moves import CutStages, ShiftLayer
from workbench.search.joint.move import Space
from workbench.search.joint.proposals import Proposals
from workbench.search.joint.question import Question

COUNTS = (1, 2, 4, 8)
EQUAL = [way for way in Grouping if way is not Grouping.EVEN]


@given(st.integers(0, 1000), st.sampled_from(EQUAL), st.sampled_from(COUNTS), st.sampled_from((1, 2)))
def test_every_way_has_all_samples_once(seed: int, way: Grouping, count: int, replicas: int) -> None:
    job = job_of(seed)
    groups = grouped(job, cost(), way, max(count, replicas), replicas)
    assert {len(group) for group in groups} == {NUM_SAMPLES // max(count, replicas)}
    assert sorted(each for group in groups for each in group) == sorted(each.id for each in job.batch)


@given(st.integers(0, 1000), st.sampled_from(COUNTS))
def test_groups_of_equal_counts_stand_lightest_first_and_are_as_even_as_pairs_allow(seed: int, count: int):
    """Two groups differ by no more than the largest sample: each went to the lighter one with a place."""
    job = job_of(seed)
    groups = grouped(job, cost(), Grouping.EVEN_COUNTS, count, 1)
    work = sample_work(job, cost())
    seconds = {sample.id: sum(each) for sample, each in zip(job.batch, zip(*work, strict=True), strict=True)}
    sums = [sum(seconds[each] for each in group) for group in groups]
    assert {len(group) for group in groups} == {NUM_SAMPLES // count}
    assert sums == sorted(sums)
    if count == 2:
        assert sums[1] - sums[0] <= max(seconds.values()) * (1 + 1e-9)


@pytest.mark.parametrize("way", [Grouping.EVEN_COUNTS, Grouping.LIGHTEST_FIRST])
def test_another_number_of_microbatches_is_grouped_by_the_same_way(way: Grouping) -> None:
    job = job_of(0)
    space, choice = Space(job, cost(), {}), choice_of(job, in_a_search(way), cost())
    assert way_of(job, cost(), choice.microbatches) is way
    for size in (1, 4):
        found = changed(space, choice, (Resize(size),))
        assert len(groups_of(job, found.microbatches)) == NUM_SAMPLES // size
        assert found.microbatches == changed(space, choice, (Resize(size), Regroup(way))).microbatches
        assert way_of(job, cost(), found.microbatches) is way


def test_what_was_exchanged_by_hand_keeps_its_order_in_groups_of_another_size() -> None:
    job = job_of(0)
    space, choice = Space(job, cost(), {}), choice_of(job, in_a_search(Grouping.EVEN_COUNTS), cost())
    first, second, *_ = groups_of(job, choice.microbatches)
    held = changed(space, choice, (Exchange(first[0], second[0]),))
    assert way_of(job, cost(), held.microbatches) is None
    members = [each for group in groups_of(job, held.microbatches) for each in group]
    found = groups_of(job, changed(space, held, (Resize(4),)).microbatches)
    assert [set(group) for group in found] == [set(members[:4]), set(members[4:])]


@pytest.mark.parametrize("varies", [False, True])
def test_where_other_batches_count_only_rules_are_proposed(varies: bool) -> None:
    job = job_of(0)
    space = replace(Space(job, cost(), {}), varies=varies)
    choice = choice_of(job, in_a_search(Grouping.EVEN_COUNTS), cost())
    proposals = Proposals(
        space, choice, arrangement=None, hints=None, questions=set(Question), rng=random.Random(0)
    )
    asked = [move for moves in proposals.next(60, set()) for move in moves]
    assert any(isinstance(move, Regroup) for move in asked)
    assert any(isinstance(move, (Exchange, Reorder)) for move in asked) is not varies


def test_no_layer_moves_between_pieces_that_the_same_ranks_do() -> None:
    job = job_of(0)
    space, choice = Space(job, cost(), {}), choice_of(job, in_a_search(Grouping.ARRIVAL), cost())
    cut = changed(space, choice, (CutStages(2),))
    pieces = [(stage.module, stage.ranks) for stage in cut.stages]
    assert len(set(pieces)) < len(pieces)
    found = Proposals(space, cut, arrangement=None, hints=None, questions=set(Question), rng=random.Random(0))
    asked = [move for moves in found.next(60, set()) for move in moves]
    assert any(isinstance(move, CutStages) for move in asked)
    assert not any(isinstance(move, ShiftLayer) for move in asked)
