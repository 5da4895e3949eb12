"""The simulator where the answer is known: pipelines, links, shared cores, reductions, memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.step.engine import simulate
from sim.step.sweep import Sweep
from tests.lowered_by_hand import FAST, group, lowered, one_node, row
from workbench.cost.hardware import Cluster, Link, Node
from workbench.memory.account import MemoryTable
from workbench.plan.lowered import Lowered, Route, Transfer
from workbench.schedule.action import STEP, Pass
from workbench.trace import Lane, MemorySample

dyadic = st.integers(1, 64).map(lambda n: n / 16)  # sums of these are exact


def one_f_one_b(num_stages: int, num_microbatches: int, *, link: Link = FAST, num_bytes: int = 0) -> Lowered:
    """A chain of stages, one rank each, under 1F1B."""
    programs = {}
    rows: list[Transfer] = []
    for stage in range(num_stages):
        warmup = min(num_stages - stage, num_microbatches)
        words = [f"{stage}F{m}" for m in range(warmup)]
        for microbatch in range(num_microbatches):
            words.append(f"{stage}B{microbatch}")
            if warmup + microbatch < num_microbatches:
                words.append(f"{stage}F{warmup + microbatch}")
        programs[(stage,)] = " ".join(words)
    for stage in range(num_stages - 1):
        for m in range(num_microbatches):
            ends = stage, stage + 1
            rows.append(row(len(rows), f"{stage}F{m}", f"{stage + 1}F{m}", ends, num_bytes=num_bytes))
            ends = stage + 1, stage
            rows.append(row(len(rows), f"{stage + 1}B{m}", f"{stage}B{m}", ends, num_bytes=num_bytes))
    return lowered(programs, rows, cluster=one_node(num_stages, link=link))


def by_kind(forward_s: float, backward_s: float):
    return lambda action: forward_s if action.kind is Pass.F else backward_s


# Pipelines


@given(st.integers(1, 6), st.integers(1, 12), dyadic, dyadic)
def test_equal_stages_take_m_plus_p_minus_1_times_f_plus_b(p, m, f, b):
    trace = simulate(one_f_one_b(p, m), by_kind(f, b))
    assert trace.iteration_s == (m + p - 1) * (f + b)


@given(st.integers(2, 6), dyadic, dyadic, dyadic, st.integers(0, 32))
def test_one_microbatch_crosses_every_link_twice(p, f, b, latency_s, num_bytes):
    link = Link(name="wire", bytes_per_s=16, latency_s=latency_s)
    trace = simulate(one_f_one_b(p, 1, link=link, num_bytes=num_bytes), by_kind(f, b))
    assert trace.iteration_s == p * (f + b) + 2 * (p - 1) * (num_bytes / 16 + latency_s)


@given(st.integers(2, 5), dyadic, dyadic, dyadic)
def test_latency_widens_the_steady_state_of_1f1b(p, f, b, latency_s):
    """With as many microbatches as stages, the first stage does all forwards before its first backward.

    The critical path goes down with the first microbatch, back up, and drains one round
    trip between neighbours per microbatch.
    """
    link = Link(name="wire", bytes_per_s=1e30, latency_s=latency_s)
    trace = simulate(one_f_one_b(p, p, link=link), by_kind(f, b))
    ends = longest_path_1f1b(p, p, f, b, latency_s)
    assert trace.iteration_s == pytest.approx(ends, rel=1e-12)
    assert trace.iteration_s >= (2 * p - 1) * (f + b) + 2 * (p - 1) * latency_s


def longest_path_1f1b(p: int, m: int, f: float, b: float, latency_s: float) -> float:
    """Ends by recursion over (stage, pass, microbatch): own predecessor in 1F1B order, and the neighbour."""
    orders = {}
    for stage in range(p):
        warmup = min(p - stage, m)
        order = [("F", i) for i in range(warmup)]
        for i in range(m):
            order.append(("B", i))
            if warmup + i < m:
                order.append(("F", warmup + i))
        orders[stage] = order
    known: dict[tuple[int, str, int], float] = {}

    def end(stage: int, kind: str, i: int) -> float:
        key = (stage, kind, i)
        if key not in known:
            index = orders[stage].index((kind, i))
            start = end(stage, *orders[stage][index - 1]) if index else 0.0
            neighbour = stage - 1 if kind == "F" else stage + 1
            if 0 <= neighbour < p:
                start = max(start, end(neighbour, kind, i) + latency_s)
            known[key] = start + (f if kind == "F" else b)
        return known[key]

    return max(end(stage, "B", m - 1) for stage in range(p))


@given(st.lists(dyadic, min_size=1, max_size=5), st.integers(1, 12))
def test_forwards_alone_take_every_stage_once_and_the_bottleneck_for_every_other_microbatch(works, m):
    stages = range(len(works))
    programs = {(stage,): " ".join(f"{stage}F{i}" for i in range(m)) for stage in stages}
    hops = [(stage, i) for stage in stages[:-1] for i in range(m)]
    rows = [
        row(number, f"{stage}F{i}", f"{stage + 1}F{i}", (stage, stage + 1), num_bytes=0)
        for number, (stage, i) in enumerate(hops)
    ]
    trace = simulate(lowered(programs, rows), lambda action: works[action.stage])
    assert trace.iteration_s == sum(works) + (m - 1) * max(works)


@given(st.lists(dyadic, min_size=2, max_size=5), st.integers(5, 12))
def test_1f1b_of_unequal_stages_is_paced_by_the_slowest(works, m):
    """Every stage does all its work between the others' way in and way out.

    The bound is met when the last stage is slowest, since nothing is behind it to wait for.
    """
    trace = simulate(
        one_f_one_b(len(works), m),
        lambda action: works[action.stage] * (1 if action.kind is Pass.F else 2),
    )
    bounds = [3 * sum(works[:stage]) + m * 3 * work for stage, work in enumerate(works)]
    assert trace.iteration_s >= max(bounds)
    if max(works) == works[-1]:
        assert trace.iteration_s == bounds[-1]


def test_a_single_stage_runs_back_to_back():
    trace = simulate(lowered({(0,): "0F0 0B0 0F1 0B1 STEP"}), by_kind(1.0, 2.0))
    assert [(s.start_s, s.end_s) for s in trace.spans] == [(0, 1), (1, 3), (3, 4), (4, 6), (6, 8)]


# Links


def links(intra: tuple[float, float], inter: tuple[float, float]) -> Cluster:
    node = Node(device="any", num_ranks=2, memory_bytes=1)
    return Cluster(
        name="any",
        nodes=(node, node),
        intra=Link(name="intra", bytes_per_s=intra[0], latency_s=intra[1]),
        inter=Link(name="inter", bytes_per_s=inter[0], latency_s=inter[1]),
    )


def test_ranks_of_a_node_share_its_nic_but_not_their_ports():
    rows = [
        row(0, "0F0", "2F0", (0, 2), num_bytes=8),
        row(1, "1F0", "3F0", (1, 3), num_bytes=8),
        row(2, "0F0", "1F1", (0, 1), num_bytes=8),
        row(3, "1F0", "0F1", (1, 0), num_bytes=8),
    ]
    programs = {(0,): "0F0 0F1", (1,): "1F0 1F1", (2,): "2F0", (3,): "3F0"}
    trace = simulate(lowered(programs, rows, cluster=links((8, 0.25), (4, 0.5))), lambda _: 1.0)
    assert [(m.row, m.ready_s, m.start_s, m.end_s) for m in trace.messages] == [
        (0, 1.0, 1.0, 3.5),
        (1, 1.0, 3.0, 5.5),
        (2, 1.0, 1.0, 2.25),
        (3, 1.0, 1.0, 2.25),
    ]


def unlike_cards(*bytes_per_s: float) -> Cluster:
    """One rank a node, each with a card of its own rate."""
    nodes = tuple(
        Node(
            device="any", num_ranks=1, memory_bytes=1, card=Link(name="card", bytes_per_s=rate, latency_s=0.5)
        )
        for rate in bytes_per_s
    )
    return Cluster(name="unlike", nodes=nodes, intra=FAST, inter=FAST)


def test_messages_to_one_slow_card_wait_for_each_other():
    """Two fast senders: 8 bytes at 2 a second each, one after the other."""
    rows = [row(0, "0F0", "2F0", (0, 2), num_bytes=8), row(1, "1F0", "2F0", (1, 2), num_bytes=8)]
    programs = {(0,): "0F0", (1,): "1F0", (2,): "2F0"}
    plan = lowered(programs, rows, cluster=unlike_cards(8, 8, 2))
    trace = simulate(plan, lambda _: 1.0)
    assert [(m.start_s, m.end_s) for m in trace.messages] == [(1.0, 5.5), (5.0, 9.5)]
    assert trace.iteration_s == Sweep(plan).iteration_s(lambda _: 1.0) == 10.5


def test_a_fast_card_sends_to_slow_ones_side_by_side():
    """Its 8 bytes a second are enough for two cards of 2; back they wait for nobody either."""
    rows = [row(0, "0F0", "1F0", (0, 1), num_bytes=8), row(1, "0F0", "2F0", (0, 2), num_bytes=8)]
    rows += [row(2, "1F0", "0F1", (1, 0), num_bytes=8), row(3, "2F0", "0F1", (2, 0), num_bytes=8)]
    programs = {(0,): "0F0 0F1", (1,): "1F0", (2,): "2F0"}
    trace = simulate(lowered(programs, rows, cluster=unlike_cards(8, 2, 2)), lambda _: 1.0)
    assert [(m.start_s, m.end_s) for m in trace.messages] == [(1.0, 5.5)] * 2 + [(6.5, 11.0)] * 2


def test_a_slow_card_sends_and_receives_at_once():
    rows = [row(0, "0F0", "1F1", (0, 1), num_bytes=8), row(1, "1F0", "0F1", (1, 0), num_bytes=8)]
    programs = {(0,): "0F0 0F1", (1,): "1F0 1F1"}
    trace = simulate(lowered(programs, rows, cluster=unlike_cards(8, 2)), lambda _: 1.0)
    assert [(m.start_s, m.end_s) for m in trace.messages] == [(1.0, 5.5)] * 2


def test_a_link_takes_the_message_that_was_ready_first_then_the_lower_row():
    rows = [
        row(0, "0F2", "1F2", (0, 1), num_bytes=4),
        row(1, "0F1", "1F1", (0, 1), num_bytes=4),
        row(2, "0F0", "1F0", (0, 1), num_bytes=4),
        row(3, "0F0", "1F3", (0, 1), num_bytes=4),
    ]
    cluster = one_node(2, link=Link(name="slow", bytes_per_s=1, latency_s=0))
    trace = simulate(
        lowered({(0,): "0F0 0F1 0F2", (1,): "1F0 1F1 1F2 1F3"}, rows, cluster=cluster), lambda _: 1
    )
    assert [(m.row, m.start_s) for m in sorted(trace.messages, key=lambda m: m.start_s)] == [
        (2, 1.0),
        (3, 5.0),
        (1, 9.0),
        (0, 13.0),
    ]


def test_a_broadcast_occupies_its_leader_once_after_the_row_it_hands_on():
    rows = [
        row(0, "0F0", "1F0", (0, 1), num_bytes=2),
        row(1, "0F0", "1F0", (1, 2, 3), num_bytes=2, route=Route.BROADCAST, after=0),
    ]
    cluster = one_node(4, link=Link(name="wire", bytes_per_s=2, latency_s=0.5))
    stages = {0: (0,), 1: (1, 2, 3)}
    trace = simulate(
        lowered({(0,): "0F0", (1, 2, 3): "1F0"}, rows, stages=stages, cluster=cluster), lambda _: 1
    )
    assert [m[2:4] + m[5:] for m in trace.messages] == [
        (0, 1, 1.0, 1.0, 2.5),
        (1, 2, 2.5, 2.5, 4.0),
        (1, 3, 2.5, 2.5, 4.0),
    ]
    assert trace.iteration_s == 5.0


def test_a_local_row_is_there_at_once_and_is_no_message():
    rows = [row(0, "0F0", "1F0", (0, 0), route=Route.LOCAL, num_bytes=10**9)]
    trace = simulate(lowered({(0,): "0F0 1F0"}, rows, stages={0: (0,), 1: (0,)}), lambda _: 1.0)
    assert trace.messages == ()
    assert trace.iteration_s == 2.0


# Shared cores


@given(st.integers(1, 5), st.integers(1, 4), dyadic)
def test_equal_work_on_too_few_cores_takes_ranks_over_cores_as_long(num_ranks, num_cores, work_s):
    programs = {(rank,): f"{rank}F0" for rank in range(num_ranks)}
    trace = simulate(lowered(programs, cluster=one_node(num_ranks, num_cores=num_cores)), lambda _: work_s)
    assert trace.iteration_s == pytest.approx(work_s * max(1.0, num_ranks / num_cores), rel=1e-12)


@given(st.lists(dyadic, min_size=1, max_size=6), st.integers(1, 3))
def test_unequal_work_on_shared_cores_ends_as_processor_sharing_says(works, num_cores):
    """Sorted ascending, the i-th ends (w_i - w_i-1) x max(1, active / cores) after the one before."""
    n = len(works)
    wanted, now_s, before_s = {}, 0.0, 0.0
    for position, rank in enumerate(sorted(range(n), key=works.__getitem__)):
        now_s += (works[rank] - before_s) * max(1.0, (n - position) / num_cores)
        before_s = works[rank]
        wanted[rank] = now_s
    programs = {(rank,): f"{rank}F0" for rank in range(n)}
    trace = simulate(
        lowered(programs, cluster=one_node(n, num_cores=num_cores)), lambda action: works[action.stage]
    )
    assert {span.rank: span.end_s for span in trace.spans} == pytest.approx(wanted, rel=1e-12)


def test_a_late_start_slows_down_what_already_runs():
    """One core: 0F0 alone for 1 s, then both at half speed until 0F0's other 2 s are done at 5."""
    rows = [row(0, "2F0", "1F0", (2, 1), num_bytes=0)]
    node = Node(device="any", num_ranks=2, memory_bytes=1, num_cores=1)
    own = Node(device="any", num_ranks=1, memory_bytes=1)
    cluster = Cluster(name="any", nodes=(node, own), intra=FAST, inter=FAST)
    works = {0: 3.0, 1: 3.0, 2: 1.0}
    trace = simulate(
        lowered({(0,): "0F0", (1,): "1F0", (2,): "2F0"}, rows, cluster=cluster),
        lambda action: works[action.stage],
    )
    assert [(s.rank, s.start_s, s.end_s) for s in trace.spans] == [(0, 0, 5), (1, 1, 6), (2, 0, 1)]


def test_a_stage_across_nodes_holds_its_ranks_until_the_slowest_ends():
    crowded = Node(device="any", num_ranks=2, memory_bytes=1, num_cores=1)
    own = Node(device="any", num_ranks=1, memory_bytes=1)
    cluster = Cluster(name="any", nodes=(crowded, own), intra=FAST, inter=FAST)
    stages = {0: (0, 2), 1: (1,)}
    trace = simulate(lowered({(0, 2): "0F0", (1,): "1F0"}, stages=stages, cluster=cluster), lambda _: 1.0)
    assert {s.end_s for s in trace.spans} == {2.0}


# Reductions and the step


def spans_of(trace, rank: int, lane: Lane):
    return [(str(s.action), s.start_s, s.end_s) for s in trace.spans if s.rank == rank and s.lane is lane]


def test_a_reduction_runs_beside_later_passes_and_the_step_waits_for_it():
    plan = lowered(
        {(0,): "0F0 0REDUCE_GRAD 0F1 STEP", (1,): "1F0 1REDUCE_GRAD STEP"},
        groups=[group(0, (0, 1), 4)],
        reductions={"0REDUCE_GRAD": (0,), "1REDUCE_GRAD": (0,)},
    )
    prices = {Pass.F: 1.0, Pass.REDUCE_GRAD: 5.0, Pass.STEP: 0.5}
    trace = simulate(plan, lambda action: prices[action.kind])
    assert spans_of(trace, 0, Lane.REDUCE) == [("0REDUCE_GRAD", 1.0, 6.0)]
    assert spans_of(trace, 0, Lane.COMPUTE) == [("0F0", 0, 1), ("0F1", 1, 2), ("STEP", 6, 6.5)]


def test_groups_share_the_price_by_elements_and_meet_one_after_the_other():
    """Rank 0 reduces 3 parts with rank 1 and 1 part with rank 2; rank 2 is late."""
    plan = lowered(
        {(0,): "0F0 0REDUCE_GRAD", (1,): "1F0 1REDUCE_GRAD", (2,): "2F0 2F1 2REDUCE_GRAD"},
        groups=[group(0, (0, 1), 3), group(1, (0, 2), 1)],
        reductions={"0REDUCE_GRAD": (0, 1), "1REDUCE_GRAD": (0,), "2REDUCE_GRAD": (1,)},
    )
    prices = {0: 4.0, 1: 3.0, 2: 1.0}
    trace = simulate(plan, lambda a: prices[a.stage] if a.kind is Pass.REDUCE_GRAD else 2.5)
    assert spans_of(trace, 1, Lane.REDUCE) == [("1REDUCE_GRAD", 2.5, 5.5)]
    assert spans_of(trace, 2, Lane.REDUCE) == [("2REDUCE_GRAD", 5.5, 6.5)]
    assert spans_of(trace, 0, Lane.REDUCE) == [("0REDUCE_GRAD", 2.5, 6.5)]


def test_a_group_takes_the_longest_part_that_any_of_its_stages_gives_it():
    plan = lowered(
        {(0,): "0F0 0REDUCE_GRAD", (1,): "1F0 1REDUCE_GRAD"},
        groups=[group(0, (0, 1), 4)],
        reductions={"0REDUCE_GRAD": (0,), "1REDUCE_GRAD": (0,)},
    )
    trace = simulate(plan, lambda a: 1.0 + a.stage)
    assert trace.iteration_s == 2.0 + 2.0


def test_tensor_parallel_places_reduce_side_by_side():
    """Each rank reduces one of the two groups, so the stage's price is the price of one."""
    stages = {0: (0, 1), 1: (2, 3)}
    plan = lowered(
        {(0, 1): "0F0 0REDUCE_GRAD STEP", (2, 3): "1F0 1REDUCE_GRAD STEP"},
        stages=stages,
        groups=[group(0, (0, 2), 4), group(1, (1, 3), 4)],
        reductions={"0REDUCE_GRAD": (0, 1), "1REDUCE_GRAD": (0, 1)},
    )
    trace = simulate(plan, lambda _: 1.0)
    for rank in range(4):
        assert [s[1:] for s in spans_of(trace, rank, Lane.REDUCE)] == [(1.0, 2.0)]
        assert spans_of(trace, rank, Lane.COMPUTE)[-1] == ("STEP", 2.0, 3.0)


# Memory


def test_memory_follows_starts_and_ends():
    table = MemoryTable(static_bytes={0: 100}, acquired_bytes={0: [10, 5, 0]}, released_bytes={0: [2, 13, 0]})
    trace = simulate(lowered({(0,): "0F0 0B0 STEP"}), by_kind(1.0, 2.0), memory=table)
    assert trace.memory == (
        MemorySample(0, 0.0, 100),
        MemorySample(0, 0.0, 110),
        MemorySample(0, 1.0, 108),
        MemorySample(0, 1.0, 113),
        MemorySample(0, 3.0, 100),
    )


def test_memory_at_one_instant_never_dips_below_what_passes_without_duration_hold():
    words = [f"0{kind}{m}" for m in range(3) for kind in "FB"]
    table = MemoryTable(static_bytes={0: 1}, acquired_bytes={0: [7, 0] * 3}, released_bytes={0: [0, 7] * 3})
    trace = simulate(lowered({(0,): " ".join(words)}), lambda _: 0.0, memory=table)
    assert [sample.num_bytes for sample in trace.memory] == [1, 8, 1, 8, 1, 8, 1]


def test_step_is_each_ranks_own():
    plan = lowered({(0,): "0F0 STEP", (1,): "1F0 1F1 STEP"})
    trace = simulate(plan, lambda _: 1.0)
    ends = {s.rank: s.end_s for s in trace.spans if s.action == STEP}
    assert ends == {0: 2.0, 1: 3.0}
