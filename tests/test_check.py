"""The plan checker: valid plans pass; each broken rule is named with the thing and the value."""

from dataclasses import replace

import pytest

from tests.plans import disjoint_plan, sample, two_encoders
from workbench.data.sample import Item
from workbench.plan.check import check
from workbench.plan.plan import Plan, Program
from workbench.schedule.action import Action, Pass, parse_action

CUTS = {"vision": [2, 1], "audio": [2], "llm": [2, 2]}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return disjoint_plan(two_encoders(llm=(True,) * 4), [sample(i) for i in range(4)], CUTS, replicas=2)


def with_actions(plan: Plan, rank: int, edit) -> Plan:
    programs = []
    for program in plan.programs:
        actions = edit(list(program.actions)) if rank in program.ranks else program.actions
        programs.append(Program(ranks=program.ranks, actions=tuple(actions)))
    return replace(plan, programs=tuple(programs))


def with_stage(plan: Plan, stage_id: int, **changes: object) -> Plan:
    stages = tuple(replace(s, **changes) if s.id == stage_id else s for s in plan.stages)
    return replace(plan, stages=stages)


def test_built_plans_pass(plan):
    check(plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"id": 1}, "stage ids must be unique, 1 is used twice", id="same-id"),
        pytest.param(
            {"layers": (0, 9)}, r"stage 0: layers \[0, 9\).*which has 3 layers", id="too-many-layers"
        ),
        pytest.param({"layers": (1, 1)}, r"stage 0: layers \[1, 1\)", id="no-layers"),
        pytest.param({"layers": (1, 2)}, r"'vision' replica 0: layers \[0, 1\) are in no stage", id="gap"),
        pytest.param(
            {"layers": (0, 3)}, r"'vision' replica 0: layers \[2, 3\) are covered twice", id="overlap"
        ),
        pytest.param(
            {"ranks": ((99,),)}, r"stage 0: rank 99 is not there, .* has ranks 0..9", id="no-such-rank"
        ),
        pytest.param({"ranks": ((0, 0),)}, r"stage 0: a rank stands twice", id="rank-twice"),
        pytest.param({"ranks": ()}, r"stage 0: ranks must be a cp x tp grid", id="no-ranks"),
        pytest.param({"module": "visoin"}, "has no module 'visoin'; it has vision, audio, llm", id="module"),
    ],
)
def test_broken_stage_is_named(plan, changes, message):
    with pytest.raises(ValueError, match=message):
        check(with_stage(plan, 0, **changes))


def without(text):
    return lambda actions: [a for a in actions if str(a) != text]


def replaced(whole, parts):
    split = [parse_action(text) for text in parts.split()]
    return lambda actions: [new for a in actions for new in (split if str(a) == whole else [a])]


def swapped(first, second):
    swap = {parse_action(first): parse_action(second), parse_action(second): parse_action(first)}
    return lambda actions: [swap.get(action, action) for action in actions]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(without("3F1"), "rank 3: action 3B1 stands before its forward", id="forward-missing"),
        pytest.param(without("3B1"), "rank 3: action 3B1 is missing", id="backward-missing"),
        pytest.param(without("3REDUCE_GRAD"), "rank 3: action 3REDUCE_GRAD is missing", id="reduce-missing"),
        pytest.param(without("STEP"), "rank 3: a program ends with its only STEP", id="step-missing"),
        pytest.param(swapped("3F0", "3B0"), "rank 3: action 3B0 stands before its forward", id="order"),
        pytest.param(swapped("3B1", "3REDUCE_GRAD"), "3B1 stands after 3REDUCE_GRAD", id="late-backward"),
        pytest.param(lambda a: [a[0], *a], "rank 3: action 3F0 stands twice", id="twice"),
        pytest.param(
            lambda a: [Action(0, Pass.F, 0), *a], "of a stage that the rank does not hold", id="foreign"
        ),
        pytest.param(lambda a: [Action(3, Pass.F, 9), *a], "3F9 has no microbatch", id="no-such-microbatch"),
        pytest.param(
            lambda a: [*a[:-1], Action(3, Pass.W, 0), a[-1]], "3W0 stands after 3B0", id="whole-and-split"
        ),
        pytest.param(replaced("3B0", "3I0"), "rank 3: action 3W0 is missing", id="weights-missing"),
        pytest.param(replaced("3B0", "3W0 3I0"), "3W0 stands before 3I0", id="weights-first"),
        pytest.param(replaced("3B0", "3W0"), "3W0 stands before 3I0", id="weights-alone"),
        pytest.param(
            replaced("3B0", "3ONLOAD 3B0"), "3ONLOAD stands before 3OFFLOAD: its stage has not", id="back"
        ),
        pytest.param(
            replaced("3B0", "3ONLOAD 3OFFLOAD 3B0"), "3ONLOAD stands before 3OFFLOAD", id="back-first"
        ),
        pytest.param(replaced("3B1", "3OFFLOAD 3B1"), "3B1 stands after 3OFFLOAD, before", id="used-away"),
        pytest.param(
            replaced("3B1", "3B1 3OFFLOAD"), "rank 3: action 3ONLOAD is missing", id="left-for-good"
        ),
    ],
)
def test_broken_program_is_named(plan, edit, message):
    with pytest.raises(ValueError, match=message):
        check(with_actions(plan, 3, edit))


def test_split_backward_is_accepted(plan):
    check(with_actions(plan, 3, replaced("3B0", "3I0 3W0")))


def test_stage_that_trains_nothing_has_no_weight_gradient():
    plan = disjoint_plan(two_encoders(), [sample(0), sample(1)], CUTS)
    frozen = next(stage.id for stage in plan.stages if stage.module == "llm")
    check(with_actions(plan, frozen, replaced(f"{frozen}B0", f"{frozen}I0")))
    with pytest.raises(ValueError, match=f"{frozen}W0 has no weights to train, {frozen}B0 splits into"):
        check(with_actions(plan, frozen, replaced(f"{frozen}B0", f"{frozen}I0 {frozen}W0")))


def test_item_in_no_microbatch(plan):
    kept = tuple(
        m for m in plan.microbatches if not (m.module == "audio" and m.replica == 1 and m.index == 0)
    )
    kept = tuple(replace(m, index=0) if m.module == "audio" and m.replica == 1 else m for m in kept)
    with pytest.raises(ValueError, match=r"module 'audio': item \(1, 0\) stands in no microbatch"):
        check(replace(plan, microbatches=kept))


def test_item_twice_in_the_llm(plan):
    llm = next(m for m in plan.microbatches if m.module == "llm")
    doubled = replace(llm, rows=(*llm.rows, *llm.rows))
    others = tuple(doubled if m is llm else m for m in plan.microbatches)
    with pytest.raises(ValueError, match=r"'llm' replica 0: item \(0, 0\) stands 2 times"):
        check(replace(plan, microbatches=others))


def test_item_of_another_batch(plan):
    llm = next(m for m in plan.microbatches if m.module == "llm")
    foreign = replace(llm, rows=(*llm.rows, (Item(77, 0),)))
    others = tuple(foreign if m is llm else m for m in plan.microbatches)
    with pytest.raises(ValueError, match=r"the batch has no item \(77, 0\)"):
        check(replace(plan, microbatches=others))


def test_empty_row_and_index_gap(plan):
    llm = next(m for m in plan.microbatches if m.module == "llm")
    for changed, message in (
        (replace(llm, rows=((),)), "empty rows do not exist"),
        (replace(llm, index=7), r"microbatch indices must be 0\.\.1 without gaps"),
    ):
        others = tuple(changed if m is llm else m for m in plan.microbatches)
        with pytest.raises(ValueError, match=message):
            check(replace(plan, microbatches=others))


def test_rank_without_program(plan):
    with pytest.raises(ValueError, match="rank 0 must have one program, got 0"):
        check(replace(plan, programs=plan.programs[1:]))
