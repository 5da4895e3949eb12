"""What a table of a search for goodput says of plans that are faster on fewer nodes."""

import pytest

from sim.predict import predict
from tests.test_search_goodput import losing
from tests.test_strategies import cost
from workbench.report.search_tables import search_record, search_table
from workbench.search.drive import search
from workbench.search.objectives.objective import Objective
from workbench.strategies.registry import PLANNERS
from workbench.timing.accept import accept


@pytest.mark.parametrize(("link_gb_per_s", "nodes"), [(1e-4, 2), (10.0, None)])
def test_a_table_says_why_a_share_of_a_plans_speed_is_above_one(link_gb_per_s, nodes) -> None:
    on, held = losing(link_gb_per_s, "2h", "10m")
    planners = {"cornstarch": PLANNERS["cornstarch"]}
    goodput = Objective.GOODPUT
    found = search(
        on, cost(), planners, lambda plan: predict(*accept(plan), cost()), objective=goodput, judge=held
    )
    record = search_record("tiny", found, held.asked)
    figures = record["candidates"][0]
    assert figures["faster_on_nodes"] == nodes
    assert (figures["useful_share"] > 1) is (nodes is not None)
    said = (
        "cornstarch: faster on 2 nodes than on all that the plan uses, so the share of its speed may exceed"
    )
    assert (said in str(search_table(record).caption)) is (nodes is not None)
