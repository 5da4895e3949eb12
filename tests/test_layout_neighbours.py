"""Which layouts a joint search tries next to one: ranks go from one degree, or one module, to another."""

from dataclasses import replace

import pytest

from experiments.search.jobs import EXAMPLES
from experiments.search.spaces import spaces
from sim.predict import IterationJudge
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.job import load_job
from workbench.job.machines import cost_of
from workbench.planner.layout_choice import Degrees
from workbench.search.joint.arrangement import Arrangement, Placement, arrangement_of
from workbench.search.joint.choice import Choice, choice_of, draft_of
from workbench.search.joint.evaluate import Request, evaluate
from workbench.search.joint.layout_moves import Arrange
from workbench.search.joint.layout_neighbours import arrangements_near
from workbench.search.joint.move import Space
from workbench.search.joint.move_json import move_from_json, move_to_json
from workbench.strategies.registry import BY_NAME

SPACE = next(space for space in spaces() if space.name == "audio frozen")  # four ranks
CHOICE: Choice = next(iter(SPACE.choices()))


def islands(*degrees: Degrees) -> Arrangement:
    return Arrangement(placement=Placement.ISLANDS, degrees=degrees)


AUDIO, LLM = Degrees(module="audio"), Degrees(module="llm")


def near(arrangement: Arrangement) -> list[Arrangement]:
    return list(arrangements_near(SPACE.job, CHOICE, arrangement))


def test_depths_that_are_no_powers_of_two_are_one_step_away():
    assert islands(AUDIO, replace(LLM, pp=3)) in near(islands(AUDIO, replace(LLM, pp=2)))


def test_a_module_takes_the_ranks_that_another_gives_up():
    found = near(islands(replace(AUDIO, cp=2), replace(LLM, pp=2)))
    assert islands(AUDIO, replace(LLM, pp=3)) in found
    assert islands(replace(AUDIO, pp=3), LLM) in near(islands(replace(AUDIO, pp=2), replace(LLM, pp=2)))


def test_degrees_of_a_module_change_places():
    assert islands(AUDIO, replace(LLM, cp=3)) in near(islands(AUDIO, replace(LLM, pp=3)))


def test_other_replicas_take_degrees_of_modules_with_them():
    two = islands(replace(AUDIO, cp=2), replace(LLM, pp=2))
    found = near(two)
    assert islands(replace(AUDIO, dp=2), replace(LLM, dp=2)) in found
    assert two in near(islands(replace(AUDIO, dp=2), replace(LLM, dp=2)))


def test_none_takes_more_ranks_than_there_are_or_comes_twice():
    for start in (islands(AUDIO, LLM), islands(replace(AUDIO, cp=2), replace(LLM, tp=2))):
        found = near(start)
        assert start not in found
        assert len(found) == len(set(found))
        assert all(each.num_ranks(SPACE.job.model.llm.name) <= 4 for each in found)


@pytest.mark.parametrize(
    "llm",
    [
        Degrees(module="llm", tp=2, cp=2, pp=2, ep=4),
        Degrees(module="llm", tp=2, cp=2, dp=2, ep=4),
        Degrees(module="llm", cp=4, pp=2, ep=2),
        Degrees(module="llm", tp=2, pp=4, ep=2),
    ],
    ids=str,
)
def test_experts_stay_distributed_over_ranks_of_their_grid(llm: Degrees):
    """Whatever changes, the experts can be distributed over the new grid."""
    job, cost = load_job(EXAMPLES / "experts.yaml"), CostModel(load_profile("H100"))
    job = replace(job, cluster=load_job(EXAMPLES / "valm.yaml").cluster)  # 24 ranks
    choice = choice_of(job, BY_NAME["megatron-heterogeneous"].planner(job, cost, lambda *_: None), cost)
    encoders = (Degrees(module=m.name) for m in job.model.modules if m.name != "llm")
    found = list(arrangements_near(job, choice, islands(*encoders, llm)))
    assert {each.of("llm").ep for each in found} >= {llm.ep}
    assert all(each.of("llm").stage_ranks % each.of("llm").ep == 0 for each in found)


def test_modules_change_pools_and_stay_in_those_that_take_them():
    job = load_job(EXAMPLES / "pools.yaml")  # 16 ranks for vision alone, 16 for all
    cost = cost_of(job, None, None)
    plan = BY_NAME["disttrain-cheapest"].planner(job, cost, lambda *_: None)
    choice = choice_of(job, plan, cost)
    now = arrangement_of(job, choice.stages, choice.schedule, draft_of(job, choice), cost)
    assert now is not None
    assert now.first_ranks == (None, 16)
    assert "llm from rank 16" in str(now)
    found = list(arrangements_near(job, choice, now))
    assert replace(now, first_ranks=(16, None)) in found, "both on the pool for all"
    assert replace(now, first_ranks=(16, 16)) not in found
    assert not any(each.first_ranks == (16, 0) for each in found), "the first pool takes no LLM"
    space, judge = Space(job, cost, {}), IterationJudge(cost)
    deeper = next(
        each for each in found if each.first_ranks and each.of("llm") == replace(now.of("llm"), pp=4)
    )
    for other in (deeper, replace(now, first_ranks=(16, None))):
        move = Arrange(other)
        assert move_from_json(move_to_json(move)) == move
        stages = move.apply(space, choice).stages
        assert arrangement_of(job, stages, choice.schedule, draft_of(job, choice), cost) == other
        assert evaluate(space, judge, Request(choice, (move,))).value is not None
