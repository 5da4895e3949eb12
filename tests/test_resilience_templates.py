"""GPU-stage mapping: exact against brute force, divide and conquer against exact, node counts."""

import random
from dataclasses import replace

import pytest

from experiments.bench.rivals.divide_and_conquer import GaveUpError, divided_template
from experiments.bench.small_templates import compare, random_chain, small_chains
from workbench.elastic.chain import LayerChain
from workbench.elastic.exact_mapping import exact_templates
from workbench.elastic.template import Template, TemplateStage

NUM_CHAINS = 400


def test_exact_equals_brute_force():
    found = compare(NUM_CHAINS)
    assert found.num_compared >= 300
    assert found.num_unfit > 0
    assert found.all_equal


def test_divide_and_conquer_is_never_better_and_sometimes_worse():
    worse = 0
    for chain, gpus, nodes in small_chains(1, NUM_CHAINS):
        exact = exact_templates(chain, gpus, (nodes,)).get(nodes)
        divided = divided_template(chain, gpus, nodes)
        assert (exact is None) == (divided is None)
        if exact is not None and divided is not None:
            assert exact.planned_s <= divided.planned_s * (1 + 1e-12)
            worse += divided.planned_s > exact.planned_s * (1 + 1e-9)
    assert worse > 0


def test_all_node_counts_at_once_equal_one_by_one():
    chain = random_chain(random.Random(5), 12, 4)
    together = exact_templates(chain, 4, range(1, 7))
    for nodes, template in together.items():
        assert exact_templates(chain, 4, (nodes,))[nodes].planned_s == template.planned_s


def test_templates_keep_node_rule_memory_and_layers():
    chain = replace(random_chain(random.Random(3), 24, 8), capacity_bytes=200)
    for nodes, template in exact_templates(chain, 8, range(1, 9)).items():
        assert template.num_nodes == nodes  # the rest is checked by Template itself
        assert template.num_layers == 24
        for stage in template.stages:
            assert chain.stage_bytes(stage.first, stage.end, stage.num_gpus) <= 200
        held = [layer for node in template.layers_by_node() for layer in node]
        assert held == list(range(24))


@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_equal_stages_take_the_pipeline_closed_form(num_stages):
    stages = tuple(TemplateStage(first=k, end=k + 1, num_gpus=1, time_s=3.0) for k in range(num_stages))
    template = Template(num_nodes=num_stages, gpus_per_node=1, stages=stages)
    for microbatches in (1, 2, 4 * num_stages):
        assert template.iteration_s(microbatches) == 3.0 * (microbatches + num_stages - 1)
    assert [template.iteration_s(k) for k in range(1, 30)] == template.iterations_s(29).tolist()


def test_stopped_divide_and_conquer_says_so():
    chain = random_chain(random.Random(0), 6, 2)
    with pytest.raises(GaveUpError, match="stopped at"):
        divided_template(chain, 2, 2, may_go_on=lambda: False)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        pytest.param(lambda: LayerChain(widths=(1,), time_s=()), "at least one layer", id="no-layer"),
        pytest.param(lambda: LayerChain(widths=(2, 1), time_s=((1.0, 1.0),)), "ascending", id="widths"),
        pytest.param(lambda: LayerChain(widths=(1,), time_s=((-1.0,),)), "layer 0", id="negative"),
        pytest.param(lambda: LayerChain(widths=(1,), time_s=((1.0, 2.0),)), "layer 0", id="ragged"),
        pytest.param(
            lambda: LayerChain(widths=(1,), time_s=((1.0,),), held_bytes=((1,), (2,))),
            "have bytes",
            id="bytes",
        ),
        pytest.param(
            lambda: exact_templates(LayerChain(widths=(4,), time_s=((1.0,),)), 2, (1,)),
            "width of at most 2",
            id="wide",
        ),
        pytest.param(
            lambda: exact_templates(LayerChain(widths=(1,), time_s=((1.0,),)), 2, (0,)),
            "node counts",
            id="no-node",
        ),
        pytest.param(
            lambda: Template(
                num_nodes=1,
                gpus_per_node=2,
                stages=(TemplateStage(first=0, end=1, num_gpus=1, time_s=1.0),),
            ),
            "the stages use 1 GPUs",
            id="idle-gpu",
        ),
        pytest.param(
            lambda: Template(
                num_nodes=2,
                gpus_per_node=2,
                stages=tuple(
                    TemplateStage(first=k, end=k + 1, num_gpus=m, time_s=1.0) for k, m in enumerate((1, 2, 1))
                ),
            ),
            "spans two nodes",
            id="spans",
        ),
    ],
)
def test_bad_input_is_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
