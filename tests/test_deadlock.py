"""The deadlock check against an executor that really runs the plan: sound plans pass, broken ones do not."""

import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.oracles import Execution, can_run
from tests.plans import chain_module, cluster, disjoint_plan, finish, sample, two_encoders
from tests.strategies import plans
from workbench.model.model_graph import connect
from workbench.plan.build import with_programs
from workbench.plan.deadlock import check_deadlock
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered, Route
from workbench.plan.plan import Plan, Program
from workbench.plan.stage import Stage
from workbench.schedule.action import Pass, parse_action


def two_stage_plan(num_microbatches=4):
    model = connect("llm", (chain_module("llm", "text", [True, True]),))
    batch = [sample(index, images=0, sounds=0) for index in range(num_microbatches)]
    return disjoint_plan(model, batch, {"llm": [1, 1]})


def with_program(plan: Plan, rank: int, actions) -> Plan:
    """The plan with another program on one rank, the other ranks of its program keeping theirs."""
    programs = [Program(ranks=(rank,), actions=tuple(actions))]
    for program in plan.programs:
        others = tuple(r for r in program.ranks if r != rank)
        if others:
            programs.append(Program(ranks=others, actions=program.actions))
    return replace(plan, programs=tuple(sorted(programs, key=lambda p: p.ranks)))


def text(line):
    return [parse_action(word) for word in line.split()]


@examples(60)
@given(plans())
def test_every_built_plan_runs_and_passes(plan):
    lowered = lower(plan)
    assert can_run(lowered)
    check_deadlock(lowered)


@examples(250)
@given(plans(), st.data())
def test_no_mutant_that_cannot_run_passes(plan, data):
    """One action or row swapped, dropped, doubled or sent to another peer."""
    mutant, kind = mutate(lower(plan), data.draw)
    assume(mutant is not None)
    runs = can_run(mutant)
    event(f"{kind}: {'runs' if runs else 'cannot run'}")
    refusal = refused(mutant)
    if not runs:
        assert refusal is not None, f"{kind} cannot run but passed"
    elif kind == "swap actions":  # nothing else is wrong with it, so it has to pass
        assert refusal is None, f"{kind} runs but was refused: {refusal}"


def refused(lowered: Lowered) -> str | None:
    try:
        check_deadlock(lowered)
    except ValueError as error:
        return str(error)
    return None


def mutate(lowered: Lowered, draw):
    kinds = ["swap actions", "move action", "drop action", "double action"]
    if any(row.route is not Route.LOCAL for row in lowered.transfers):
        kinds += ["swap rows", "drop row", "double row", "re-peer row", "lose input", "lose output"]
    kind = draw(st.sampled_from(kinds))
    mutant = MUTATIONS[kind](lowered, draw)
    return mutant, kind


def _swap_actions(lowered, draw):
    """Before lowering is done again: another order of the same passes is a plan of its own."""
    rank, program = _a_program(lowered, draw)
    a, b = sorted(draw(st.sets(st.integers(0, len(program) - 2), min_size=2, max_size=2)))
    program[a], program[b] = program[b], program[a]
    plan = lowered.plan
    for peer in _peers(plan, rank):
        plan = with_program(plan, peer, program)
    return lower(plan)


def _move_action(lowered, draw):
    """On one rank alone and without lowering again."""
    rank, program = _a_program(lowered, draw)
    action = program.pop(draw(st.integers(0, len(program) - 2)))
    program.insert(draw(st.integers(0, len(program) - 1)), action)
    return replace(lowered, plan=with_program(lowered.plan, rank, program))


def _drop_action(lowered, draw):
    rank, program = _a_program(lowered, draw)
    del program[draw(st.integers(0, len(program) - 1))]
    return replace(lowered, plan=with_program(lowered.plan, rank, program))


def _double_action(lowered, draw):
    rank, program = _a_program(lowered, draw)
    action = program[draw(st.integers(0, len(program) - 2))]
    program.insert(draw(st.integers(0, len(program) - 1)), action)
    return replace(lowered, plan=with_program(lowered.plan, rank, program))


def _swap_rows(lowered, draw):
    a, b = (_a_row(lowered, draw).row for _ in range(2))
    assume(a != b)
    return with_rows_swapped(lowered, a, b)


def with_rows_swapped(lowered, a, b):
    """Two rows change places, and with them their numbers."""
    number = {a: b, b: a}

    def renamed(row):
        after = row.after if row.after is None else number.get(row.after, row.after)
        return row._replace(row=number.get(row.row, row.row), after=after)

    rows = tuple(sorted(map(renamed, lowered.transfers), key=lambda row: row.row))
    tables = [
        {action: tuple(sorted(number.get(n, n) for n in numbers)) for action, numbers in table.items()}
        for table in (lowered.inputs, lowered.outputs)
    ]
    return replace(lowered, transfers=rows, inputs=tables[0], outputs=tables[1])


def _drop_row(lowered, draw):
    """From the rows, its consumer still waiting: the rows behind it move up."""
    gone = _a_row(lowered, draw).row
    rows = tuple(
        row._replace(row=row.row - (row.row > gone), after=_without(row.after, gone))
        for row in lowered.transfers
        if row.row != gone
    )
    last = len(rows)  # where the lost row's consumer looks: there is nothing
    tables = [
        {a: tuple(last if n == gone else n - (n > gone) for n in numbers) for a, numbers in table.items()}
        for table in (lowered.inputs, lowered.outputs)
    ]
    return replace(lowered, transfers=rows, inputs=tables[0], outputs=tables[1])


def _without(after, gone):
    if after is None or after == gone:
        return None
    return after - (after > gone)


def _double_row(lowered, draw):
    row = _a_row(lowered, draw)
    table = draw(st.sampled_from(["inputs", "outputs"]))
    action = row.consumer if table == "inputs" else row.producer
    numbers = dict(getattr(lowered, table))
    numbers[action] = (*numbers[action], row.row)
    return replace(lowered, **{table: numbers})


def _repeer_row(lowered, draw):
    row = _a_row(lowered, draw)
    others = [rank for rank in lowered.plan.ranks if rank not in (row.source_rank, *row.destination_ranks)]
    assume(others)
    other = draw(st.sampled_from(others))
    change = {"source_rank": other}
    if draw(st.booleans()):
        change = {"destination_ranks": (other, *row.destination_ranks[1:])}
    rows = list(lowered.transfers)
    rows[row.row] = row._replace(**change)
    return replace(lowered, transfers=tuple(rows))


def _lose_input(lowered, draw):
    row = _a_row(lowered, draw)
    return replace(lowered, inputs=_removed(lowered.inputs, row.consumer, row.row))


def _lose_output(lowered, draw):
    row = _a_row(lowered, draw)
    assume(row.route is Route.P2P)  # broadcasts follow their row whatever `outputs` says
    return replace(lowered, outputs=_removed(lowered.outputs, row.producer, row.row))


def _removed(table, action, number):
    return {**table, action: tuple(n for n in table[action] if n != number)}


def _a_program(lowered, draw):
    rank = draw(st.sampled_from(lowered.plan.ranks))
    program = list(lowered.plan.program[rank])
    assume(len(program) > 2)
    return rank, program


def _peers(plan, rank):
    return next(program.ranks for program in plan.programs if rank in program.ranks)


def _a_row(lowered, draw):
    return draw(st.sampled_from([row for row in lowered.transfers if row.route is not Route.LOCAL]))


MUTATIONS = {
    "swap actions": _swap_actions,
    "move action": _move_action,
    "drop action": _drop_action,
    "double action": _double_action,
    "swap rows": _swap_rows,
    "drop row": _drop_row,
    "double row": _double_row,
    "re-peer row": _repeer_row,
    "lose input": _lose_input,
    "lose output": _lose_output,
}


def test_ring_through_program_order_names_ranks_actions_and_rows():
    plan = two_stage_plan()
    wrong = with_program(plan, 1, text("1F2 1B2 1F0 1B0 1F1 1B1 1F3 1B3 STEP"))
    message = refused(lower(wrong))
    assert message is not None
    assert (
        message.splitlines()[0] == "deadlock (buffered): every one waits for the next, the last for the first"
    )
    assert "rank 0 before 0B0" in message
    assert "row 4 (llm backward, 1B0 to 0B0, rank 1 to 0)" in message
    assert "rank 1 with [0]: recv 0 (0F0 to 1F0), " in message
    assert "send 4 (1B0 to 0B0) <--" in message
    assert "recv 4 (1B0 to 0B0) <--" in message
    assert "rank 1 runs ... 1F2 1B2 1F0 1B0 <-- 1F1" in message


def test_rows_out_of_order_block_only_as_rendezvous():
    """The gradient of microbatch 0 queues in front of its activation: by tag it arrives, in order never."""
    lowered = lower(two_stage_plan(2))
    lowered = with_rows_swapped(lowered, row_of(lowered, "0F0"), row_of(lowered, "1B0"))
    assert Execution(lowered).run()
    message = refused(lowered)
    assert message is not None
    assert message.startswith("deadlock (rendezvous)")
    assert "send" in message
    assert "recv" in message


def test_sends_against_row_order_are_refused():
    lowered = lower(two_stage_plan(3))
    lowered = with_rows_swapped(lowered, row_of(lowered, "0F0"), row_of(lowered, "0F1"))
    assert Execution(lowered).run()
    with pytest.raises(
        ValueError, match=r"rank 0 sends row 1 \(.*0F0.*before row 0 .*but rank 1 receives in row order"
    ):
        check_deadlock(lowered)


def row_of(lowered, producer):
    return next(row.row for row in lowered.transfers if str(row.producer) == producer)


def test_opposite_rows_of_one_tick_are_one_unit():
    """Steady 1F1B: a forward and a backward cross each tick; numbered either way, both must pass."""
    lowered = lower(two_stage_plan(6))
    check_deadlock(lowered)
    execution = Execution(lowered)
    assert execution.run()
    crossing = [
        (one, other)
        for one, other in pairwise(lowered.transfers)
        if execution.ticks[one.producer] == execution.ticks[other.producer]
        and one.source_rank != other.source_rank
    ]
    assert len(crossing) >= 3
    for one, other in crossing:
        swapped = with_rows_swapped(lowered, one.row, other.row)
        assert can_run(swapped)
        check_deadlock(swapped)


def test_pass_missing_on_one_rank_of_a_stage_names_both():
    plan = disjoint_plan(two_encoders(), [sample(0)], {"vision": [3], "audio": [2], "llm": [4]})
    stage = replace(plan.stages[2], ranks=((2, 3),))
    plan = replace(plan, stages=(*plan.stages[:2], stage), cluster=cluster(4))
    program = plan.program[2]
    plan = replace(plan, programs=(*plan.programs, Program(ranks=(3,), actions=program)))
    check_deadlock(lower(plan))
    short = with_program(plan, 3, [action for action in program if str(action) != "2B0"])
    with pytest.raises(ValueError, match="rank 2 before 2B0: waits for rank 3, which never runs it"):
        check_deadlock(lower(short))


def test_gradient_groups_need_all_members_in_one_order():
    """Two replicas of an LLM in two stages on one rank each: reducing in opposite orders blocks both."""
    model = connect("llm", (chain_module("llm", "text", [True, True]),))
    stages = [
        Stage(
            id=2 * replica + index,
            module="llm",
            replica=replica,
            layers=(index, index + 1),
            ranks=((replica,),),
        )
        for replica in range(2)
        for index in range(2)
    ]
    plan = finish(model, [sample(i, images=0, sounds=0) for i in range(2)], stages, replicas=2)
    check_deadlock(lower(plan))
    program = list(plan.program[1])
    one, other = (i for i, action in enumerate(program) if action.kind is Pass.REDUCE_GRAD)
    program[one], program[other] = program[other], program[one]
    crossed = lower(with_program(plan, 1, program))
    assert not can_run(crossed)
    with pytest.raises(ValueError, match=r"gradient group 0 of ranks \[0, 1\]\n  gradient group 1"):
        check_deadlock(crossed)
    del program[min(one, other)]
    with pytest.raises(ValueError, match="every rank must reduce it once, rank 1 does 0 times, rank 0 1"):
        check_deadlock(replace(lower(plan), plan=with_program(plan, 1, program)))


def test_large_plan_is_checked_in_seconds():
    """48 stages and 64 microbatches: 6,144 passes and as many rows."""
    model = connect("llm", (chain_module("llm", "text", [True] * 48),))
    batch = [sample(index, images=0, sounds=0) for index in range(64)]
    lowered = lower(disjoint_plan(model, batch, {"llm": [1] * 48}))
    start_s = time.process_time()
    check_deadlock(lowered)
    assert time.process_time() - start_s < 10


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(0, 2), min_size=1, max_size=6), st.booleans())
def test_encoder_copies_on_every_llm_stage_run_and_pass(num_stages, images, trainable):
    """The encoder whole on the ranks of every LLM stage; the LLM reads the first one's."""
    model = connect(
        "vlm",
        (
            chain_module("vision", "image", [trainable, True]),
            chain_module("llm", "text", [trainable] * num_stages),
        ),
    )
    stages = [
        Stage(id=2 * position, module="vision", replica=position, layers=(0, 2), ranks=((position,),))
        for position in range(num_stages)
    ] + [
        Stage(
            id=2 * position + 1,
            module="llm",
            replica=0,
            layers=(position, position + 1),
            ranks=((position,),),
        )
        for position in range(num_stages)
    ]
    batch = [sample(index, images=count, sounds=0) for index, count in enumerate(images)]
    draft = finish(model, batch, stages)
    copies = [
        replace(m, replica=position)
        for m in draft.microbatches
        for position in range(num_stages if m.module == "vision" else 1)
    ]
    lowered = lower(with_programs(replace(draft, programs=(), microbatches=tuple(copies))))
    assert can_run(lowered)
    check_deadlock(lowered)
