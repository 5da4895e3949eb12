"""Graded microbatches and shared cuts: contracts, and how near they come to the best of all."""

from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.balance.microbatches.assignment import hierarchical_assignment
from workbench.balance.microbatches.bottleneck_match import even_match
from workbench.balance.microbatches.graded import graded_assignment
from workbench.balance.microbatches.pipeline_time import iteration_s
from workbench.balance.microbatches.unit_order import order_units
from workbench.balance.stages.chain_cuts import chain_cuts
from workbench.balance.stages.partition import bottleneck_s
from workbench.strategies.entrain_graded import units_of

SECONDS = st.floats(0.0, 10.0)


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=24), st.integers(1, 8), st.data())
def test_every_sample_stands_once_on_either_side(works, num: int, data):
    small = data.draw(st.integers(0, num))
    encoder_s, llm_s = zip(*works, strict=True)
    found = graded_assignment(encoder_s, llm_s, num_microbatches=num, num_small=small)
    for held in (found.encoder, found.llm):
        assert Counter(sample for places in held for sample in places) == Counter(range(len(works)))
    assert len(found.encoder) == len(found.deferred) == len(found.llm) <= num
    assert all(found.encoder)
    assert all(found.llm)


def test_no_small_ones_are_entrain_and_only_small_ones_are_cut_by_size():
    rng = np.random.default_rng(0)
    encoder_s, llm_s = rng.lognormal(size=(2, 24)).tolist()
    (even,) = hierarchical_assignment(encoder_s, llm_s, num_replicas=1, num_microbatches=6, match=even_match)
    assert graded_assignment(encoder_s, llm_s, num_microbatches=6, num_small=0) == even
    by_size = graded_assignment(encoder_s, llm_s, num_microbatches=6, num_small=6)
    work = [sum(pair) for pair in zip(encoder_s, llm_s, strict=True)]
    assert all(
        min(work[one] for one in heavier) >= max(work[other] for other in lighter)
        for heavier, lighter in combinations(by_size.encoder, 2)
    )
    assert {len(places) for places in by_size.encoder} == {4}


def test_small_microbatches_hold_the_lightest_samples():
    rng = np.random.default_rng(1)
    encoder_s, llm_s = rng.lognormal(size=(2, 24)).tolist()
    found = graded_assignment(encoder_s, llm_s, num_microbatches=6, num_small=2)
    work = np.array(encoder_s) + np.array(llm_s)
    assert {sample for places in found.encoder[-2:] for sample in places} == set(
        np.argsort(work)[:8].tolist()
    )


@pytest.mark.parametrize("small", [-1, 4])
def test_a_bad_number_of_small_ones_is_named(small: int):
    with pytest.raises(ValueError, match=rf"num_small must be 0..3, got {small}"):
        graded_assignment([1.0] * 4, [1.0] * 4, num_microbatches=3, num_small=small)


def pipeline(works: np.ndarray, encoder: tuple[tuple[int, ...], ...], llm: tuple[tuple[int, ...], ...]):
    """[microbatches, 2] forwards of an encoder stage and an LLM stage; backwards take twice as long."""
    forward = np.array(
        [[works[0, list(a)].sum(), works[1, list(b)].sum()] for a, b in zip(encoder, llm, strict=True)]
    )
    return forward, 2 * forward


def best_of_all_s(works: np.ndarray, num: int) -> float:
    """Over all ways to share samples out, in all orders: slow, obviously right."""
    best = float("inf")
    for owners in product(range(num), repeat=works.shape[1]):
        groups = tuple(tuple(i for i, o in enumerate(owners) if o == group) for group in range(num))
        if all(groups):
            forward, backward = pipeline(works, groups, groups)
            best = min(best, iteration_s(forward, backward, np.arange(num)))
    return best


def test_the_best_grading_is_near_the_best_of_all_assignments_and_nearer_than_entrain():
    """Six samples in three microbatches on two stages, which the best may size as it likes."""
    over: dict[str, list[float]] = {"graded": [], "entrain": []}
    for seed in range(40):
        works = np.random.default_rng(seed).lognormal(0, 0.5, (2, 6))
        found = []
        for small in range(4):
            held = graded_assignment(*works.tolist(), num_microbatches=3, num_small=small)
            found.append(order_units(*pipeline(works, held.encoder, held.llm), units_of(held)).iteration_s)
        best_s = best_of_all_s(works, 3)
        over["graded"].append(min(found) / best_s)
        over["entrain"].append(found[0] / best_s)
    assert max(over["graded"]) < 1.15
    assert np.mean(over["graded"]) < 1.06 < np.mean(over["entrain"])


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(0.1, 5.0), min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_the_heaviest_block_is_as_light_as_any_contiguous_cut_makes_it(costs, data):
    flat = [cost for of_module in costs for cost in of_module]
    num = data.draw(st.integers(1, len(flat)))
    pieces = chain_cuts(costs, num)
    loads = [0.0] * num
    seen = []
    for module, block, (first, last) in pieces:
        assert first < last
        loads[block] += sum(costs[module][first:last])
        seen += [(module, layer) for layer in range(first, last)]
    assert seen == [(m, layer) for m, of_module in enumerate(costs) for layer in range(len(of_module))]
    best = min(
        max(sum(flat[a:b]) for a, b in zip((0, *cuts), (*cuts, len(flat)), strict=True))
        for cuts in combinations(range(1, len(flat)), num - 1)
    )
    assert max(loads) == pytest.approx(best)


@given(
    st.lists(st.floats(0.1, 5.0), min_size=2, max_size=6),
    st.lists(st.floats(0.1, 5.0), min_size=2, max_size=6),
)
def test_sharing_a_block_is_never_heavier_than_whole_blocks_for_each(encoder, llm):
    num = 3
    pieces = chain_cuts([encoder, llm], num)
    loads = [0.0] * num
    for module, block, (first, last) in pieces:
        loads[block] += sum((encoder, llm)[module][first:last])
    whole = min(
        max(bottleneck_s(encoder, mine), bottleneck_s(llm, num - mine))
        for mine in range(1, num)
        if mine <= len(encoder) and num - mine <= len(llm)
    )
    assert max(loads) <= whole * (1 + 1e-9)
