"""A schedule from outside of the package: planned, checked, simulated, executed, searched with and named."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench
from sim.predict import IterationJudge
from tests.chains import chain
from tests.command_line import accept
from workbench.job.machines import cost_of
from workbench.plan.codec import dumps, loads, plan_hash, write_plan
from workbench.schedule.action import Action, Pass
from workbench.schedule.choice import Schedule, ScheduleKind, usual
from workbench.schedule.one_f_one_b import SPEC as SPEC_1F1B
from workbench.schedule.one_f_one_b import gpipe, one_f_one_b
from workbench.schedule.own_order import checked_chain
from workbench.schedule.programs import programs_of
from workbench.schedule.spec import ScheduleSpec
from workbench.search.drive import with_schedules
from workbench.search.joint.drive import joint_search
from workbench.search.joint.layout_moves import Reschedule
from workbench.search.joint.move_json import move_to_json
from workbench.search.joint.terms import Scope, Stop
from workbench.strategies import cornstarch

EXAMPLES = Path(__file__).parents[1] / "examples"
PROFILE = str(EXAMPLES / "elastic-cpu.json")


def eager(stages, num_ranks, num_microbatches):
    """1F1B with 2(p - i) - 1 forwards ahead, an order that no registered schedule has."""
    programs = []
    for position, stage in enumerate(stages):
        ahead = min(2 * (len(stages) - position) - 1, num_microbatches)
        program = [Action(stage, Pass.F, index) for index in range(ahead)]
        for index in range(num_microbatches):
            program.append(Action(stage, Pass.B, index))
            program += [Action(stage, Pass.F, index + ahead)] * (index + ahead < num_microbatches)
        programs.append(tuple(program))
    return tuple(programs)


EAGER = ScheduleSpec(name="eager", summary="more warm-up", chain=eager)


@pytest.fixture(scope="module")
def job() -> workbench.Job:
    return workbench.load_job(EXAMPLES / "tiny.yaml")


@pytest.fixture(scope="module")
def plan(job: workbench.Job) -> workbench.Plan:
    return workbench.plan(job, schedule=EAGER, profile=PROFILE)


def test_the_plan_has_its_order_and_its_name(plan: workbench.Plan):
    llm = [stage.id for stage in plan.stages if stage.module == "llm"]
    passes = {program.ranks: program.actions[:-1] for program in plan.programs}
    ranks = [stage.flat_ranks for stage in plan.stages if stage.module == "llm"]
    assert tuple(passes[each] for each in ranks) == eager(llm, 2, 8)
    assert plan.schedule == "eager"
    assert "strategy cornstarch, schedule eager:" in plan.headline


def test_its_file_names_it_and_needs_no_code_of_it(plan: workbench.Plan, tmp_path: Path):
    unnamed = dataclasses.replace(plan, schedule="")
    assert plan_hash(plan) == plan_hash(unnamed)
    assert loads(dumps(plan)) == plan
    assert '"schedule"' not in dumps(unnamed)  # files of registered schedules are as before
    write_plan(plan, tmp_path / "plan.json", profiles=[PROFILE])
    assert "accepted" in accept("check", str(tmp_path / "plan.json")).stdout
    assert "strategy cornstarch, schedule eager" in accept("simulate", str(tmp_path / "plan.json")).stdout


def test_processes_train_by_it_as_by_1f1b(job: workbench.Job, plan: workbench.Plan):
    options = workbench.RunOptions(steps=2, warmup=0)
    plain = workbench.plan(job, profile=PROFILE)
    assert plan_hash(plain) != plan_hash(plan)
    assert workbench.run(plan, options).losses == pytest.approx(
        workbench.run(plain, options).losses, rel=1e-6
    )


def test_other_schedules_do_not_keep_its_name(job: workbench.Job, plan: workbench.Plan):
    assert workbench.plan(dataclasses.replace(job, schedule=usual(EAGER)), profile=PROFILE) == plan
    assert workbench.plan(job, schedule="gpipe", profile=PROFILE).schedule == ""
    by_settings = workbench.plan(job, schedule=Schedule(run_ahead=1), profile=PROFILE)
    assert plan_hash(by_settings) != plan_hash(workbench.plan(job, profile=PROFILE))


def test_search_ranks_it_among_others(job: workbench.Job, plan: workbench.Plan):
    ranked = workbench.search(
        job, strategies=["cornstarch"], schedules=["1f1b", EAGER, ScheduleKind.GPIPE], profile=PROFILE
    )
    by_name = {each.strategy: each for each in ranked}
    assert by_name.keys() == {"cornstarch 1f1b", "cornstarch eager", "cornstarch gpipe"}
    assert by_name["cornstarch eager"].plan == plan


def test_a_joint_search_starts_from_it_and_takes_its_order(job: workbench.Job, plan: workbench.Plan):
    cost = cost_of(job, PROFILE, None)
    planners = {"plain": cornstarch.plan, **with_schedules({"own": cornstarch.plan}, [usual(EAGER)])}
    judge, stop = IterationJudge(cost), Stop(candidates=5)
    results = [
        joint_search(job, cost, judge, stop=stop, scope=Scope(planners=planners), workers=workers)
        for workers in (1, 2)
    ]
    starts = {start.name: start for start in results[0].starts}
    choice = starts["own eager"].choice
    assert choice is not None
    assert (choice.schedule.kind, choice.programs) == (EAGER, ())  # an order that follows other layouts
    assert results[0].value <= (starts["own eager"].value or 0)
    assert [entry.value for entry in results[0].log] == [entry.value for entry in results[1].log]
    assert move_to_json(Reschedule(usual(EAGER)))["schedule"]["kind"] == "eager"


ONE = one_f_one_b((0, 1), 3)
WRONG = {
    "a pass less": (ONE[0][:-1], ONE[1]),
    "a pass twice": ((*ONE[0], ONE[0][-1]), ONE[1]),
    "backward first": (tuple(reversed(ONE[0])), ONE[1]),
    "another's stage": (ONE[1], ONE[0]),
    "a microbatch too many": one_f_one_b((0, 1), 4),
    "one program": ONE[:1],
    "three programs": (*ONE, ()),
}


@pytest.mark.parametrize("programs", WRONG.values(), ids=WRONG)
def test_an_incomplete_order_is_refused(programs):
    with pytest.raises(ValueError, match=r"^schedule mine: "):
        checked_chain(_own(programs), programs, [[0], [1]], 3)


def test_other_things_than_actions_are_refused(job: workbench.Job):
    for returned in (None, "2F0", (("2F0",), ("3F0",)), (0, 1)):
        with pytest.raises(TypeError, match=r"^schedule mine: "):
            workbench.plan(job, schedule=_own(returned), profile=PROFILE)


def test_a_split_backward_has_to_be_said(job: workbench.Job):
    split = ScheduleKind.ZB_H2.spec.chain
    spec = ScheduleSpec(name="mine", summary="", chain=split)
    with pytest.raises(ValueError, match=r"does F I W .* want F B; nearest: splits_backward=True"):
        workbench.plan(job, schedule=spec, profile=PROFILE)
    said = workbench.plan(job, schedule=dataclasses.replace(spec, splits_backward=True), profile=PROFILE)
    shipped = workbench.plan(job, schedule=Schedule(kind=ScheduleKind.ZB_H2), profile=PROFILE)
    assert {action.kind for action in said.program_actions} == {a.kind for a in shipped.program_actions}


def test_a_deadlock_names_the_schedule(job: workbench.Job):
    def crossed(stages, num_ranks, num_microbatches):
        first, _ = gpipe(stages, num_microbatches)
        back = [
            Action(stages[1], kind, i) for i in range(num_microbatches)[::-1] for kind in (Pass.F, Pass.B)
        ]
        one_by_one = [
            Action(stages[0], kind, i) for i in range(num_microbatches) for kind in (Pass.F, Pass.B)
        ]
        assert sorted(first) == sorted(one_by_one)
        return tuple(one_by_one), tuple(back)

    with pytest.raises(ValueError, match=r"schedule mine: pass .* the given orders wait for each other"):
        workbench.plan(job, schedule=ScheduleSpec(name="mine", summary="", chain=crossed), profile=PROFILE)


@pytest.mark.parametrize("returned", [None, {}, {(9,): ()}])
def test_programs_of_a_dag_are_of_its_groups(job: workbench.Job, returned):
    spec = ScheduleSpec(name="mine", summary="", chain=eager, dag=lambda problem: returned)
    with pytest.raises((TypeError, ValueError), match=r"schedule mine: want (a program for|programs by)"):
        workbench.plan(job, schedule=spec, profile=PROFILE)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"name": ""}, "one line of text"),
        ({"name": "a\nb"}, "one line of text"),
        ({"chain": 3}, "chain must be a function, got 3"),
        ({"usual_virtual_stages": 0}, "usual_virtual_stages >= 1"),
        ({"parameters": ("run_ahead",)}, "reach dag alone"),
        ({"parameters": ("lead",), "dag": gpipe}, "parameters are of window, run_ahead, offload, got 'lead'"),
    ],
)
def test_a_spec_says_what_it_lacks(fields, rule):
    with pytest.raises(ValueError, match=rule):
        ScheduleSpec(**{"name": "mine", "summary": "", "chain": eager} | fields)


def test_a_registered_name_is_taken():
    with pytest.raises(ValueError, match=r"'1f1b' of your own: the name is that of a registered schedule"):
        Schedule(kind=SPEC_1F1B)
    with pytest.raises(ValueError, match="ScheduleSpec of your own, got '1f1b'; nearest: ScheduleKind"):
        Schedule(kind="1f1b")


def test_names_of_schedules_are_distinct(job: workbench.Job):
    with pytest.raises(ValueError, match="schedules: names must be unique, 'eager' is twice"):
        workbench.search(job, schedules=[EAGER, EAGER], profile=PROFILE)
    with pytest.raises(TypeError, match="want a name, a ScheduleSpec or a Schedule, got function"):
        workbench.plan(job, schedule=eager, profile=PROFILE)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_stages=st.integers(1, 4), num_microbatches=st.integers(1, 5))
def test_any_order_without_deadlock_is_kept(data, num_stages: int, num_microbatches: int):
    """Restrictions of a random total order in which every pass follows its inputs."""
    stages = tuple(range(num_stages))
    done: list[Action] = []
    waiting = {(s, k, m) for s in stages for k in (Pass.F, Pass.B) for m in range(num_microbatches)}
    while waiting:
        ready = sorted(each for each in waiting if not waiting & set(_inputs(*each, num_stages=num_stages)))
        pick = data.draw(st.sampled_from(ready))
        waiting.remove(pick)
        done.append(Action(*pick))
    programs = tuple(tuple(action for action in done if action.stage == stage) for stage in stages)
    groups = [(stage,) for stage in stages]
    made = programs_of(chain(num_stages, num_microbatches), groups, usual(_own(programs)), [stages])
    assert tuple(made.values()) == programs


def _inputs(stage: int, kind: Pass, microbatch: int, *, num_stages: int) -> list[tuple[int, Pass, int]]:
    if kind is Pass.F:
        return [(stage - 1, Pass.F, microbatch)]
    return [(stage, Pass.F, microbatch), (stage + 1, Pass.B, microbatch)]


def _own(programs: object) -> ScheduleSpec:
    return ScheduleSpec(name="mine", summary="", chain=lambda *_: programs)
