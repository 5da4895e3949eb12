"""Kernels beyond the tables: power, narrow products, stored scores, experts, main gradients, launches."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cost_models import GPT, block, causal, layer
from workbench.cost.device_limits import LaunchTimes, NarrowRate, PowerLimit
from workbench.cost.execution import AttentionKernel, Execution, GradientSum, Launch, Lookups
from workbench.cost.flash import OF_THE_NEXT, FlashKernel, flash_share
from workbench.cost.kernel_times import GROUP_TILE, KernelTimes
from workbench.cost.model import CostModel
from workbench.cost.operator_passes import OperatorPasses, kernels_of
from workbench.cost.power import LEAST_VOLTAGE_CLOCK, STATIC_SHARE, clock_share, slowest_share
from workbench.cost.products import NARROW, ProductFormat, narrow_rate
from workbench.cost.profile import Direction, Profile, ideal_profile, load_profile
from workbench.cost.roofline import Gemm, Grid
from workbench.model.experts import EXPERT, Experts, with_experts
from workbench.model.frozen import Needs
from workbench.model.layer import Attention, Layer, LayerKind, Lookup, Matmul, Shard
from workbench.model.transformer import Mlp

ONE = Grid(1, 1)
FLOP_PER_S, BYTES_PER_S = 1e15, 1e12
RATED = PowerLimit(rated_w=700, source="test", sustained_products=0.8, clock_spread=0.02)
NARROW_FORMATS = (ProductFormat.FP8, ProductFormat.MXFP8, ProductFormat.NVFP4)


def machine(**changes: object) -> Profile:
    """A machine at its peaks, with memory of a finite rate."""
    profile = ideal_profile(flop_per_s=FLOP_PER_S, bytes_per_s=BYTES_PER_S)
    return replace(profile, **changes)


def times(profile: Profile, execution: Execution | None = None) -> KernelTimes:
    return KernelTimes(profile, execution)


def passes(execution: Execution, operator: Matmul | Attention, profile: Profile | None = None):
    kernels = times(profile or machine(), execution)
    return OperatorPasses(kernels, ONE, "bfloat16").of(operator, causal(64))


def test_a_limit_leaves_the_cube_root_of_the_power_above_its_static_share():
    assert clock_share(None, RATED) == clock_share(700, RATED) == clock_share(1000, RATED) == 1
    left = (500 / 700 - STATIC_SHARE) / (1 - STATIC_SHARE)
    assert clock_share(500, RATED) == pytest.approx(left ** (1 / 3))
    low_w = 700 * (STATIC_SHARE + (1 - STATIC_SHARE) * LEAST_VOLTAGE_CLOCK**3 / 2)
    assert clock_share(low_w, RATED) == pytest.approx(LEAST_VOLTAGE_CLOCK / 2)


def test_impossible_limits_are_refused():
    with pytest.raises(ValueError, match="must be above 140 W for this device, got 100"):
        clock_share(100, RATED)
    with pytest.raises(ValueError, match="does not say under which power its rates hold"):
        clock_share(500, None)


@given(st.floats(150, 1500), st.floats(150, 1500))
def test_a_lower_limit_is_never_faster(one: float, other: float):
    low, high = sorted((one, other))
    assert clock_share(low, RATED) <= clock_share(high, RATED)


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_more_devices_never_have_a_faster_slowest_one(one: int, other: int):
    few, many = sorted((one, other))
    assert slowest_share(many, 0.02) <= slowest_share(few, 0.02) <= 1
    assert slowest_share(many, 0.0) == 1


@settings(max_examples=20, deadline=None)
@given(st.floats(200, 700), st.floats(200, 700), st.integers(1, 4096))
def test_blocks_never_run_faster_under_a_lower_limit(one: float, other: float, tokens: int):
    cost = CostModel(load_profile("H100"))
    low, high = (
        cost.executed(Execution(power_limit_w=watt)).layer_time(
            block(GPT), causal(tokens), tp=1, cp=1, precision="bfloat16"
        )
        for watt in sorted((one, other))
    )
    trained = Needs(input_grad=True, weight_grad=True)
    assert low.forward_s >= high.forward_s * (1 - 1e-9)
    assert low.backward_s(trained) >= high.backward_s(trained) * (1 - 1e-9)


def test_products_run_at_what_is_sustained_by_the_slowest_device():
    gemm, run = Gemm(4096, 4096, 4096), Execution(num_devices=8)
    seconds, _ = times(machine(power=RATED), run).matmul_s(gemm, "bfloat16")
    assert seconds == pytest.approx(gemm.flop / FLOP_PER_S / 0.8 / slowest_share(8, 0.02))


@pytest.mark.parametrize("narrow", NARROW_FORMATS)
def test_casts_cost_their_bytes(narrow: ProductFormat):
    format_ = NARROW[narrow]
    by_hand = {  # greatest value, read, written along rows and along columns with their scales
        ProductFormat.FP8: 2 + 2 + 1 + 1,
        ProductFormat.MXFP8: 2 + 2 * 33 / 32,
        ProductFormat.NVFP4: 2 + 2 + 2 * 9 / 16,
    }[narrow]
    assert format_.cast_bytes == by_hand
    seconds = times(machine()).cast_s(1e6, narrow)
    assert seconds == pytest.approx(1e6 * by_hand / format_.cast_rate / BYTES_PER_S)


def test_published_casts_and_products_come_out():
    """Transformer Engine on B300: 656 million elements of forward operands read as 2 bytes and written once;
    products of a layer, 19.2 TFLOP, at 12.8 ms in bfloat16, 7.3 in MXFP8, 3.75 in NVFP4."""
    b300 = replace(
        ideal_profile(flop_per_s=2250e12, bytes_per_s=0.85 * 8e12),
        peak_flop_per_s=(("bfloat16", 2250e12), ("mxfp8", 4500e12), ("nvfp4", 9000e12)),
    )
    kernels = times(b300)
    one_way = 3 / NARROW[ProductFormat.MXFP8].cast_bytes
    assert one_way * kernels.cast_s(656e6, ProductFormat.MXFP8) == pytest.approx(0.30e-3, rel=0.05)
    assert narrow_rate(b300, ProductFormat.MXFP8) == pytest.approx(12.835 / 7.324, rel=0.01)
    assert narrow_rate(b300, ProductFormat.NVFP4) == pytest.approx(12.835 / 3.754, rel=0.01)


def test_rates_of_formats_are_the_profiles_then_those_of_peaks():
    peaks = (("bfloat16", 1e15), ("fp8", 2e15))
    known = NarrowRate(product_format="fp8", rate=1.7, measured=True, source="test")
    assert narrow_rate(machine(peak_flop_per_s=peaks, narrow_rates=(known,)), ProductFormat.FP8) == 1.7
    by_peaks = NARROW[ProductFormat.MXFP8].rate_of_peaks * 2
    blackwell = machine(peak_flop_per_s=(*peaks, ("mxfp8", 2e15)))
    assert narrow_rate(blackwell, ProductFormat.MXFP8) == pytest.approx(by_peaks)
    for missing in (ProductFormat.NVFP4, ProductFormat.MXFP8):
        message = rf"'ideal' has no products in {missing}, only in: bfloat16, fp8; nearest: fp8"
        with pytest.raises(ValueError, match=message):
            narrow_rate(machine(peak_flop_per_s=peaks), missing)


def test_narrower_formats_are_faster_on_large_layers_and_only_there():
    peaks = (("bfloat16", 1e15), ("fp8", 2e15), ("mxfp8", 2e15), ("nvfp4", 4e15))
    wide = replace(GPT, width=8192, heads=replace(GPT.heads, num=64, num_kv=64, dim=128))
    wide = replace(wide, mlp=replace(wide.mlp, width=32768))
    profile = replace(ideal_profile(flop_per_s=1e15, bytes_per_s=3e12), peak_flop_per_s=peaks)
    cost = CostModel(profile)

    def forward_s(products: ProductFormat, tokens: int) -> float:
        run = cost.executed(Execution(products=products))
        time = run.layer_time(block(wide), causal(tokens), tp=1, cp=1, precision="bfloat16")
        return time.forward_s

    large = [forward_s(each, 8192) for each in ProductFormat]
    assert large[0] > max(large[1:3]) >= min(large[1:3]) > large[3]
    assert forward_s(ProductFormat.FP8, 8) > large[0] / 8192  # weights are read all the same


def test_only_linear_layers_of_blocks_are_narrow():
    """A head of the same shape keeps its precision."""
    profile = machine(peak_flop_per_s=(("bfloat16", FLOP_PER_S), ("fp8", 2 * FLOP_PER_S)))
    cost = CostModel(profile).executed(Execution(products=ProductFormat.FP8))
    product = layer(Matmul(name="lm_head", in_features=8192, out_features=8192))

    def forward_s(kind: LayerKind) -> float:
        found = replace(product, kind=kind)
        return cost.layer_time(found, causal(8192), tp=1, cp=1, precision="bfloat16").forward_s

    assert forward_s(LayerKind.HEAD) == pytest.approx(2 * 8192**3 / FLOP_PER_S)
    assert forward_s(LayerKind.BLOCK) < forward_s(LayerKind.HEAD)


def test_stored_scores_go_through_memory_pass_by_pass():
    """Two heads over 64 x 64 scores of two bytes: products move them once each and are bound by that."""
    attention = Attention(name="a", num_heads=2, num_kv_heads=2, head_dim=8, causal=True)
    run = Execution(
        attention=AttentionKernel.STORED, scores_passes=4, scores_backward_passes=4.5, scores_rate=0.5
    )
    found = passes(run, attention)
    pass_s = 2 * 64 * 64 * 2 / 0.5 / BYTES_PER_S
    assert found.forward_s == pytest.approx((2 + 4) * pass_s)
    assert found.input_grad_s == pytest.approx((4 + 4.5) * pass_s)
    again = passes(replace(run, attention=AttentionKernel.RECOMPUTED), attention)
    assert again.input_grad_s == pytest.approx(found.input_grad_s + found.forward_s)
    wide = passes(run, replace(attention, head_dim=10**6))
    assert wide.forward_s == pytest.approx(2 * 2 * 10**6 * 2 * 64 * 64 / FLOP_PER_S + 4 * pass_s)


def test_korthikanti_2022_table_4_recomputes_attention_in_1_3_ms():
    work = replace(causal(2048), rows=causal(2048).rows * 4)
    attention = Attention(name="a", num_heads=8, num_kv_heads=8, head_dim=96, causal=True)
    kernels = times(load_profile("A100-80GB"), Execution(attention=AttentionKernel.RECOMPUTED))
    seconds, _ = kernels.attention_s(attention, work, ONE, "bfloat16")
    assert seconds == pytest.approx(1.3e-3, rel=0.05)


def test_main_gradients_are_read_and_written_in_float32():
    product = Matmul(name="m", in_features=32, out_features=16)
    main, own = (passes(Execution(gradient_sum=each), product).weight_grad_s for each in GradientSum)
    assert main - own == pytest.approx(32 * 16 * (4 + 4 - 2) / BYTES_PER_S)


def test_a_bias_sums_its_output_gradient():
    product = Matmul(name="m", in_features=32, out_features=16)
    biased = passes(Execution(), replace(product, bias=True)).weight_grad_s
    assert biased - passes(Execution(), product).weight_grad_s == pytest.approx(64 * 16 * 2 / BYTES_PER_S)


def mixture(num: int) -> Layer:
    mlp = Mlp(width=512, gated=False, activation="gelu")
    return with_experts(block(GPT), Experts(num=num, num_chosen=2, mlp=mlp))


def test_experts_run_as_one_kernel_a_place():
    """Their products pad rows to half a tile each; nothing is counted an expert."""
    few, many = (kernels_of(mixture(num)) for num in (4, 64))
    assert [each.name for each in few] == [each.name for each in many]
    assert sum(each.name.startswith(EXPERT) for each in many) == 3
    gemm = Gemm(1000, 512, 1024)
    kernels = times(ideal_profile(flop_per_s=FLOP_PER_S, bytes_per_s=1e30))
    seconds, _ = kernels.linear_s(gemm, Direction.FORWARD, "bfloat16", ProductFormat.SAME, num_grouped=4)
    padded = gemm._replace(m=1000 + GROUP_TILE / 2)
    assert seconds == pytest.approx(4 * padded.flop / FLOP_PER_S)


def test_few_rows_an_expert_wait_for_its_weights():
    gemm = Gemm(1, 4096, 4096)
    seconds, _ = times(machine()).linear_s(
        gemm, Direction.FORWARD, "bfloat16", ProductFormat.SAME, num_grouped=8
    )
    assert seconds == pytest.approx(8 * gemm.num_bytes(2) / BYTES_PER_S)


def test_older_attention_reaches_its_share_of_newer_one():
    assert flash_share(FlashKernel.NEWEST, 3) == flash_share(FlashKernel.FLASH1, None) == 1
    assert flash_share(FlashKernel.FLASH2, 3) == OF_THE_NEXT[2]
    assert flash_share(FlashKernel.FLASH1, 3) == pytest.approx(OF_THE_NEXT[1] * OF_THE_NEXT[2])
    attention = Attention(name="a", num_heads=4, num_kv_heads=4, head_dim=64, causal=True)
    profile = replace(ideal_profile(flop_per_s=FLOP_PER_S), flash_generation=2)
    new, old = (passes(Execution(flash=each), attention, profile) for each in ("newest", "flash1"))
    assert old.forward_s == pytest.approx(new.forward_s / OF_THE_NEXT[1])


def test_gaps_and_hosts_are_the_profiles_unless_said():
    launch = LaunchTimes(kernel_gap_s=1.0, graph_gap_s=0.5, host_kernel_s=3.0, host_collective_s=2.0)
    profile = replace(ideal_profile(), launch=launch)
    run = Execution().on(profile)
    assert (run.kernel_gap_s, run.host_kernel_s, run.host_collective_s) == (1.0, 3.0, 2.0)
    assert Execution(kernel_gap_s=0.0, host_kernel_s=9.0).on(profile).pass_s(1.0, 2, 1, 1) == 2 * 9.0 + 2.0
    graph = Execution(launch=Launch.GRAPH).on(profile)
    assert graph.pass_s(1.0, 4, 1, 1) == 1.0 + 4 * 0.5
    silent = Execution().on(ideal_profile())
    assert silent.pass_s(1.0, 100, 10, 1) == 1.0


@pytest.mark.parametrize("tp", [1, 4])
def test_tables_read_by_products_take_a_forward_a_weight_gradient_and_two_matrices_of_ones(tp: int):
    tokens, width, rows = 4096, 1024, 50304
    table = Lookup(name="tokens", num_rows=rows, width=width, shard=Shard.COLUMN)
    cost = times(machine(), Execution(lookups=Lookups.PRODUCTS))
    found = OperatorPasses(cost, Grid(tp, 1), "bfloat16").of(table, causal(tokens))
    gemm = Gemm(tokens, width, rows / tp)
    product_s = max(gemm.flop / FLOP_PER_S, gemm.num_bytes(2) / BYTES_PER_S)
    each_s = product_s + 2 * tokens * rows / tp / BYTES_PER_S
    assert (found.forward_s, found.weight_grad_s) == (pytest.approx(each_s), pytest.approx(each_s))
    assert found.input_grad_s == 0.0
