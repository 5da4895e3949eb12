"""Which choices a joint search makes candidates from, and that none of these comes twice."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from experiments.search.spaces import spaces
from workbench.plan.plan import Sharding
from workbench.planner.groupings import groups_of, resized, round_robin
from workbench.search.joint.choice import Choice, draft_of
from workbench.search.joint.evaluate import changed
from workbench.search.joint.grouping import exchanged
from workbench.search.joint.incumbents import BEST_SHARE, OTHERS, Incumbent, admitted, shares, site_of
from workbench.search.joint.move import Space
from workbench.search.joint.proposals import QUICK, Proposals, single_moves
from workbench.search.joint.question import Question
from workbench.search.joint.setting_moves import Keep

SPACE = next(space for space in spaces() if space.name == "audio frozen")
BY_SITE: dict[object, Choice] = {}
for _choice in SPACE.choices():
    BY_SITE.setdefault(site_of(_choice), _choice)
AMONG = Space(SPACE.job, SPACE.cost, {})
CHOICES = list(BY_SITE.values())


def incumbent(place: int, value: float, tried: int = 0) -> Incumbent:
    return Incumbent(value, CHOICES[place], place, "drawn", tried=tried)


def test_of_every_site_the_best_has_a_seat():
    incumbents = admitted([], incumbent(0, 3.0))
    incumbents = admitted(incumbents, incumbent(1, 2.0))
    assert [each.value for each in incumbents] == [2.0, 3.0]
    assert admitted(incumbents, incumbent(1, 2.5)) is None
    assert [each.value for each in admitted(incumbents, incumbent(0, 1.0))] == [1.0, 2.0]


def test_what_is_as_good_as_equal_has_one_seat():
    incumbents = [incumbent(0, 2.0)]
    assert admitted(incumbents, incumbent(1, 2.0)) is None
    assert [each.index for each in admitted(incumbents, incumbent(1, 2.0 - 1e-9))] == [1]


def test_a_better_choice_at_the_same_site_has_half_of_what_was_tried_there():
    (held,) = admitted([incumbent(0, 2.0, tried=9)], incumbent(0, 1.9))
    assert held.tried == 4.5


def test_another_number_of_microbatches_has_a_seat_of_its_own():
    held = CHOICES[0]
    ids = [sample.id for sample in SPACE.job.batch]
    counts = dict.fromkeys((each.module for each in held.microbatches), 1)
    single, paired = (
        Incumbent(value, replace(held, microbatches=round_robin(SPACE.job, groups, counts)), 0, "drawn")
        for value, groups in ((2.1, [(each,) for each in ids]), (2.0, [(ids[0], ids[1]), (ids[2], ids[3])]))
    )
    assert admitted([paired], single) == [paired, single]


def test_there_are_no_more_seats_than_said(monkeypatch):
    monkeypatch.setattr("workbench.search.joint.incumbents.MOST_INCUMBENTS", 5)
    assert len(CHOICES) > 5
    incumbents = []
    for index in range(len(CHOICES)):
        incumbents = admitted(incumbents, incumbent(index, 100.0 - index)) or incumbents
    assert [each.value for each in incumbents] == sorted(100.0 - index for index in range(len(CHOICES)))[:5]
    assert admitted(incumbents, incumbent(0, 101.0)) is None


def test_the_best_and_those_that_promise_most_share_a_round():
    many, few = incumbent(1, 2.0, tried=500), incumbent(2, 2.1)
    found = {each.index: count for each, count in shares([incumbent(0, 1.9), many, few], 24)}
    assert found[0] == round(BEST_SHARE * 24)
    assert sum(found.values()) >= 24
    rest = [
        incumbent(index, 2 + index / 100, tried=500 if index == 1 else 0) for index in range(1, OTHERS + 2)
    ]
    assert {each.index for each, _ in shares([incumbent(0, 1.9), *rest], 24)} == {0, *range(2, OTHERS + 2)}
    assert list(shares([many], 24)) == [(many, 24)]


def test_large_plans_get_fewer_candidates_of_a_round_by_the_effort_of_judging_them():
    best, alike, large, huge = (incumbent(place, 2 + place / 100) for place in range(OTHERS + 1))
    whole = {each.index: count for each, count in shares([best, alike, large, huge], 24)}
    best.effort, alike.effort, large.effort, huge.effort = 10.0, 5.0, 30.0, 10_000.0
    found = {each.index: count for each, count in shares([best, alike, large, huge], 24)}
    assert found == whole | {2: -(-whole[2] // 3), 3: 1}


def test_weights_that_a_move_shards_come_late_where_that_makes_many_stages():
    choice, keeps = next((each, keeps) for each in CHOICES if sharding_ones(keeps := keeps_of(each)))
    split = sharding_ones(keeps)
    assert split < set(keeps)
    places: Counter[bool] = Counter()
    for seed in range(100):
        asked = [moves[0] for moves in proposals(choice, seed).next(100, set()) if len(moves) == 1]
        for place, move in enumerate(move for move in asked if isinstance(move, Keep)):
            places[move in split] += place
    late, early = places[True] / len(split), places[False] / (len(keeps) - len(split))
    assert late > 1.5 * early


def keeps_of(choice: Choice) -> list[Keep]:
    moves = single_moves(AMONG, choice, draft_of(SPACE.job, choice), None)
    return [move for move in moves if isinstance(move, Keep)]


def sharding_ones(keeps: list[Keep]) -> set[Keep]:
    return {move for move in keeps if move.sharding is Sharding.PARAMETERS}


def proposals(choice: Choice, seed: int) -> Proposals:
    return Proposals(
        AMONG,
        choice,
        arrangement=None,
        hints=None,
        questions=set(Question),
        rng=random.Random(seed),
    )


@pytest.mark.parametrize("seed", range(3))
def test_no_choice_that_is_quick_to_come_by_is_proposed_twice(seed):
    seen: set[Choice] = set()
    one, other = CHOICES[0], replace(CHOICES[0], microbatches=CHOICES[0].microbatches[::-1])
    found = []
    for choice in (one, other):
        assert draft_of(SPACE.job, choice).microbatches
        asked = proposals(choice, seed).next(300, seen)
        assert len(asked) == len(set(asked)) == 300
        for moves in asked:
            is_quick = all(isinstance(move, QUICK) for move in moves)
            found += [changed(AMONG, choice, moves)] if is_quick else []
    assert len(found) > 20
    assert len(found) == len(set(found))
    assert one not in found


def test_samples_stand_in_a_microbatch_in_one_order_however_they_came_there():
    ids = [sample.id for sample in SPACE.job.batch]
    assert resized([(each,) for each in reversed(ids)], 2) == (tuple(ids[2:]), tuple(ids[:2]))
    pairs = round_robin(SPACE.job, ((ids[0], ids[2]), (ids[1], ids[3])), {"audio": 1, "llm": 1})
    swapped = exchanged(SPACE.job, pairs, ids[0], ids[3])
    assert groups_of(SPACE.job, swapped) == ((ids[2], ids[3]), (ids[0], ids[1]))
