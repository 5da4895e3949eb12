"""The result of a job, item by item and without any plan, under a surrogate for its model.

A layer of the surrogate multiplies every token by a number of its own, by those of its tied weights and,
where it has experts, by that of the expert to which the token is routed. Features replace the tokens of their
segments; those for cross-attention are added up and given to every token of their sample. The loss is a sum
of tokens, each with its own weight. So every item's path through every layer leaves a trace in the layers'
gradients that nothing else can cancel.

Differs: from training, attention does not mix tokens, so that a rank needs no other rank's keys; a token has
         one expert.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.data.sample import Item, Sample
from workbench.model.experts import num_experts
from workbench.model.layer import TokenCount
from workbench.model.model_graph import TEXT, Edge, Module
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.stage import Stage

Tokens = NDArray[np.float64]
Experts = tuple[int, ...]  # of every token, the expert to which it is routed


class Key(NamedTuple):
    """Key of a weight: a layer's own, one of its experts', or a tied one, which has no layer."""

    module: str
    layer: int | None
    expert: int | None = None
    shared: str | None = None


@dataclass(frozen=True, slots=True)
class Meaning:
    """What one step computes: the loss, and the gradient of every trainable layer."""

    loss: float
    gradients: dict[Key, float]


def number(*name: object) -> float:
    """A fixed pseudo-random number in [0.5, 1.5] for a name."""
    digest = hashlib.blake2b(repr(name).encode(), digest_size=8).digest()
    return 0.5 + int.from_bytes(digest, "big") / 2**64


def numbers(count: int, *name: object) -> Tokens:
    """Fixed pseudo-random numbers, one per token."""
    seed = int.from_bytes(hashlib.blake2b(repr(name).encode(), digest_size=8).digest(), "big")
    return np.random.default_rng(seed).uniform(0.5, 1.5, count)


def meaning_of(plan: Plan) -> Meaning:
    """Compute the job's meaning item by item, without stages, microbatches or rows."""
    language = plan.model.llm
    gradients: dict[Key, float] = {}
    loss = 0.0
    for sample in plan.batch:
        hidden = embedded(plan, sample)
        inputs: list[Tokens] = []
        for index in range(len(language.layers)):
            for edge in _entering(plan, language, index):
                hidden = _entered(plan, edge, index, sample, hidden)
            inputs.append(hidden.copy())
            hidden = hidden * layer_factor(language, index) * _routed(language, index, sample, hidden)
        weights = loss_weights(sample)
        loss += float(weights @ hidden)
        gradient = weights
        for index in reversed(range(len(language.layers))):
            _add_language(gradients, language, index, sample, inputs[index] * gradient)
            gradient = gradient * layer_factor(language, index)
            gradient = gradient * _routed(language, index, sample, gradient)
            for edge in _entering(plan, language, index):
                for item, start, stop in item_spans(plan, edge, sample):
                    count = len(encoder_states(plan, edge.source, item, sample)[-1])
                    returned = (
                        readings(edge, index, item, count) * gradient.sum()
                        if plan.model.is_context(edge)
                        else gradient[start:stop]
                    )
                    _backward_encoder(plan, edge, item, sample, returned, gradients)
    return Meaning(loss, gradients)


def _entering(plan: Plan, module: Module, layer: int) -> list[Edge]:
    return [edge for edge in plan.model.edges_into(module.name) if layer in edge.entered]


def _entered(plan: Plan, edge: Edge, index: int, sample: Sample, hidden: Tokens) -> Tokens:
    """A sample's tokens in front of a layer that reads an edge."""
    hidden = hidden.copy()
    for item, start, stop in item_spans(plan, edge, sample):
        features = encoder_states(plan, edge.source, item, sample)[-1]
        if plan.model.is_context(edge):
            hidden += float(readings(edge, index, item, len(features)) @ features)
        else:
            hidden[start:stop] += features
    return hidden


def _routed(module: Module, index: int, sample: Sample, tokens: Tokens) -> Tokens:
    return expert_factors(module, index, experts_of(module, index, Item(sample.id, 0), len(tokens)))


def _add_language(
    gradients: dict[Key, float], module: Module, index: int, sample: Sample, terms: Tokens
) -> None:
    """Add the derivatives of a layer's work on one sample, by its own weights and its experts'."""
    if not module.layers[index].trainable:
        return
    chosen = experts_of(module, index, Item(sample.id, 0), len(terms))
    for key, value in layer_terms(module, index, chosen, terms).items():
        gradients[key] = gradients.get(key, 0.0) + value


def layer_terms(module: Module, index: int, chosen: Experts, terms: Tokens) -> dict[Key, float]:
    """Derivatives by key; `terms` are input times output gradient, per token.

    Args:
        chosen: [tokens] each one's expert.
    """
    whole = float(terms @ expert_factors(module, index, chosen)) * layer_factor(module, index)
    terms_by_key = {}
    for key in keys_of(module, index):
        if key.expert is None:
            terms_by_key[key] = whole / _own_factor(key)
        else:
            own_terms = terms[np.asarray(chosen) == key.expert]
            terms_by_key[key] = float(own_terms.sum()) * layer_factor(module, index)
    return terms_by_key


def keys_of(module: Module, index: int) -> list[Key]:
    """Keys of a layer: own weights that no other layer shares, tied ones, experts'."""
    layer = module.layers[index]
    shared = dict.fromkeys(name for _, name in layer.tied)
    own = [Key(module.name, index)] * any(p.name not in shared for p in layer.parameters())
    tied = [Key(module.name, None, shared=name) for name in shared]
    return [*own, *tied, *(Key(module.name, index, expert) for expert in range(num_experts(layer)))]


def layer_factor(module: Module, index: int) -> float:
    """The factor of a layer, without its experts."""
    factor = coefficient(module.name, index)
    for name in dict.fromkeys(name for _, name in module.layers[index].tied):
        factor *= _own_factor(Key(module.name, None, shared=name))
    return factor


def _own_factor(key: Key) -> float:
    if key.layer is None:
        return number("tied", key.module, key.shared)
    return coefficient(key.module, key.layer)


def experts_of(module: Module, index: int, item: Item, num_tokens: int) -> Experts:
    """Return [tokens] the expert of each token of an item; 0 for a layer without experts."""
    return _chosen(module.name, index, num_experts(module.layers[index]), item, num_tokens)


@cache
def _chosen(module: str, layer: int, count: int, item: Item, num_tokens: int) -> Experts:
    if not count:
        return (0,) * num_tokens
    return tuple((numbers(num_tokens, "route", module, layer, *item) * 1e6).astype(int) % count)


def expert_factors(module: Module, index: int, chosen: Experts) -> Tokens:
    """Return [tokens] the experts' factors; ones for a layer without experts."""
    if not num_experts(module.layers[index]):
        return np.ones(len(chosen))
    return np.array([_expert_coefficient(module.name, index, expert) for expert in chosen])


@cache
def _expert_coefficient(module: str, layer: int, expert: int) -> float:
    return number("expert", module, layer, expert)


def readings(edge: Edge, layer: int, item: Item, num_tokens: int) -> Tokens:
    """Weights with which a cross-attention layer reads every feature of an item."""
    return numbers(num_tokens, "reading", edge.name, layer, *item)


def _backward_encoder(
    plan: Plan, edge: Edge, item: Item, sample: Sample, gradient: Tokens, gradients: dict[Key, float]
) -> None:
    module = plan.model.module(edge.source)
    states = encoder_states(plan, edge.source, item, sample)
    for index in reversed(range(len(module.layers))):
        read = resized(states[index], len(states[index + 1]))
        _add(gradients, module, index, float(gradient @ read))
        back = np.zeros_like(states[index])
        np.add.at(
            back,
            source_indices(len(states[index]), len(gradient)),
            gradient * coefficient(module.name, index),
        )
        gradient = back


def _add(gradients: dict[Key, float], module: Module, index: int, value: float) -> None:
    if module.layers[index].trainable:
        key = Key(module.name, index)
        gradients[key] = gradients.get(key, 0.0) + value


def coefficient(module: str, layer: int) -> float:
    return number("weight", module, layer)


def embedded(plan: Plan, sample: Sample) -> Tokens:
    """Inputs of the LLM's layer 0 before features are added: zero at feature positions."""
    model = plan.model
    placed = {model.module(edge.source).modality for edge in model.edges if not model.is_context(edge)}
    parts = [
        np.zeros(s.tokens_out) if s.modality in placed else numbers(s.tokens_out, s.modality, sample.id, s.k)
        for s in sample.segments
    ]
    return np.concatenate(parts)


def loss_weights(sample: Sample) -> Tokens:
    return numbers(sample.num_tokens, "loss", sample.id)


def item_spans(plan: Plan, edge: Edge, sample: Sample) -> Iterator[tuple[Item, int, int]]:
    """Positions of an edge's items in one sample's sequence."""
    modality = plan.model.module(edge.source).modality
    start = 0
    for segment in sample.segments:
        if segment.modality == modality:
            yield Item(sample.id, segment.k), start, start + segment.tokens_out
        start += segment.tokens_out


def encoder_states(plan: Plan, name: str, item: Item, sample: Sample) -> list[Tokens]:
    """An item's tokens before every layer of its encoder, and after the last."""
    module = plan.model.module(name)
    segment = next(s for s in sample.of(module.modality) if s.k == item.k)
    states = [numbers(segment.tokens_in, "raw", name, *item)]
    for index, layer in enumerate(module.layers):
        count = segment.tokens_in if layer.emits is TokenCount.IN else segment.tokens_out
        states.append(resized(states[-1], count) * coefficient(name, index))
    return states


def source_indices(num_tokens: int, num_kept: int) -> NDArray[np.int64]:
    """Index of the source token of each token after a layer that changes their number."""
    return np.arange(num_kept) * num_tokens // num_kept


def resized(tokens: Tokens, num_kept: int) -> Tokens:
    return tokens[source_indices(len(tokens), num_kept)]


Token = tuple[Item, int]


class Owners:
    """Tokens of a microbatch owned by each context-parallel position, computed token by token."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._samples = {sample.id: sample for sample in plan.batch}
        self._known: dict[tuple[str, int, int, TokenCount], list[list[Token]]] = {}

    def counts(self, module: Module, item: Item) -> tuple[int, int]:
        """(IN, OUT) tokens of an item."""
        sample = self._samples[item.sample]
        if module.modality == TEXT:
            return sample.num_tokens, sample.num_tokens
        segment = next(s for s in sample.of(module.modality) if s.k == item.k)
        return segment.tokens_in, segment.tokens_out

    def tokens(self, microbatch: Microbatch, count: TokenCount, stage: Stage) -> list[list[Token]]:
        """Return [position] the tokens in the order in which that rank stores them."""
        key = (microbatch.module, microbatch.replica, microbatch.index, count)
        if key not in self._known:
            self._known[key] = self._tokens(microbatch, count, stage)
        return self._known[key]

    def _tokens(self, microbatch: Microbatch, count: TokenCount, stage: Stage) -> list[list[Token]]:
        module = self._plan.model.module(microbatch.module)
        tokens_by_rank: list[list[Token]] = [[] for _ in stage.ranks]
        for row, items in enumerate(microbatch.rows):
            sizes = [self.counts(module, item) for item in items]
            owner = self._owner(microbatch, row, sum(size for size, _ in sizes), stage)
            start = 0
            for item, (num_in, num_out) in zip(items, sizes, strict=True):
                kept = num_in if count is TokenCount.IN else num_out
                for token in range(kept):
                    index = owner(start + token * num_in // kept)
                    if index < 0:
                        raise LookupError(f"owner {index} is nobody")
                    tokens_by_rank[index].append((item, token))
                start += num_in
        return tokens_by_rank

    def _owner(self, microbatch: Microbatch, row: int, length: int, stage: Stage) -> Callable[[int], int]:
        for shard in self._plan.token_shards:
            mine = (shard.module, shard.replica, shard.microbatch, shard.row)
            if mine == (microbatch.module, microbatch.replica, microbatch.index, row):
                return lambda index: shard.owners[index // shard.block_tokens]
        cp = len(stage.ranks) // stage.joint_replicas
        first, block = row % stage.joint_replicas * cp, -(-length // (2 * cp))
        return lambda index: first + min(index // block, 2 * cp - 1 - index // block)
