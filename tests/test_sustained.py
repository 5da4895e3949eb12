"""Long loops: what they time, the tables made of them, and prices that follow them."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from runtime.measure.cells import operator_cells
from runtime.measure.clock import Clock
from runtime.measure.sustained import DIRECTIONS, _Operands, num_sets, time_sustained_attention
from tests.bench_sizes import CELLS, LOOPS
from tests.cost_models import causal, linear
from tests.test_fit import HEADER, OTHERS
from workbench.calibrate.fit import fit
from workbench.calibrate.measurement import (
    MatmulRow,
    Measurement,
    OptimizerRow,
    Row,
    read_measurement,
    write_measurement,
)
from workbench.calibrate.sustained_rows import SustainedAttentionRow, SustainedMatmulRow
from workbench.cost.model import CostModel
from workbench.cost.profile import Direction, SustainedHeads, Table, dump_profile, parse_profile
from workbench.cost.roofline import ATTENTION_BACKWARD_FLOP, Gemm, Grid
from workbench.cost.sustained import HeadWidths, Line, in_direction
from workbench.model.layer import Attention, Layer, LayerKind

SLOWER = {"forward": 1.2, "input_grad": 1.5, "weight_grad": 2.0}
SHAPES = ((64, 64, 64), (128, 64, 64), (128, 64, 32))
PEAK = 2e10  # of the products in OTHERS, which have no attention beside them
WIDTHS = (32, 64, 128)
LENGTHS = (64, 256, 1024)
SHORT = CostModel(fit("short", [Measurement(HEADER, OTHERS)]))


def product_rows() -> list[Row]:
    return [
        SustainedMatmulRow(
            precision="float32",
            direction=direction,
            m=m,
            n=n,
            k=k,
            seconds=slower * SHORT.matmul_s(in_direction(Gemm(m, n, k), Direction(direction)), "float32")[0],
        )
        for direction, slower in SLOWER.items()
        for m, n, k in SHAPES
    ]


def flop_per_s(width: int, direction: str, *, is_causal: bool) -> float:
    """Wider heads are faster, backwards run at half the rate, and full masks a tenth faster."""
    return PEAK * width / 256 * (0.5 if direction == "backward" else 1.0) * (1.0 if is_causal else 1.1)


def attention_rows() -> list[Row]:
    return [
        SustainedAttentionRow(
            precision="float32",
            mask=mask,
            direction=direction,
            length=length,
            heads=4,
            kv_heads=2,
            head_dim=width,
            pairs=pairs,
            seconds=4.0
            * width
            * pairs
            * 4
            * scale
            / flop_per_s(width, direction, is_causal=mask == "causal"),
        )
        for width, length, (mask, pairs) in (
            (width, length, found)
            for width, length in itertools.product(WIDTHS, LENGTHS)
            for found in (("causal", length * (length + 1) // 2), ("full", length**2))
        )
        for direction, scale in (("forward", 1.0), ("backward", ATTENTION_BACKWARD_FLOP))
    ]


def measured(*more: Row) -> Measurement:
    return Measurement(HEADER, (*OTHERS, *product_rows(), *attention_rows(), *more))


def heads_of(width: int, *, is_causal: bool = True) -> Layer:
    heads = Attention(name="attention", num_heads=4, num_kv_heads=2, head_dim=width, causal=is_causal)
    return Layer(name="attention", kind=LayerKind.BLOCK, operators=(heads,), out_width=4 * width)


def test_products_take_what_their_long_loops_took() -> None:
    cost = CostModel(fit("here", [measured()]))
    for m, n, k in SHAPES:
        for row in product_rows():
            assert isinstance(row, SustainedMatmulRow)
            if (row.m, row.n, row.k) == (m, n, k):
                found, _ = cost.product_s(Gemm(m, n, k), Direction(row.direction), "float32")
                assert found == pytest.approx(row.seconds)
    for direction, slower in SLOWER.items():  # also between the shapes, where all take as much longer
        gemm = Gemm(100, 64, 50)
        short = SHORT.product_s(gemm, Direction(direction), "float32")[0]
        found, _ = cost.product_s(gemm, Direction(direction), "float32")
        assert found == pytest.approx(slower * short)


def test_a_layers_price_has_each_direction_of_its_own() -> None:
    layer, work = linear(), causal(100)
    short = SHORT.layer_time(layer, work, tp=1, cp=1, precision="float32")
    found = CostModel(fit("here", [measured()])).layer_time(layer, work, tp=1, cp=1, precision="float32")
    assert found.forward_s == pytest.approx(1.2 * short.forward_s)
    assert found.input_grad_s == pytest.approx(1.5 * short.input_grad_s)
    assert found.weight_grad_s == pytest.approx(2.0 * short.weight_grad_s)
    assert short.unmeasured - found.unmeasured == {"backward of matmul"}


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_is_priced_by_head_width_forward_and_backward(is_causal: bool) -> None:
    cost = CostModel(fit("here", [measured()]))
    for width in WIDTHS:
        work = causal(256)
        flop = 4.0 * width * work.attention_area * 4
        layer = heads_of(width, is_causal=is_causal)
        found = cost.layer_time(layer, work, tp=1, cp=1, precision="float32")
        forward, backward = (
            flop_per_s(width, direction, is_causal=is_causal) for direction in ("forward", "backward")
        )
        assert found.forward_s == pytest.approx(flop / forward)
        assert found.input_grad_s == pytest.approx(ATTENTION_BACKWARD_FLOP * flop / backward)
        assert not [reason for reason in found.unmeasured if "backward" in reason or "heads" in reason]
    wide = cost.layer_time(heads_of(512), causal(256), tp=1, cp=1, precision="float32")
    assert "backward of attention" in wide.unmeasured


def test_widths_in_between_lie_on_a_line_of_their_neighbours() -> None:
    def table(width: int, *, is_causal: bool) -> SustainedHeads:
        rates = Table(axes=("length", "heads", "queries_per_key"), points=((1.0, 1.0, 1.0, 1.0),))
        return SustainedHeads(head_dim=width, causal=is_causal, forward=rates, backward=rates)

    found = HeadWidths(
        [
            (table(32, is_causal=True), Line([(64.0, 1.0), (256.0, 4.0)])),
            (table(128, is_causal=True), Line([(64.0, 4.0), (256.0, 16.0)])),
        ]
    )
    assert found.at(32, causal=True, length=128.0) == pytest.approx(2.0)
    assert found.at(64, causal=True, length=64.0) == pytest.approx(2.0)
    assert found.at(64, causal=True, length=128.0) == pytest.approx(4.0)
    assert found.at(256, causal=True, length=1024.0) == pytest.approx(16.0), "ends hold"
    assert found.at(16, causal=False, length=1.0) == pytest.approx(1.0), "the other kind of mask"
    assert [found.covers(width) for width in (16, 32, 100, 256)] == [False, True, True, False]
    assert HeadWidths([]).at(64, causal=True, length=8.0) == 1.0


def test_profiles_hold_both_rates_and_survive_their_file() -> None:
    profile = fit("here", [measured(OptimizerRow(precision="float32", num_parameters=9, seconds=1e-3))])
    assert parse_profile(dump_profile(profile)) == profile
    assert profile.matmul == SHORT.profile.matmul
    assert [str(found.direction) for found in profile.sustained_products] == sorted(SLOWER)
    assert len(profile.sustained_attention) == len(WIDTHS) * 2
    assert profile.optimizer_update == "single"
    text = dump_profile(replace(SHORT.profile, optimizer_update=None))
    assert "sustained" not in text.replace("long loops", "")
    assert "optimizer_update" not in text


def test_fused_and_other_optimizer_steps_are_not_mixed() -> None:
    row = OptimizerRow(precision="float32", num_parameters=9, seconds=1e-3, update="fused")
    with pytest.raises(ValueError, match="optimizer steps of fused and single updates are not mixed"):
        fit("here", [measured(row)])


def test_leave_one_out_errors_are_those_of_the_reading() -> None:
    """Where every ratio follows the rule the error is 0; a width twice as slow is off by half."""
    fits = {found.table: found for found in fit("here", [measured()]).fits}
    names = [f"long loops of products, {direction}" for direction in SLOWER]
    for what in ("forward", "backward over forward"):
        names += [f"long loops of attention, {what}, by {axis}" for axis in ("length", "head width")]
    assert all(fits[name].p90 < 1e-9 for name in names)
    assert fits["long loops of attention, forward, by length"].num_points == len(WIDTHS) * 2
    rows = [
        replace(row, seconds=2 * row.seconds)
        if isinstance(row, SustainedAttentionRow) and row.head_dim == 64
        else row
        for row in measured().rows
    ]
    fits = {found.table: found for found in fit("here", [Measurement(HEADER, tuple(rows))]).fits}
    assert fits["long loops of attention, forward, by length"].p90 < 1e-9
    assert fits["long loops of attention, forward, by head width"].median == pytest.approx(0.5)


def test_directions_are_the_gradients_of_a_layer() -> None:
    x, weight, dy = torch.randn(5, 7), torch.randn(3, 7), torch.randn(5, 3)
    asked = [x.requires_grad_(), weight.requires_grad_()]
    y = functional.linear(x, weight)
    expected = dict(zip(DIRECTIONS, [y, *torch.autograd.grad([y], asked, [dy])], strict=True))
    operands = _Operands(x.detach(), weight.detach(), dy)
    for direction, call in DIRECTIONS.items():
        assert torch.allclose(call(operands), expected[direction], atol=1e-6)


def test_operands_overflow_the_cache_together() -> None:
    assert num_sets(LOOPS, LOOPS.cache_bytes) == 2
    assert num_sets(LOOPS, LOOPS.cache_bytes // 10) * (LOOPS.cache_bytes // 10) > LOOPS.cache_bytes
    assert num_sets(LOOPS, 10 * LOOPS.cache_bytes) == 2, "two at least: no operand twice in a row"


def test_a_loop_takes_calls_in_turn_and_leaves_its_first_half_out(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    now_s = 0.0

    def call(name: str) -> None:
        nonlocal now_s
        now_s += 0.05 if len(order) < 6 else 0.001  # a device that settles after two turns and the warm-up
        order.append(name)

    monkeypatch.setattr("runtime.measure.clock.time", SimpleNamespace(perf_counter=lambda: now_s))
    found = Clock().loop([lambda: call("a"), lambda: call("b")], 0.0)
    assert order == ["a", "b"] * 5
    assert found.seconds == pytest.approx((0.001, 0.001))
    assert found.notes.clock_during_hz is None
    assert found.notes.power_after_w is None


def test_a_driver_that_says_nothing_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(device: object) -> int:
        raise ModuleNotFoundError("pynvml is not installed")

    clock = Clock("cuda")
    monkeypatch.setattr("torch.cuda.clock_rate", lambda device: 1980)
    monkeypatch.setattr("torch.cuda.power_draw", missing)
    assert clock.gauge() == (1.98e9, None)


def test_rows_say_what_the_device_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short loops before and after; a long one halfway through as well."""
    clock = Clock()
    readings = itertools.count(1)
    monkeypatch.setattr(Clock, "gauge", lambda self: (1e9 * next(readings), 300.0))
    first = {cell.kind: cell for cell in reversed(operator_cells("cpu", torch.float32, CELLS))}
    (short,) = first[MatmulRow].measure(clock)
    assert isinstance(short, MatmulRow)
    assert (short.clock_before_hz, short.clock_during_hz, short.clock_after_hz) == (1e9, None, 2e9)
    long, *_ = first[SustainedMatmulRow].measure(clock)
    assert isinstance(long, SustainedMatmulRow)
    assert (long.clock_before_hz, long.clock_during_hz, long.clock_after_hz) == (4e9, 5e9, 6e9)
    assert long.power_during_w == 300.0


def test_cells_measure_what_they_name(tmp_path) -> None:
    """Every cell alone, its rows through the file, and a profile of them all."""
    cells = operator_cells("cpu", torch.float32, CELLS)
    assert len({cell.key for cell in cells}) == len(cells)
    rows: list[Row] = []
    for cell in cells:
        assert not cell.is_in(rows), cell.key
        rows += cell.measure(Clock())
        assert cell.is_in(rows), cell.key
    write_measurement(Measurement(HEADER, tuple(rows)), tmp_path / "rows.jsonl")
    again = read_measurement(tmp_path / "rows.jsonl")
    assert again.rows == tuple(rows)
    profile = fit("here", [again])
    assert {found.head_dim for found in profile.sustained_attention} == set(LOOPS.head_dims)
    assert {str(found.direction) for found in profile.sustained_products} == set(SLOWER)
    assert not any("long loops" in reason for reason in profile.unmeasured)
    rate = CostModel(profile).attention_backward_rate(
        Attention(name="attention", num_heads=2, num_kv_heads=2, head_dim=8, causal=True), causal(16), Grid()
    )
    assert 0 < rate < 100


def test_attention_in_loops_says_its_shape() -> None:
    forward, backward = time_sustained_attention(Clock(), LOOPS, torch.float32, 8, "causal", 16)
    assert (forward.direction, backward.direction) == ("forward", "backward")
    assert (forward.heads, forward.pairs) == (4 * 2, 16 * 17 // 2), "32 / 8 heads of 32 / 16 sequences"
    assert forward.seconds > 0
    assert backward.seconds > 0
