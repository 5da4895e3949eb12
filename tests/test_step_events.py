"""Events by step: checked by name, from a list or a trace, and never two nodes of one name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.elastic.availability import Rates, parse_trace, random_trace
from workbench.elastic.step_events import AtStep, Happening, told_events, traced_events


def test_a_node_that_comes_back_has_a_name_of_its_own():
    found = told_events(["1:kill:node1", "2:join:node1", "2:warn:node1", "2:join:node1"], 3, first=0, steps=4)
    assert found.start == ("node0", "node1", "node2")
    assert found.at(1) == AtStep(killed=("node1",))
    assert found.at(2) == AtStep(joins=("node1.3",))
    assert found.most_nodes == 3


def test_a_kill_in_a_recovery_is_of_the_kill_listed_before_it():
    found = told_events(
        ["2:kill:node3", "1:kill:node0", "recovery:kill:node1", "recovery:kill:node2"], 5, first=0, steps=4
    )
    assert found.at(1) == AtStep(killed=("node0",), killed_in_recovery=("node1", "node2"))
    assert found.at(2) == AtStep(killed=("node3",))
    assert [str(event) for event in found.events[:2]] == ["1:kill:node0", "recovery:kill:node1"]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["x:kill:node1"], "want STEP:kill|warn|join:NODE"),
        (["1:kil:node1"], "did you mean 'kill'?"),
        (["1:kill:node7"], "no node 'node7'; did you mean 'node"),
        (["1:kill:db"], "no node 'db'; there are node0, node1, node2"),
        (
            ["1:kill:node1", "2:warn:node1"],
            "node 'node1' is gone since '1:kill:node1'; there are node0, node2",
        ),
        (["1:join:node1"], "node 'node1' is there already"),
        (["1:join:new", "2:join:new"], "event '2:join:new': node 'new' is there already"),
        (["recovery:kill:node1"], "from the kill listed before it, and there is no event"),
        (["1:join:new", "recovery:kill:node1"], "there stands '1:join:new'; want e.g. '3:kill:OTHER'"),
        (["1:kill:node0", "recovery:join:new"], "want a kill in a recovery; nearest: recovery:kill:new"),
        (["1:kill:node0", "recovery:kill:node0"], "node 'node0' is gone since '1:kill:node0'"),
        (["1:kill:node0", "recovery:kill"], "want STEP:kill|warn|join:NODE or recovery:kill:NODE"),
        (["9:kill:node1"], "training ends after 4 steps; nearest: 3:kill:node1"),
    ],
)
def test_a_wrong_event_is_named(texts: list[str], message: str):
    with pytest.raises(ValueError, match="event") as caught:
        told_events(texts, 3, first=0, steps=4)
    assert message in str(caught.value)


def test_a_resumed_training_has_no_events_of_its_past():
    with pytest.raises(ValueError, match="and 2 are taken already; nearest: 2:kill:node1"):
        told_events(["1:kill:node1"], 3, first=2, steps=4)


@given(
    st.integers(0, 10**6),
    st.integers(1, 6),
    st.integers(1, 40),
    st.integers(0, 10),
    st.sampled_from((0.0, 30.0)),
)
def test_a_trace_on_steps_keeps_who_is_there(seed: int, nodes: int, steps: int, first: int, notice_s: float):
    rates = Rates(leaves_per_node_h=30.0, joins_per_missing_h=60.0)
    trace = random_trace(nodes, rates, 900.0, seed)
    found, num_late = traced_events(trace, 25.0, notice_s, first=first, steps=first + steps)
    present = set(found.start)
    assert len(present) == len(found.start)
    for event in found.events:
        assert first <= event.step < first + steps
        if event.what is Happening.JOIN:
            assert event.node not in present
            present.add(event.node)
        else:
            assert event.what is (Happening.WARN if notice_s else Happening.KILL)
            present.remove(event.node)
    if not notice_s:  # as many as the trace has then
        end_s = (first + steps) * 25.0
        counts = [count for time_s, count in trace.num_nodes() if time_s < end_s]
        assert len(present) == counts[-1]
        assert num_late == sum(event.time_s >= end_s for event in trace.events)


def test_time_counts_from_the_first_event_and_folds_what_was_before():
    trace = parse_trace("t", "t_s,event,node\n480,add,a\n480,add,b\n500,remove,a\n560,add,a\n")
    found, late = traced_events(trace, 10.0, 0.0, first=0, steps=20)
    assert (found.start, late) == (("a", "b"), 0)
    assert [str(event) for event in found.events] == ["2:kill:a", "8:join:a.2"]
    later, late = traced_events(trace, 10.0, 0.0, first=5, steps=7)
    assert (later.start, later.events, late) == (("b",), (), 1)
    warned, _ = traced_events(trace, 10.0, 15.0, first=0, steps=20)
    assert [str(event) for event in warned.events] == ["0:warn:a", "8:join:a.2"]
    at_once, _ = traced_events(trace, 10.0, 100.0, first=0, steps=20)
    assert (at_once.start, len(at_once.events)) == (("b",), 1)
