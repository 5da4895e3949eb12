"""Node counts, batch distribution and instantiation against enumeration."""

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.bench.small_templates import random_chain
from tests.examples import examples
from workbench.elastic.batch_distribution import distribute, nearest_batch, num_microbatches
from workbench.elastic.chain import LayerChain
from workbench.elastic.instantiate import fastest, instantiate, multisets
from workbench.elastic.node_specification import (
    NodeSpecification,
    TemplateSet,
    plan_templates,
)


def spread(times, counts):
    whole = [time * count for time, count in zip(times, counts, strict=True)]
    mean = sum(whole) / len(whole)
    return sum((each - mean) ** 2 for each in whole)


def splits(total, parts):
    return (c for c in product(range(1, total + 1), repeat=parts) if sum(c) == total)


@given(st.lists(st.floats(0.1, 5.0), min_size=1, max_size=4), st.integers(0, 9))
@examples(150)
def test_distribution_has_the_least_variance_of_all(times, more):
    total = len(times) + more
    found = distribute(times, total)
    assert sum(found) == total
    assert min(found) >= 1
    best = min(spread(times, counts) for counts in splits(total, len(times)))
    assert spread(times, found) <= best * (1 + 1e-9) + 1e-12


def test_distribution_of_many_pipelines_is_quick_and_nearly_level():
    rng = random.Random(0)
    times = [rng.uniform(0.5, 2.0) for _ in range(40)]
    counts = distribute(times, 8000)
    level = 8000 / sum(1 / time for time in times)
    assert sum(counts) == 8000
    assert all(abs(count * time - level) <= time for count, time in zip(counts, times, strict=True))


@given(st.integers(1, 30), st.integers(0, 3), st.integers(1, 8), st.integers(1, 30))
@settings(deadline=None)
def test_covering_agrees_with_enumeration(num_nodes, faults, smallest, most):
    try:
        specification = NodeSpecification(
            num_nodes=num_nodes, num_faults=faults, smallest=smallest, most=max(most, smallest)
        )
    except ValueError:
        return
    for left in range(specification.threshold, num_nodes + 1):
        assert any(True for _ in multisets(specification.sizes, left, faults + 1))
    assert not any(True for _ in multisets(specification.sizes, specification.threshold - 1, faults + 1))


def test_multisets_of_the_worked_example():
    """Templates of 2, 3 and 4 nodes on 7 nodes (section 2.4.2.1)."""
    assert set(multisets(range(2, 5), 7, 1)) == {(2, 2, 3), (3, 4)}
    assert set(multisets(range(2, 5), 7, 3)) == {(2, 2, 3)}


def planned(seed: int, num_nodes: int, faults: int) -> TemplateSet:
    chain = random_chain(random.Random(seed), 12, 2)
    chain = LayerChain(widths=chain.widths, time_s=chain.time_s)
    return plan_templates(chain, 2, num_nodes, faults)


@pytest.mark.parametrize("seed", range(6))
def test_fastest_equals_the_best_of_all_multisets_and_splits(seed):
    num_nodes, total = 6, 7
    templates = planned(seed, num_nodes, 1)
    found = fastest(templates, num_nodes, total)
    best = min(
        max(templates.of_size(size).iteration_s(count) for size, count in zip(sizes, counts, strict=True))
        for sizes in multisets(templates.specification.sizes, num_nodes, 2)
        for counts in splits(total, len(sizes))
    )
    assert found.iteration_s == pytest.approx(best, rel=1e-12)
    assert sum(found.sizes) == num_nodes
    assert sum(found.microbatches) == total
    by_variance = instantiate(templates, found.sizes, total)
    assert by_variance.iteration_s >= found.iteration_s * (1 - 1e-12)
    assert found.samples_per_s(4) == pytest.approx(28 / best)


def test_fastest_needs_no_enumeration():
    chain = LayerChain(widths=(1,), time_s=((1.0,),) * 64)
    found = fastest(plan_templates(chain, 1, 64, 2), 64, 1024)  # 1.7 million multisets
    assert sum(found.sizes) == 64
    assert sum(found.microbatches) == 1024


@pytest.mark.parametrize(
    ("wanted", "microbatch", "pipelines", "nearest"),
    [(8192, 32, 5, 8192), (100, 32, 2, 96), (112, 32, 2, 96), (113, 32, 2, 128), (64, 32, 5, 160)],
)
def test_nearest_batch(wanted, microbatch, pipelines, nearest):
    assert nearest_batch(wanted, microbatch, pipelines) == nearest
    if nearest == wanted:
        assert num_microbatches(wanted, microbatch, pipelines) == wanted // microbatch
    else:
        with pytest.raises(ValueError, match=f"the nearest that can is {nearest}"):
            num_microbatches(wanted, microbatch, pipelines)


HEAVY = LayerChain(widths=(1,), time_s=((1.0,),) * 4, held_bytes=((10,),) * 4, capacity_bytes=20)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        pytest.param(
            lambda: NodeSpecification(num_nodes=8, num_faults=3, smallest=3),
            "want faults 1, or 12 nodes",
            id="f",
        ),
        pytest.param(
            lambda: NodeSpecification(num_nodes=2, num_faults=0, smallest=3),
            "want at least 3 nodes",
            id="few",
        ),
        pytest.param(
            lambda: NodeSpecification(num_nodes=2, num_faults=-1, smallest=1), ">= 0", id="negative"
        ),
        pytest.param(
            lambda: NodeSpecification(num_nodes=8, num_faults=0, smallest=4, most=5), "7 layers", id="gap"
        ),
        pytest.param(
            lambda: plan_templates(HEAVY, 1, 1, 0), "fits no template of up to 1 nodes", id="no-fit"
        ),
        pytest.param(
            lambda: plan_templates(
                LayerChain(widths=(1,), time_s=((1.0,),), held_bytes=((10,),), capacity_bytes=5), 1, 4, 0
            ),
            "layer 0 alone needs 10 bytes",
            id="heavy-layer",
        ),
        pytest.param(lambda: distribute([1.0, 1.0], 1), "at least 2", id="batch"),
        pytest.param(lambda: distribute([0.0], 1), "positive", id="time"),
        pytest.param(lambda: fastest(plan_templates(HEAVY, 1, 4, 1), 3, 8), "at least 4", id="below"),
        pytest.param(lambda: fastest(plan_templates(HEAVY, 1, 4, 1), 4, 1), "at least 2", id="small-batch"),
    ],
)
def test_bad_input_is_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_smallest_pipeline_comes_from_memory():
    assert plan_templates(HEAVY, 1, 4, 1).specification.smallest == 2
