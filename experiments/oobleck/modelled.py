"""Throughput by number of nodes from our own planner and cost model: A40, one GPU per node."""

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cache
from itertools import pairwise

from experiments.cornstarch.modelled import A40, Setting, layer_times
from experiments.harness.printed_pipeline import StageTimes, free_cluster, microbatched, passes_s
from experiments.oobleck.systems import MOST_NODES
from sim.step.sweep import Sweep
from workbench.cost.execution import AttentionKernel, Execution
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.cost.roofline import Grid, RowWork, Work
from workbench.elastic.instantiate import Instantiation, fastest
from workbench.elastic.model_chain import ModelChain, model_chain
from workbench.elastic.node_specification import TemplateSet, plan_templates
from workbench.elastic.template import Template
from workbench.float_sum import float_sum
from workbench.memory.layer import layer_bytes
from workbench.memory.setting import Setting as MemorySetting
from workbench.model.frozen import gradient_needs
from workbench.model.layer import Operator, Pointwise
from workbench.model.model_graph import ModelGraph
from workbench.model.zoo import from_shape
from workbench.plan.build import with_programs
from workbench.plan.kernels import Kernels
from workbench.plan.lower import lower
from workbench.plan.plan import Recompute
from workbench.plan.stage import Stage

FORWARD_SHARE = 1 / 3


def pipeline_s(
    model: ModelGraph,
    chain: ModelChain,
    template: Template,
    num_microbatches: int,
    forward_share: float = FORWARD_SHARE,
) -> float:
    """Seconds of one iteration of a template's pipeline, without links, by the share of forwards.

    A stage that crosses modules is one plan stage per module on the same rank, whose time is divided
    by layers.
    """
    stages: list[Stage] = []
    seconds: list[float] = []
    for rank, stage in enumerate(template.stages):
        for name, first, end in chain.runs_of(stage):
            stages.append(
                Stage(id=len(stages), module=name, replica=0, layers=(first, end), ranks=((rank,),))
            )
            seconds.append(stage.time_s * (end - first) / (stage.end - stage.first))
    cluster = free_cluster(len(template.stages))
    plan = with_programs(microbatched("template", model, cluster, tuple(stages), num_microbatches))

    def stage_times(stage: int) -> StageTimes:
        return StageTimes(forward_share * seconds[stage], (1 - forward_share) * seconds[stage])

    return Sweep(lower(plan)).iteration_s(passes_s(stage_times))


def simulated_s(
    model: ModelGraph,
    chain: ModelChain,
    planned: TemplateSet,
    instantiation: Instantiation,
    forward_share: float = FORWARD_SHARE,
) -> float:
    """Seconds of the slowest pipeline of an instantiation."""
    pairs: Sequence[tuple[int, int]] = sorted(
        set(zip(instantiation.sizes, instantiation.microbatches, strict=True))
    )
    return max(pipeline_s(model, chain, planned.of_size(size), count, forward_share) for size, count in pairs)


SHAPES = {
    "BERT-Large": "bert-large",
    "GPT-2": "gpt2-medium",
    "GPT-3 Medium": "gpt3-medium-350m",
    "GPT-3 2.7b": "gpt3-2.7b",
    "GPT-3 6.7b": "gpt3-6.7b",
}
TOKENS = {"BERT-Large": 512, "GPT-2": 1024, "GPT-3 Medium": 2048, "GPT-3 2.7b": 2048, "GPT-3 6.7b": 2048}
MICROBATCH = {"BERT-Large": 32, "GPT-2": 32, "GPT-3 Medium": 16, "GPT-3 2.7b": 2, "GPT-3 6.7b": 2}
BAMBOO_MICROBATCH = {"BERT-Large": 4, "GPT-2": 1}
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
BAMBOO_DEPTH = 6  # its published throughput changes at 30, 24 and 18 nodes only

# Times the scores are read or written between the products of a forward by transformers, on which the
# chapter builds (section 2.6), as it was in 2023 (v4.2x, `GPT2Attention._attn`, `BertSelfAttention.forward`):
# divided, masked (GPT-2: causally, and for padding), soft-maxed and dropped in kernels of their own.
SCORES_PASSES = {"BERT-Large": 8.0} | dict.fromkeys(
    ("GPT-2", "GPT-3 Medium", "GPT-3 2.7b", "GPT-3 6.7b"), 10.0
)
FUSED = Execution()

# Tensors that further operators of theirs read or write in a forward: GPT-2's GELU is eight kernels (cube,
# times 0.044715, plus x, times a constant, tanh, plus 1, half of x, their product), and a dropout stands
# before either sum of a block.
SPELLED_OUT_PASSES = {"mlp.gelu_new": 18, "attention_residual": 5, "mlp_residual": 5}


class Written(StrEnum):
    """How the operators between matrix products run."""

    FUSED = "fused"
    SPELLED_OUT = "spelled out"


@cache
def graph(model: str) -> ModelGraph:
    """The model as a graph of one module."""
    return ModelGraph(name=model, modules=(from_shape(SHAPES[model]),))


@cache
def spelled_out(model: str) -> ModelGraph:
    """The model with every kernel of transformers' operators counted."""
    plain = graph(model)
    module = plain.modules[0]
    layers = tuple(
        replace(layer, operators=tuple(_spelled_out(operator) for operator in layer.operators))
        for layer in module.layers
    )
    return replace(plain, modules=(replace(module, layers=layers),))


def _spelled_out(operator: Operator) -> Operator:
    if isinstance(operator, Pointwise) and operator.name in SPELLED_OUT_PASSES:
        return replace(operator, num_passes=SPELLED_OUT_PASSES[operator.name])
    return operator


def stored(model: str) -> Execution:
    """The execution with attention scores stored in memory."""
    forward = SCORES_PASSES[model]
    return Execution(
        attention=AttentionKernel.STORED,
        scores_passes=forward,
        scores_backward_passes=2 * forward,
        scores_rate=1.0,  # plain kernels, as other memory-bound ones
    )


@cache
def layer_s(
    model: str,
    microbatch: int,
    recompute: Recompute,
    execution: Execution,
    precision: str = "tf32",
    written: Written = Written.SPELLED_OUT,
) -> tuple[StageTimes, ...]:
    """[layers] forward and backward seconds of a microbatch in "tf32" or "float32"."""
    priced, factor = ("bfloat16", TF32_OVER_BFLOAT16) if precision == "tf32" else (precision, 1.0)
    setting = Setting(
        text_tokens=TOKENS[model],
        items=(),
        microbatch_samples=microbatch,
        recompute=recompute,
        precision=priced,
    )
    model_graph = spelled_out(model) if written is Written.SPELLED_OUT else graph(model)
    (times,) = layer_times(model_graph, setting, CostModel(load_profile(A40), execution)).values()
    return tuple(StageTimes(factor * time.forward_s, factor * time.backward_s) for time in times)


def forward_share(model: str) -> float:
    """The forward's share of a layer's forward, recomputation and backward."""
    times = layer_s(model, MICROBATCH[model], Recompute.FULL, stored(model))
    return float_sum(time.forward_s for time in times) / float_sum(time.total_s for time in times)


@cache
def kept_bytes(model: str, microbatch: int) -> tuple[int, ...]:
    """[layers] bytes kept of one microbatch without recomputation."""
    tokens, module = TOKENS[model], graph(model).modules[0]
    work = Work((RowWork(tokens, tokens, tokens * (tokens + 1) // 2),) * microbatch)
    setting = MemorySetting(work, Grid(), ELEMENT_BYTES, False)  # noqa: FBT003  (items of one length)
    needs = gradient_needs(graph(model))[module.name]
    return tuple(
        layer_bytes(layer, need, setting, Kernels.MEGATRON_SCORES).kept.num_bytes
        for layer, need in zip(module.layers, needs, strict=True)
    )


@cache
def chain(model: str) -> ModelChain:
    """The model's layers with times and bytes.

    With recomputation a stage keeps one boundary tensor per layer and microbatch in flight; (layers of a
    stage) x (stages) is about the model's layers, so that many tensors are reserved on every GPU, and
    the layer that is recomputed.
    """
    model_graph, samples = graph(model), MICROBATCH[model]
    times = layer_s(model, samples, Recompute.FULL, stored(model))
    layers = model_graph.modules[0].layers
    width = max(layer.out_width for layer in layers[:-1])
    aside = len(layers) * samples * TOKENS[model] * width * ELEMENT_BYTES + max(kept_bytes(model, samples))
    return model_chain(
        model_graph,
        (1,),
        lambda _, layer, __: times[layer].total_s,
        lambda _, layer, __: layers[layer].num_parameters * STATE_BYTES,
        MEMORY_BYTES - aside,
    )


@cache
def planned(model: str) -> TemplateSet:
    """Templates for 30 nodes."""
    return plan_templates(chain(model).chain, 1, MOST_NODES, FAULTS)


@cache
def oobleck_layout(model: str, nodes: int) -> Instantiation:
    """The fastest instantiation."""
    return fastest(planned(model), nodes, GLOBAL_BATCH[model] // MICROBATCH[model])


@cache
def varuna_grid(model: str, nodes: int) -> tuple[int, int]:
    """(depth, microbatches of each pipeline) of the best grid of equal pipelines; spare nodes idle."""
    templates, count = planned(model), GLOBAL_BATCH[model] // MICROBATCH[model]
    grids = [
        (depth, -(-count // (nodes // depth))) for depth in templates.specification.sizes if depth <= nodes
    ]
    return min(grids, key=lambda grid: templates.of_size(grid[0]).iteration_s(grid[1]))


@cache
def oobleck_rates(model: str) -> dict[int, float]:
    """Samples per second of the fastest instantiation of 15 to 30 nodes, by the planning formula."""
    return {
        nodes: oobleck_layout(model, nodes).samples_per_s(MICROBATCH[model])
        for nodes in range(MOST_NODES // 2, MOST_NODES + 1)
    }


@cache
def varuna_rates(model: str) -> dict[int, float]:
    """Samples per second of the best grid on 15 to 30 nodes, by the planning formula."""
    rates = {}
    for nodes in range(MOST_NODES // 2, MOST_NODES + 1):
        depth, count = varuna_grid(model, nodes)
        rates[nodes] = GLOBAL_BATCH[model] / planned(model).of_size(depth).iteration_s(count)
    return rates


def bamboo_stages(model: str) -> tuple[StageTimes, ...]:
    """[6] stages of an even cut, each of which also runs its successor's forward, without recomputation."""
    times = layer_s(model, BAMBOO_MICROBATCH[model], Recompute.NONE, stored(model))
    bounds = [round(stage * len(times) / BAMBOO_DEPTH) for stage in range(BAMBOO_DEPTH + 1)]
    forward_s = [float_sum(time.forward_s for time in times[a:b]) for a, b in pairwise(bounds)]
    backward_s = [float_sum(time.backward_s for time in times[a:b]) for a, b in pairwise(bounds)]
    return tuple(
        StageTimes(forward_s[stage] + forward_s[(stage + 1) % BAMBOO_DEPTH], backward_s[stage])
        for stage in range(BAMBOO_DEPTH)
    )


def bamboo_useful_share(model: str) -> float:
    """The share of an iteration's passes that are not a neighbour's."""
    times = layer_s(model, BAMBOO_MICROBATCH[model], Recompute.NONE, stored(model))
    return float_sum(time.total_s for time in times) / float_sum(
        stage.total_s for stage in bamboo_stages(model)
    )


@cache
def bamboo_rates(model: str) -> dict[int, float]:
    """Samples per second of pipelines of six nodes on 15 to 30 nodes: sum of stages, then the slowest."""
    stages = [stage.total_s for stage in bamboo_stages(model)]
    count = GLOBAL_BATCH[model] // BAMBOO_MICROBATCH[model]
    return {
        nodes: GLOBAL_BATCH[model]
        / (float_sum(stages) + (-(-count // (nodes // BAMBOO_DEPTH)) - 1) * max(stages))
        for nodes in range(MOST_NODES // 2, MOST_NODES + 1)
    }
