"""The compiled loop of the sweep: a heap of events over arrays. No fast-math."""

from heapq import heappop, heappush

import numpy as np

from workbench.arrays import Floats, Ints
from workbench.compiled import compiled

TASK_ENDS, TRANSMITTED, ARRIVES = 0, 1, 2


@compiled
def run(  # noqa: C901, PLR0912, PLR0915  (one loop: its parts share a dozen arrays)
    duration_s: Floats,
    wires: tuple[Floats, Floats, Ints],
    missing: Ints,
    offsets: Ints,
    successors: Ints,
) -> tuple[Floats, Floats, Floats]:
    """Start and end of every node, and when every row is ready.

    Args:
        duration_s: [T] seconds of every task; tasks are nodes 0..T-1.
        wires: per row, (seconds on its port, latency after it, port or -1); row r is node T + r.
        missing: [N] number of predecessors of every node; overwritten.
        offsets, successors: [N + 1], [E] successors of every node, in compressed rows.

    Returns:
        ([N] start, [N] end, [R] ready) in seconds; NaN for what never happened.
    """
    transmit_s, latency_s, port = wires
    num_tasks, num_nodes = len(duration_s), len(missing)
    start_s, end_s = np.full(num_nodes, np.nan), np.full(num_nodes, np.nan)
    ready_s = np.full(num_nodes - num_tasks, np.nan)
    num_ports = port.max() + 1 if len(port) else 0
    is_free = np.ones(num_ports, dtype=np.bool_)
    waiting = [[(0.0, 0)] for _ in range(num_ports)]
    for queue in waiting:
        queue.clear()
    undecided = [0]
    undecided.clear()
    events = [(0.0, 0, 0)]  # (time, kind, node)
    events.clear()
    stack = [node for node in range(num_nodes) if missing[node] == 0]
    now = 0.0
    while True:
        while stack:
            node = stack.pop()
            if node < num_tasks:
                start_s[node] = now
                heappush(events, (now + duration_s[node], TASK_ENDS, node))
                continue
            row = node - num_tasks
            ready_s[row] = now
            if port[row] < 0:
                end_s[node] = now
                _release(node, missing, offsets, successors, stack)
            else:
                heappush(waiting[port[row]], (now, row))
                undecided.append(port[row])
        if events and events[0][0] == now:
            _, kind, node = heappop(events)
            if kind != TRANSMITTED:
                end_s[node] = now
                _release(node, missing, offsets, successors, stack)
            else:
                row = node - num_tasks
                is_free[port[row]] = True
                undecided.append(port[row])
                heappush(events, (now + latency_s[row], ARRIVES, node))
            continue
        if undecided:  # all events of this instant are processed: free ports take their next row
            while undecided:
                free_port = undecided.pop()
                if is_free[free_port] and waiting[free_port]:
                    is_free[free_port] = False
                    row = heappop(waiting[free_port])[1]
                    start_s[num_tasks + row] = now
                    heappush(events, (now + transmit_s[row], TRANSMITTED, num_tasks + row))
            continue
        if not events:
            return start_s, end_s, ready_s
        now = events[0][0]


@compiled
def _release(node: int, missing: Ints, offsets: Ints, successors: Ints, stack: list[int]) -> None:
    """Process the end of a node: successors that wait for nothing else go on the stack."""
    for index in range(offsets[node], offsets[node + 1]):
        follower = successors[index]
        missing[follower] -= 1
        if missing[follower] == 0:
            stack.append(follower)
