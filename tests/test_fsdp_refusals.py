"""Sharded weights: plans that cannot shard them, and programs that break a round, are refused by name."""

from dataclasses import replace

import pytest

from tests.plans import sample, two_encoders
from tests.test_fsdp import IN_TWO, sharded_parameters
from tests.test_fsdp_plan import A40, CUTS, NAMES, actions, batch_of, of_layers
from tests.test_parity import mixed
from tests.tiny_valm import tiny_batch
from workbench.plan.check import check
from workbench.plan.deadlock import check_deadlock
from workbench.plan.lower import lower
from workbench.plan.parameter_shards import shard_units
from workbench.plan.plan import ModuleSettings, Plan, Program, Sharding
from workbench.schedule.action import Pass
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.timing.price import price


def overlapping() -> Plan:
    """Replica 1 has its head on the rank of replica 0's: the table's two units share one rank of two."""
    plan = sharded_parameters(mixed("llm", tied=True), tiny_batch(), replicas=2, cuts=IN_TWO)
    heads = plan.stages_on[3]
    return replace(plan, stages=tuple(replace(s, ranks=((0,),)) if s in heads else s for s in plan.stages))


MODULES = tuple(ModuleSettings(module=name, sharding=Sharding.PARAMETERS) for name in NAMES)


def unlike() -> Plan:
    """Two replicas of the LLM, cut unlike each other."""
    plan = sharded_parameters(two_encoders(), [sample(0), sample(1)], replicas=2, cuts=CUTS, modules=())
    first, second = (next(s for s in plan.chain["llm", replica]) for replica in (0, 1))
    halves = (replace(second, layers=(0, 2)), replace(second, id=99, layers=(2, 4)))
    stages = (*(s for s in plan.stages if s != second), *halves)
    assert first.layers == (0, 4)
    return with_parameters(replace(plan, stages=stages))


def with_parameters(plan: Plan, **llm: int) -> Plan:
    modules = (*MODULES[:2], replace(MODULES[2], **llm))
    return replace(plan, settings=replace(plan.settings, modules=modules))


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        pytest.param(
            unlike,
            r"'llm' shards its weights, so all 2 replicas of an instance are cut alike",
            id="unlike",
        ),
        pytest.param(
            lambda: with_parameters(
                sharded_parameters(two_encoders(), [sample(0), sample(1)], replicas=2, cuts=CUTS), instances=3
            ),
            r"'llm': instances .* must divide its 2 replicas, got 3; nearest: 2",
            id="instances",
        ),
        pytest.param(
            lambda: with_parameters(
                sharded_parameters(two_encoders(), [sample(0), sample(1)], replicas=2, cuts=CUTS), instances=2
            ),
            r"one rank holds them alone; nearest: sharding 'none'",
            id="instances-of-one",
        ),
        pytest.param(
            lambda: with_parameters(
                sharded_parameters(two_encoders(), batch_of(4), replicas=4, cuts=CUTS, modules=()),
                instances=2,
            ),
            r"its 2 instances add up gradients layer by layer, want one layer a stage, got \[0, 4\)",
            id="instances-of-many-layers",
        ),
        pytest.param(
            lambda: sharded_parameters(two_encoders(), [sample(0)], replicas=1, cuts=CUTS),
            r"one rank holds them alone; nearest: sharding 'none'",
            id="alone",
        ),
        pytest.param(
            overlapping,
            r"tied between stages \d+ and \d+, which have some of their ranks in common; want all or none",
            id="tied-askew",
        ),
        pytest.param(
            lambda: sharded_parameters(
                two_encoders(llm=(True,) * 4),
                [sample(0), sample(1)],
                replicas=2,
                cuts=CUTS,
                schedule=Schedule(kind=ScheduleKind.ZB_H1),
            ),
            r"has whole backwards; want a schedule without I and W",
            id="split-backward",
        ),
    ],
)
def test_what_cannot_be_sharded_is_named(plan, why) -> None:
    with pytest.raises(ValueError, match=why):
        shard_units(plan())


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        pytest.param(
            "{0}FREE0", "", r"{1}\w+ of a stage whose weights.*want round 1 here|ALL_GATHER1.*want", id="kept"
        ),
        pytest.param(
            "{0}ALL_GATHER0 ", "", r"want F or B, between ALL_GATHER|want .*ALL_GATHER", id="never-gathered"
        ),
        pytest.param(
            "{0}REDUCE_SCATTER1", "", r"want round 2|REDUCE_SCATTER1 is missing", id="never-reduced"
        ),
        pytest.param(
            "{0}FREE0", "{0}OFFLOAD", r"OFFLOAD of stage {0}: sharded weights stay on the", id="to-the-host"
        ),
    ],
)
def test_programs_that_break_a_round_are_refused(old: str, new: str, why: str) -> None:
    plan = of_layers(2, replicas=2, num_samples=4)
    stage = plan.chain["llm", 0][0].id
    first, *others = plan.programs
    text = " ".join(map(str, first.actions))
    assert old.format(stage) in text
    broken = Program(
        ranks=first.ranks, actions=actions(text.replace(old.format(stage), new.format(stage), 1))
    )
    with pytest.raises(ValueError, match=why.format(stage, stage)):
        check(replace(plan, programs=(broken, *others)))


def test_rounds_in_another_order_deadlock() -> None:
    """Two replicas that gather two layers in opposite orders wait for each other."""
    plan = of_layers(2, replicas=2, num_samples=2)
    first, second = plan.programs
    swapped = list(second.actions)
    place = [i for i, a in enumerate(swapped) if a.kind is Pass.ALL_GATHER][:2]
    swapped[place[0]], swapped[place[1]] = swapped[place[1]], swapped[place[0]]
    broken = replace(plan, programs=(first, Program(ranks=second.ranks, actions=tuple(swapped))))
    with pytest.raises(ValueError, match=r"deadlock.*\n.*ALL_GATHER0 of all replicas"):
        check_deadlock(lower(broken))


def test_rounds_of_whole_weights_are_refused_by_all_who_read_a_plan() -> None:
    """By the check, and by the task graph and the price of a plan that nobody checked."""
    plan = of_layers(2, replicas=2, num_samples=2)
    whole = replace(plan, settings=replace(plan.settings, modules=()))
    message = "ALL_GATHER0.*weights.* not sharded"
    with pytest.raises(ValueError, match=message):
        check(whole)
    lowered = lower(whole)
    with pytest.raises(ValueError, match=message):
        lowered.tasks  # noqa: B018
    with pytest.raises(ValueError, match=message):
        price(lowered, A40)
