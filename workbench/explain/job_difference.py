"""What differs between the jobs of two plans: model, machines and samples. Names of jobs do not count."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from workbench.cost.hardware import Cluster, Link
from workbench.model.model_graph import ModelGraph, Module
from workbench.plan.plan import Plan
from workbench.units import gib


class Differs(NamedTuple):
    """One part in which two plans differ.

    Args:
        part: stages, microbatches, order, tokens, settings, samples, model or cluster; of a module that both
            plans shard instead of cutting it, sharding and accumulation.
        about: which element of it.
        first, second: what each plan has, in words.
    """

    part: str
    about: str
    first: str
    second: str


def if_different(part: str, about: str, first: str, second: str) -> Iterator[Differs]:
    """The part, if it differs in words."""
    if first != second:
        yield Differs(part, about, first, second)


def job_differs(first: Plan, second: Plan) -> Iterator[Differs]:
    """The parts in which the jobs of two plans differ."""
    yield from _models(first.model, second.model)
    yield from _clusters(first.cluster, second.cluster)
    if first.batch != second.batch:
        yield Differs("samples", "", *(_batch(plan) for plan in (first, second)))


def module_names(first: Plan, second: Plan) -> list[str]:
    """Names of the modules of both plans, those of the first in front."""
    return _names(first.model, second.model)


def _names(first: ModelGraph, second: ModelGraph) -> list[str]:
    return list(dict.fromkeys(module.name for model in (first, second) for module in model.modules))


def _models(first: ModelGraph, second: ModelGraph) -> Iterator[Differs]:
    """Modules by layers and weights, or by the number of layers that differ where these are the same."""
    for name in _names(first, second):
        one, other = (
            next((each for each in model.modules if each.name == name), None) for model in (first, second)
        )
        if one == other:
            continue
        sizes = _size(one), _size(other)
        if sizes[0] == sizes[1] and one is not None and other is not None:
            unlike = sum(a != b for a, b in zip(one.layers, other.layers, strict=True))
            sizes = f"{len(one.layers)} layers", f"{unlike} of them differ" if unlike else "another source"
        yield Differs("model", name, *sizes)
    edges = ([f"{edge.source}>{edge.target}" for edge in model.edges] for model in (first, second))
    yield from if_different("model", "edges", *map(", ".join, edges))


def _size(module: Module | None) -> str:
    if module is None:
        return "none"
    return f"{len(module.layers)} layers, {module.num_parameters:,} weights, {module.num_trained:,} trained"


def _clusters(first: Cluster, second: Cluster) -> Iterator[Differs]:
    about: dict[str, Callable[[Cluster], Iterable[str]]] = {
        "nodes": _nodes,
        "memory of a rank": lambda cluster: (f"{gib(node.memory_bytes):.4g} GiB" for node in cluster.nodes),
        "network cards of a node": lambda cluster: (str(node.num_cards) for node in cluster.nodes),
        "links inside nodes": lambda cluster: (_link(node.link or cluster.intra) for node in cluster.nodes),
        "links between nodes": lambda cluster: (
            _link(node.card or cluster.inter) for node in cluster.nodes[1:]
        ),
    }
    for what, words_of in about.items():
        words = (" + ".join(dict.fromkeys(words_of(cluster))) or "none" for cluster in (first, second))
        yield from if_different("cluster", what, *words)


def _nodes(cluster: Cluster) -> Iterator[str]:
    for (ranks, cores, device), num in Counter(
        (n.num_ranks, n.num_cores, n.device) for n in cluster.nodes
    ).items():
        yield f"{num} of {ranks} {device}" + ("" if cores is None else f" on {cores} cores")


def _link(link: Link) -> str:
    return f"{link.bytes_per_s / 1e9:.4g} GB/s, {1e6 * link.latency_s:.4g} us"


def _batch(plan: Plan) -> str:
    return f"{len(plan.batch)} with {sum(sample.num_tokens for sample in plan.batch)} tokens"
