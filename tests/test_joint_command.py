"""`search --joint`: what is typed wrong is refused in one line, and what is typed right is understood."""

from pathlib import Path

import pytest

from tests.test_joint_search import small
from workbench.cli.joint_searching import JointFlags, SearchRequest, fixed_of, search_jointly, stop_of
from workbench.cli.searching import Criterion
from workbench.planner.judged import JudgedBy
from workbench.search.joint.question import Question
from workbench.search.joint.terms import Stop


def test_ends_are_read():
    assert stop_of(JointFlags()) == Stop(seconds=60.0)
    assert stop_of(JointFlags(budget="2m", gap="2.5%")) == Stop(seconds=120.0, gap=0.025)
    assert stop_of(JointFlags(budget="20")) == Stop(seconds=20.0)
    assert stop_of(JointFlags(candidates=7)) == Stop(candidates=7)


def test_fixed_questions_are_read():
    assert fixed_of(["layout=dip", "layout=dip"]) == {Question.LAYOUT: "dip"}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"budget": "0s"}, "--budget: want a duration > 0 such as 60s, .*got '0s'"),
        ({"budget": "soon"}, "--budget: want a duration > 0 such as 60s"),
        ({"gap": "2"}, "want --gap as a percentage"),
        ({"candidates": 0}, "want candidates > 0, got 0"),
        ({"fix": ["layout"]}, "want --fix QUESTION=STRATEGY"),
        ({"fix": ["colour=dip"]}, "want --fix QUESTION=STRATEGY"),
        ({"fix": ["layout=nobody"]}, "want --fix QUESTION=STRATEGY"),
        ({"fix": ["layout=dip", "layout=fsdp"]}, "--fix layout names both dip and fsdp"),
        ({"fix": [f"{question}=dip" for question in Question]}, "so there is nothing to search"),
        ({"replay": Path("a.jsonl"), "ablate": "dip"}, "got --replay and --ablate; want one of the two"),
        ({"replay": Path("a.jsonl"), "log": Path("b.jsonl")}, "--replay takes no --log"),
        ({"ablate": "dip", "fix": ["layout=dip"]}, "--ablate takes no --fix"),
    ],
)
def test_what_is_typed_wrong_is_refused_before_any_search(said, reason):
    request = SearchRequest(small(), None, Criterion(), {}, JudgedBy.SIMULATOR, 0)
    with pytest.raises(ValueError, match=reason):
        search_jointly(request, JointFlags(**said), None, None, as_json=True)


def test_flags_of_a_joint_search_want_it():
    JointFlags().check_absent()
    JointFlags(budget="3s").check_absent()
    for said in ({"gap": "3%"}, {"fix": ["layout=dip"]}, {"workers": 2}, {"ablate": "dip"}):
        with pytest.raises(ValueError, match="wants --joint"):
            JointFlags(**said).check_absent()
