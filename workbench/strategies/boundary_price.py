"""What features take on their way from an encoder's grid to the LLM's."""

from typing import NamedTuple

from workbench.cost.collectives import Collective
from workbench.cost.group_link import group_link
from workbench.graph.model_graph import TEXT
from workbench.strategies.layout_choice import ModuleChoice
from workbench.strategies.module_price import ModulePrices


class Boundary(NamedTuple):
    """Seconds ahead of the LLM's forwards and behind its backwards; bytes that a replica of it receives."""

    before_s: float
    after_s: float
    num_bytes: float


def regrouped(prices: ModulePrices, encoder: ModuleChoice, llm: ModuleChoice) -> Boundary:
    """Colocated, a whole step: fan-in gathers features ahead, fan-out gathers gradients behind.

    Where both have as many replicas, nothing moves.

    Source: Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training",
    section 3.2.
    """
    job = prices.job
    all_bytes = _feature_bytes(prices, encoder, len(job.batch))
    fewest, most = sorted((encoder.dp, llm.dp))
    if fewest == most:
        return Boundary(0.0, 0.0, all_bytes / llm.dp)
    finer = encoder if encoder.dp == most else llm
    members = most // fewest
    link = group_link(job.cluster, num_ranks=members, stride=finer.tp * finer.cp)
    seconds = prices.cost.between_ranks_s(Collective.ALL_GATHER, all_bytes / fewest, members, link)
    before_s, after_s = (seconds, 0.0) if finer is encoder else (0.0, seconds)
    return Boundary(before_s, after_s, all_bytes / llm.dp)


def sent(prices: ModulePrices, encoder: ModuleChoice, llm: ModuleChoice, num_samples: int) -> Boundary:
    """Apart, for so many samples: leaders send over their cards, receivers broadcast in their tp x cp group.

    Source: the same, section 3.1.
    """
    cluster = prices.job.cluster
    all_bytes = _feature_bytes(prices, encoder, num_samples)
    sent_s = prices.send_s(all_bytes / min(encoder.dp, llm.dp), cluster.inter)

    def spread_s(choice: ModuleChoice) -> float:
        members = choice.tp * choice.cp
        link = group_link(cluster, num_ranks=members, stride=1)
        return prices.cost.between_ranks_s(Collective.BROADCAST, all_bytes / choice.dp, members, link)

    return Boundary(sent_s + spread_s(llm), sent_s + spread_s(encoder), all_bytes / llm.dp)


def _feature_bytes(prices: ModulePrices, encoder: ModuleChoice, num_samples: int) -> float:
    job = prices.job
    llm = next(module for module in job.model.modules if module.modality == TEXT)
    size = job.settings.precision.num_bytes
    return prices.sample_tokens(encoder.module) * num_samples * llm.layers[0].out_width * size
