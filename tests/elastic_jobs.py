"""A small job that can lose nodes, and its losses as one process computes them."""

from functools import cache

import torch

from runtime.batches import SyntheticSource
from runtime.elastic.job import ElasticJob, plan_step
from runtime.elastic.replan import start_layout
from runtime.reference import Reference
from tests.tiny_models import llm
from workbench.data.sample import Sample, Segment
from workbench.graph.model_graph import TEXT, ModelGraph
from workbench.plan.plan import Precision
from workbench.resilience.model_chain import model_chain
from workbench.resilience.node_specification import plan_templates

LLAMA_OF_SIX = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}

WAIT_S = 5.0


def batch(step: int) -> tuple[Sample, ...]:
    """Six samples of a step, of unequal length; ids go on from step to step."""
    return tuple(
        Sample(first, (Segment(TEXT, 0, length, length),))
        for first, length in zip(range(6 * step, 6 * step + 6), (5, 9, 4, 7, 6, 8), strict=True)
    )


def elastic_job(
    num_nodes: int,
    *,
    num_faults: int = 1,
    ranks_per_node: int = 1,
    layers_per_rank: int = 8,
    wait_s: float = WAIT_S,
) -> ElasticJob:
    """Eight layers (embedding and head are tied) on nodes that hold at most so many of them per rank."""
    model = ModelGraph(name="six-blocks", modules=(llm(LLAMA_OF_SIX),))
    chain = model_chain(model, (1,), lambda *_: 1.0, lambda *_: 1, layers_per_rank)
    return ElasticJob(
        model=model,
        chain=chain,
        templates=plan_templates(chain.chain, ranks_per_node, num_nodes, num_faults),
        batch=batch,
        source=SyntheticSource(0),
        precision=Precision.FLOAT32,
        wait_s=wait_s,
        step_s=30.0,
    )


@cache
def undisturbed(steps: int) -> tuple[float, ...]:
    """Losses of one process that trains on the same samples, in float64."""
    job = elastic_job(2)
    plan = plan_step(job, start_layout(job, ("a", "b")), batch(0))
    reference = Reference(plan, seed=job.seed, dtype=torch.float64, optimizer=job.optimizer)
    losses = []
    for step in range(steps):
        reference.plan = plan_step(job, start_layout(job, ("a", "b")), batch(step))
        losses.append(reference.step(job.source).loss)
    return tuple(losses)
