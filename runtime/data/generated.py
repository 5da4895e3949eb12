"""What a generator is fed with: latents, and where its condition stands in the LLM's states."""

from itertools import accumulate

import torch
from torch import Tensor

from workbench.data.sample import Item, Sample
from workbench.model.model_graph import Edge
from workbench.plan.plan import Microbatch, Plan, Stage
from workbench.plan.routing import routing_of

# Shape suffix: E = packed condition tokens.


def entering_conditions(plan: Plan, stage: Stage, microbatch: Microbatch) -> dict[str, Tensor]:
    """Edge from a module of other items -> [E] places of the items' tokens in its packed states.

    The states are of whole samples, of each once, in the order in which the items name them.
    """
    modality = plan.model.module(stage.module).modality
    entering = [edge for edge in plan.model.edges_into(stage.module) if edge.entered_in(stage.layers)]
    return {edge.name: _places(plan, edge, microbatch, modality) for edge in entering}


def _places(plan: Plan, edge: Edge, microbatch: Microbatch, modality: str) -> Tensor:
    wanted = routing_of(plan).wanted(edge, microbatch)
    tokens = [plan.sample[item.sample].num_tokens for item in wanted]
    starts = dict(zip((item.sample for item in wanted), accumulate(tokens, initial=0), strict=False))
    return torch.cat(
        [starts[item.sample] + _inside(plan.sample[item.sample], modality, item) for item in microbatch.items]
    )


def _inside(sample: Sample, modality: str, item: Item) -> Tensor:
    """Where the item's tokens stand in its sample."""
    start = 0
    for segment in sample.segments:
        if segment.modality == modality and segment.k == item.k:
            return torch.arange(start, start + segment.tokens_out)
        start += segment.tokens_out
    raise ValueError(f"sample {sample.id} has no segment {modality}[{item.k}]")
