"""Which pipelines are fastest where the sum of gradients over them counts, against enumeration."""

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.bench.small_templates import random_chain
from runtime.elastic.local_nodes import Shape
from runtime.elastic.replan import start_layout
from runtime.elastic.run import elastic_job
from runtime.elastic.step_data import drawn
from tests.command_line import JOB
from tests.examples import examples
from workbench.elastic.chain import LayerChain
from workbench.elastic.instantiate import SumSeconds, fastest, multisets
from workbench.elastic.node_specification import TemplateSet, plan_templates
from workbench.job.job import load_job
from workbench.job.machines import cost_of
from workbench.strategies.elastic_templates import elastic_templates

NODES, MICROBATCHES = 6, 7


def planned(seed: int, faults: int) -> TemplateSet:
    chain = random_chain(random.Random(seed), 12, 2)
    return plan_templates(LayerChain(widths=chain.widths, time_s=chain.time_s), 2, NODES, faults)


def ring(templates: TemplateSet, trained_s: list[float]) -> SumSeconds:
    """Of the stage with the most to sum, in a ring: so many seconds a layer for the way once around."""

    def sum_s(size: int, num_pipelines: int) -> float:
        of_stages = (sum(trained_s[stage.first : stage.end]) for stage in templates.of_size(size).stages)
        return 2 * (num_pipelines - 1) / num_pipelines * max(of_stages)

    return sum_s


def splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    return (counts for counts in product(range(1, total + 1), repeat=parts) if sum(counts) == total)


def shortest_s(templates: TemplateSet, num_microbatches: int, sum_s: SumSeconds) -> float:
    """Of the steps of all pipelines and all distributions."""
    specification = templates.specification
    return min(
        max(templates.of_size(size).iteration_s(count) for size, count in zip(sizes, counts, strict=True))
        + max(sum_s(size, len(sizes)) for size in sizes)
        for sizes in multisets(specification.sizes, NODES, specification.num_faults + 1)
        for counts in splits(num_microbatches, len(sizes))
    )


@given(
    st.integers(0, 10**6),
    st.integers(0, 1),
    st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=12, max_size=12),
    st.floats(0.0, 20.0),
)
@examples(60)
def test_the_step_with_its_sum_is_the_shortest_of_all(
    seed: int, faults: int, trained: list[float], scale: float
):
    """Also where some layers are frozen, and where the sum is nothing or nearly all of the step."""
    templates = planned(seed, faults)
    sum_s = ring(templates, [each * scale for each in trained])
    found = fastest(templates, NODES, MICROBATCHES, sum_s)
    assert found.step_s == pytest.approx(shortest_s(templates, MICROBATCHES, sum_s), rel=1e-12)
    assert found.sum_s == max(sum_s(size, len(found.sizes)) for size in found.sizes)
    assert (sum(found.sizes), sum(found.microbatches)) == (NODES, MICROBATCHES)


def test_a_sum_that_takes_longer_than_it_saves_is_not_chosen():
    """Six pipelines take 24 s, two of three stages 32 s; they sum 12 layers over 6 ranks, or 4 over 2."""
    templates = plan_templates(LayerChain(widths=(1,), time_s=((1.0,),) * 12), 1, NODES, 1)
    sum_s = ring(templates, [1.0] * 12)
    assert fastest(templates, NODES, 12).sizes == (1, 1, 1, 1, 1, 1)
    found = fastest(templates, NODES, 12, sum_s)
    assert (found.sizes, found.microbatches) == ((3, 3), (6, 6))
    assert (found.iteration_s, found.sum_s, found.step_s) == (32.0, 4.0, 36.0)
    assert found.samples_per_s(3) == 1.0
    assert 24.0 + sum_s(1, 6) == 44.0


@pytest.fixture
def slow(tmp_path: Path) -> Shape:
    """Six nodes of one rank, over a link on which the sum of gradients is most of a step."""
    path = tmp_path / "job.yaml"
    path.write_text(
        JOB.replace("gb_per_s: 1.0", "gb_per_s: 1.0e-3").replace("  samples: 4\n", "  samples: 6\n")
    )
    return Shape(job=load_job(path), nodes=NODES, ranks_per_node=1, trace=None)


def test_a_job_and_its_training_take_the_pipelines_whose_step_is_the_shortest(slow: Shape):
    cost, whole = cost_of(slow.job, None, None), slow.on_nodes()
    templates = elastic_templates(whole, cost, num_nodes=NODES, num_faults=1)
    found = templates.at(NODES)
    assert found.step_s == pytest.approx(shortest_s(templates.planned, 6, templates.sum_s), rel=1e-12)
    assert len(whole.batch) / templates.samples_per_s(NODES) == found.step_s
    assert found.sizes != fastest(templates.planned, NODES, 6).sizes
    job = elastic_job(templates, drawn(whole, 0), seed=0, wait_s=5.0, num_cores=2)
    assert start_layout(job, [f"node{index}" for index in range(NODES)]).sizes == found.sizes
