"""What is told of strategies is told of all of them."""

from workbench.cli.planning import Strategy
from workbench.strategies.registry import BY_NAME, PLANNERS, PRICED, STRATEGIES


def test_names_are_theirs_alone():
    names = [spec.name for spec in STRATEGIES]
    assert list(BY_NAME) == names
    assert [member.value for member in Strategy] == names
    assert PLANNERS.keys() | PRICED.keys() == set(names)
    assert not PLANNERS.keys() & PRICED.keys()


def test_planners_and_summaries_differ():
    assert len({spec.planner for spec in STRATEGIES}) == len(STRATEGIES)
    assert len({spec.summary for spec in STRATEGIES}) == len(STRATEGIES)
    assert all(spec.summary and "\n" not in spec.summary for spec in STRATEGIES)
