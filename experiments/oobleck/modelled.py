"""Throughput by number of nodes from our own planner and cost model: A40, one GPU a node."""

from functools import cache

from experiments.modelled import A40, Setting, layer_times
from experiments.oobleck.systems import MOST_NODES
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.graph.model_graph import ModelGraph
from workbench.graph.zoo import from_shape
from workbench.resilience.instantiate import fastest
from workbench.resilience.model_chain import ModelChain, model_chain
from workbench.resilience.node_specification import TemplateSet, plan_templates

SHAPES = {
    "BERT-Large": "bert-large",
    "GPT-2": "gpt2-medium",
    "GPT-3 Medium": "gpt3-medium-350m",
    "GPT-3 2.7b": "gpt3-2.7b",
    "GPT-3 6.7b": "gpt3-6.7b",
}
TOKENS = {"BERT-Large": 512, "GPT-2": 1024, "GPT-3 Medium": 2048, "GPT-3 2.7b": 2048, "GPT-3 6.7b": 2048}
MICROBATCH = {"BERT-Large": 32, "GPT-2": 32, "GPT-3 Medium": 16, "GPT-3 2.7b": 2, "GPT-3 6.7b": 2}
GLOBAL_BATCH = {
    "BERT-Large": 8192,
    "GPT-2": 8192,
    "GPT-3 Medium": 8192,
    "GPT-3 2.7b": 1024,
    "GPT-3 6.7b": 1024,
}
TF32_OVER_BFLOAT16 = 2.0  # half the rate, twice the bytes; the profile has no TF32 of its own
STATE_BYTES = 16  # float32 weight, gradient and two Adam moments
ELEMENT_BYTES = 4
MEMORY_BYTES = 40e9  # what section 2.7.1 prints; the card has 48
FAULTS = 1


@cache
def graph(model: str) -> ModelGraph:
    """The model as a graph of one module."""
    return ModelGraph(name=model, modules=(from_shape(SHAPES[model]),))


@cache
def chain(model: str) -> ModelChain:
    """Layers with times and bytes.

    With recomputation a stage keeps one boundary tensor per layer and microbatch in flight; (layers of a
    stage) x (stages) is about the model's layers, so that many tensors are set aside on every GPU.
    """
    found, samples = graph(model), MICROBATCH[model]
    setting = Setting(text_tokens=TOKENS[model], items=(), microbatch_samples=samples)
    times = layer_times(found, setting, CostModel(load_profile(A40)))
    layers = found.modules[0].layers
    width = max(layer.out_width for layer in layers[:-1])
    aside = len(layers) * samples * TOKENS[model] * width * ELEMENT_BYTES
    return model_chain(
        found,
        (1,),
        lambda module, layer, _: TF32_OVER_BFLOAT16 * times[module][layer].total_s,
        lambda _, layer, __: layers[layer].num_parameters * STATE_BYTES,
        MEMORY_BYTES - aside,
    )


@cache
def planned(model: str) -> TemplateSet:
    """Templates for 30 nodes."""
    return plan_templates(chain(model).chain, 1, MOST_NODES, FAULTS)


@cache
def oobleck_rates(model: str) -> dict[int, float]:
    """Samples per second of the fastest instantiation of 15 to 30 nodes."""
    templates, microbatch = planned(model), MICROBATCH[model]
    count = GLOBAL_BATCH[model] // microbatch
    return {
        nodes: fastest(templates, nodes, count).samples_per_s(microbatch)
        for nodes in range(MOST_NODES // 2, MOST_NODES + 1)
    }


@cache
def varuna_rates(model: str) -> dict[int, float]:
    """Samples per second of the best grid of equal pipelines on 15 to 30 nodes; the rest stands by."""
    templates, microbatch = planned(model), MICROBATCH[model]
    count = GLOBAL_BATCH[model] // microbatch
    rates = {}
    for nodes in range(MOST_NODES // 2, MOST_NODES + 1):
        shortest_s = min(
            templates.of_size(depth).iteration_s(-(-count // (nodes // depth)))
            for depth in templates.specification.sizes
            if depth <= nodes
        )
        rates[nodes] = GLOBAL_BATCH[model] / shortest_s
    return rates
