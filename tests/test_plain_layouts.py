"""Plain layouts and what they are made of: every one is read as a sound plan, or refused for a reason."""

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest

from sim.predict import IterationJudge
from tests.joint_jobs import joint_job
from tests.plans import LINK
from tests.test_fsdp import assert_trains_as_one
from tests.test_strategies import CLUSTER, cost, job
from tests.tiny_valm import tiny_batch
from workbench.cost.hardware import uniform
from workbench.job.module_layout import ModuleLayout
from workbench.plan.check import check
from workbench.plan.lower import lower
from workbench.plan.plan import Recompute, Sharding
from workbench.plan.runnable import check_runnable
from workbench.schedule.choice import ScheduleKind, usual
from workbench.search.joint.arrangement import Placement
from workbench.search.joint.choice import choice_of
from workbench.search.joint.evaluate import changed, plan_of
from workbench.search.joint.layout_moves import Arrange, CutStages
from workbench.search.joint.move import Space
from workbench.search.joint.plain_layouts import plain_layouts
from workbench.search.joint.question import Question
from workbench.search.joint.setting_moves import Keep, instance_counts, shardings
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept

BATCH = tiny_batch(images=(1, 2, 0, 1, 2, 0, 1, 1), clips=(1, 0, 0, 2, 1, 1, 0, 2))
ALL = frozenset(Question)


def started(name="megatron-homogeneous", layouts=()):
    small = replace(job(batch=BATCH), max_ranks=8, layouts=layouts, replicas=1)
    space = Space(small, cost(), {})
    return space, choice_of(small, PLANNERS[name](small, cost()), cost())


def test_plain_layouts_are_sound_plans_and_differ():
    space, choice = started()
    plans, refusals = [], []
    for moves in plain_layouts(space.job, ALL):
        try:
            plan = plan_of(space, changed(space, choice, moves))
            accept(plan)
            check(plan)
            plans.append(plan)
        except ValueError as error:
            refusals.append(str(error))
    shardings_of = {frozenset((m.sharding, m.instances) for m in plan.settings.modules) for plan in plans}
    assert len(plans) >= 10, refusals
    assert any((Sharding.PARAMETERS, 1) in found for found in shardings_of)
    assert any(len(found) > 1 for found in shardings_of), "some modules sharded and others not"


def pipelines_on_all_nodes(space, choice):
    """Plans of plain layouts with every module on all ranks and a stage on each node."""
    for moves in plain_layouts(space.job, ALL):
        arranged = next(move.arrangement for move in moves if isinstance(move, Arrange))
        if arranged.placement is Placement.EVERYWHERE:
            with suppress(ValueError):  # more virtual stages than layers
                yield plan_of(space, changed(space, choice, moves))


def assert_on_all_nodes(plan):
    accept(plan)
    check_runnable(plan)
    per_node = plan.cluster.nodes[0].num_ranks
    nodes = {}
    for stage in plan.stages:
        (node,) = {rank // per_node for rank in stage.flat_ranks}
        nodes.setdefault(stage.module, set()).add(node)
    assert all(found == {0, 1} for found in nodes.values())


def test_modules_share_all_nodes():
    space, choice = started()
    plans = list(pipelines_on_all_nodes(space, choice))
    assert plans
    for plan in plans:
        assert_on_all_nodes(plan)


def test_experts_stay_inside_nodes_that_all_modules_share(pool):
    small = replace(
        joint_job(images=(1, 2, 0, 1), shares_ranks=True),
        cluster=uniform(
            "two nodes", replace(CLUSTER.nodes[0], num_ranks=2), num_nodes=2, intra=LINK, inter=LINK
        ),
    )
    space = Space(small, cost(), {})
    choice = choice_of(small, PLANNERS["megatron-homogeneous"](small, cost()), cost())
    plan, *_ = pipelines_on_all_nodes(space, choice)
    assert_on_all_nodes(plan)
    assert {stage.ep for stage in plan.stages if stage.module == "llm"} == {2}
    assert plan.stages[-1].joint_replicas == 2
    assert_trains_as_one(plan, pool)


@pytest.mark.parametrize("fixed", [Question.MEMORY, Question.ORDER, Question.GROUPING])
def test_a_fixed_question_is_left_alone(fixed):
    space, _ = started()
    asked = list(plain_layouts(space.job, ALL - {fixed}))
    assert asked
    assert not any(move.question is fixed for moves in asked for move in moves)


def test_no_plain_layout_where_layouts_stay():
    space, _ = started()
    assert not list(plain_layouts(space.job, ALL - {Question.LAYOUT}))


def test_pieces_hold_the_same_layers_on_the_same_ranks_and_can_be_joined_again():
    space, choice = started()
    cut = CutStages(2).apply(space, choice)
    assert len(cut.stages) > len(choice.stages)
    for before in choice.stages:
        key = before.module, before.replica, before.ranks
        layers = [s.layers for s in cut.stages if (s.module, s.replica, s.ranks) == key]
        assert (layers[0][0], layers[-1][1]) == before.layers
        assert all(front[1] == behind[0] for front, behind in pairwise(layers))
    assert CutStages(1).apply(space, cut).stages == CutStages(1).apply(space, choice).stages


def test_sums_of_gradients_go_beside_the_backward_of_other_pieces():
    space, choice = started("megatron-homogeneous")
    whole, cut = (plan_of(space, CutStages(pieces).apply(space, choice)) for pieces in (1, 4))
    program = cut.programs[0].actions
    sums = [index for index, action in enumerate(program) if action.kind.value == "REDUCE_GRAD"]
    passes = [index for index, action in enumerate(program) if action.kind.value == "B"]
    assert len(sums) > sum(a.kind.value == "REDUCE_GRAD" for a in whole.programs[0].actions)
    assert min(sums) < max(passes)
    judge = IterationJudge(cost())
    assert judge.value(cut) != judge.value(whole)


def test_virtual_stages_are_not_cut():
    space, choice = started()
    virtual = replace(choice, schedule=usual(ScheduleKind.INTERLEAVED))
    with pytest.raises(ValueError, match="2 virtual stages lie where their schedule wants them"):
        CutStages(2).apply(space, virtual)


@pytest.mark.parametrize(
    ("replicas", "cp", "counts"),
    [(24, 1, [12, 6, 3, 1]), (16, 1, [8, 4, 2, 1]), (4, 2, [4, 2, 1]), (1, 4, [1]), (1, 1, [])],
)
def test_instances_are_of_powers_of_two_and_divide_the_replicas(replicas, cp, counts):
    assert list(instance_counts(replicas, cp)) == counts


def test_shardings_offer_other_instances_and_the_way_back():
    """Of eight replicas: with layers so small fsdp itself takes two ranks, which are no two instances."""
    eight = tuple(ModuleLayout(module=name, dp=8) for name in ("vision", "audio", "llm"))
    space, choice = started("fsdp", eight)
    plan = plan_of(space, choice)
    offered = list(shardings(choice, plan))
    now = choice.settings.of("llm")
    assert Keep("llm", now.recompute, Sharding.OPTIMIZER, 1, now.sequence_parallel) in offered
    assert {each.instances for each in offered if each.sharding is Sharding.PARAMETERS} - {now.instances}
    instances = [each.instances for each in offered if each.sharding is Sharding.OPTIMIZER]
    assert len(set(instances)) > 1, "state of the optimizer in several instances"
    for each in (each for each in offered if each.sharding is Sharding.OPTIMIZER):
        lower(plan_of(space, each.apply(space, choice)))
    assert all(each.recompute is Recompute(now.recompute) for each in offered if each.module == "llm")
