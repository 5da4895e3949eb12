"""Scales of FP8: bytes and kernels of their casts, whose rate their products take, what is kept of inputs."""

from dataclasses import replace

import pytest

from sim.predict import iteration_s
from tests.test_predict import row
from workbench.cost.execution import Execution
from workbench.cost.model import CostModel
from workbench.cost.products import ProductFormat, is_measured, is_narrowed, narrow_rate
from workbench.cost.profile import NarrowRate, Profile, ideal_profile
from workbench.cost.roofline import RowWork, Work
from workbench.llm_table.predict import Prediction, RowPredictor
from workbench.model.experts import ROUTER
from workbench.model.layer import Layer, LayerKind, Matmul, Pointwise

BYTES_PER_S = 3e12
ROWS, INNER, OUTER = 8192, 4096, 16384
LINEAR = Layer(
    name="block.0",
    kind=LayerKind.BLOCK,
    operators=(Matmul(name="up", in_features=INNER, out_features=OUTER),),
    out_width=OUTER,
)
SCALED = (ProductFormat.FP8_DELAYED, ProductFormat.FP8_ROW, ProductFormat.FP8_BLOCK)
BIG = {"architecture": "llama", "hidden": 4096, "heads": 32, "sequence": 4096, "gpu": "H100", "vocab": 4096}


def machine() -> Profile:
    peaks = (("bfloat16", 1e15), ("fp8", 2e15))
    known = NarrowRate(product_format="fp8", rate=1.8, measured=True, source="test")
    ideal = ideal_profile(flop_per_s=1e15, bytes_per_s=BYTES_PER_S)
    return replace(ideal, peak_flop_per_s=peaks, narrow_rates=(known,))


@pytest.mark.parametrize(
    ("products", "activation", "later", "weight"),
    [  # bytes of an element beyond 6 of a current scale: of activations, of both again, of a weight by pass
        (ProductFormat.FP8_DELAYED, (2 + 1 + 1) - 6, 0, (0, 0)),
        (ProductFormat.FP8_ROW, (2 + 1) - 6, 2 + 2 + 1, (2 + 1, 2 + 2 + 1)),
        (ProductFormat.FP8_BLOCK, 2 + 2 * (1 + 4 / 128) - 6, 0, (0, 0)),
    ],
)
def test_casts_move_their_bytes(products, activation, later, weight):
    """Products are limited by FLOP, and equally fast."""
    times = [
        CostModel(machine())
        .executed(Execution(products=each))
        .layer_time(LINEAR, Work((RowWork(ROWS, ROWS, 1),)), tp=1, cp=1, precision="bfloat16")
        for each in (ProductFormat.FP8, products)
    ]
    inputs, results, weights = ROWS * INNER, ROWS * OUTER, INNER * OUTER
    by_hand = {
        "forward_s": activation * inputs + weight[0] * weights,
        "input_grad_s": activation * results + weight[1] * weights,
        "weight_grad_s": later * (inputs + results),
    }
    for name, num_bytes in by_hand.items():
        plain, scaled = (getattr(time, name) for time in times)
        assert scaled - plain == pytest.approx(num_bytes / BYTES_PER_S, abs=1e-12), name


@pytest.mark.parametrize(
    ("products", "forward", "backward"), [("fp8_row", 2, 7), ("fp8_block", 1, 1), ("fp8", 0, 0)]
)
def test_casts_are_kernels_of_their_own(products, forward, backward):
    """A layer of which gaps alone take time: of a product forward, of two backward, and of its casts."""
    run = Execution(products=ProductFormat(products), kernel_gap_s=1.0)
    tiny = replace(LINEAR, operators=(Matmul(name="up", in_features=16, out_features=16),))
    time = (
        CostModel(machine())
        .executed(run)
        .layer_time(tiny, Work((RowWork(16, 16, 1),)), tp=1, cp=1, precision="bfloat16")
    )
    assert time.forward_s == pytest.approx(1 + forward)
    assert time.input_grad_s + time.weight_grad_s == pytest.approx(2 + backward)


def test_products_take_the_rate_of_one_scale_a_tensor():
    """Delayed scales go to the same kernels; of the others nothing is measured."""
    assert {narrow_rate(machine(), each) for each in SCALED} == {1.8}
    assert [is_measured(machine(), each) for each in SCALED] == [True, False, False]


def predicted(**cells: object) -> Prediction:
    return RowPredictor(iteration_s).predict(row(**BIG | {"precision": "fp8"} | cells))


def test_a_scale_a_row_takes_longest_and_says_what_nobody_measured():
    found = {each: predicted(fp8_scaling=each) for each in ("delayed", "block", "current", "row")}
    times = [each.iteration_s for each in found.values()]
    assert times == sorted(times)
    assert "products in fp8_row: at the rate of fp8" in found["row"].unmeasured
    assert "products in fp8_block: at the rate of fp8" in found["block"].unmeasured
    widths = {name: each.interval.high_s / each.iteration_s for name, each in found.items()}
    assert widths["row"] > widths["current"]


def test_a_scale_a_row_keeps_inputs_as_they_are():
    """The others keep them narrow: a byte an element, and for a block's scales a thirty-second more."""
    plain = predicted(precision="bf16").peak_bytes
    assert predicted(fp8_scaling="row").peak_bytes == plain
    current, delayed, block = (
        predicted(fp8_scaling=each).peak_bytes for each in ("current", "delayed", "block")
    )
    assert current == delayed < block < plain
    kept = (block - current) * 32  # of a block: qkv, o, gate and up together, down
    assert kept == pytest.approx(4 * 4096 * (4096 + 4096 + 4096 + 11008), rel=0.01)


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_other_formats_have_no_such_scales(precision: str):
    with pytest.raises(ValueError, match="fp8_scaling: want current without precision fp8, got row"):
        row(precision=precision, fp8_scaling="row")


def test_products_alone_are_cast():
    """Not the norm in front of them, nor the router."""
    norm = Pointwise(name="norm", width=INNER, num_passes=2, weights=(("weight", INNER),))
    router = Matmul(name=ROUTER, in_features=INNER, out_features=8)
    mixed = replace(LINEAR, operators=(norm, *LINEAR.operators, router))
    assert [is_narrowed(mixed, each) for each in mixed.operators] == [False, True, False]
