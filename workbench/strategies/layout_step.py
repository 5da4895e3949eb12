"""Seconds and bytes of an optimizer step under a layout, without building its plan."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from workbench.balance.partition import partition
from workbench.balance.pipeline_time import iteration_s
from workbench.cost.group_link import group_link
from workbench.cost.model import CostModel
from workbench.graph.model_graph import TEXT
from workbench.job import Job
from workbench.strategies.boundary_price import regrouped, sent
from workbench.strategies.layout_choice import LayoutChoice, LayoutStep, Mode, ModuleChoice
from workbench.strategies.module_price import LayerPrice, ModulePrices
from workbench.strategies.sharded_step import sharded_step

_partition = cache(partition)


class Chain(NamedTuple):
    """The stages of a pipeline, first to last: of each its layers and what they take."""

    stages: tuple[tuple[LayerPrice, ...], ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


class Held(NamedTuple):
    """Layers of a module on a rank, and how many microbatches' activations of them it holds."""

    choice: ModuleChoice
    layers: tuple[LayerPrice, ...]
    in_flight: float


class LayoutSteps:
    """Step times of layouts of one job: 1F1B by its recurrence over the layers' prices.

    Collectives inside layers are part of the passes. Gradients are reduced behind the last
    microbatch's backward and weights gathered ahead of the first forward; of either, what outlasts
    all layers but one is exposed. Of encoders that stand apart, side by side, the slowest counts at each
    depth.

    Differs: the plan's simulation prices the true microbatches, messages that share a link and each
    gradient group; here a microbatch is a mean one and a stage's exchanges are one.

    Args:
        job: whose cluster, batch, microbatch size and kernels hold.
        cost: the machine.
    """

    def __init__(self, job: Job, cost: CostModel) -> None:
        self.job, self.prices = job, ModulePrices(job, cost)
        self._chains: dict[tuple[ModuleChoice, int | None], Chain] = {}
        self._llm_s: dict[ModuleChoice, float] = {}
        self._llm = next(module.name for module in job.model.modules if module.modality == TEXT)

    def step(self, choice: LayoutChoice) -> LayoutStep:
        """The step under a layout, whether it fits or not.

        Complexity: O(layers + stages x microbatches), but for layers priced for the first time.
        """
        if choice.mode is Mode.SHARDED:
            return sharded_step(self.prices, choice)
        return {
            Mode.HOMOGENEOUS: self._homogeneous,
            Mode.COLOCATED: self._colocated,
            Mode.APART: self._apart,
        }[choice.mode](choice)

    def llm_s(self, llm: ModuleChoice) -> float:
        """Seconds of the LLM's pipeline with nothing in front: no step is faster."""
        key = replace(llm, instances=1)
        if key not in self._llm_s:
            chain = self._chain(llm)
            self._llm_s[key] = pipeline_s(chain.forward_s, chain.backward_s, self._rounds(llm))
        return self._llm_s[key]

    def phases_s(self, encoder: ModuleChoice) -> float:
        """Seconds of an encoder's passes over all samples of a replica: what colocation adds to the LLM's."""
        return self.prices.passes_s(encoder, self._local_samples(encoder))

    def busy_s(self, encoder: ModuleChoice, llm: ModuleChoice) -> float:
        """Seconds for which an encoder apart keeps its busiest rank, on average over its stages."""
        per_round = llm.dp * self.job.microbatch_samples
        samples = max(1, per_round // encoder.dp)
        calls = self._rounds(llm) * per_round / (encoder.dp * samples)
        return calls * self.prices.passes_s(encoder, samples) / encoder.pp

    def joint_s(self, choice: LayoutChoice) -> float:
        """Seconds for which one grid keeps the busiest rank, on average over its stages."""
        samples = self.job.microbatch_samples
        each = sum(self.prices.passes_s(part, samples) for part in (*choice.encoders, choice.llm))
        return self._rounds(choice.llm) * each / choice.llm.pp

    def state_fits(self, choice: ModuleChoice) -> bool:
        """Whether the module's mean stage would fit with nothing beside it; False: no layout of it does."""
        layers = self.prices.layers(choice, 1)
        weights, trained = _sum(layers, "weights") / choice.pp, _sum(layers, "trained") / choice.pp
        return self.prices.state_bytes(choice, weights, trained) <= self._memory_bytes

    def _homogeneous(self, choice: LayoutChoice) -> LayoutStep:
        samples = self.job.microbatch_samples
        encoded = [(encoder, self.prices.layers(encoder, samples)) for encoder in choice.encoders]
        leading = tuple(layer for _, layers in encoded for layer in layers)
        chain = self._chain(choice.llm, leading)
        rounds = self._rounds(choice.llm)
        ranks = []
        for place, stage in enumerate(chain.stages):
            held = min(len(chain.stages) - place, rounds)
            parts = [Held(choice.llm, stage[len(leading) :] if place == 0 else stage, held)]
            parts += [Held(encoder, layers, held) for encoder, layers in encoded if place == 0]
            ranks.append(parts)
        passes_s = pipeline_s(chain.forward_s, chain.backward_s, rounds)
        return self._step(ranks, passes_s, 0.0, 0.0, _counts(chain, len(leading)))

    def _colocated(self, choice: LayoutChoice) -> LayoutStep:
        chain = self._chain(choice.llm)
        rounds = self._rounds(choice.llm)
        encoded = [
            Held(encoder, self.prices.layers(encoder, self._local_samples(encoder)), 1)
            for encoder in choice.encoders
        ]
        crossings = [regrouped(self.prices, encoder, choice.llm) for encoder in choice.encoders]
        boundary_s = sum(crossing.before_s + crossing.after_s for crossing in crossings)
        num_bytes = sum(crossing.num_bytes for crossing in crossings)
        phases_s = sum(_sum(part.layers, "forward_s") + _sum(part.layers, "backward_s") for part in encoded)
        ranks = [
            [Held(choice.llm, stage, min(len(chain.stages) - place, rounds)), *encoded]
            for place, stage in enumerate(chain.stages)
        ]
        passes_s = phases_s + boundary_s + pipeline_s(chain.forward_s, chain.backward_s, rounds)
        packed = [2 * num_bytes, *[0.0] * (len(ranks) - 1)]  # features and their gradients
        return self._step(ranks, passes_s, boundary_s, num_bytes, _counts(chain), packed)

    def _apart(self, choice: LayoutChoice) -> LayoutStep:
        llm = self._chain(choice.llm)
        rounds = self._rounds(choice.llm)
        per_round = choice.llm.dp * self.job.microbatch_samples
        depth = max((encoder.pp for encoder in choice.encoders), default=0)
        forward_s, backward_s = [0.0] * depth, [0.0] * depth
        ranks = []
        boundary_s = num_bytes = 0.0
        for encoder in choice.encoders:
            samples = max(1, per_round // encoder.dp)
            chain = self._chain(encoder, samples=samples)
            calls = per_round / (encoder.dp * samples)  # a replica may sit out rounds
            crossing = sent(self.prices, encoder, choice.llm, per_round)
            for place, stage in enumerate(chain.stages):
                at = depth - encoder.pp + place
                is_last = place == encoder.pp - 1
                ahead_s, behind_s = (crossing.before_s, crossing.after_s) if is_last else (0.0, 0.0)
                forward_s[at] = max(forward_s[at], calls * chain.forward_s[place] + ahead_s)
                backward_s[at] = max(backward_s[at], calls * chain.backward_s[place] + behind_s)
                in_flight = min(depth - at + choice.llm.pp, rounds)
                ranks.append([Held(encoder, stage, max(1.0, calls * in_flight))])
            boundary_s += (crossing.before_s + crossing.after_s) * rounds
            num_bytes += crossing.num_bytes * rounds
        ranks += [
            [Held(choice.llm, stage, min(choice.llm.pp - place, rounds))]
            for place, stage in enumerate(llm.stages)
        ]
        passes_s = pipeline_s((*forward_s, *llm.forward_s), (*backward_s, *llm.backward_s), rounds)
        return self._step(ranks, passes_s, boundary_s, num_bytes, _counts(llm))

    def _step(
        self,
        ranks: Sequence[Sequence[Held]],
        passes_s: float,
        boundary_s: float,
        boundary_bytes: float,
        llm_layers: tuple[int, ...],
        more_bytes: Sequence[float] = (),
    ) -> LayoutStep:
        """The step whose ranks, kind by kind, hold these parts; the worst of each account counts."""
        more = [*more_bytes, *[0.0] * (len(ranks) - len(more_bytes))]
        exchange_s = max(sum(map(self._exposed_s, parts)) for parts in ranks)
        return LayoutStep(
            passes_s=passes_s,
            exchange_s=exchange_s,
            hidden_s=max(0.0, max(sum(map(self._exchange_s, parts)) for parts in ranks) - exchange_s),
            update_s=max(
                sum(self.prices.update_s(part.choice, _sum(part.layers, "trained")) for part in parts)
                for parts in ranks
            ),
            boundary_s=boundary_s,
            boundary_bytes=boundary_bytes,
            peak_bytes=round(
                max(self._held_bytes(parts) + extra for parts, extra in zip(ranks, more, strict=True))
            ),
            memory_bytes=self._memory_bytes,
            llm_layers=llm_layers,
        )

    @property
    def _memory_bytes(self) -> int:
        return min(node.memory_bytes for node in self.job.cluster.nodes)

    def _rounds(self, llm: ModuleChoice) -> int:
        """Microbatches of each replica of the LLM."""
        return len(self.job.batch) // (llm.dp * self.job.microbatch_samples)

    def _local_samples(self, encoder: ModuleChoice) -> int:
        """Samples of the replica that has most."""
        return -(-len(self.job.batch) // encoder.dp)

    def _chain(
        self, choice: ModuleChoice, leading: tuple[LayerPrice, ...] = (), *, samples: int | None = None
    ) -> Chain:
        """A module's stages, the slowest as fast as can be, with layers of others on the first."""
        key = (replace(choice, instances=1), samples)
        if not leading and key in self._chains:
            return self._chains[key]
        layers = self.prices.layers(choice, samples or self.job.microbatch_samples)
        each = [layer.forward_s + layer.backward_s for layer in layers]
        each[0] += sum(layer.forward_s + layer.backward_s for layer in leading)
        stages = [layers[first:last] for first, last in _partition(tuple(each), choice.pp)]
        stages[0] = (*leading, *stages[0])
        hop_s = self._hop_s(choice)
        enters_s = [hop_s * (place > 0) for place in range(len(stages))]
        chain = Chain(
            tuple(stages),
            tuple(_sum(stage, "forward_s") + hop for stage, hop in zip(stages, enters_s, strict=True)),
            tuple(_sum(stage, "backward_s") + hop for stage, hop in zip(stages, enters_s, strict=True)),
        )
        if not leading:
            self._chains[key] = chain
        return chain

    def _hop_s(self, choice: ModuleChoice) -> float:
        """A message of activations from one stage to the next."""
        tokens = self.prices.sample_tokens(choice.module) * self.job.microbatch_samples
        layers = self.job.model.module(choice.module).layers
        width = layers[0].out_width
        cut = choice.cp * (choice.tp if "sequence" in self.job.settings.kernels else 1)
        num_bytes = tokens / cut * width * self.job.settings.precision.num_bytes
        link = group_link(self.job.cluster, num_ranks=2, stride=choice.tp * choice.cp * choice.dp)
        return self.prices.send_s(num_bytes, link)

    def _exposed_s(self, part: Held) -> float:
        """Exchanges between replicas that passes of all layers but one do not hide."""
        exchange = self.prices.exchange(part.choice, _sum(part.layers, "trained"))
        share = 1 / len(part.layers)
        backward_s = _sum(part.layers, "backward_s") * (1 - share)
        forward_s = _sum(part.layers, "forward_s") * (1 - share)
        return max(exchange.reduce_s - backward_s, share * exchange.reduce_s) + max(
            exchange.gather_s - forward_s, share * exchange.gather_s
        )

    def _exchange_s(self, part: Held) -> float:
        exchange = self.prices.exchange(part.choice, _sum(part.layers, "trained"))
        return exchange.reduce_s + exchange.gather_s

    def _held_bytes(self, parts: Sequence[Held]) -> float:
        """State, kept activations of the microbatches in flight, and the largest layer's own."""
        total = working = 0.0
        for choice, layers, times in parts:
            weights, trained = _sum(layers, "weights"), _sum(layers, "trained")
            total += self.prices.state_bytes(choice, weights, trained) + times * _sum(layers, "kept_bytes")
            working = max(working, *(layer.working_bytes for layer in layers))
        return total + working


@cache
def pipeline_s(forward_s: tuple[float, ...], backward_s: tuple[float, ...], rounds: int) -> float:
    """1F1B over equal microbatches."""
    forward = np.tile(np.array(forward_s), (rounds, 1))
    backward = np.tile(np.array(backward_s), (rounds, 1))
    return iteration_s(forward, backward, np.arange(rounds, dtype=np.int64))


def _sum(layers: Sequence[LayerPrice], name: str) -> float:
    return float(sum(getattr(layer, name) for layer in layers))


def _counts(chain: Chain, leading: int = 0) -> tuple[int, ...]:
    first, *rest = (len(stage) for stage in chain.stages)
    return (first - leading, *rest)
