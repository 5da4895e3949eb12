"""Which layouts a joint search tries next to one: ranks go from one degree, or one module, to another."""

from dataclasses import replace

from experiments.search.spaces import spaces
from workbench.planner.layout_choice import Degrees
from workbench.search.joint.arrangement import Arrangement, Placement
from workbench.search.joint.choice import Choice
from workbench.search.joint.grouping import llm_of
from workbench.search.joint.layout_neighbours import arrangements_near

SPACE = next(space for space in spaces() if space.name == "audio frozen")  # four ranks
CHOICE: Choice = next(iter(SPACE.choices()))


def islands(audio: Degrees, llm: Degrees) -> Arrangement:
    return Arrangement(placement=Placement.ISLANDS, degrees=(audio, llm))


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
        assert all(each.num_ranks(llm_of(SPACE.job)) <= 4 for each in found)
