"""What one rank does in a pass: the layers of its stage, on the tokens that it holds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from experiments.fidelity.mutant_meaning import (
    Experts,
    Key,
    Owners,
    Token,
    Tokens,
    embedded,
    expert_factors,
    experts_of,
    item_spans,
    layer_factor,
    layer_terms,
    loss_weights,
    numbers,
    readings,
)
from experiments.fidelity.mutant_weights import own_experts
from workbench.data.sample import Item
from workbench.model.experts import num_experts
from workbench.model.layer import TokenCount
from workbench.model.model_graph import TEXT, Edge, Module
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.stage import Stage

Indices = NDArray[np.int64]
Assemble = Callable[[str, int], Tokens]  # (edge, size) -> the tensor that its rows make


@dataclass(frozen=True, slots=True)
class _Reading:
    """How features entered the tokens in front of a layer.

    Args:
        weights: [tokens, features] each token's weight of each feature.
    """

    edge: str
    layer: int
    weights: Tokens


@dataclass(slots=True)
class Activations:
    """Activations that one rank keeps from a forward.

    Args:
        inputs: of every layer.
        maps: of every layer, the index of the input token that each output token comes from.
        chosen: of every layer, the experts of its output tokens.
        readings: of features, in layer order.
        output: of the stage.
        loss_weights: of the output's tokens, where they have a loss.
        terms: gradient terms not yet added to a weight: (rank, key) -> value.
    """

    inputs: list[Tokens] = field(default_factory=list)
    maps: list[Indices] = field(default_factory=list)
    chosen: list[Experts] = field(default_factory=list)
    readings: list[_Reading] = field(default_factory=list)
    output: Tokens = field(default_factory=lambda: np.zeros(0))
    loss_weights: Tokens | None = None
    terms: dict[tuple[int, Key], float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        return 0.0 if self.loss_weights is None else float(self.loss_weights @ self.output)


class Layers:
    """The surrogate's layers under a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._owners = plan, Owners(plan)
        self._samples = {sample.id: sample for sample in plan.batch}

    def forward(self, rank: int, stage: Stage, microbatch: Microbatch, assemble: Assemble) -> Activations:
        """Run one rank's forward; inputs from other ranks are requested with `assemble`."""
        module = self._plan.model.module(stage.module)
        first, last = stage.layers
        position, activations = position_of(stage, rank), Activations()
        count = module.layers[first - 1].emits if first else TokenCount.IN
        owned = self._owners.tokens(microbatch, count, stage)[position]
        hidden = assemble(module.name, len(owned)) if first else self._raw(module, owned)
        for index in range(first, last):
            for edge in self._plan.model.edges_into(module.name):
                if index in edge.entered:
                    hidden = self._read(edge, index, microbatch, assemble, (hidden, owned, activations))
            following = self._owners.tokens(microbatch, module.layers[index].emits, stage)[position]
            sources, chosen = self._sources(module, owned, following), self._chosen(module, index, following)
            activations.inputs.append(hidden)
            activations.maps.append(sources)
            activations.chosen.append(chosen)
            hidden = hidden[sources] * layer_factor(module, index) * expert_factors(module, index, chosen)
            owned = following
        activations.output = hidden
        if module.modality == TEXT and last == len(module.layers):
            weights_of_item = {item: loss_weights(self._samples[item.sample]) for item in microbatch.items}
            activations.loss_weights = np.array([weights_of_item[item][token] for item, token in owned])
        return activations

    def backward(
        self, rank: int, stage: Stage, activations: Activations, gradient: Tokens
    ) -> tuple[Tokens, dict[str, Tokens]]:
        """Gradients of the stage's input and of every edge it reads; adds to `activations.terms`."""
        module = self._plan.model.module(stage.module)
        of_edge: dict[str, Tokens] = {}
        for index in reversed(range(*stage.layers)):
            position = index - stage.layers[0]
            if module.layers[index].trainable:
                terms = gradient * activations.inputs[position][activations.maps[position]]
                self._add_terms(rank, stage, index, activations, terms)
            back = np.zeros_like(activations.inputs[position])
            factors = expert_factors(module, index, activations.chosen[position])
            np.add.at(back, activations.maps[position], gradient * factors * layer_factor(module, index))
            gradient = back
            for reading in activations.readings:
                if reading.layer == index:
                    returned = gradient @ reading.weights
                    of_edge[reading.edge] = of_edge.get(reading.edge, 0.0) + returned
        return gradient, of_edge

    def _add_terms(
        self, rank: int, stage: Stage, index: int, activations: Activations, terms: Tokens
    ) -> None:
        """Add weight terms: own weights see all tokens of the rank, an expert's those that ranks send to it.

        Expert-parallel ranks send each token once: tensor-parallel ranks take turns.
        """
        module, position = self._plan.model.module(stage.module), index - stage.layers[0]
        own_terms = layer_terms(module, index, activations.chosen[position], terms)
        for key, value in own_terms.items():
            if stage.ep == 1 or key.expert is None:
                activations.terms[rank, key] = activations.terms.get((rank, key), 0.0) + value
        if stage.ep == 1:
            return
        turn = stage.ranks[position_of(stage, rank)].index(rank)
        sent = np.where(np.arange(len(terms)) % stage.tp == turn, terms, 0.0)
        start = stage.flat_ranks.index(rank) // stage.ep * stage.ep
        count = num_experts(module.layers[index])
        for key, value in layer_terms(module, index, activations.chosen[position], sent).items():
            for holder in stage.flat_ranks[start : start + stage.ep]:
                if key.expert is not None and key.expert in own_experts(stage, holder, count):
                    activations.terms[holder, key] = value

    def _raw(self, module: Module, owned: Sequence[Token]) -> Tokens:
        values = np.zeros(len(owned))
        known: dict[Item, Tokens] = {}
        for index, (item, token) in enumerate(owned):
            if item not in known:
                num_in, _ = self._owners.counts(module, item)
                known[item] = (
                    embedded(self._plan, self._samples[item.sample])
                    if module.modality == TEXT
                    else numbers(num_in, "raw", module.name, *item)
                )
            values[index] = known[item][token]
        return values

    def _chosen(self, module: Module, index: int, tokens: Sequence[Token]) -> Experts:
        if not num_experts(module.layers[index]):
            return (0,) * len(tokens)
        counts = {item: self._owners.counts(module, item)[0] for item in {item for item, _ in tokens}}
        experts_of_item = {item: experts_of(module, index, item, count) for item, count in counts.items()}
        return tuple(experts_of_item[item][token] for item, token in tokens)

    def _read(
        self,
        edge: Edge,
        index: int,
        microbatch: Microbatch,
        assemble: Assemble,
        state: tuple[Tokens, Sequence[Token], Activations],
    ) -> Tokens:
        """Add the features of an edge to the tokens in front of a layer."""
        hidden, owned, activations = state
        parts: list[Tokens] = []  # [tokens, features] of every item
        position = {token: number for number, token in enumerate(owned)}
        samples = np.array([item.sample for item, _ in owned])
        for sample in dict.fromkeys(item.sample for item in microbatch.items):
            for item, start, stop in item_spans(self._plan, edge, self._samples[sample]):
                if self._plan.model.is_context(edge):
                    count = self._count(edge.source, edge.after_layer, item)
                    parts.append(np.outer(samples == sample, readings(edge, index, item, count)))
                    continue
                own = [
                    position[Item(sample, 0), t]
                    for t in range(start, stop)
                    if (Item(sample, 0), t) in position
                ]
                part = np.zeros((len(owned), len(own)))  # a rank gets the features of its tokens alone
                part[own, range(len(own))] = 1.0
                parts.append(part)
        matrix = np.concatenate(parts, axis=1) if parts else np.zeros((len(owned), 0))
        activations.readings.append(_Reading(edge.name, index, matrix))
        return hidden + matrix @ assemble(edge.name, matrix.shape[1])

    def _count(self, name: str, layer: int, item: Item) -> int:
        """Number of tokens of an item after a layer."""
        module = self._plan.model.module(name)
        num_in, num_out = self._owners.counts(module, item)
        return num_in if module.layers[layer].emits is TokenCount.IN else num_out

    def _sources(self, module: Module, owned: Sequence[Token], following: Sequence[Token]) -> Indices:
        """For every token after a layer, the index of the token before it that it comes from."""
        if owned is following or list(owned) == list(following):
            return np.arange(len(owned))
        index_of = {token: index for index, token in enumerate(owned)}
        indices = []
        for item, token in following:
            num_in, num_out = self._owners.counts(module, item)
            indices.append(index_of[item, token * num_in // num_out])
        return np.array(indices, dtype=np.int64)


def position_of(stage: Stage, rank: int) -> int:
    """The rank's context-parallel position."""
    return next(index for index, row in enumerate(stage.ranks) if rank in row)
