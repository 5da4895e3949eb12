"""Tensor-parallel collectives beside products: a pipeline of two machines, no byte lost, remaps paid."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cost_models import LLAMA_8B, block, causal
from workbench.cost.collectives import Collective
from workbench.cost.execution import ActivationCut, Execution, SavedInput
from workbench.cost.hardware import Link
from workbench.cost.model import CostModel
from workbench.cost.overlap import Machine, Pair, added_kernels, exposed_s, pairs_of
from workbench.cost.overlapped_collectives import left_s, lost_s
from workbench.cost.profile import Direction, ideal_profile
from workbench.cost.roofline import Gemm, Grid, gemm_of, placed_messages
from workbench.model.layer import Matmul, Shard
from workbench.model.module_layers import lm_head, token_embedding
from workbench.model.transformer import Norm

GRID = Grid(4, 1)


def machine(*, flop_per_s: float = 1.0, bytes_per_s: float = 1.0, latency_s: float = 0.0) -> Machine:
    return Machine(
        product_s=lambda gemm: gemm.flop / flop_per_s,
        weights_s=lambda gemm: gemm.flop / flop_per_s,
        collective_s=lambda kind, num_bytes: latency_s + num_bytes / bytes_per_s,
        copied_s=lambda elements: elements,
    )


def two_machines_s(first_s: float, second_s: float, num_pieces: int) -> float:
    """End of the last of equal jobs, event by event: each begins where its own and the one before allow."""
    free_s, end_s = 0.0, 0.0
    for _ in range(num_pieces):
        free_s += first_s
        end_s = max(free_s, end_s) + second_s
    return end_s


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0, 1), st.integers(2, 9))
def test_pieces_pass_through_two_machines(rows: float, num_bytes: float, latency_s: float, pieces: int):
    pair = Pair(kind=Collective.ALL_GATHER, num_bytes=num_bytes, products=(Gemm(rows, 1, 0.5),) * 2)
    collective_s = latency_s + num_bytes / pieces
    expected = two_machines_s(collective_s, 2 * rows / pieces, pieces)
    assert exposed_s(pair, pieces, machine(latency_s=latency_s)) + 2 * rows == pytest.approx(expected)
    assert two_machines_s(2 * rows / pieces, collective_s, pieces) == pytest.approx(expected)  # mirrored


@given(st.floats(0.1, 10), st.floats(0.1, 10))
def test_without_latency_pieces_hide_all_but_the_first_at_best(rows: float, num_bytes: float):
    pair = Pair(kind=Collective.ALL_REDUCE, num_bytes=num_bytes, products=(Gemm(rows, 1, 0.5),))
    left = [exposed_s(pair, pieces, machine()) for pieces in (1, 2, 4, 8, 16)]
    assert all(more >= fewer - 1e-12 for more, fewer in pairwise(left))
    assert left[0] == num_bytes
    assert left[-1] == pytest.approx(max(num_bytes / 16, num_bytes - rows * 15 / 16))


def test_latency_of_every_piece_ends_the_gain():
    pair = Pair(kind=Collective.ALL_REDUCE, num_bytes=1.0, products=(Gemm(1, 1, 0.5),))
    left = [exposed_s(pair, pieces, machine(latency_s=0.3)) for pieces in (1, 2, 4, 8)]
    assert left[1] < left[0] < left[3]


def test_small_products_lose_what_pieces_win():
    """A kernel that is never shorter than a whole product's time is run once per piece."""
    pair = Pair(kind=Collective.ALL_REDUCE, num_bytes=0.5, products=(Gemm(1, 1, 0.5),))
    slow = replace(machine(), product_s=lambda gemm: max(1.0, gemm.flop))
    assert exposed_s(pair, 4, slow) > exposed_s(pair, 1, slow)


def test_a_remap_is_one_pass_over_the_tensor():
    pair = Pair(kind=Collective.ALL_GATHER, num_bytes=2.0, products=(Gemm(8, 1, 0.5),))
    moved = replace(pair, remapped_elements=7.0)
    assert exposed_s(moved, 2, machine()) == pytest.approx(exposed_s(pair, 2, machine()) + 7.0)
    assert exposed_s(moved, 1, machine()) == exposed_s(pair, 1, machine())  # nothing is out of order
    assert added_kernels([moved, pair], Execution(overlap_pieces=3)) == 2 + 2 + 1
    assert added_kernels([moved, replace(pair, is_of_sums=True)], Execution(sum_pieces=3)) == 2
    assert added_kernels([moved, pair], Execution()) == 0


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.integers(2, 9))
def test_products_beside_collectives_of_the_same_processors_are_longer(
    rows: float, num_bytes: float, pieces: int
):
    """All but one piece of each lie side by side."""
    pair = Pair(kind=Collective.ALL_REDUCE, num_bytes=num_bytes, products=(Gemm(rows, 1, 0.5),))
    slowed = exposed_s(pair, pieces, replace(machine(), lost_s=lost_s))
    beside_s = (pieces - 1) * lost_s(num_bytes / pieces, rows / pieces)
    assert slowed == pytest.approx(exposed_s(pair, pieces, machine()) + beside_s)


@pytest.mark.parametrize("pieces", [2, 4])
def test_sums_in_pieces_shorten_a_layer_by_what_two_machines_save(pieces: int):
    layer, work, link = block(LLAMA_8B), causal(8192), Link(name="card", bytes_per_s=1e8, latency_s=1e-6)
    cost = CostModel(ideal_profile())
    cut = cost.executed(Execution(sum_pieces=pieces))
    whole, divided = (
        model.layer_time(layer, work, tp=GRID.tp, cp=1, precision="bfloat16", link=link)
        for model in (cost, cut)
    )
    expected_s = 0.0
    for pair in pairs_of(layer, work, GRID, 2, ActivationCut.WHOLE).forward:
        (gemm,) = pair.products
        product_s = cost.product_s(gemm._replace(m=gemm.m / pieces), Direction.FORWARD, "bfloat16")[0]
        sum_s = cost.collectives.seconds(pair.kind, pair.num_bytes / pieces, GRID.tp, link)
        together_s = two_machines_s(product_s, sum_s, pieces) + (pieces - 1) * lost_s(sum_s, product_s)
        apart_s = cost.product_s(gemm, Direction.FORWARD, "bfloat16")[0]
        apart_s += cost.collectives.seconds(pair.kind, pair.num_bytes, GRID.tp, link)
        expected_s += apart_s - together_s
    assert expected_s > 0
    assert whole.forward_s - divided.forward_s == pytest.approx(expected_s)
    assert divided.input_grad_s == whole.input_grad_s  # an all-reduce in front of products stays whole


@pytest.mark.parametrize("cut", list(ActivationCut))
def test_every_product_that_is_cut_runs_beside_collectives(cut: ActivationCut):
    layer, work = block(LLAMA_8B), causal(64)
    pairs = pairs_of(layer, work, GRID, 2, cut)
    gemms = {op.name: gemm_of(op, work, GRID) for op in layer.operators if isinstance(op, Matmul)}
    closing = [gemms["o_proj"], gemms["mlp.down"]]
    opening = [gemms[name] for name in ("q_proj", "k_proj", "v_proj", "mlp.gate", "mlp.up")]
    forward = [gemm for pair in pairs.forward for gemm in pair.products]
    backward = [gemm for _, pair in pairs.backward for gemm in pair.products]
    both = cut is ActivationCut.SEQUENCE
    assert sorted(forward) == sorted([*closing, *(opening if both else [])])
    gradients = [gemm.input_grad for gemm in [*opening, *(closing if both else [])]]
    assert sorted(backward) == sorted(gradients)
    assert sorted(gemm for pair in pairs.forward if pair.is_of_sums for gemm in pair.products) == sorted(
        closing
    )
    back = sorted(gemm for _, pair in pairs.backward if pair.is_of_sums for gemm in pair.products)
    assert back == sorted(gemm.input_grad for gemm in closing if both)


@pytest.mark.parametrize("cut", list(ActivationCut))
@pytest.mark.parametrize("name", ["block", "embedding", "head"])
def test_no_byte_is_lost(name: str, cut: ActivationCut):
    """An all-reduce moves as much as a reduce-scatter and an all-gather."""
    layers = {
        "block": block(LLAMA_8B),
        "embedding": token_embedding(1000, 16),
        "head": lm_head(1000, 16, Norm.RMS),
    }
    layer, work = layers[name], causal(64)
    messages = placed_messages(layer, work, GRID, 2)
    pairs = pairs_of(layer, work, GRID, 2, cut)

    def volume(found: list[Pair]) -> float:
        return sum(p.num_bytes * (2 if p.kind is Collective.ALL_REDUCE else 1) for p in found)

    assert volume(list(pairs.forward)) == 2 * sum(size for _, size in messages.forward)
    assert volume([pair for _, pair in pairs.backward]) == 2 * sum(size for _, size in messages.backward)


def test_remaps_are_of_what_enters_a_scatter_and_of_what_follows_a_gather():
    layer, work = block(LLAMA_8B), causal(64)
    pairs = pairs_of(layer, work, GRID, 2, ActivationCut.SEQUENCE)
    scatter, gather = pairs.forward[:2]
    assert [scatter.kind, gather.kind] == [Collective.REDUCE_SCATTER, Collective.ALL_GATHER]
    assert scatter.remapped_elements == 64 * 4096 / 4  # o_proj's input
    assert gather.remapped_elements == 2 * 64 * 14336 / 4  # what gate and up give
    assert all(p.remapped_elements == 0 for p in pairs_of(layer, work, GRID, 2, ActivationCut.WHOLE).forward)


def layer_s(execution: Execution, link: Link) -> float:
    profile = ideal_profile(flop_per_s=1e12, bytes_per_s=1e11)
    time = CostModel(profile, execution).layer_time(
        block(LLAMA_8B), causal(4096), tp=4, cp=1, precision="bfloat16", link=link
    )
    return time.forward_s + time.input_grad_s + time.weight_grad_s


@pytest.mark.parametrize("cut", list(ActivationCut))
def test_a_layer_saves_what_its_products_can_hide(cut: ActivationCut):
    """Products take far longer than collectives: of each pair but a piece and its remap are hidden."""
    link = Link(name="link", bytes_per_s=1e10, latency_s=0.0)
    plain = Execution(activations=cut, saved_input=SavedInput.WHOLE)
    serial = layer_s(plain, link)
    layer, work = block(LLAMA_8B), causal(4096)
    num_bytes = 4096 * 4096 * 2
    all_s = 4 * 2 * 3 / 4 * num_bytes / link.bytes_per_s
    pairs = pairs_of(layer, work, GRID, 2, cut)
    remap_s = sum(
        2 * 2 * pair.remapped_elements / 1e11
        for pair in (*pairs.forward, *(pair for _, pair in pairs.backward))
    )
    for pieces in (2, 8):
        together = layer_s(replace(plain, overlap_pieces=pieces), link)
        assert serial - together == pytest.approx(all_s * (1 - 1 / pieces) - remap_s, rel=1e-9)


@pytest.mark.parametrize("bytes_per_s", [1e8, 1e10])
def test_inputs_saved_by_share_are_gathered_again_beside_products(bytes_per_s: float):
    """Closed form: two regions a block; the gather beside input gradients, the scatter beside weights'."""
    link = Link(name="link", bytes_per_s=bytes_per_s, latency_s=0.0)
    by_cut = {
        saved: layer_s(Execution(activations=ActivationCut.SEQUENCE, saved_input=saved), link)
        for saved in SavedInput
    }
    half_s = 3 / 4 * 4096 * 4096 * 2 / bytes_per_s
    layer, work = block(LLAMA_8B), causal(4096)
    flop = {op.name: gemm_of(op, work, GRID).flop for op in layer.operators if isinstance(op, Matmul)}
    added_s = 0.0
    for names in (("q_proj", "k_proj", "v_proj"), ("mlp.gate", "mlp.up")):
        products_s = sum(flop[name] for name in names) / 1e12
        added_s += 2 * left_s(half_s, products_s) - half_s
    assert by_cut[SavedInput.SHARE] - by_cut[SavedInput.WHOLE] == pytest.approx(added_s, rel=1e-6)


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10))
def test_what_is_hidden_is_never_free_nor_dearer_than_alone(collective_s, kernels_s, more_s):
    left = left_s(collective_s, kernels_s)
    assert 0 <= left <= collective_s + 1e-12
    assert left_s(collective_s + more_s, kernels_s) >= left
    assert left_s(collective_s, kernels_s + more_s) <= left + 1e-12
    assert left_s(collective_s, 0.0) == collective_s


def test_one_piece_is_the_default_to_the_last_bit():
    link = Link(name="link", bytes_per_s=1e10, latency_s=1e-6)
    assert layer_s(Execution(overlap_pieces=1), link) == layer_s(Execution(), link)


def test_a_fraction_of_a_piece_is_refused():
    with pytest.raises(ValueError, match=r"overlap_pieces must be >= 1, got 0; nearest: 1"):
        Execution(overlap_pieces=0)


def test_replicated_products_have_no_collective():
    layer = block(LLAMA_8B)
    whole = tuple(
        replace(op, shard=Shard.REPLICATED) if isinstance(op, Matmul) else op for op in layer.operators
    )
    alone = pairs_of(replace(layer, operators=whole), causal(64), GRID, 2, ActivationCut.WHOLE)
    assert alone == ((), ())
