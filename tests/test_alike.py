"""Equal replicas are derived once: rows, order, memory and refusals are those of a plan derived whole."""

from dataclasses import replace

import pytest

from experiments.bench.speed_cases import CASES, plan_of
from workbench.memory import account
from workbench.memory.account import memory_table, peak_bytes
from workbench.plan import check as checking
from workbench.plan import lower as lowering
from workbench.plan.alike import alike_replicas, part_of
from workbench.plan.boundaries import Boundaries
from workbench.plan.build import with_programs
from workbench.plan.check import check
from workbench.plan.lower import lower
from workbench.plan.lru_cache import clear_caches
from workbench.plan.parameter_shards import in_units
from workbench.plan.plan import ModuleSettings, Plan, Program, Recompute, Settings, Sharding
from workbench.schedule.choice import Schedule, ScheduleKind

SMALL = replace(
    CASES[2],
    llm="llama-3.1-8b",
    layout={"vision": (1, 2), "audio": (2, 1), "llm": (3, 2)},
    replicas=3,
    microbatches=4,
)
NODE_EACH = replace(SMALL, layout=SMALL.layout | {"llm": (2, 2)})


def changed_sample(plan: Plan) -> Plan:
    """The last replica has a sample of its own size."""
    *others, last = plan.batch
    segments = tuple(
        replace(s, tokens_in=s.tokens_in - 1, tokens_out=s.tokens_out - 1) for s in last.segments
    )
    return replace(plan, batch=(*others, replace(last, segments=segments)))


def scheduled(plan: Plan, kind: ScheduleKind, settings: Settings) -> Plan:
    return with_programs(replace(plan, programs=(), settings=settings), Schedule(kind=kind))


OPTIMIZER = Settings(
    modules=(ModuleSettings(module="llm", sharding=Sharding.OPTIMIZER, recompute=Recompute.FULL),)
)
IN_PARTS = {"name": "parts", "layout": {"vision": (1, 1), "audio": (2, 1), "llm": (3, 2)}}


def in_parts(plan: Plan, instances: int) -> Plan:
    """Encoders' weights sharded among replicas."""
    modules = ("vision", "audio")
    sharded = Sharding.PARAMETERS
    settings = Settings(
        modules=tuple(ModuleSettings(module=m, sharding=sharded, instances=instances) for m in modules)
    )
    return with_programs(in_units(replace(plan, programs=(), settings=settings)), Schedule())


PLANS = {
    "three equal": lambda: plan_of(NODE_EACH),
    "one cut by nodes where it gathers": lambda: plan_of(SMALL),
    "one unlike two equal": lambda: changed_sample(plan_of(SMALL)),
    "all unlike": lambda: plan_of(replace(SMALL, is_drawn=True)),
    "zb-h1": lambda: scheduled(plan_of(SMALL), ScheduleKind.ZB_H1, Settings()),
    "weights in parts": lambda: in_parts(plan_of(replace(SMALL, **IN_PARTS)), 1),
    "weights in parts, an instance of two each": lambda: in_parts(
        plan_of(replace(SMALL, **IN_PARTS, replicas=4)), 2
    ),
    "weights in parts, one unlike": lambda: in_parts(changed_sample(plan_of(replace(SMALL, **IN_PARTS))), 1),
    "optimizer in parts": lambda: scheduled(plan_of(SMALL), ScheduleKind.GPIPE, OPTIMIZER),
}


@pytest.mark.parametrize("name", PLANS)
def test_rows_and_memory_are_those_of_the_plan_derived_whole(name, monkeypatch):
    plan = PLANS[name]()
    lowered = lower(plan)
    table = memory_table(lowered)
    for module in (lowering, account, checking):
        monkeypatch.setattr(module, "alike_replicas", lambda plan: ())
    clear_caches()
    whole = lower(replace(plan))
    assert whole == lowered
    assert [list(whole.inputs), list(whole.outputs)] == [list(lowered.inputs), list(lowered.outputs)]
    assert memory_table(whole) == table
    assert peak_bytes(whole, table) == peak_bytes(whole, memory_table(whole))


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        ("three equal", [[0, 1, 2]]),
        ("one cut by nodes where it gathers", [[0, 1], [2]]),
        ("one unlike two equal", [[0, 1], [2]]),
        ("all unlike", [[0], [1], [2]]),
        ("weights in parts, an instance of two each", [[0, 1, 2, 3]]),
    ],
)
def test_which_replicas_are_equal(name, sets):
    alike = alike_replicas(PLANS[name]())
    assert [[{replica for _, replica in one.replicas} for one in found] for found in alike] == [
        [{number} for number in numbers] for numbers in sets
    ]


def without_last_pass(program: Program) -> Program:
    return replace(program, actions=(*program.actions[:-3], *program.actions[-2:]))


def test_a_replica_with_another_program_is_not_equal_and_is_checked():
    plan = plan_of(SMALL)
    broken = replace(plan, programs=(*plan.programs[:-1], without_last_pass(plan.programs[-1])))
    assert [len(replicas) for replicas in alike_replicas(broken)] == [2, 1]
    with pytest.raises(ValueError, match="is missing from the program"):
        check(broken)


def moved(plan: Plan) -> Plan:
    """One rank less: the last stage of replica 1 stands on ranks of replica 0 too."""
    stages = {stage.id: stage for stage in plan.stages}
    last = max(number for number, stage in stages.items() if stage.replica == 1)
    first = min(number for number, stage in stages.items() if stage.replica == 0)
    stages[last] = replace(stages[last], ranks=stages[first].ranks)
    return replace(plan, stages=tuple(stages.values()), programs=())


def shared(plan: Plan) -> Plan:
    """Replica 1 reads a sample of replica 0 too."""
    rows = next(m.rows for m in plan.microbatches if m.replica == 0)
    microbatches = tuple(
        replace(m, rows=(*m.rows, *rows)) if m.replica == 1 and m.index == 0 else m for m in plan.microbatches
    )
    return replace(plan, microbatches=microbatches)


@pytest.mark.parametrize("change", [moved, shared])
def test_replicas_with_ranks_or_samples_in_common_are_one_component(change):
    alike = alike_replicas(change(plan_of(replace(NODE_EACH, replicas=4))))
    found = [[sorted({replica for _, replica in one.replicas}) for one in each] for each in alike]
    assert found == [[[0, 1]], [[2], [3]]]


def test_a_program_of_ranks_of_two_replicas_tells_none_apart():
    plan = plan_of(SMALL)
    one, *_, two = plan.programs
    assert plan.stages_on[one.ranks[0]][0].replica != plan.stages_on[two.ranks[0]][0].replica
    both = Program(ranks=(*one.ranks, *two.ranks), actions=(*one.actions, *two.actions))
    others = tuple(program for program in plan.programs if program not in (one, two))
    assert alike_replicas(replace(plan, programs=(both, *others))) == ()


def test_brokered_replicas_have_no_equals_whoever_asked_before():
    plan = plan_of(NODE_EACH)
    assert alike_replicas(replace(plan))
    brokered = replace(plan, settings=replace(plan.settings, boundaries=Boundaries.BROKERS))
    assert alike_replicas(brokered) == ()


def test_one_replica_has_no_equal():
    assert alike_replicas(plan_of(replace(SMALL, replicas=1))) == ()


def test_part_of_a_plan_holds_its_replicas_alone():
    plan = plan_of(SMALL)
    part = part_of(plan, {(module.name, 1) for module in plan.model.modules})
    assert {stage.replica for stage in part.stages} == {1}
    assert part.ranks == alike_replicas(plan)[0][1].ranks
    assert {rank for program in part.programs for rank in program.ranks} == set(part.ranks)


def test_cases_of_the_bench_differ_from_plan_to_plan():
    one, other = plan_of(SMALL, 1), plan_of(SMALL, 2)
    assert not set(one.model.modules) & set(other.model.modules)
    assert not {s.segments for s in one.batch} & {s.segments for s in other.batch}
    assert [s.layers for s in one.stages] != [s.layers for s in other.stages]
