"""The compiled loop of the sweep: ready times along the graph, and a heap of the ports' decisions.

Only ports need events in the order of time: which of its rows a port takes next depends on when they are
ready. Everything else starts when its last predecessor has ended, in any topological order. No fast-math.
"""

from heapq import heappop, heappush

import numpy as np

from workbench.arrays import Floats, Ints
from workbench.compiled import compiled


@compiled
def run(  # noqa: C901, PLR0912, PLR0915  (one loop: its parts share a dozen arrays)
    duration_s: Floats,
    wires: tuple[Floats, Floats, Ints],
    missing: Ints,
    offsets: Ints,
    successors: Ints,
) -> tuple[Floats, Floats, Floats]:
    """Start and end of every node, and when every row is ready.

    A port takes its next row once it is free and a row is ready, the one that was ready first (ties: the
    lower row). Decisions are made in the order of time: whatever becomes ready by a later one is ready
    later. Those of one instant are made before their rows arrive anywhere, as the engine does it.

    Args:
        duration_s: [T] seconds of every task; tasks are nodes 0..T-1.
        wires: per row, (seconds on its port, latency after it, port or -1); row r is node T + r.
        missing: [N] number of predecessors of every node; overwritten.
        offsets, successors: [N + 1], [E] successors of every node, in compressed rows.

    Returns:
        ([N] start, [N] end, [R] ready) in seconds; NaN for what never happened.

    Complexity: O(N + E + P log P) for P rows on ports.
    """
    transmit_s, latency_s, port_of = wires
    followers = offsets, successors
    num_tasks, num_nodes = len(duration_s), len(missing)
    start_s, end_s = np.full(num_nodes, np.nan), np.full(num_nodes, np.nan)
    ready_s = np.zeros(num_nodes)  # by the predecessors that have ended
    num_ports = port_of.max() + 1 if len(port_of) else 0
    free_s, decides_s = np.zeros(num_ports), np.full(num_ports, np.inf)
    waiting = [[(0.0, 0)] for _ in range(num_ports)]  # heaps of (ready, node)
    for queue in waiting:
        queue.clear()
    decisions = [(0.0, 0)]  # (time, port); only valid if `decides_s` agrees
    decisions.clear()
    sent = np.empty(num_ports, np.int64)
    first = np.flatnonzero(missing == 0)
    stack, top = np.empty(num_nodes, np.int64), len(first)
    stack[:top] = first
    while True:
        while top:
            top -= 1
            node = stack[top]
            now = ready_s[node]
            port = -1 if node < num_tasks else port_of[node - num_tasks]
            if port >= 0:
                heappush(waiting[port], (now, node))
                _decide(port, max(now, free_s[port]), decides_s, decisions)
                continue
            if node < num_tasks:
                start_s[node] = now
                end_s[node] = now + duration_s[node]
            else:
                end_s[node] = now
            top = _release(node, end_s[node], ready_s, missing, followers, stack, top)
        if not decisions:
            rows_s = ready_s[num_tasks:]
            rows_s[missing[num_tasks:] > 0] = np.nan
            return start_s, end_s, rows_s
        now, num_sent = decisions[0][0], 0
        while decisions and decisions[0][0] == now:
            port = heappop(decisions)[1]
            if decides_s[port] == now:
                decides_s[port] = np.inf
                sent[num_sent] = heappop(waiting[port])[1]
                num_sent += 1
        for node in sent[:num_sent]:
            row = node - num_tasks
            port = port_of[row]
            start_s[node] = now
            free_s[port] = now + transmit_s[row]
            end_s[node] = free_s[port] + latency_s[row]
            if waiting[port]:
                _decide(port, max(waiting[port][0][0], free_s[port]), decides_s, decisions)
        for node in sent[:num_sent]:
            top = _release(node, end_s[node], ready_s, missing, followers, stack, top)


@compiled
def _decide(port: int, time_s: float, decides_s: Floats, decisions: list[tuple[float, int]]) -> None:
    """Let a port take a row at that time, if it does not take one before."""
    if time_s < decides_s[port]:
        decides_s[port] = time_s
        heappush(decisions, (time_s, port))


@compiled
def _release(
    node: int,
    ended_s: float,
    ready_s: Floats,
    missing: Ints,
    followers: tuple[Ints, Ints],
    stack: Ints,
    top: int,
) -> int:
    """Process the end of a node: successors that wait for nothing else go on the stack; its new height."""
    offsets, successors = followers
    for index in range(offsets[node], offsets[node + 1]):
        follower = successors[index]
        ready_s[follower] = max(ready_s[follower], ended_s)
        missing[follower] -= 1
        if missing[follower] == 0:
            stack[top] = follower
            top += 1
    return top
