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
    layer_factor,
    layer_terms,
    loss_weights,
    numbers,
    places,
    readings,
)
from experiments.fidelity.mutant_weights import own_experts
from workbench.data.sample import Item
from workbench.model.experts import num_experts
from workbench.model.layer import TokenCount
from workbench.model.model_graph import TEXT, Edge, Module
from workbench.plan.plan import Microbatch, Plan, Stage

Places = NDArray[np.int64]
Assemble = Callable[[str, int], Tokens]  # (edge, size) -> the tensor that its rows make


@dataclass(frozen=True, slots=True)
class _Reading:
    """How features came into the tokens in front of a layer.

    Args:
        weights: [tokens, features] what of each feature each token got.
    """

    edge: str
    layer: int
    weights: Tokens


@dataclass(slots=True)
class Kept:
    """What one rank keeps of a forward.

    Args:
        inputs: of every layer.
        maps: of every layer, which of its input's tokens each output token comes from.
        chosen: of every layer, its output tokens' experts.
        readings: of features, in the order of layers.
        output: of the stage.
        loss_weights: of the output's tokens, where they have a loss.
        terms: of gradients, that no weight has yet: (rank, key) -> value.
    """

    inputs: list[Tokens] = field(default_factory=list)
    maps: list[Places] = field(default_factory=list)
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

    def forward(self, rank: int, stage: Stage, microbatch: Microbatch, assemble: Assemble) -> Kept:
        """Of one rank; what comes from elsewhere is asked of `assemble`."""
        module = self._plan.model.module(stage.module)
        first, last = stage.layers
        position, kept = place_of(stage, rank), Kept()
        count = module.layers[first - 1].emits if first else TokenCount.IN
        owned = self._owners.tokens(microbatch, count, stage.cp)[position]
        hidden = assemble(module.name, len(owned)) if first else self._raw(module, owned)
        for index in range(first, last):
            for edge in self._plan.model.edges_into(module.name):
                if index in edge.entered:
                    hidden = self._read(edge, index, microbatch, assemble, (hidden, owned, kept))
            following = self._owners.tokens(microbatch, module.layers[index].emits, stage.cp)[position]
            mapped, chosen = self._mapped(module, owned, following), self._chosen(module, index, following)
            kept.inputs.append(hidden)
            kept.maps.append(mapped)
            kept.chosen.append(chosen)
            hidden = hidden[mapped] * layer_factor(module, index) * expert_factors(module, index, chosen)
            owned = following
        kept.output = hidden
        if module.modality == TEXT and last == len(module.layers):
            every = {item: loss_weights(self._samples[item.sample]) for item in microbatch.items}
            kept.loss_weights = np.array([every[item][token] for item, token in owned])
        return kept

    def backward(
        self, rank: int, stage: Stage, kept: Kept, gradient: Tokens
    ) -> tuple[Tokens, dict[str, Tokens]]:
        """Gradients of the stage's input and of every edge that it reads; weights' go to `kept.terms`."""
        module = self._plan.model.module(stage.module)
        of_edge: dict[str, Tokens] = {}
        for index in reversed(range(*stage.layers)):
            at = index - stage.layers[0]
            if module.layers[index].trainable:
                terms = gradient * kept.inputs[at][kept.maps[at]]
                self._note(rank, stage, index, kept, terms)
            back = np.zeros_like(kept.inputs[at])
            factors = expert_factors(module, index, kept.chosen[at])
            np.add.at(back, kept.maps[at], gradient * factors * layer_factor(module, index))
            gradient = back
            for reading in kept.readings:
                if reading.layer == index:
                    returned = gradient @ reading.weights
                    of_edge[reading.edge] = of_edge.get(reading.edge, 0.0) + returned
        return gradient, of_edge

    def _note(self, rank: int, stage: Stage, index: int, kept: Kept, terms: Tokens) -> None:
        """Own weights see all tokens of the rank; an expert's see those that some rank sends to it.

        Ranks of expert parallelism send each token once: tensor-parallel ones take turns.
        """
        module, at = self._plan.model.module(stage.module), index - stage.layers[0]
        found = layer_terms(module, index, kept.chosen[at], terms)
        for key, value in found.items():
            if stage.ep == 1 or key.expert is None:
                kept.terms[rank, key] = kept.terms.get((rank, key), 0.0) + value
        if stage.ep == 1:
            return
        turn = stage.ranks[place_of(stage, rank)].index(rank)
        sent = np.where(np.arange(len(terms)) % stage.tp == turn, terms, 0.0)
        start = stage.flat_ranks.index(rank) // stage.ep * stage.ep
        count = num_experts(module.layers[index])
        for key, value in layer_terms(module, index, kept.chosen[at], sent).items():
            for holder in stage.flat_ranks[start : start + stage.ep]:
                if key.expert is not None and key.expert in own_experts(stage, holder, count):
                    kept.terms[holder, key] = value

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
        every = {item: experts_of(module, index, item, count) for item, count in counts.items()}
        return tuple(every[item][token] for item, token in tokens)

    def _read(
        self,
        edge: Edge,
        index: int,
        microbatch: Microbatch,
        assemble: Assemble,
        at: tuple[Tokens, Sequence[Token], Kept],
    ) -> Tokens:
        """The tokens with what they take of an edge's features."""
        hidden, owned, kept = at
        parts: list[Tokens] = []  # [tokens, features] of every item
        position = {token: number for number, token in enumerate(owned)}
        samples = np.array([item.sample for item, _ in owned])
        for sample in dict.fromkeys(item.sample for item in microbatch.items):
            for item, start, stop in places(self._plan, edge, self._samples[sample]):
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
        kept.readings.append(_Reading(edge.name, index, matrix))
        return hidden + matrix @ assemble(edge.name, matrix.shape[1])

    def _count(self, name: str, layer: int, item: Item) -> int:
        """Tokens of an item behind a layer."""
        module = self._plan.model.module(name)
        num_in, num_out = self._owners.counts(module, item)
        return num_in if module.layers[layer].emits is TokenCount.IN else num_out

    def _mapped(self, module: Module, owned: Sequence[Token], following: Sequence[Token]) -> Places:
        """Which of the tokens before a layer every token behind it comes from."""
        if owned is following or list(owned) == list(following):
            return np.arange(len(owned))
        where = {token: index for index, token in enumerate(owned)}
        found = []
        for item, token in following:
            num_in, num_out = self._owners.counts(module, item)
            found.append(where[item, token * num_in // num_out])
        return np.array(found, dtype=np.int64)


def place_of(stage: Stage, rank: int) -> int:
    """The rank's context-parallel place."""
    return next(index for index, row in enumerate(stage.ranks) if rank in row)
