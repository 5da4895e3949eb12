"""The textbook simulator: right where links are not contended, and why it is not the engine."""

import pytest

from experiments.bench.rivals.textbook import simulate_textbook
from sim.step.engine import simulate
from tests.lowered_by_hand import lowered, one_node, row
from tests.plans import disjoint_plan, sample, two_encoders
from tests.random_lowered import random_durations
from workbench.cost.hardware import Link
from workbench.memory.account import memory_table
from workbench.plan.lower import lower

SLOW = one_node(3, link=Link(name="slow", bytes_per_s=1, latency_s=0))


def test_agrees_with_the_engine_where_messages_never_meet():
    plan = disjoint_plan(
        two_encoders(), [sample(i) for i in range(6)], {"vision": [3], "audio": [2], "llm": [2, 2]}
    )
    given = lower(plan)
    table = memory_table(given)
    for seed in range(5):
        ours = simulate(given, random_durations(seed), memory=table)
        theirs = simulate_textbook(given, random_durations(seed), memory=table)
        assert (theirs.spans, theirs.messages) == (ours.spans, ours.messages)
        peaks = [
            {rank: max(m.num_bytes for m in trace.memory if m.rank == rank) for rank in plan.ranks}
            for trace in (ours, theirs)
        ]
        assert peaks[0] == peaks[1]


def test_the_textbook_way_serves_whoever_was_created_first_the_engine_the_lowest_row():
    """Two rows of one sender become ready at one instant, the higher one told first."""
    rows = [
        row(0, "0F0", "1F0", (0, 1), num_bytes=4),
        row(1, "0F0", "2F0", (0, 2), num_bytes=4),
    ]
    given = lowered({(0,): "0F0", (1,): "1F0", (2,): "2F0"}, rows, cluster=SLOW)
    (producer,) = given.outputs
    for order in ((0, 1), (1, 0)):
        given.outputs[producer] = order
        ours, theirs = simulate(given, lambda _: 1.0), simulate_textbook(given, lambda _: 1.0)
        assert [message.start_s for message in ours.messages] == [1.0, 5.0]
        assert [message.start_s for message in theirs.messages] == [1.0, 5.0][:: 1 if order == (0, 1) else -1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param(lambda: lowered({(0, 1): "0F0"}, stages={0: (0, 1)}), "needs one rank", id="ranks"),
        pytest.param(lambda: lowered({(0,): "0F0 0REDUCE_GRAD"}), "has no reductions", id="reductions"),
        pytest.param(lambda: lowered({(0,): "0F0"}, cluster=one_node(1, num_cores=1)), "cores", id="cores"),
    ],
)
def test_what_it_cannot_do_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        simulate_textbook(given(), lambda _: 1.0)
