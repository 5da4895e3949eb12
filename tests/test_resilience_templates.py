"""Pipeline templates and their search, layer by layer."""

import dataclasses
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.bench.rivals.divide_and_conquer import GaveUpError, divided_template
from experiments.bench.small_templates import compare, random_chain, small_chains
from experiments.oobleck.chaos_job import batch, elastic_job
from runtime.elastic.job import plan_step
from runtime.elastic.replan import start_layout
from sim.step.engine import simulate
from tests.examples import examples
from workbench.elastic.chain import LayerChain
from workbench.elastic.exact_mapping import exact_templates
from workbench.elastic.layerwise import LastBackward, layerwise
from workbench.elastic.template import Template, TemplateStage
from workbench.plan.lower import lower
from workbench.plan.lowered import Lowered
from workbench.schedule.action import STEP, Action, Pass, parse_action
from workbench.trace import Lane

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


FORWARD_S, BACKWARD_S = 1.0, 8.0  # a microbatch; eight layers of equal backwards
REDUCE = parse_action("0REDUCE_GRAD")


def two_replicas() -> Lowered:
    """Two nodes, each the whole model of eight layers; three microbatches each."""
    job = elastic_job(2)
    return lower(plan_step(job, start_layout(job, ("a", "b")), batch(0)))


def seconds(reduce_s: float):
    table = {Pass.F: FORWARD_S, Pass.B: BACKWARD_S, Pass.REDUCE_GRAD: reduce_s, Pass.STEP: 0.0}
    return lambda action: table[action.kind]


def makespan_s(lowered: Lowered, reduce_s: float, overlapped: dict[Action, LastBackward]) -> float:
    trace = simulate(lowered, seconds(reduce_s), overlapped=overlapped)
    return max(span.end_s for span in trace.spans)


def test_layers_are_whole_from_the_last_to_the_first():
    lowered = two_replicas()
    found = layerwise(lowered, lambda module, layer: 1.0)
    assert found[REDUCE].backward == parse_action("0B2")
    # the head's norm, six blocks; the embedding is tied to the head and whole with the first layer
    assert found[REDUCE].shares == pytest.approx([k / 8 for k in range(1, 9)])
    uneven = layerwise(lowered, lambda module, layer: 9.0 if layer == 7 else 1.0)
    assert uneven[REDUCE].shares == pytest.approx([k / 16 for k in range(9, 17)])


def test_the_step_ends_when_the_last_sum_can_have_ended():
    """Equal sums behind layers that are whole every second: the last starts at 8, or behind the others."""
    lowered = two_replicas()
    equal = tuple(dataclasses.replace(group, num_elements=1) for group in lowered.groups)
    lowered = dataclasses.replace(lowered, groups=equal)
    overlapped = layerwise(lowered, lambda module, layer: 1.0)
    passes_s = 3 * (FORWARD_S + BACKWARD_S)
    for each_s in (0.25, 1.0, 3.0):
        expected_s = passes_s - BACKWARD_S + max(8 + each_s, 1 + 8 * each_s)
        assert makespan_s(lowered, 8 * each_s, overlapped) == pytest.approx(expected_s)
        assert makespan_s(lowered, 8 * each_s, {}) == pytest.approx(passes_s + 8 * each_s)


@examples(40)
@given(st.floats(0.0, 40.0), st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8), st.booleans())
def test_overlap_never_costs_and_never_gains_more_than_the_backward(reduce_s, shares, is_of_one_replica):
    lowered = LOWERED
    table = {
        action: LastBackward(backward=Action(action.stage, Pass.B, 2), shares=tuple(shares))
        for action in list(lowered.reductions)[: 1 if is_of_one_replica else 2]
    }
    plain_s, overlapped_s = makespan_s(lowered, reduce_s, {}), makespan_s(lowered, reduce_s, table)
    assert plain_s - min(reduce_s, BACKWARD_S) - 1e-9 <= overlapped_s <= plain_s + 1e-9
    whole = {action: LastBackward(backward=o.backward, shares=(1.0,) * 8) for action, o in table.items()}
    assert makespan_s(lowered, reduce_s, whole) == pytest.approx(plain_s)


def test_passes_stay_what_they_are_and_the_step_waits_for_all_sums():
    lowered = two_replicas()
    trace = simulate(lowered, seconds(6.0), overlapped=layerwise(lowered, lambda module, layer: 1.0))
    plain = simulate(lowered, seconds(6.0))
    assert [s for s in trace.spans if s.lane is Lane.COMPUTE and s.action != STEP] == [
        s for s in plain.spans if s.lane is Lane.COMPUTE and s.action != STEP
    ]
    for rank in (0, 1):
        (summed,) = [s for s in trace.spans if s.rank == rank and s.lane is Lane.REDUCE]
        (step,) = [s for s in trace.spans if s.rank == rank and s.action == STEP]
        assert summed.start_s == pytest.approx(2 * 9 + FORWARD_S + 1)
        assert step.start_s == summed.end_s


def test_what_cannot_be_overlapped_is_refused_or_left_out():
    lowered = two_replicas()
    (node, *_), cluster = lowered.plan.cluster.nodes, lowered.plan.cluster
    few = dataclasses.replace(node, num_ranks=2, num_cores=1)
    crowded = dataclasses.replace(
        lowered,
        plan=dataclasses.replace(lowered.plan, cluster=dataclasses.replace(cluster, nodes=(few,))),
    )
    with pytest.raises(ValueError, match="ranks share cores"):
        simulate(crowded, seconds(1.0), overlapped=layerwise(crowded, lambda module, layer: 1.0))
    with pytest.raises(ValueError, match=r"shares of a backward lie in \[0, 1\]"):
        LastBackward(backward=parse_action("0B2"), shares=(1.5,))
    with pytest.raises(ValueError, match="layer 3 of 'llm': a backward takes >= 0 s, got -1"):
        layerwise(lowered, lambda module, layer: -1.0 if layer == 3 else 1.0)


LOWERED = two_replicas()
