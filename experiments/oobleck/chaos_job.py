"""A small language model on nodes that can be lost, and its reference losses in one process."""

from collections.abc import Callable, Mapping
from math import lcm
from typing import Any

import torch

from runtime.data.batches import SyntheticSource
from runtime.elastic.job import ElasticJob, plan_step
from runtime.elastic.replan import start_layout
from runtime.reference import Reference
from workbench.data.sample import Sample, Segment
from workbench.elastic.model_chain import model_chain
from workbench.elastic.node_specification import plan_templates
from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import TEXT, ModelGraph

LLAMA: dict[str, Any] = {
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
LENGTHS = (5, 9, 4, 7, 6, 8)  # tokens of a batch's samples


def batch(step: int) -> tuple[Sample, ...]:
    """Samples of unequal length; ids continue from step to step, and determine the data."""
    return tuple(
        Sample(len(LENGTHS) * step + index, (Segment(TEXT, 0, length, length),))
        for index, length in enumerate(LENGTHS)
    )


def elastic_job(
    num_nodes: int,
    *,
    num_faults: int = 1,
    ranks_per_node: int = 1,
    layers_per_rank: int = 8,
    wait_s: float = 30.0,
    config: Mapping[str, Any] = LLAMA,
    ranks_per_stage: int | tuple[int, ...] = 1,
) -> ElasticJob:
    """A job of eight layers, the first and the last sharing a table, with a limit of layers per rank.

    A microbatch has a sample for each rank of a stage; of several widths, templates choose stage by stage,
    and ranks that split samples are as many times as fast.
    """
    widths = (ranks_per_stage,) if isinstance(ranks_per_stage, int) else ranks_per_stage
    llm = module_from_config(dict(config), name="llm", modality=TEXT)
    model = ModelGraph(name="six-blocks", modules=(llm,))
    chain = model_chain(model, widths, lambda *at: 1.0 / at[2], lambda *_: 1, layers_per_rank)
    return ElasticJob(
        model=model,
        chain=chain,
        templates=plan_templates(chain.chain, ranks_per_node, num_nodes, num_faults),
        batch=batch,
        samples_per_microbatch=lcm(*widths),
        source=SyntheticSource(0),
        wait_s=wait_s,
        step_s=max(30.0, wait_s),
    )


def one_process(steps: int, batch: Callable[[int], tuple[Sample, ...]] = batch) -> tuple[float, ...]:
    """Losses of one process that trains on the same samples, in float64."""
    job = elastic_job(2)
    layout = start_layout(job, ("a", "b"))
    reference = Reference(
        plan_step(job, layout, batch(0)), seed=job.seed, dtype=torch.float64, optimizer=job.optimizer
    )
    losses = []
    for step in range(steps):
        reference.plan = plan_step(job, layout, batch(step))
        losses.append(reference.step(job.source).loss)
    return tuple(losses)
