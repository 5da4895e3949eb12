"""The proof that a plan's tasks fit one order, against the search for cycles that it replaces."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.fidelity.mutant_pool import pool
from tests.test_fsdp_plan import of_layers
from workbench.plan.deadlock import _by_communicator, _followers, _queues_of_slots
from workbench.plan.folded import checked_part
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan, Program
from workbench.plan.row_proofs import goes_forward
from workbench.plan.task_graph import reducers_of
from workbench.schedule.action import FSDP, MOVES, Action, Pass, reduction_of
from workbench.schedule.precedence import find_cycle

SEED, SWAPS_PER_PLAN = 5, 12


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    """Plans whose weights are gathered, freed, or copied to the host."""
    moved = {*FSDP, *MOVES}
    return {
        name: plan
        for name, plan in pool(mixes=("all",))
        if any(action.kind in moved for action in plan.program_actions)
    }


def has_cycle(lowered: Lowered) -> bool:
    """Whether any task waits for itself, with rows of a communicator one after another."""
    queues = _queues_of_slots(lowered, _by_communicator(lowered).values())
    return bool(find_cycle(_followers(lowered, queues)))


def swapped(plan: Plan, random: Random) -> Plan:
    """The plan with two neighbours of one program swapped, one of which is no pass over a microbatch."""
    moved = {*FSDP, *MOVES}
    places = [
        (number, index)
        for number, program in enumerate(plan.programs)
        for index in range(len(program.actions) - 2)
        if moved & {action.kind for action in program.actions[index : index + 2]}
    ]
    number, index = random.choice(places)
    actions = list(plan.programs[number].actions)
    actions[index : index + 2] = reversed(actions[index : index + 2])
    programs = list(plan.programs)
    programs[number] = Program(ranks=programs[number].ranks, actions=tuple(actions))
    return replace(plan, programs=tuple(programs))


def test_plans_that_move_weights_are_proved(plans: Mapping[str, Plan]) -> None:
    """Not all: unequal replicas wait for each other's passes, which ticks do not know."""
    lowered = {name: lower(plan) for name, plan in plans.items()}
    assert not [name for name, each in lowered.items() if has_cycle(each)]
    proved = [plans[name] for name, each in lowered.items() if goes_forward(each)]
    assert {Pass.FREE, Pass.OFFLOAD} <= {action.kind for plan in proved for action in plan.program_actions}


@pytest.mark.parametrize("part_of", [lambda plan: plan, checked_part], ids=["all replicas", "folded"])
def test_equal_replicas_that_shard_weights_are_proved(part_of: Callable[[Plan], Plan]) -> None:
    plan = of_layers(4, replicas=3, num_samples=6)
    part = part_of(plan)
    assert (len(part.stages) < len(plan.stages)) == (part_of is checked_part)
    assert goes_forward(lower(part))


def mutants(plans: Mapping[str, Plan]) -> Iterator[Lowered]:
    random = Random(SEED)
    for plan in plans.values():
        for _ in range(SWAPS_PER_PLAN):
            yield lower(swapped(plan, random))


def test_no_plan_with_a_cycle_is_proved(plans: Mapping[str, Plan]) -> None:
    verdicts = [(goes_forward(lowered), has_cycle(lowered)) for lowered in mutants(plans)]
    assert (True, True) not in verdicts
    assert {(True, False), (False, True)} <= set(verdicts)


class Group:
    """A gradient group, as far as its order goes."""

    def __init__(self, index: int, ranks: tuple[int, ...]) -> None:
        self.index, self.ranks = index, ranks


@given(
    st.lists(st.sets(st.integers(0, 5), min_size=1).map(sorted).map(tuple), min_size=1, max_size=6),
    st.sets(st.integers(0, 5), min_size=1),
)
def test_reducers_are_the_ranks_of_a_stage_by_their_groups(
    members: list[tuple[int, ...]], holders: set[int]
) -> None:
    """Whether or not the groups have ranks in common."""
    groups = [Group(index, ranks) for index, ranks in enumerate(members)]
    reduction: Action = reduction_of(0)
    reducers = reducers_of(lambda action: holders, groups, {reduction: tuple(range(len(groups)))})
    by_rank = {rank: each.groups for each in reducers[reduction] for rank in each.ranks}
    assert sum(len(each.ranks) for each in reducers[reduction]) == len(by_rank)
    assert len({each.groups for each in reducers[reduction]}) == len(reducers[reduction])
    assert by_rank == {
        rank: own
        for rank in holders
        if (own := tuple(group.index for group in groups if rank in group.ranks))
    }
