"""What a job computes, item by item and without any plan, under a surrogate for its model.

A layer of the surrogate multiplies every token by a number of its own, features replace the tokens
of their segments, and the loss is a sum of tokens, each with its own weight. So every item's way
through every layer leaves a trace in the layers' gradients that nothing else can cancel.

Differs: from training, attention does not mix tokens, so that a rank needs nobody's keys.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.data.sample import Item, Sample
from workbench.graph.layer import TokenCount
from workbench.graph.model_graph import TEXT, Edge, Module
from workbench.plan.plan import Microbatch, Plan

Tokens = NDArray[np.float64]
Key = tuple[str, int]  # module, layer


@dataclass(frozen=True, slots=True)
class Meaning:
    """What one step computes: the loss, and the gradient of every trainable layer."""

    loss: float
    gradients: dict[Key, float]


def number(*name: object) -> float:
    """A fixed random number in [0.5, 1.5] for a name."""
    digest = hashlib.blake2b(repr(name).encode(), digest_size=8).digest()
    return 0.5 + int.from_bytes(digest, "big") / 2**64


def numbers(count: int, *name: object) -> Tokens:
    """One per token."""
    seed = int.from_bytes(hashlib.blake2b(repr(name).encode(), digest_size=8).digest(), "big")
    return np.random.default_rng(seed).uniform(0.5, 1.5, count)


def meaning_of(plan: Plan) -> Meaning:
    """Of the job: item after item, without stages, microbatches or rows."""
    language = next(module for module in plan.model.modules if module.modality == TEXT)
    gradients: dict[Key, float] = {}
    loss = 0.0
    for sample in plan.batch:
        hidden = embedded(plan, sample)
        inputs: dict[Key, Tokens] = {}
        for index in range(len(language.layers)):
            for edge in plan.model.edges_into(language.name):
                if edge.before_layer == index:
                    for item, start, stop in places(plan, edge, sample):
                        features = through(plan, edge.source, item, sample)[-1]
                        hidden[start:stop] = features if index == 0 else hidden[start:stop] + features
            inputs[language.name, index] = hidden.copy()
            hidden = hidden * coefficient(language.name, index)
        weights = loss_weights(sample)
        loss += float(weights @ hidden)
        gradient = weights
        for index in reversed(range(len(language.layers))):
            _add(gradients, language, index, float(gradient @ inputs[language.name, index]))
            gradient = gradient * coefficient(language.name, index)
            for edge in plan.model.edges_into(language.name):
                if edge.before_layer == index:
                    for item, start, stop in places(plan, edge, sample):
                        _backward_encoder(plan, edge, item, sample, gradient[start:stop], gradients)
    return Meaning(loss, gradients)


def _backward_encoder(
    plan: Plan, edge: Edge, item: Item, sample: Sample, gradient: Tokens, gradients: dict[Key, float]
) -> None:
    module = plan.model.module(edge.source)
    states = through(plan, edge.source, item, sample)
    for index in reversed(range(len(module.layers))):
        read = picked(states[index], len(states[index + 1]))
        _add(gradients, module, index, float(gradient @ read))
        back = np.zeros_like(states[index])
        np.add.at(back, picks(len(states[index]), len(gradient)), gradient * coefficient(module.name, index))
        gradient = back


def _add(gradients: dict[Key, float], module: Module, index: int, value: float) -> None:
    if module.layers[index].trainable:
        key = (module.name, index)
        gradients[key] = gradients.get(key, 0.0) + value


def coefficient(module: str, layer: int) -> float:
    return number("weight", module, layer)


def embedded(plan: Plan, sample: Sample) -> Tokens:
    """Inputs of the LLM's layer 0 before features: text has its own, other places zero."""
    parts = [
        numbers(s.tokens_out, "text", sample.id, s.k) if s.modality == TEXT else np.zeros(s.tokens_out)
        for s in sample.segments
    ]
    del plan
    return np.concatenate(parts)


def loss_weights(sample: Sample) -> Tokens:
    return numbers(sample.num_tokens, "loss", sample.id)


def places(plan: Plan, edge: Edge, sample: Sample) -> Iterator[tuple[Item, int, int]]:
    """Where an edge's items stand in one sample's sequence."""
    modality = plan.model.module(edge.source).modality
    start = 0
    for segment in sample.segments:
        if segment.modality == modality:
            yield Item(sample.id, segment.k), start, start + segment.tokens_out
        start += segment.tokens_out


def through(plan: Plan, name: str, item: Item, sample: Sample) -> list[Tokens]:
    """An item's tokens before every layer of its encoder, and behind the last."""
    module = plan.model.module(name)
    segment = next(s for s in sample.of(module.modality) if s.k == item.k)
    states = [numbers(segment.tokens_in, "raw", name, *item)]
    for index, layer in enumerate(module.layers):
        count = segment.tokens_in if layer.emits is TokenCount.IN else segment.tokens_out
        states.append(picked(states[-1], count) * coefficient(name, index))
    return states


def picks(num_tokens: int, num_kept: int) -> NDArray[np.int64]:
    """Which of an item's tokens stand behind a layer that changes their number."""
    return np.arange(num_kept) * num_tokens // num_kept


def picked(tokens: Tokens, num_kept: int) -> Tokens:
    return tokens[picks(len(tokens), num_kept)]


Token = tuple[Item, int]


class Owners:
    """Which tokens of a microbatch each context-parallel place holds, worked out token by token."""

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

    def tokens(self, microbatch: Microbatch, count: TokenCount, cp: int) -> list[list[Token]]:
        """[place] tokens in the order in which the rank there holds them."""
        key = (microbatch.module, microbatch.replica, microbatch.index, count)
        if key not in self._known:
            self._known[key] = self._tokens(microbatch, count, cp)
        return self._known[key]

    def _tokens(self, microbatch: Microbatch, count: TokenCount, cp: int) -> list[list[Token]]:
        module = self._plan.model.module(microbatch.module)
        held: list[list[Token]] = [[] for _ in range(cp)]
        for row, items in enumerate(microbatch.rows):
            sizes = [self.counts(module, item) for item in items]
            owner = self._owner(microbatch, row, sum(size for size, _ in sizes), cp)
            start = 0
            for item, (num_in, num_out) in zip(items, sizes, strict=True):
                kept = num_in if count is TokenCount.IN else num_out
                for token in range(kept):
                    place = owner(start + token * num_in // kept)
                    if place < 0:
                        raise LookupError(f"owner {place} is nobody")
                    held[place].append((item, token))
                start += num_in
        return held

    def _owner(self, microbatch: Microbatch, row: int, length: int, cp: int) -> Callable[[int], int]:
        for shard in self._plan.token_shards:
            mine = (shard.module, shard.replica, shard.microbatch, shard.row)
            if mine == (microbatch.module, microbatch.replica, microbatch.index, row):
                return lambda place: shard.owners[place // shard.block_tokens]
        block = -(-length // (2 * cp))
        return lambda place: min(place // block, 2 * cp - 1 - place // block)
