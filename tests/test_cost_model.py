"""Times of layers: closed forms on ideal machines, plausibility on shipped ones, measured layers."""

import pickle
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cost_models import GPT, LLAMA_8B, block, causal, compute_only, layer, linear
from tests.examples import examples
from workbench.calibrate.data_sheet import A100, H100, H200, DataSheet
from workbench.cost.collectives import (
    Collective,
    Collectives,
    all_gather_s,
    all_reduce_s,
    broadcast_s,
    reduce_scatter_s,
)
from workbench.cost.execution import AttentionKernel, Execution
from workbench.cost.hardware import Link
from workbench.cost.interpolate import Surface
from workbench.cost.layer_table import LayerPoint, LayerTable
from workbench.cost.model import CostModel, LayerTime, RowWork, Work
from workbench.cost.profile import Direction, Profile, ideal_profile, known_profiles, load_profile
from workbench.cost.roofline import Gemm, Grid, layer_flop
from workbench.cost.signature import signature
from workbench.model.frozen import Needs
from workbench.model.layer import Attention

LINK = Link(name="wire", bytes_per_s=1e9, latency_s=1e-6)
FROZEN, THROUGH, TRAINED = Needs(False, False), Needs(True, False), Needs(True, True)


def time_of(
    cost: CostModel, what=None, work=None, *, tp=1, cp=1, precision="bfloat16", link=None
) -> LayerTime:
    return cost.layer_time(
        what or block(LLAMA_8B), work or causal(1024), tp=tp, cp=cp, precision=precision, link=link
    )


def test_backward_is_zero_one_or_two_forwards():
    time = time_of(CostModel(compute_only()), linear())
    assert time.forward_s == pytest.approx(2 * 1024 * 512 * 512 / 1e12)
    assert time.backward_s(FROZEN) == 0
    assert time.backward_s(THROUGH) == time.forward_s
    assert time.backward_s(TRAINED) == 2 * time.forward_s
    first = Needs(input_grad=False, weight_grad=True)
    assert time.backward_s(first) == time.forward_s


def test_first_trainable_block_needs_gradients_through_all_but_its_first_weights():
    """Weight gradients of the whole block need gradients of everything behind its first norm."""
    time = time_of(CostModel(compute_only()))
    first = Needs(input_grad=False, weight_grad=True)
    assert time.backward_s(first) == pytest.approx(time.backward_s(TRAINED), rel=1e-3)
    two = time_of(CostModel(compute_only()), layer(*linear().operators, *linear(512, bias=True).operators))
    assert two.backward_s(first) == pytest.approx(0.75 * two.backward_s(TRAINED))


def test_attention_backward_is_two_and_a_half_forwards():
    attention = Attention(name="a", num_heads=4, num_kv_heads=4, head_dim=64, causal=True)
    time = time_of(CostModel(compute_only()), layer(attention))
    assert time.input_grad_s == pytest.approx(2.5 * time.forward_s)
    assert time.weight_grad_s == 0


@given(st.integers(1, 2048), st.sampled_from([1, 2, 4, 8]))
def test_ideal_block_time_is_flop_over_peak_and_tp_divides_it(tokens: int, tp: int):
    cost = CostModel(ideal_profile(flop_per_s=1e12))
    fast = Link(name="fast", bytes_per_s=1e30, latency_s=0.0)
    time = time_of(cost, work=causal(tokens), tp=tp, link=fast)
    assert time.forward_s == pytest.approx(layer_flop(block(), causal(tokens), Grid(tp, 1)) / 1e12)


def test_collectives_inside_a_layer():
    alone, cut = (time_of(CostModel(compute_only()), tp=tp, link=LINK) for tp in (1, 2))
    message_s = all_reduce_s(1024 * 4096 * 2, 2, LINK)
    assert cut.forward_s == pytest.approx(alone.forward_s / 2 + 2 * message_s)
    assert cut.input_grad_s == pytest.approx(alone.input_grad_s / 2 + 2 * message_s)
    assert cut.weight_grad_s == pytest.approx(alone.weight_grad_s / 2)
    shared = time_of(CostModel(compute_only()), cp=4, link=LINK)
    gathered_s = all_gather_s(2 * 1024 * 8 * 128 * 2, 4, LINK)
    assert shared.forward_s == pytest.approx(alone.forward_s / 4 + gathered_s)
    back_s = gathered_s + all_gather_s(2 * 1024 * 8 * 128 * 4, 4, LINK)  # again, and sums in float32
    assert shared.input_grad_s == pytest.approx(alone.input_grad_s / 4 + back_s)


@given(st.integers(1, 64), st.integers(0, 10**9))
def test_ring_formulas(num_ranks: int, num_bytes: int):
    bandwidth_s, n = num_bytes / 1e9, num_ranks
    expected = 2 * (n - 1) / n * bandwidth_s + 2 * (n - 1) * 1e-6
    assert all_reduce_s(num_bytes, n, LINK) == pytest.approx(expected)
    assert all_gather_s(num_bytes, n, LINK) == pytest.approx(expected / 2)
    assert reduce_scatter_s(num_bytes, n, LINK) == pytest.approx(expected / 2)
    assert broadcast_s(num_bytes, n, LINK) == pytest.approx((bandwidth_s + (n - 1) * 1e-6) * (n > 1))


def test_measured_collectives_belong_to_the_machines_own_link_and_stand_in_for_others():
    profile = load_profile("A100-80GB")
    own, collectives = profile.machine_link("intra").link, Collectives(profile)
    assert collectives.is_measured(Collective.ALL_REDUCE, 8, own)
    assert not collectives.is_measured(Collective.ALL_REDUCE, 8, LINK)
    assert not collectives.is_measured(Collective.ALL_REDUCE, 6, own)
    # 512 MiB over 8 ranks were measured at a bus bandwidth of 222 GB/s.
    assert collectives.seconds(Collective.ALL_REDUCE, 2**29, 8, own) == pytest.approx(4.2259e-3, rel=1e-3)
    assert collectives.seconds(Collective.ALL_REDUCE, 1, 8, own) == pytest.approx(2.2e-5, rel=0.1)
    waiting_s, whole_s = (collectives.seconds(Collective.ALL_REDUCE, size, 8, own) for size in (1, 2**29))
    slow, late, near = (
        replace(own, bytes_per_s=own.bytes_per_s / slower, latency_s=later * own.latency_s)
        for slower, later in ((4, 1), (1, 2), (1, 0.5))
    )
    slow_s, late_s, near_s = (
        collectives.seconds(Collective.ALL_REDUCE, 2**29, 8, each) for each in (slow, late, near)
    )
    assert slow_s == pytest.approx(waiting_s + 4 * (whole_s - waiting_s))
    assert late_s == pytest.approx(whole_s + 14 * own.latency_s)
    assert near_s == pytest.approx(whole_s - waiting_s / 2)
    at_once = replace(own, latency_s=0.0)
    byte_s, two_s = (collectives.seconds(Collective.ALL_REDUCE, size, 8, at_once) for size in (1, 2))
    assert 0 < byte_s == pytest.approx(two_s / 2)
    bare = Collectives(load_profile("A40"))  # nothing was measured
    assert bare.seconds(Collective.ALL_REDUCE, 2**20, 8, LINK) == all_reduce_s(2**20, 8, LINK)


@given(
    st.sampled_from(["A100-80GB", "H100", "V100-32GB", "A40"]),
    st.sampled_from(["intra", "inter"]),
    st.sampled_from(list(Collective)),
    st.integers(2, 24),
    st.floats(1, 2**32),
    st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)),
)
def test_a_link_that_is_better_is_never_slower(name, scope, kind, num_ranks, num_bytes, changes):
    """Whether one of them is the machine's own, of which there are tables, or none is."""
    profile = load_profile(name)
    own, collectives = profile.machine_link(scope).link, Collectives(profile)
    other = replace(own, bytes_per_s=own.bytes_per_s * changes[0])
    later = replace(own, latency_s=own.latency_s * changes[1])
    own_s, other_s, later_s = (
        collectives.seconds(kind, num_bytes, num_ranks, each) for each in (own, other, later)
    )
    slack = 1 + 1e-6  # a message of no bytes is one of a byte
    assert own_s <= other_s * slack if changes[0] < 1 else other_s <= own_s * slack
    assert own_s <= later_s * slack if changes[1] > 1 else later_s <= own_s * slack


@pytest.mark.parametrize(("name", "lowest", "highest"), [("A40", 0.6, 0.85), ("A100-80GB", 0.6, 0.9)])
def test_large_matmuls_reach_a_plausible_share_of_the_peak(name: str, lowest: float, highest: float):
    cost = CostModel(load_profile(name))
    for gemm in (Gemm(4096, 4096, 4096), Gemm(4096, 11008, 4096), Gemm(2048, 8192, 8192)):
        seconds, _ = cost.matmul_s(gemm, "bfloat16")
        assert lowest < gemm.flop / seconds / cost.profile.peak("bfloat16") < highest


@pytest.mark.parametrize(
    ("sheet", "milliseconds"),
    [(A100, 0.548896), (H100, 0.166026), (H200, 0.168069)],
    ids=["A100", "H100", "H200"],
)
def test_a_measured_matmul_comes_back(sheet: DataSheet, milliseconds: float):
    """The published times of m = n = k = 4096, up to the four digits that profiles keep, no faster than the
    best of any shape, at what training sustains of that."""
    gemm = Gemm(4096, 4096, 4096)
    seconds, inside = CostModel(load_profile(sheet.device)).matmul_s(gemm, "bfloat16")
    assert inside
    least_s = gemm.flop / (sheet.sheet.reached_bfloat16_flop_per_s or sheet.sheet.bfloat16_flop_per_s)
    assert seconds == pytest.approx(max(milliseconds / 1e3, least_s) / sheet.sustained_products, rel=1e-3)


@pytest.mark.parametrize("name", ["A40", "H100"])
def test_a_product_of_few_columns_is_read_as_its_transposed(name: str):
    """Tables begin at 1,280 and 512 columns: an encoder of width 192 has a seventh of the former."""
    cost, few = CostModel(load_profile(name)), Gemm(8192, 192, 1024)
    seconds, inside = cost.matmul_s(few, "bfloat16")
    assert (seconds, inside) == (cost.matmul_s(few.transposed, "bfloat16")[0], False)
    assert seconds < cost.matmul_s(few._replace(n=1280), "bfloat16")[0] / 2


@pytest.mark.parametrize("name", ["A40", "A100-80GB"])
@examples(60)
@given(
    columns=st.tuples(st.sampled_from([64, 192, 768, 1280, 4096]), st.sampled_from([192, 768, 4096])),
    rows=st.lists(st.floats(20, 100_000), min_size=2, max_size=5, unique=True).map(sorted),
    share=st.floats(0, 1),
    direction=st.sampled_from(list(Direction)),
)
def test_no_product_is_faster_than_the_bound_of_its_rows(name: str, columns, rows, share: float, direction):
    cost = CostModel(load_profile(name))
    most = cost.most_products_flop_per_s(np.array(rows), columns, direction, "bfloat16")
    for (least, largest), bound in zip(pairwise(rows), most, strict=True):
        gemm = Gemm(least + share * (largest - least), *columns)
        assert gemm.flop / cost.product_s(gemm, direction, "bfloat16")[0] <= bound * (1 + 1e-9)


@pytest.mark.parametrize("name", known_profiles())
@examples(30)
@given(tokens=st.integers(16, 4096))
def test_twice_the_tokens_never_take_less_time(name: str, tokens: int):
    cost = CostModel(load_profile(name))
    once, twice = (time_of(cost, block(GPT), causal(n)) for n in (tokens, 2 * tokens))
    assert once.forward_s <= twice.forward_s * (1 + 1e-9)
    assert once.backward_s(TRAINED) <= twice.backward_s(TRAINED) * (1 + 1e-9)


@given(st.integers(1, 4000), st.integers(1, 4000))
def test_ideal_time_grows_with_tokens(fewer: int, more: int):
    fewer, more = sorted((fewer, more))
    cost = CostModel(ideal_profile(bytes_per_s=1e11))
    assert time_of(cost, work=causal(fewer)).forward_s <= time_of(cost, work=causal(more)).forward_s


def test_unmeasured_costs_are_named():
    a40 = time_of(CostModel(load_profile("A40"))).unmeasured
    assert "attention: scaled from another machine" in a40
    assert "backward of matmul" in a40
    assert "matmul: scaled from another machine" not in a40
    a100 = CostModel(load_profile("A100-80GB"))
    assert "attention: scaled from another machine" not in time_of(a100).unmeasured
    assert "attention with heads of 64" in time_of(a100, block(GPT)).unmeasured
    assert "matmul in float32" in time_of(a100, precision="float32").unmeasured
    assert "matmul outside the measured shapes" in time_of(a100, work=causal(2**17)).unmeasured
    of_another = {"collectives inside a layer: scaled table"}
    assert of_another <= time_of(a100, tp=2, link=LINK).unmeasured
    assert not any("collectives" in doubt for doubt in time_of(a100, tp=2).unmeasured)
    assert (
        "collectives inside a layer: ring formula" in time_of(CostModel(load_profile("A40")), tp=2).unmeasured
    )


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"precision 'int8': want one of bfloat16, float32, float64"):
        time_of(CostModel(compute_only()), precision="int8")
    with pytest.raises(ValueError, match=r"'ideal' has no 'intra' link; it has none"):
        time_of(CostModel(compute_only()), tp=2)


COORDINATE = st.floats(1.0, 1e6)


@given(
    st.lists(st.tuples(COORDINATE, COORDINATE, COORDINATE), min_size=1, max_size=12), COORDINATE, COORDINATE
)
def test_surface_stays_between_its_rates_and_does_not_see_order(points, x, y):
    reading = Surface(points).read(x, y)
    rates = [point[-1] for point in points]
    assert min(rates) * (1 - 1e-9) <= reading.rate <= max(rates) * (1 + 1e-9)
    assert Surface(points[::-1]).read(x, y).rate == pytest.approx(reading.rate, rel=1e-9)


@given(st.dictionaries(st.tuples(st.integers(0, 20), st.integers(0, 20)), COORDINATE, min_size=1))
def test_surface_returns_its_points_exactly(rates):
    surface = Surface([(2.0**x, 2.0**y, rate) for (x, y), rate in rates.items()])
    for (x, y), rate in rates.items():
        assert surface.read(2.0**x, 2.0**y) == (pytest.approx(rate, rel=1e-9), True)


@given(st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_surface_reads_all_its_points_wherever_they_stand(seed, num_coordinates):
    """Inverse squared distance over the six nearest of all points; a straight line over one coordinate."""
    random = np.random.default_rng(seed)
    points = 2.0 ** random.uniform(0, 12, (random.integers(1, 200), num_coordinates + 1))
    surface, (*columns, rates) = Surface(points), np.log2(points).T
    low, high = (extreme(axis=1) for extreme in (np.array(columns).min, np.array(columns).max))
    for asked in random.uniform(-1, 13, (5, num_coordinates)):
        at = np.clip(asked, low, high)
        if num_coordinates == 1:
            order = np.argsort(columns[0])
            expected = np.interp(at[0], columns[0][order], rates[order])
        else:
            apart = sum(abs(each - value) for each, value in zip(columns, at, strict=True))
            near = apart <= sorted(apart)[min(6, len(apart)) - 1] + 1e-9
            expected = np.average(rates[near], weights=np.maximum(apart[near], 1e-12) ** -2.0)
        assert surface.read(*2.0**asked).rate == pytest.approx(2.0**expected, rel=1e-9)


@pytest.mark.parametrize(
    "run", [Execution(), Execution(attention=AttentionKernel.STORED, unaligned_rate=0.9)]
)
def test_a_model_that_was_asked_for_others_answers_as_a_new_one(run):
    """Layers, works and grids share prices of operators and products; executions share neither."""
    profile = load_profile("A100-80GB")
    works = [causal(512), causal(512, 2), Work((RowWork(1024, 1024, 9),)), causal(100, 9)]
    asked = list(product([block(GPT), block(LLAMA_8B)], works, [(1, 1), (2, 1), (1, 2), (2, 2)]))
    old = CostModel(profile)
    for what, work, (tp, cp) in asked:
        time_of(old, what, work, tp=tp, cp=cp, link=LINK)
    old = pickle.loads(pickle.dumps(old.executed(run)))
    for what, work, (tp, cp) in asked:
        new = CostModel(profile, run)
        expected = time_of(new, what, work, tp=tp, cp=cp, link=LINK)
        assert time_of(old, what, work, tp=tp, cp=cp, link=LINK) == expected


def test_leave_one_out_of_a_power_law_is_small_and_of_noise_is_not():
    smooth = [(2.0**i, 2.0**j, 1e9 * 2 ** (0.05 * (i + j))) for i in range(6) for j in range(6)]
    median, p90 = Surface(smooth).leave_one_out()
    assert median < 0.02
    assert p90 < 0.1
    noisy = [(a, b, rate * (1 + (index % 2))) for index, (a, b, rate) in enumerate(smooth)]
    assert Surface(noisy).leave_one_out()[0] > 0.2


def seconds_of(rows: int, tokens: int) -> float:
    """A machine whose layer takes this long: quadratic in tokens per row, linear in rows."""
    return 1e-4 + rows * (2e-6 * tokens + 1e-9 * tokens * tokens)


def measured_profile(precision: str = "float32", *, tokens=(32, 64, 128, 256), rows=(1, 2, 4)) -> Profile:
    points = tuple(
        LayerPoint(
            rows=r,
            tokens_in=t,
            attention_area=t * (t + 1) // 2,
            forward_s=seconds_of(r, t),
            input_grad_s=seconds_of(r, t) * 1.1,
            weight_grad_s=seconds_of(r, t) * 0.9,
            weight_only_s=seconds_of(r, t) * 1.8,
        )
        for r in rows
        for t in tokens
    )
    table = LayerTable(signature=signature(block()), precision=precision, points=points)
    return replace(ideal_profile("local"), layers=(table,))


@given(st.sampled_from([1, 2, 4]), st.sampled_from([32, 64, 128, 256]))
def test_a_measured_size_comes_back_exactly(rows: int, tokens: int):
    time = time_of(CostModel(measured_profile()), work=causal(tokens, rows), precision="float32")
    assert time.forward_s == seconds_of(rows, tokens)
    assert time.input_grad_s == seconds_of(rows, tokens) * 1.1
    assert time.weight_grad_s == seconds_of(rows, tokens) * 0.9
    assert time.interior_grad_s == pytest.approx(seconds_of(rows, tokens) * 0.9)
    assert not time.unmeasured


@given(st.integers(1, 4), st.integers(32, 256))
def test_sizes_between_follow_the_quadratic(rows: int, tokens: int):
    time = time_of(CostModel(measured_profile()), work=causal(tokens, rows), precision="float32")
    assert time.forward_s == pytest.approx(seconds_of(rows, tokens), rel=1e-3)
    assert not time.unmeasured


def test_unequal_rows_are_summed():
    work = Work((RowWork(40, 40, 820), RowWork(200, 200, 20100)))
    time = time_of(CostModel(measured_profile()), work=work, precision="float32")
    expected = 1e-4 + 2e-6 * 240 + 1e-9 * (40**2 + 200**2)
    assert time.forward_s == pytest.approx(expected, rel=1e-3)


def test_sizes_beyond_the_measured_ones_are_named():
    cost = CostModel(measured_profile())
    reason = "block layer outside the measured sizes"
    for work in (causal(16), causal(1024), causal(256, 8)):
        assert reason in time_of(cost, work=work, precision="float32").unmeasured


def test_other_precision_and_grid_are_named():
    cost = CostModel(measured_profile())
    assert "matmul: peak rate assumed" in time_of(cost, precision="float64").unmeasured
    cut = time_of(cost, work=causal(64), tp=2, precision="float32", link=LINK)
    assert "tp2 x cp1 scaled from one rank" in cut.unmeasured
    message_s = all_reduce_s(64 * 4096 * 4, 2, LINK)
    assert cut.forward_s == pytest.approx(seconds_of(1, 64) / 2 + 2 * message_s)


def test_a_layer_without_backward_stays_without():
    """An embedding's input has no gradient: zeros are measured and zeros come back."""
    profile = measured_profile()
    (table,) = profile.layers
    points = tuple(
        replace(point, input_grad_s=0.0, weight_grad_s=0.0, weight_only_s=None) for point in table.points
    )
    still = replace(profile, layers=(replace(table, points=points),))
    time = time_of(CostModel(still), work=causal(100), precision="float32")
    assert time.backward_s(TRAINED) == 0
    assert time.forward_s > 0
