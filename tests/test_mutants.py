"""The judge of mutants tells what a plan does, and the validator lets nothing through that it should not."""

from dataclasses import replace

import pytest

from experiments.fidelity.mutant_judge import judge
from experiments.fidelity.mutant_meaning import Meaning, meaning_of
from experiments.fidelity.mutant_operators import OPERATORS
from experiments.fidelity.mutant_pool import pool
from experiments.fidelity.mutant_rows import ROW_OPERATORS
from experiments.fidelity.mutant_verdict import Stalled, Verdict, check_lanes
from experiments.fidelity.mutants import Gate, Tally, count_one, mutants
from workbench.plan.deadlock import check_deadlock
from workbench.plan.lower import lower
from workbench.plan.lowered import GradientGroup, Lowered, Route, Weights
from workbench.plan.plan import Plan
from workbench.schedule.action import Pass

SEED = 11
NUM_MUTANTS = 200


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return dict(pool(mixes=("all",)))


@pytest.fixture(scope="module")
def meanings(plans: dict[str, Plan]) -> dict[str, Meaning]:
    return {name: meaning_of(plan) for name, plan in plans.items()}


def test_the_pool_is_valid_and_as_diverse_as_it_says(plans, meanings):
    for name, plan in plans.items():
        lowered = lower(plan)
        check_deadlock(lowered)
        assert judge(lowered, meanings[name]).verdict is Verdict.SAME, name
    kinds = {action.kind for plan in plans.values() for action in plan.program_actions}
    assert {Pass.F, Pass.B, Pass.I, Pass.W, Pass.REDUCE_GRAD, Pass.STEP} <= kinds
    assert any(stage.cp > 1 for plan in plans.values() for stage in plan.stages)
    assert any(len(plan.replicas("llm")) > 1 for plan in plans.values())
    assert any(len(on) > 1 for plan in plans.values() for on in plan.stages_on.values())
    assert any(row.route is Route.BROADCAST for plan in plans.values() for row in lower(plan).transfers)


def test_mutants_are_a_function_of_the_seed(plans):
    def drawn(seed: int) -> list[tuple[str, str]]:
        return [(m.parent, m.operator) for m in mutants(list(plans.items()), 60, seed)]

    assert drawn(SEED) == drawn(SEED)
    assert drawn(SEED) != drawn(SEED + 1)
    operators = {m.operator for m in mutants(list(plans.items()), 400, SEED)}
    assert operators == {operator.__name__ for operator in (*OPERATORS, *ROW_OPERATORS)}


def test_nothing_false_is_accepted(plans, meanings):
    tally = Tally()
    seen: dict[Gate, int] = {}
    for mutant in mutants(list(plans.items()), NUM_MUTANTS, SEED):
        gate, _ = count_one(tally, mutant, meanings[mutant.parent])
        seen[gate] = seen.get(gate, 0) + 1
    assert tally.false_accepts == []
    assert tally.crashes == []
    assert seen[Gate.ACCEPTED] > NUM_MUTANTS / 10
    assert seen[Gate.CHECK] > NUM_MUTANTS / 10
    assert seen[Gate.DEADLOCK] > 0
    assert tally.as_json()["num_mutants"] == NUM_MUTANTS


# The judge, on damage that is known


def first_row(lowered: Lowered, *, kind: Pass = Pass.F):
    return next(r for r in lowered.transfers if r.route is Route.P2P and r.producer.kind is kind)


@pytest.fixture(scope="module")
def lowered(plans: dict[str, Plan]) -> Lowered:
    return lower(plans["all, cornstarch"])


@pytest.fixture(scope="module")
def meaning(meanings: dict[str, Meaning]) -> Meaning:
    return meanings["all, cornstarch"]


def test_a_row_that_is_never_sent_is_a_deadlock(lowered, meaning):
    row = first_row(lowered)
    outputs = lowered.outputs | {
        row.producer: tuple(n for n in lowered.outputs[row.producer] if n != row.row)
    }
    found = judge(replace(lowered, outputs=outputs), meaning)
    assert found.verdict is Verdict.DEADLOCK
    assert f"rank {row.destination_rank} before {row.consumer}" in found.reason


@pytest.mark.parametrize("kind", [Pass.F, Pass.B])
def test_tokens_in_another_order_are_another_meaning(lowered, meaning, kind: Pass):
    row = first_row(lowered, kind=kind)
    piece = row.slices[0]
    one = piece._replace(destination_start=piece.destination_start + 1, num_tokens=1)
    other = piece._replace(source_start=piece.source_start + 1, num_tokens=1)
    rest = piece._replace(
        source_start=piece.source_start + 2,
        destination_start=piece.destination_start + 2,
        num_tokens=piece.num_tokens - 2,
    )
    changed = replace(row, slices=(one, other, rest, *row.slices[1:]))
    rows = tuple(changed if r.row == row.row else r for r in lowered.transfers)
    assert judge(replace(lowered, transfers=rows), meaning).verdict is Verdict.OTHER


def with_program(plan: Plan, rank: int, edit) -> Lowered:
    programs = tuple(
        replace(p, actions=tuple(edit(p.actions))) if rank in p.ranks else p for p in plan.programs
    )
    return lower(replace(plan, programs=programs))


def test_weights_that_miss_a_microbatch_or_count_it_twice_are_another_meaning(plans, meanings):
    name = "all, zb-h1"
    plan = plans[name]
    action = next(a for a in plan.program_actions if a.kind is Pass.W)
    rank = plan.stage[action.stage].flat_ranks[0]
    without = with_program(plan, rank, lambda actions: (a for a in actions if a != action))
    assert judge(without, meanings[name]).verdict is Verdict.OTHER
    stays = with_program(plan, rank, lambda actions: actions)
    assert judge(stays, meanings[name]).verdict is Verdict.SAME


def test_a_sum_that_misses_a_replica_is_another_meaning(plans, meanings):
    name = "2 replicas"
    lowered = lower(plans[name])
    group = next(group for group in lowered.groups if len(group.ranks) == 2)
    alone = replace(group, ranks=group.ranks[:1])
    groups = tuple(alone if g is group else g for g in lowered.groups)
    assert judge(replace(lowered, groups=groups), meanings[name]).verdict is Verdict.OTHER


def test_reductions_in_opposite_orders_stall():
    groups = [
        GradientGroup(index=i, ranks=(0, 1), weights=(Weights("llm", i),), num_elements=1) for i in range(2)
    ]
    check_lanes({0: [(0, 1.0), (1, 1.0)], 1: [(0, 1.0), (1, 1.0)]}, groups)
    with pytest.raises(Stalled, match="gradient groups wait for each other"):
        check_lanes({0: [(0, 1.0), (1, 1.0)], 1: [(1, 1.0), (0, 1.0)]}, groups)


@pytest.mark.parametrize("kind", [Pass.REDUCE_GRAD, Pass.W])
def test_rows_of_what_sends_nothing_are_refused(lowered, kind: Pass):
    """What mutants found: such a row was taken for one that comes."""
    row = first_row(lowered, kind=Pass.B)
    silent = row.producer._replace(kind=kind)
    rows = tuple(replace(r, producer=silent) if r.row == row.row else r for r in lowered.transfers)
    outputs = lowered.outputs | {row.producer: (), silent: (row.row,)}
    with pytest.raises(ValueError, match=f"{silent} neither sends nor receives"):
        check_deadlock(replace(lowered, transfers=rows, outputs=outputs))
