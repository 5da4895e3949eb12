"""The judge of mutants tells what a plan does, and the validator lets nothing through that it should not."""

from dataclasses import replace

import pytest

from experiments.fidelity.mutant_judge import judge
from experiments.fidelity.mutant_lanes import LaneKind, Lanes, Subject
from experiments.fidelity.mutant_meaning import Key, Meaning, meaning_of
from experiments.fidelity.mutant_pool import pool
from experiments.fidelity.mutant_rows import ROW_OPERATORS
from experiments.fidelity.mutant_verdict import Stalled, Verdict
from experiments.fidelity.mutants import PLAN_OPERATORS, Gate, Tally, count_one, mutants
from workbench.plan.deadlock import check_deadlock
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered, Route
from workbench.plan.plan import Plan, Sharding
from workbench.schedule.action import Action, Pass

SEED = 11
NUM_MUTANTS = 120


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
    assert kinds == set(Pass)
    stages = [stage for plan in plans.values() for stage in plan.stages]
    assert {1, 2} <= {stage.cp for stage in stages} & {stage.tp for stage in stages}
    assert {1, 2, 4} <= {stage.ep for stage in stages}
    modules = [settings for plan in plans.values() for settings in plan.settings.modules]
    assert {1, 2} <= {each.instances for each in modules if each.sharding is Sharding.PARAMETERS}
    assert any(each.sequence_parallel for each in modules)
    layers = [layer for plan in plans.values() for m in plan.model.modules for layer in m.layers]
    assert any(layer.tied for layer in layers)
    assert any(edge.also_before for plan in plans.values() for edge in plan.model.edges)
    assert any(len(plan.replicas("llm")) > 1 for plan in plans.values())
    assert any(len(on) > 1 for plan in plans.values() for on in plan.stages_on.values())
    assert any(row.route is Route.BROADCAST for plan in plans.values() for row in lower(plan).transfers)


def test_mutants_are_a_function_of_the_seed(plans):
    def drawn(seed: int) -> list[tuple[str, str]]:
        return [(m.parent, m.operator) for m in mutants(list(plans.items()), 60, seed)]

    assert drawn(SEED) == drawn(SEED)
    assert drawn(SEED) != drawn(SEED + 1)
    operators = {m.operator for m in mutants(list(plans.items()), 400, SEED)}
    assert operators == {operator.__name__ for operator in (*PLAN_OPERATORS, *ROW_OPERATORS)}


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
    outputs = dict(lowered.outputs) | {
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
    changed = row._replace(slices=(one, other, rest, *row.slices[1:]))
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


def test_collectives_in_opposite_orders_stall():
    key = Key("llm", 0)
    for order in ((0, 1), (1, 0)):
        lanes = Lanes()
        for rank, first in ((0, 0), (1, order[0])):
            for index in (first, 1 - first):
                lanes.begin(rank, Subject(LaneKind.SUM, index), (0, 1), {key: 1.0})
        lanes.begin(0, Subject(LaneKind.GATHER, ("llm", 0, 1)), (0, 1), {})  # on a lane of its own
        if order == (0, 1):
            assert [ended.subject.of for ended in lanes.advance()] == [0, 1]
            assert lanes.stuck() == "rank 0 in gather ('llm', 0, 1) of (0, 1)"
        else:
            with pytest.raises(Stalled, match=r"ranks \(0, 1\) meet at 0 and at 1"):
                lanes.advance()


def without(*gone: Action):
    return lambda actions: (action for action in actions if action not in gone)


def earlier(moved: Action, mark: Action):
    """`moved` stands just in front of `mark`."""

    def edit(actions):
        left = [action for action in actions if action != moved]
        at = left.index(mark)
        return [*left[:at], moved, *left[at:]]

    return edit


def first_of(plan: Plan, kind: Pass) -> Action:
    """An action of a round of a stage of the first rank, in the midst of its program."""
    found = [a for a in plan.program[0] if a.kind is kind]
    return found[len(found) // 2]


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        pytest.param(Pass.ALL_GATHER, Verdict.DEADLOCK, id="gathered-by-one"),
        pytest.param(Pass.REDUCE_SCATTER, Verdict.DEADLOCK, id="scattered-by-one"),
        pytest.param(Pass.FREE, Verdict.SAME, id="kept"),
    ],
)
def test_rounds_that_a_replica_misses(plans, meanings, kind: Pass, verdict: Verdict):
    """Weights that stay whole cost memory alone; `check` refuses them."""
    name = "all, shared out"
    damaged = with_program(plans[name], 0, without(first_of(plans[name], kind)))
    assert judge(damaged, meanings[name]).verdict is verdict


def test_weights_that_go_before_their_last_use(plans, meanings):
    name = "all, shared out"
    plan = plans[name]
    away = first_of(plan, Pass.FREE)
    program = plan.program[0]
    use = next(a for a in reversed(program[: program.index(away)]) if a.stage == away.stage)
    found = judge(with_program(plan, 0, earlier(away, use)), meanings[name])
    assert found.verdict is Verdict.OTHER
    assert f"rank 0 has no weights of stage {away.stage}" in found.reason


def test_exchanges_in_another_order_on_one_rank(plans, meanings):
    name = "all, shared out"
    plan = plans[name]
    one, other = [a for a in plan.program[0] if a.kind is Pass.ALL_GATHER][:2]
    assert judge(with_program(plan, 0, earlier(other, one)), meanings[name]).verdict is Verdict.DEADLOCK


def test_gradients_that_instances_do_not_add_up(plans, meanings):
    name = "shared out, 2 instances of 2"
    lowered = lower(plans[name])
    none = replace(lowered, reductions={})
    assert judge(none, meanings[name]).verdict is Verdict.OTHER


def test_a_stage_that_is_on_the_host(plans, meanings):
    name = "all, offload"
    plan = plans[name]
    away = next(action for action in plan.program[0] if action.kind is Pass.OFFLOAD)
    back = away._replace(kind=Pass.ONLOAD)

    def verdict_of(damage) -> Verdict:
        return judge(with_program(plan, 0, damage), meanings[name]).verdict

    assert verdict_of(without(away, back)) is Verdict.SAME
    for damage in (without(back), without(away), earlier(back, away)):
        assert verdict_of(damage) is Verdict.OTHER


def test_tied_weights_that_are_summed_apart(plans, meanings):
    """The head's stage brings its own copy's gradient alone."""
    name = "tied, interleaved"
    lowered = lower(plans[name])
    tied = next(group for group in lowered.groups if group.weights[0].shared is not None)
    assert len(tied.ranks) == 2
    left = {
        action: tuple(index for index in found if index != tied.index)
        for action, found in lowered.reductions.items()
    }
    assert judge(replace(lowered, reductions=left), meanings[name]).verdict is Verdict.OTHER


def test_experts_that_miss_a_holder_or_a_token(plans, meanings):
    name = "experts, tp 2, cp 2, ep 2"
    lowered = lower(plans[name])
    group = next(g for g in lowered.groups if g.weights[0].experts and len(g.ranks) > 1)
    groups = tuple(replace(g, ranks=g.ranks[:1]) if g is group else g for g in lowered.groups)
    assert judge(replace(lowered, groups=groups), meanings[name]).verdict is Verdict.OTHER
    keys = [key for key in meanings[name].gradients if key.expert is not None]
    assert len({key.expert for key in keys}) == 8


def test_a_stage_that_reads_aside_waits_for_its_own_copy(plans, meanings):
    name = "cross-attention, 3 stages"
    lowered = lower(plans[name])
    rows = [row for row in lowered.transfers if row.edge == "vision>llm" and row.producer.kind is Pass.F]
    assert len({row.consumer.stage for row in rows}) == 3
    outputs = dict(lowered.outputs) | {
        rows[-1].producer: tuple(n for n in lowered.outputs[rows[-1].producer] if n != rows[-1].row)
    }
    found = judge(replace(lowered, outputs=outputs), meanings[name])
    assert found.verdict is Verdict.DEADLOCK
    assert f"before {rows[-1].consumer}" in found.reason


@pytest.mark.parametrize("kind", [Pass.REDUCE_GRAD, Pass.W])
def test_rows_of_what_sends_nothing_are_refused(lowered, kind: Pass):
    """What mutants found: such a row was taken for one that comes."""
    row = first_row(lowered, kind=Pass.B)
    silent = row.producer._replace(kind=kind)
    rows = tuple(r._replace(producer=silent) if r.row == row.row else r for r in lowered.transfers)
    outputs = dict(lowered.outputs) | {row.producer: (), silent: (row.row,)}
    with pytest.raises(ValueError, match=f"{silent} neither sends nor receives"):
        check_deadlock(replace(lowered, transfers=rows, outputs=outputs))
