"""Seconds and bytes of one module under one choice of its layout, layer by layer."""

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
from workbench.job.job import Job
from workbench.memory.layer import layer_bytes, state_bytes_of
from workbench.memory.setting import Setting
from workbench.model.experts import is_of_expert
from workbench.model.frozen import Needs
from workbench.model.layer import Layer, Parameter, Shard, TokenCount
from workbench.plan.plan import Microbatch, Plan, Recompute
from workbench.plan.sequence import dividing
from workbench.plan.work import even_work_of, row_kinds, works_over
from workbench.planner.assembly import shared_draft
from workbench.planner.layer_cost import Shapes, alike_layers, mean_cost
from workbench.planner.layout_choice import ModuleChoice
from workbench.schedule.choice import Schedule
from workbench.timing.grid_links import GridCost, GridLinks
from workbench.timing.price import step_bytes


class Totals(NamedTuple):
    """Layers on one rank over one microbatch: sums of theirs, and the most bytes that one works in.

    Args:
        num_layers: how many.
        forward_s, backward_s: recomputation is part of the backward.
        kept_bytes: from forwards to backwards.
        working_bytes: on top of that inside a pass, what is computed again included.
        weights, trained: elements it holds, and of these the ones an optimizer updates.
        of_experts: of those updated, distributed experts' with fewer or more holders than other weights.
    """

    num_layers: int
    forward_s: float
    backward_s: float
    kept_bytes: float
    working_bytes: float
    weights: float
    trained: float
    of_experts: float


def _num_cuts(parameter: Parameter, choice: ModuleChoice) -> int:
    """Among how many ranks a weight is cut, or the experts distributed that it is one of."""
    if choice.ep > 1 and is_of_expert(parameter):
        return choice.ep
    return 1 if parameter.shard is Shard.REPLICATED else choice.tp


def total_of(layers: Sequence[Totals]) -> Totals:
    """Layers one after the other. Complexity: O(layers)."""
    if not layers:
        return Totals._make((0, *(0.0,) * 7))
    num, forward, backward, kept, working, *elements = zip(*layers, strict=True)
    sums = (float(sum(each)) for each in (forward, backward, kept))
    return Totals._make((sum(num), *sums, float(max(working)), *(float(sum(each)) for each in elements)))


class BoundaryExchange(NamedTuple):
    """Seconds between the ranks that hold the same weights.

    Args:
        gather_s: of updated weights.
        scatter_s: of gradients, reduced inside an instance.
        sum_s: of gradients' parts, added up over instances.
    """

    gather_s: float
    scatter_s: float
    sum_s: float

    @property
    def reduce_s(self) -> float:
        """Of gradients."""
        return self.scatter_s + self.sum_s


class ModulePrices:
    """Prices modules of a job; what choices share is computed once.

    A microbatch is as long as the mean of those that the batch gives.

    Args:
        job: whose model, batch, cluster and settings are priced, in microbatches of any size.
        cost: the machine.
    """

    def __init__(self, job: Job, cost: CostModel) -> None:
        self.job, self.cost = job, cost
        self.size = state_bytes_of(job.settings)  # per parameter
        self._draft, self._alone = self._samples()
        self._kinds = {
            name: tuple([row_kinds(self._draft, each) for each in alone])
            for name, alone in self._alone.items()
        }
        self._known: dict[tuple[object, ...], tuple[Totals, ...]] = {}
        self._exchanges: dict[tuple[ModuleChoice, float, float], BoundaryExchange] = {}
        self._totals: dict[tuple[object, ...], Totals] = {}
        self.shapes = cache(self._find_shapes)
        self._tokens = {
            (name, count): sum(even_work_of(self._draft, each).tokens(count) for each in alone)
            / len(job.batch)
            for name, alone in self._alone.items()
            for count in (TokenCount.IN, TokenCount.OUT)
        }

    def layers(self, choice: ModuleChoice, num_samples: int) -> tuple[Totals, ...]:
        """Every layer of the module over a microbatch of so many samples.

        Complexity: O(layers x distinct microbatch shapes), once per (tp, cp, ep, recompute, samples).
        """
        key = (choice.module, choice.tp, choice.cp, choice.ep, choice.recompute, num_samples)
        if key not in self._known:
            layers = self.job.model.module(choice.module).layers
            alike = alike_layers(self.job.model, choice.module)
            found = {
                first: self._layer(layers[first], alike.needs[first], choice, num_samples)
                for first in set(alike.firsts)
            }
            self._known[key] = tuple(found[first] for first in alike.firsts)
        return self._known[key]

    def total(self, choice: ModuleChoice, num_samples: int) -> Totals:
        """All layers of the module over so many samples. Complexity: as `layers`."""
        key = (choice.module, choice.tp, choice.cp, choice.ep, choice.recompute, num_samples)
        if key not in self._totals:
            self._totals[key] = total_of(self.layers(choice, num_samples))
        return self._totals[key]

    def passes_s(self, choice: ModuleChoice, num_samples: int) -> float:
        """Seconds of a forward and a backward of all layers over so many samples."""
        total = self.total(choice, num_samples)
        return total.forward_s + total.backward_s

    def exchange(self, choice: ModuleChoice, trained: float, of_experts: float = 0.0) -> BoundaryExchange:
        """Gradients and weights of `trained` elements among their holders, `of_experts` of them experts'.

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
            self._exchanges[key] = BoundaryExchange(*map(sum, zip(*both, strict=True)))
        return self._exchanges[key]

    def sharded_exchange(self, choice: ModuleChoice, layer: Totals) -> BoundaryExchange:
        """Of a layer whose parameters the holders of each instance shard."""
        gathered, reduced = layer.weights * self.size.weight, layer.trained * self.size.gradient
        return self._exchange(gathered, reduced, choice.num_holders, choice.instances, 1)

    def sum_s(self, elements: float, ranks: Sequence[int]) -> float:
        """Gradients of so many elements, which all of these ranks hold, added up."""
        link = ring_link(self.job.cluster, ranks)
        return self._collective_s(Collective.ALL_REDUCE, elements * self.size.gradient, len(ranks), link)

    def _exchange(
        self, gathered: float, reduced: float, num_holders: int, instances: int, stride: int
    ) -> BoundaryExchange:
        """Of bytes that ranks so far apart hold alike."""
        inner, cluster = num_holders // instances, self.job.cluster
        near = group_link(cluster, num_ranks=inner, stride=stride, num_groups=instances)
        far = group_link(cluster, num_ranks=instances, stride=stride * inner)
        return BoundaryExchange(
            self._collective_s(Collective.ALL_GATHER, gathered, inner, near),
            self._collective_s(Collective.REDUCE_SCATTER, reduced, inner, near),
            self._collective_s(Collective.ALL_REDUCE, reduced / inner, instances, far),
        )

    def update_s(self, choice: ModuleChoice, trained: float, of_experts: float = 0.0) -> float:
        """The update of a rank's part of the optimizer state."""
        return self.updated_s(self._shard(choice, trained, of_experts))

    def updated_s(self, num_elements: float) -> float:
        """The update of so many elements on one rank."""
        settings = self.job.settings
        return self.cost.update_s(num_elements * step_bytes(settings.precision, settings.optimizer_precision))

    def state_bytes(
        self, choice: ModuleChoice, weights: float, trained: float, of_experts: float = 0.0
    ) -> float:
        """Weights, gradients and the rank's part of the optimizer state."""
        mine = self._shard(choice, trained, of_experts)
        return weights * self.size.weight + trained * self.size.gradient + mine * self.size.optimizer

    def _shard(self, choice: ModuleChoice, trained: float, of_experts: float) -> float:
        """Elements that one rank updates."""
        own = (trained - of_experts) / (choice.num_holders // choice.instances)
        return own + of_experts / (choice.num_expert_holders // choice.instances)

    def moved_bytes(self, choice: ModuleChoice) -> float:
        """What offloading takes off a rank that holds the whole module: its state but for gradients."""
        layers = self.total(choice, 1)
        held = self.state_bytes(choice, layers.weights, layers.trained, layers.of_experts)
        return held - layers.trained * self.size.gradient

    def sample_tokens(self, module: str, count: TokenCount) -> float:
        """Mean tokens of a sample inside the module (IN) or behind it (OUT)."""
        return self._tokens[module, count]

    def send_s(self, num_bytes: float, link: Link) -> float:
        """One message."""
        return link.latency_s + num_bytes / link.bytes_per_s

    def _collective_s(self, kind: Collective, num_bytes: float, num_ranks: int, link: Link) -> float:
        if num_ranks == 1 or not num_bytes:
            return 0.0
        return self.cost.between_ranks_s(kind, num_bytes, num_ranks, link)

    def _samples(self) -> tuple[Plan, dict[str, tuple[Microbatch, ...]]]:
        """A draft, and module -> its microbatches: each sample that has items of the module, in order."""
        one_by_one = replace(self.job, layouts=(), replicas=1, microbatch_samples=1, schedule=Schedule())
        draft = shared_draft(one_by_one, "prices")
        of = {module.name: draft.microbatches_of.get((module.name, 0), ()) for module in draft.model.modules}
        return draft, of

    def _find_shapes(self, module: str, num_samples: int, cp: int) -> Shapes:
        """Distinct works of consecutive samples on the busiest of so many context-parallel ranks, with their
        shares of all microbatches.
        """
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

    def _layer(self, layer: Layer, need: Needs, choice: ModuleChoice, num_samples: int) -> Totals:
        settings, cluster = self.job.settings, self.job.cluster
        links = GridLinks(
            group_link(cluster, num_ranks=choice.tp, stride=1),
            group_link(cluster, num_ranks=choice.cp, stride=choice.tp),
            group_link(cluster, num_ranks=choice.ep, stride=1),
        )
        cost = dividing(self.cost, settings, choice.module).with_expert_parallel(choice.ep, links.experts)
        machine = GridCost(cost, choice.tp, choice.cp, settings.precision, links)
        shapes = self.shapes(choice.module, num_samples, choice.cp)
        passes = mean_cost(machine, layer, need, shapes, choice.recompute)
        again = choice.recompute is Recompute.FULL and need.any
        grid = Grid(choice.tp, choice.cp, choice.ep)
        divides = choice.tp > 1 and settings.divides_tokens(choice.module)
        cut = choice.cp * (choice.tp if divides else 1)
        kept = working = 0.0
        for work, _ in shapes:
            setting = Setting(
                work, grid, settings.precision.num_bytes, is_gathered=False, divides_tokens=divides
            )
            held = layer_bytes(layer, need, setting, settings.kernels)
            inside = max(held.forward, held.backward)
            entering = work.tokens(layer.emits) / cut * layer.out_width * setting.element_bytes
            kept = max(kept, entering if again else held.kept.num_bytes)
            working = max(working, inside + (held.kept.num_bytes if again else 0))
        weights = sum(
            parameter.num_elements / _num_cuts(parameter, choice) for parameter in layer.parameters()
        )
        of_experts = 0.0
        if layer.trainable and choice.num_expert_holders != choice.num_holders:
            of_experts = sum(p.num_elements / choice.ep for p in layer.parameters() if is_of_expert(p))
        return Totals(
            num_layers=1,
            forward_s=passes.forward_s,
            backward_s=passes.backward_s,
            kept_bytes=round(kept),
            working_bytes=round(working),
            weights=weights,
            trained=weights if layer.trainable else 0.0,
            of_experts=of_experts,
        )
