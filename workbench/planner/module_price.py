"""Prices one module under one choice of its layout, layer by layer, in seconds and bytes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from workbench.cost.collectives import Collective
from workbench.cost.group_link import group_link, ring_link
from workbench.cost.hardware import Link
from workbench.cost.model import CostModel, Work
from workbench.cost.roofline import Grid
from workbench.float_sum import float_sum
from workbench.job.job import Job
from workbench.memory.layer import MUON_MOMENTS, layer_bytes, state_bytes_of
from workbench.memory.setting import Setting
from workbench.model.frozen import Needs
from workbench.model.layer import Layer, TokenCount
from workbench.plan.narrow_products import multiplying
from workbench.plan.plan import Microbatch, Plan
from workbench.plan.recomputed_layers import recomputed_layers
from workbench.plan.sequence import dividing
from workbench.plan.work import even_work_of, row_kinds, works_over
from workbench.planner.assembly import shared_draft
from workbench.planner.layer_cost import Shapes, alike_layers, mean_cost
from workbench.planner.layer_totals import Elements, Totals, elements_of, elements_on, total_of
from workbench.planner.layout_choice import ModuleChoice
from workbench.planner.matrix_updates import Matrices, MatrixUpdates, shard_elements
from workbench.schedule.action import Pass
from workbench.schedule.choice import Schedule
from workbench.timing.clipping import clipped_s
from workbench.timing.grid_links import GridCost, GridLinks
from workbench.timing.price import adamw_s


def _key(choice: ModuleChoice, num_samples: int) -> tuple[object, ...]:
    """A key of what decides the prices of layers."""
    recomputation = choice.recompute, choice.recompute_layers
    return (choice.module, choice.tp, choice.cp, choice.ep, *recomputation, num_samples)


class BoundaryExchange(NamedTuple):
    """Seconds of the exchange between ranks that hold the same weights.

    Args:
        gather_s: all-gather of updated weights.
        scatter_s: reduce-scatter of gradients inside an instance.
        sum_s: all-reduce of gradient shards over instances.
    """

    gather_s: float
    scatter_s: float
    sum_s: float

    @property
    def reduce_s(self) -> float:
        """Seconds to reduce gradients."""
        return self.scatter_s + self.sum_s


class ModulePrices:
    """Prices modules of a job; what choices share is computed once.

    Prices are means over the microbatches that the batch gives.

    Args:
        job: gives model, batch, cluster and settings; its microbatch size does not matter.
        cost: the machine.
    """

    def __init__(self, job: Job, cost: CostModel) -> None:
        self.job, self.cost = job, cost
        self.size = state_bytes_of(job.settings)  # per parameter of AdamW's
        self._saved_bytes = self.size.optimizer - state_bytes_of(job.settings, MUON_MOMENTS).optimizer
        self.matrix_updates = MatrixUpdates(job.settings, job.cluster, cost)
        self._draft, self._alone = self._samples()
        self._kinds = {
            name: tuple([row_kinds(self._draft, each) for each in alone])
            for name, alone in self._alone.items()
        }
        self._known: dict[tuple[object, ...], tuple[Totals, ...]] = {}
        self._exchanges: dict[tuple[ModuleChoice, float, float], BoundaryExchange] = {}
        self._totals: dict[tuple[object, ...], Totals] = {}
        self._held: dict[tuple[str, int, int], Elements] = {}
        self.shapes = cache(self._find_shapes)
        self._tokens = {
            (name, count): sum(even_work_of(self._draft, each).tokens(count) for each in alone)
            / len(job.batch)
            for name, alone in self._alone.items()
            for count in (TokenCount.IN, TokenCount.OUT)
        }

    def layers(self, choice: ModuleChoice, num_samples: int) -> tuple[Totals, ...]:
        """Every layer of the module over a microbatch of `num_samples` samples.

        Complexity: O(layers x distinct microbatch shapes), once per (tp, cp, ep, recomputation, samples).
        """
        key = _key(choice, num_samples)
        if key not in self._known:
            layers = self.job.model.module(choice.module).layers
            alike = alike_layers(self.job.model, choice.module)
            again = recomputed_layers(choice.recompute, choice.recompute_layers, layers)
            kinds = list(zip(alike.firsts, again, strict=True))
            price_of = {
                (first, is_again): self._layer(
                    layers[first], alike.needs[first], choice, num_samples, recomputed=is_again
                )
                for first, is_again in set(kinds)
            }
            self._known[key] = tuple(price_of[kind] for kind in kinds)
        return self._known[key]

    def total(self, choice: ModuleChoice, num_samples: int) -> Totals:
        """Totals of all layers of the module over a microbatch. Complexity: as `layers`."""
        key = _key(choice, num_samples)
        if key not in self._totals:
            self._totals[key] = total_of(self.layers(choice, num_samples))
        return self._totals[key]

    def elements(self, choice: ModuleChoice) -> Elements:
        """Elements of all layers of the module, without a price. Complexity: O(distinct layers), once."""
        key = choice.module, choice.tp, choice.ep
        if key not in self._held:
            layers = self.job.model.module(choice.module).layers
            firsts = alike_layers(self.job.model, choice.module).firsts
            settings = self.job.settings
            on_rank = {first: elements_on(layers[first], choice, settings) for first in set(firsts)}
            self._held[key] = elements_of(on_rank[first] for first in firsts)
        return self._held[key]

    def passes_s(self, choice: ModuleChoice, num_samples: int) -> float:
        """Seconds of a forward and a backward of all layers over a microbatch."""
        total = self.total(choice, num_samples)
        return total.forward_s + total.backward_s

    def exchange(self, choice: ModuleChoice, trained: float, of_experts: float = 0.0) -> BoundaryExchange:
        """The exchange of gradients and weights of `trained` elements, `of_experts` of them experts'.

        The state is sharded inside an instance: gradients are reduced and scattered there, the
        shards summed across instances, and updated weights gathered inside the instance again
        (Rajbhandari et al. 2020, "ZeRO", section 5, stage 1).
        """
        key = (choice, trained, of_experts)
        if key not in self._exchanges:
            size, both = self.size, []
            for elements, holders, stride in (
                (trained - of_experts, choice.num_holders, choice.tp),
                (of_experts, choice.num_expert_holders, choice.ep),
            ):
                gathered, reduced = elements * size.weight, elements * size.gradient
                both.append(self._exchange(gathered, reduced, holders, choice.instances, stride))
            self._exchanges[key] = BoundaryExchange(*map(float_sum, zip(*both, strict=True)))
        return self._exchanges[key]

    def sharded_exchange(self, choice: ModuleChoice, held: Elements) -> BoundaryExchange:
        """The exchange of a layer whose parameters are sharded among the holders of each instance.

        Distributed experts are sharded among the ranks that hold the same ones.
        """
        gathered = (held.weights - held.expert_weights) * self.size.weight
        reduced = (held.trained - held.of_experts) * self.size.gradient
        dense = self._exchange(gathered, reduced, choice.num_holders, choice.instances, 1)
        if not held.expert_weights:
            return dense
        gathered, reduced = held.expert_weights * self.size.weight, held.of_experts * self.size.gradient
        holders, stride = choice.num_expert_holders, choice.ep
        experts = self._exchange(gathered, reduced, holders, choice.instances, stride)
        return BoundaryExchange(*map(float_sum, zip(dense, experts, strict=True)))

    def sum_s(self, elements: float, ranks: Sequence[int]) -> float:
        """Seconds to all-reduce gradients of `elements` elements among these ranks."""
        link = ring_link(self.job.cluster, ranks)
        return self._collective_s(Collective.ALL_REDUCE, elements * self.size.gradient, len(ranks), link)

    def _exchange(
        self, gathered: float, reduced: float, num_holders: int, instances: int, stride: int
    ) -> BoundaryExchange:
        """The exchange of bytes that ranks at a stride hold alike."""
        inner, cluster = num_holders // instances, self.job.cluster
        near = group_link(cluster, num_ranks=inner, stride=stride, num_groups=instances)
        far = group_link(cluster, num_ranks=instances, stride=stride * inner)
        return BoundaryExchange(
            self._collective_s(Collective.ALL_GATHER, gathered, inner, near),
            self._collective_s(Collective.REDUCE_SCATTER, reduced, inner, near),
            self._collective_s(Collective.ALL_REDUCE, reduced / inner, instances, far),
        )

    def update_s(self, choice: ModuleChoice, held: Elements) -> float:
        """Seconds to clip a rank's gradients and update all but Muon's matrices of its part of the state."""
        matrices = shard_elements(choice, held.matrices)
        return self.updated_s(self._shard(choice, held) - matrices, matrices)

    def step_s(self, choice: ModuleChoice) -> float:
        """Seconds to update a rank's part of the whole module, by AdamW and Muon."""
        held = self.elements(choice)
        return self.update_s(choice, held) + self.matrix_updates.seconds([(choice, held.matrices)])

    def updated_s(self, num_elements: float, in_matrices: float) -> float:
        """Seconds to update `num_elements` elements on one rank by AdamW, as a plan's STEP takes them.

        They are clipped before, with those in Muon's matrices.
        """
        factor, settings = self.cost.profile.pipeline_factor(Pass.STEP), self.job.settings
        clipping_s = clipped_s(num_elements + in_matrices, self.cost, settings)
        return factor * (adamw_s(num_elements, self.cost, settings) + clipping_s)

    def state_bytes(self, choice: ModuleChoice, held: Elements) -> float:
        """Bytes of weights, gradients and the rank's part of the optimizer state."""
        size, shard = self.size, self._shard(choice, held)
        held_bytes = held.weights * size.weight + held.trained * size.gradient + shard * size.optimizer
        return held_bytes - self.saved_bytes(choice, held.matrices)

    def saved_bytes(self, choice: ModuleChoice, matrices: Matrices) -> float:
        """Bytes of a rank's part of the state by which Muon's one momentum is less than AdamW's moments."""
        return shard_elements(choice, matrices) * self._saved_bytes

    def _shard(self, choice: ModuleChoice, held: Elements) -> float:
        """The number of elements that one rank updates.

        Ranks that shard a tied weight's state are those of all stages that hold it.
        """
        dense = held.trained - held.of_experts
        if choice.shards_state:
            dense -= float_sum(each.trained * (1 - 1 / each.num_stages) for each in held.tied)
        dense /= choice.num_holders // choice.instances
        return dense + held.of_experts / (choice.num_expert_holders // choice.instances)

    def moved_bytes(self, choice: ModuleChoice) -> float:
        """Bytes that offloading frees on a rank that holds the whole module: its state without gradients."""
        held = self.elements(choice)
        return self.state_bytes(choice, held) - held.trained * self.size.gradient

    def sample_tokens(self, module: str, count: TokenCount) -> float:
        """Mean tokens of a sample inside the module (IN) or at its output (OUT)."""
        return self._tokens[module, count]

    def send_s(self, num_bytes: float, link: Link) -> float:
        """Seconds of one message."""
        return link.latency_s + num_bytes / link.bytes_per_s

    def _collective_s(self, kind: Collective, num_bytes: float, num_ranks: int, link: Link) -> float:
        if num_ranks == 1 or not num_bytes:
            return 0.0
        return self.cost.between_ranks_s(kind, num_bytes, num_ranks, link)

    def _samples(self) -> tuple[Plan, dict[str, tuple[Microbatch, ...]]]:
        """A draft, and module -> microbatches of one sample each, for samples with items of the module."""
        one_by_one = replace(self.job, layouts=(), replicas=1, microbatch_samples=1, schedule=Schedule())
        draft = shared_draft(one_by_one, "prices")
        microbatches = {
            module.name: draft.microbatches_of.get((module.name, 0), ()) for module in draft.model.modules
        }
        return draft, microbatches

    def _find_shapes(self, module: str, num_samples: int, cp: int) -> Shapes:
        """Distinct shapes of microbatches on the busiest of `cp` context-parallel ranks, and their shares."""
        alone, kinds = self._alone[module], self._kinds[module]
        alike: dict[tuple[object, ...], list[int]] = {}
        for start in range(0, len(alone), num_samples):
            alike.setdefault(kinds[start : start + num_samples], []).append(start)
        joined: Counter[Work] = Counter()
        for first, *others in alike.values():
            joined[self._work(alone[first : first + num_samples], cp)] += 1 + len(others)
        total = sum(joined.values())
        return tuple((work, count / total) for work, count in joined.items())

    def _work(self, alone: Sequence[Microbatch], cp: int) -> Work:
        together = replace(alone[0], rows=tuple(row for each in alone for row in each.rows))
        return works_over(self._draft, together, cp)[0]

    def _layer(
        self, layer: Layer, need: Needs, choice: ModuleChoice, num_samples: int, *, recomputed: bool
    ) -> Totals:
        settings, cluster = self.job.settings, self.job.cluster
        links = GridLinks(
            group_link(cluster, num_ranks=choice.tp, stride=1),
            group_link(cluster, num_ranks=choice.cp, stride=choice.tp),
            group_link(cluster, num_ranks=choice.ep, stride=1),
        )
        cost = dividing(multiplying(self.cost, settings, choice.module), settings, choice.module)
        cost = cost.with_expert_parallel(choice.ep, links.experts)
        machine = GridCost(cost, choice.tp, choice.cp, settings.precision, links)
        shapes = self.shapes(choice.module, num_samples, choice.cp)
        parts = settings.of(choice.module).computed_again
        passes = mean_cost(machine, layer, need, shapes, recomputed=recomputed, parts=parts)
        again = recomputed and need.any
        grid = Grid(choice.tp, choice.cp, choice.ep)
        divides = choice.tp > 1 and settings.divides_tokens(choice.module)
        cut = choice.cp * (choice.tp if divides else 1)
        kept = working = 0.0
        for work, _ in shapes:
            setting = Setting(
                work,
                grid,
                settings.precision.num_bytes,
                is_gathered=False,
                divides_tokens=divides,
                computed_again=parts,
                products=settings.of(choice.module).products,
                key_exchange=settings.of(choice.module).key_exchange,
            )
            memory = layer_bytes(layer, need, setting, settings.kernels)
            inside = max(memory.forward, memory.backward)
            entering = work.tokens(layer.emits) / cut * layer.out_width * setting.element_bytes
            kept = max(kept, entering if again else memory.kept.num_bytes)
            working = max(working, inside + (memory.kept.num_bytes if again else 0))
        held = elements_on(layer, choice, settings)
        return Totals(1, passes.forward_s, passes.backward_s, round(kept), round(working), held)
