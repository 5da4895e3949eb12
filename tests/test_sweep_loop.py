"""The compiled loop of the sweep against a simulation instant by instant, on graphs full of ties."""

from collections import defaultdict
from graphlib import TopologicalSorter
from math import inf

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sim.step.sweep_loop import run
from tests.examples import examples


def by_instants(duration_s, wires, edges, num_nodes):
    """Start, end and ready time of every node: whatever ends at an instant does, then idle ports decide."""
    num_tasks = len(duration_s)
    start_s, end_s, ready_s = [inf] * num_nodes, [inf] * num_nodes, [inf] * num_nodes
    free_s, sent = defaultdict(float), set()
    before = {node: [source for source, target in edges if target == node] for node in range(num_nodes)}
    in_order = list(TopologicalSorter(before).static_order())

    def settled():
        """Times of all nodes that follow from those that are known, without a decision."""
        for node in in_order:
            ready_s[node] = max((end_s[source] for source in before[node]), default=0.0)
            if node < num_tasks:
                start_s[node], end_s[node] = ready_s[node], ready_s[node] + duration_s[node]
            elif wires[node - num_tasks][2] < 0:
                end_s[node] = ready_s[node]

    now = 0.0
    while now < inf:
        settled()
        waiting = defaultdict(list)
        for row, (_, _, port) in enumerate(wires):
            if port >= 0 and row not in sent and ready_s[num_tasks + row] < inf:
                waiting[port].append((ready_s[num_tasks + row], row))
        decisions = {port: max(min(queue)[0], free_s[port]) for port, queue in waiting.items()}
        now = min(decisions.values(), default=inf)
        for port in [port for port, time_s in decisions.items() if time_s == now]:
            row = min(waiting[port])[1]
            transmit_s, latency_s, _ = wires[row]
            start_s[num_tasks + row], free_s[port] = now, now + transmit_s
            end_s[num_tasks + row] = free_s[port] + latency_s
            sent.add(row)
    return start_s, end_s, ready_s[num_tasks:]


@st.composite
def graphs(draw):
    """Tasks that send rows to later tasks; times are 0, 1 or 2, so that most instants are shared."""
    num_tasks, num_rows = draw(st.integers(1, 8)), draw(st.integers(0, 10))
    seconds = st.sampled_from((0.0, 1.0, 2.0))
    duration_s = draw(st.lists(seconds, min_size=num_tasks, max_size=num_tasks))
    ports = st.integers(-1, 1)
    wires = draw(st.lists(st.tuples(seconds, seconds, ports), min_size=num_rows, max_size=num_rows))
    links = [
        (task, later)
        for task in range(num_tasks)
        for later in range(task + 1, num_tasks)
        if draw(st.booleans()) and draw(st.booleans())
    ]
    rows = [(draw(st.integers(0, num_tasks - 1)), draw(st.integers(0, num_tasks - 1))) for _ in wires]
    return duration_s, wires, links, [(a, b) if a < b else (a, None) for a, b in rows]


@examples(300)
@given(graphs())
def test_times_are_those_of_a_simulation_instant_by_instant(graph) -> None:
    duration_s, wires, links, rows = graph
    num_tasks, num_nodes = len(duration_s), len(duration_s) + len(wires)
    edges = list(links)
    for row, (producer, consumer) in enumerate(rows, num_tasks):
        edges += [(producer, row)] + ([(row, consumer)] if consumer is not None else [])
    missing = np.bincount([target for _, target in edges], minlength=num_nodes)
    order = sorted(edges)
    offsets = np.searchsorted([source for source, _ in order], np.arange(num_nodes + 1))
    successors = np.array([target for _, target in order], dtype=np.int64)
    columns = [np.array(column, dtype=float) for column in zip(*wires, strict=True)] or [np.zeros(0)] * 3
    times = run(
        np.array(duration_s),
        (columns[0], columns[1], columns[2].astype(np.int64)),
        missing.astype(np.int64),
        offsets.astype(np.int64),
        successors,
    )
    expected = by_instants(duration_s, wires, edges, num_nodes)
    is_sent = np.array([True] * num_tasks + [port >= 0 for _, _, port in wires])
    np.testing.assert_array_equal(times[0][is_sent], np.array(expected[0])[is_sent])
    np.testing.assert_array_equal(times[1], expected[1])
    np.testing.assert_array_equal(times[2], expected[2])
