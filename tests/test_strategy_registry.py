"""What is told of strategies is told of all of them."""

import re
from pathlib import Path

from workbench.cli.planning import Strategy
from workbench.strategies.registry import BY_NAME, PLANNERS, PRICED, STRATEGIES

README = Path(__file__).parent.parent / "README.md"


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


def test_readme_lists_them_with_their_summaries():
    table = README.read_text(encoding="utf-8").partition("| `--strategy` | what it does |")[2]
    rows = table.partition("\n\n")[0].splitlines()[2:]
    told = {tuple(re.findall(r"`([a-z-]+)`", row.split("|")[1])): row.split("|")[2].strip() for row in rows}
    assert sorted(name for names in told for name in names) == sorted(BY_NAME)
    for names, summary in told.items():
        if len(names) == 1:  # one row stands for several searched layouts
            assert summary == BY_NAME[names[0]].summary
