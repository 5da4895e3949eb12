"""Tiles on compute units, and one attention layer over context-parallel ranks."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.attention.gpu import (
    COMPUTE_UNITS,
    activity,
    compute_units,
    list_schedule,
    longest_first,
    makespan_bounds,
)
from sim.attention.pieces import (
    Order,
    Split,
    UnitTiming,
    cut,
    even_pieces,
    fixed_pieces,
    pieces_where_it_pays,
    run_launch,
    whole_rows,
)
from sim.attention.policies import (
    Gpu,
    Kernel,
    Launches,
    Wires,
    launches_of,
    simulate_attention,
)
from sim.attention.price import backward_gpu, gpu_of, wires_of
from workbench.cost.collectives import all_gather_s
from workbench.cost.hardware import Link
from workbench.cost.model import CostModel
from workbench.cost.profile import ideal_profile, load_profile
from workbench.cost.roofline import Grid, RowWork, Work
from workbench.model.layer import Attention

UNIT = UnitTiming(tile_s=1.0)
TIMING = UnitTiming(tile_s=1.0, block_s=0.5, partial_s=0.25, merge_s=0.25, launch_s=0.125)
SIMPLE = Kernel(order=Order.STATIC, split=Split.NONE)
OPERATOR = Attention(name="attention", num_heads=32, num_kv_heads=8, head_dim=128, causal=True)
LINK = Link(name="wire", bytes_per_s=1e9, latency_s=1e-6)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compile before hypothesis takes the time of a case."""
    list_schedule([1.0], 1)


durations = st.lists(st.integers(0, 8).map(float), max_size=24)
units = st.integers(1, 5)


def dispatched(durations_s, num_units, free_s=None, release_s=0.0):
    """The dispatcher in the plainest way: look at every unit, take the first free one."""
    free = [max(time, release_s) for time in free_s or [0.0] * num_units]
    blocks = []
    for seconds in durations_s:
        unit = min(range(num_units), key=lambda u: (free[u], u))
        blocks.append((unit, free[unit], free[unit] + seconds))
        free[unit] += seconds
    return blocks


def optimum_s(durations_s, num_units):
    """Shortest makespan over all assignments."""
    return min(
        max(
            sum(s for s, where in zip(durations_s, assigned, strict=True) if where == u)
            for u in range(num_units)
        )
        for assigned in product(range(num_units), repeat=len(durations_s))
    )


@given(durations, units, st.data())
def test_blocks_run_as_the_plain_dispatcher_runs_them(durations_s, num_units, data):
    free_s = data.draw(st.lists(st.integers(0, 6).map(float), min_size=num_units, max_size=num_units))
    release_s = data.draw(st.integers(0, 6).map(float))
    found = list_schedule(durations_s, num_units, free_s=free_s, release_s=release_s)
    blocks = list(zip(found.unit.tolist(), found.start_s.tolist(), found.end_s.tolist(), strict=True))
    assert blocks == dispatched(durations_s, num_units, free_s, release_s)
    for unit in range(num_units):
        ends = [end for where, _, end in blocks if where == unit]
        assert found.free_s[unit] == max(ends, default=free_s[unit])


@given(durations, units)
def test_makespan_lies_within_grahams_bounds(durations_s, num_units):
    low, high = makespan_bounds(durations_s, num_units)
    assert low <= list_schedule(durations_s, num_units).makespan_s <= high + 1e-9


@given(st.lists(st.integers(1, 9).map(float), min_size=1, max_size=7), st.integers(1, 3))
def test_longest_first_is_within_four_thirds_of_the_optimum(durations_s, num_units):
    ordered = np.asarray(durations_s)[longest_first(durations_s)]
    found_s = list_schedule(ordered, num_units).makespan_s
    assert found_s <= (4 / 3 - 1 / (3 * num_units)) * optimum_s(durations_s, num_units) + 1e-9


def test_long_rows_last_leave_a_tail():
    """Causal rows 1..8 on 4 units: natural order ends with the two longest, sorted order is even."""
    rows = np.arange(1.0, 9.0)
    assert list_schedule(rows, 4).makespan_s == 12.0
    assert list_schedule(rows[longest_first(rows)], 4).makespan_s == 9.0 == rows.sum() / 4


@given(durations, units, st.integers(1, 6))
def test_activity_is_the_share_of_busy_units(durations_s, num_units, num_bins):
    found = list_schedule(durations_s, num_units)
    edges = np.linspace(0.0, found.makespan_s + 1.0, num_bins + 1)
    share = activity(found.start_s, found.end_s, edges, num_units)
    for low, high, value in zip(edges[:-1], edges[1:], share, strict=True):
        overlap = np.minimum(found.end_s, high) - np.maximum(found.start_s, low)
        assert value == pytest.approx(np.maximum(overlap, 0).sum() / ((high - low) * num_units), abs=1e-9)


@given(
    st.lists(st.lists(st.integers(0, 9).map(float), min_size=3, max_size=3), min_size=1, max_size=6),
    st.data(),
)
def test_cutting_keeps_all_work(tiles, data):
    counts = data.draw(st.lists(st.integers(1, 5), min_size=len(tiles), max_size=len(tiles)))
    by_row = np.asarray(tiles).sum(axis=1)
    for pieces in (whole_rows(tiles), fixed_pieces(tiles), even_pieces(tiles, counts)):
        found = np.bincount(pieces.row, weights=pieces.tiles, minlength=len(tiles))
        assert found == pytest.approx(by_row)
    assert np.all(even_pieces(tiles, counts).per_row <= np.maximum(1, np.ceil(by_row)))


@given(st.lists(st.integers(0, 40).map(float), min_size=1, max_size=12), st.integers(1, 3), units)
def test_a_split_that_pays_never_loses(tiles, num_heads, num_units):
    for order in Order:
        whole_s = run_launch(whole_rows(tiles), num_heads, num_units, TIMING, order).end_s
        pieces = pieces_where_it_pays(tiles, num_heads, num_units, TIMING, order)
        assert run_launch(pieces, num_heads, num_units, TIMING, order).end_s <= whole_s


def test_one_long_row_is_cut_and_merged():
    """40 tiles on 4 units: 4 pieces of 10, each 0.5 + 0.25 + 10; then a merge of 4 x 0.25 after 0.125."""
    pieces = even_pieces([40.0], [4])
    found = run_launch(pieces, 1, 4, TIMING, Order.STATIC)
    assert found.blocks.makespan_s == 10.75
    assert found.end_s == 10.75 + 0.125 + 1.0
    assert cut([40.0], Split.WHERE_IT_PAYS, 1, 4, TIMING, Order.STATIC).per_row[0] > 1
    assert cut([10.0] * 4, Split.WHERE_IT_PAYS, 1, 4, TIMING, Order.STATIC).per_row.tolist() == [1] * 4
    assert cut([[9.0, 0.0]], Split.FIXED, 1, 4, TIMING, Order.STATIC).per_row.tolist() == [2]


def test_launches_wait_for_their_keys():
    """Gathers of 3 s hide behind computing of 4 s but for the first; computing of 1 s hides in them."""
    launches, wires = Launches(count=4, heads=1, kv_heads=1), Wires(gather_s=3.0)
    gpu = Gpu(num_units=1, timing=UNIT)
    assert simulate_attention([[4.0]], launches, gpu, wires, SIMPLE).makespan_s == 3 + 4 * 4
    assert simulate_attention([[1.0]], launches, gpu, wires, SIMPLE).makespan_s == 4 * 3 + 1


def test_a_single_buffer_lets_nothing_overlap():
    launches, gpu = Launches(count=3, heads=1, kv_heads=1), Gpu(num_units=1, timing=UNIT)
    run = simulate_attention([[4.0]], launches, gpu, Wires(gather_s=3.0, num_buffers=1), SIMPLE)
    assert run.makespan_s == 3 * (3 + 4)


def test_gradients_are_scattered_after_their_launch():
    """Compute-bound: gather 1, three launches of 4, the last scatter of 2; wire-bound: all on the wire."""
    launches, gpu = Launches(count=3, heads=1, kv_heads=1), Gpu(num_units=1, timing=UNIT)
    run = simulate_attention([[4.0]], launches, gpu, Wires(gather_s=1.0, scatter_s=2.0), SIMPLE)
    assert run.makespan_s == 1 + 3 * 4 + 2
    bound = simulate_attention([[0.5]], launches, gpu, Wires(gather_s=3.0, scatter_s=2.0), SIMPLE)
    assert bound.makespan_s == 3 * 3 + 3 * 2


def test_a_slow_rank_holds_the_gathers_of_all():
    """The gather of launch 2 needs the buffer that the slow rank still reads."""
    launches, gpu = Launches(count=3, heads=1, kv_heads=1), Gpu(num_units=1, timing=UNIT)
    run = simulate_attention([[1.0], [10.0]], launches, gpu, Wires(gather_s=1.0), SIMPLE)
    assert run.gathers_s == ((0.0, 1.0), (1.0, 2.0), (11.0, 12.0))
    assert run.rank_s == (13.0, 31.0)
    three = simulate_attention([[1.0], [10.0], [1.0]], launches, gpu, Wires(gather_s=1.0), SIMPLE)
    assert (three.gathers_s, three.rank_s) == (run.gathers_s, (*run.rank_s, 13.0))
    assert three.busy_share == (*run.busy_share, run.busy_share[0])


def test_streams_fill_all_tails_but_the_last():
    """Rows 1, 1, 1, 3 on 2 units: 4 s alone; side by side the next launch starts in the gap."""
    launches, gpu = Launches(count=3, heads=1, kv_heads=1), Gpu(num_units=2, timing=UNIT)
    rows = [[1.0, 1.0, 1.0, 3.0]]
    one = simulate_attention(rows, launches, gpu, Wires(), SIMPLE)
    many = simulate_attention(
        rows, launches, gpu, Wires(), Kernel(order=Order.STATIC, split=Split.NONE, streams=3)
    )
    assert one.makespan_s == 3 * 4.0
    assert many.makespan_s == 10.0
    assert many.activity(0, [0.0, 8.0, 10.0]).tolist() == [1.0, 0.5]
    assert one.activity(0, [0.0, 2.0, 4.0]).tolist() == [1.0, 0.5]


tile_rows = st.lists(st.integers(0, 12).map(float), min_size=1, max_size=8)


@given(st.lists(tile_rows, min_size=1, max_size=3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_a_layer_lies_between_its_bounds(tiles, count, heads, streams):
    launches, gpu = Launches(count=count, heads=heads, kv_heads=1), Gpu(num_units=3, timing=UNIT)
    kernel = Kernel(order=Order.STATIC, split=Split.NONE, streams=streams)
    run = simulate_attention(tiles, launches, gpu, Wires(gather_s=2.0), kernel)
    for own, seconds in zip(tiles, run.rank_s, strict=True):
        assert seconds >= max(2.0 * count, sum(own) * heads * count / 3, *own)
    alone = [list_schedule(np.tile(own, heads), 3).makespan_s for own in tiles]
    assert run.makespan_s <= count * (2.0 + max(alone)) + 1e-9
    assert all(0 <= share <= 1 for share in run.busy_share)


@pytest.mark.parametrize("split", [Split.NONE, Split.FIXED])
def test_a_second_stream_never_delays_an_unmerged_layer(split):
    rng = np.random.default_rng(0)
    tiles = [rng.integers(1, 30, size=(20, 1)).astype(float) for _ in range(2)]
    launches, gpu = Launches(count=5, heads=2, kv_heads=1), Gpu(num_units=8, timing=UNIT)
    seconds = [
        simulate_attention(
            tiles, launches, gpu, Wires(), Kernel(order=Order.STATIC, split=split, streams=streams)
        ).makespan_s
        for streams in (1, 2)
    ]
    assert seconds[1] < seconds[0]


def test_a_full_gpu_reaches_the_rate_of_the_profile():
    """A causal layer in one launch takes what the cost model says, plus the overhead of its blocks."""
    cost = CostModel(load_profile("H100"))
    gpu = gpu_of(cost, OPERATOR, precision="bfloat16", num_units=compute_units("H100"))
    rows = np.arange(1, 129, dtype=float)  # 16k tokens
    launches = launches_of(OPERATOR, kv_heads_per_launch=8)
    run = simulate_attention([rows], launches, gpu, Wires(), Kernel())
    work = Work((RowWork(16384, 16384, 16384 * 16385 // 2),))
    seconds, _ = cost.attention_s(OPERATOR, work, Grid(), "bfloat16")
    assert run.makespan_s == pytest.approx(seconds, rel=0.05)
    assert run.makespan_s > seconds


def test_a_backward_is_five_products_for_two():
    cost = CostModel(ideal_profile(flop_per_s=1e12, bytes_per_s=1e12))
    forward = gpu_of(cost, OPERATOR, precision="bfloat16", num_units=4)
    assert forward.timing.tile_s == pytest.approx(4 * 128**3 / (1e12 / 4))
    assert backward_gpu(cost, OPERATOR, forward).timing.tile_s == pytest.approx(2.5 * forward.timing.tile_s)


def test_launches_share_out_heads():
    assert launches_of(OPERATOR) == Launches(count=8, heads=4, kv_heads=1)
    assert launches_of(OPERATOR, tp=2, kv_heads_per_launch=2) == Launches(count=2, heads=8, kv_heads=2)


def test_a_gather_is_padded_to_the_longest_share():
    cost = CostModel(ideal_profile())
    launches = launches_of(OPERATOR)
    found = wires_of(cost, OPERATOR, launches, (100, 140), precision="bfloat16", link=LINK)
    assert found.gather_s == all_gather_s(2 * 280 * 128 * 2, 2, LINK)
    assert found.scatter_s == all_gather_s(2 * 280 * 128 * 4, 2, LINK)  # gradients in float32
    assert wires_of(cost, OPERATOR, launches, (100,), precision="bfloat16", link=None) == Wires()


def test_gathers_go_at_the_rate_of_collectives_inside_layers():
    cost = CostModel(ideal_profile())
    twice = cost.executed(replace(cost.execution, collective_rate=2.0))
    slow, fast = (
        wires_of(model, OPERATOR, launches_of(OPERATOR), (100, 140), precision="bfloat16", link=LINK)
        for model in (cost, twice)
    )
    assert (fast.gather_s, fast.scatter_s) == (slow.gather_s / 2, slow.scatter_s / 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(lambda: list_schedule([1.0], 0), "compute units: want >= 1, got 0", id="units"),
        pytest.param(lambda: list_schedule([-1.0], 1), "finite number >= 0", id="negative"),
        pytest.param(lambda: list_schedule([np.nan], 1), "finite number >= 0", id="nan"),
        pytest.param(lambda: list_schedule([1.0], 2, free_s=[0.0]), "each of 2 units", id="free"),
        pytest.param(lambda: activity([], [], [0.0, 0.0], 1), "ascending times", id="edges"),
        pytest.param(lambda: compute_units("abacus"), "'abacus'.*known: .*A40", id="device"),
        pytest.param(lambda: UnitTiming(tile_s=0.0), "want tile_s > 0", id="tile"),
        pytest.param(lambda: whole_rows([-1.0]), "tiles: want finite numbers >= 0", id="tiles"),
        pytest.param(lambda: even_pieces([1.0], [0]), "want a count >= 1", id="pieces"),
        pytest.param(
            lambda: run_launch(whole_rows([1.0]), 0, 1, UNIT, Order.STATIC), "heads of a launch", id="heads"
        ),
        pytest.param(lambda: Kernel(streams=0), "streams: want >= 1, got 0", id="streams"),
        pytest.param(lambda: Launches(count=0, heads=1, kv_heads=1), "counts >= 1", id="launches"),
        pytest.param(lambda: Wires(gather_s=-1.0), "times >= 0", id="wires"),
        pytest.param(lambda: launches_of(OPERATOR, tp=3), "do not divide by tp 3", id="tp"),
        pytest.param(lambda: launches_of(OPERATOR, kv_heads_per_launch=3), "a divisor of 8, got 3", id="kv"),
        pytest.param(
            lambda: simulate_attention(
                [], Launches(count=1, heads=1, kv_heads=1), Gpu(num_units=1, timing=UNIT), Wires(), SIMPLE
            ),
            "at least one rank",
            id="ranks",
        ),
        pytest.param(
            lambda: wires_of(
                CostModel(ideal_profile()),
                OPERATOR,
                launches_of(OPERATOR),
                (1, 1),
                precision="bfloat16",
                link=None,
            ),
            "want a link",
            id="link",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_every_shipped_gpu_profile_has_compute_units():
    for name in COMPUTE_UNITS:
        assert load_profile(name).device == name
