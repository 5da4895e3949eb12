"""Seconds of what ranks say to each other about weights: gradients added up, updated weights gathered."""

from collections.abc import Callable, Collection, Sequence

from workbench.cost.collectives import Collective
from workbench.cost.execution import InstanceSums, UpdatedWeights
from workbench.cost.group_link import ring_link
from workbench.cost.hardware import Link
from workbench.cost.model import CostModel
from workbench.model.layer import Shard
from workbench.plan.lowered import GradientGroup, Lowered, Weights
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.optimizer_shards import OptimizerShards, optimizer_shards
from workbench.plan.plan import Plan, Stage
from workbench.plan.sequence import can_divide, token_borders
from workbench.schedule.action import Action, Pass

_LINKS: LruCache[Link] = LruCache(16_384)
_ROUND = {
    Pass.ALL_GATHER: Collective.PARAMETERS_GATHER,
    Pass.REDUCE_SCATTER: Collective.PARAMETERS_SCATTER,
}


class CollectivePrices:
    """Prices of collectives between a plan's ranks, each over the link of its own.

    Args:
        plan: for its cluster.
        cost_of: the machine that some ranks are.
    """

    def __init__(self, plan: Plan, cost_of: Callable[[Sequence[int]], CostModel]) -> None:
        self._plan, self._cost_of = plan, cost_of
        self._links: dict[tuple[int, ...], Link] = {}
        self._known_s: dict[tuple[object, ...], float] = {}
        self.unmeasured: set[str] = set()

    def collective_s(self, kind: Collective, num_bytes: float, ranks: Sequence[int]) -> float:
        """Seconds on a ring of these ranks; 0 for one rank."""
        if len(ranks) == 1:
            return 0.0
        cost, link = self._cost_of(ranks[:1]), self.link(ranks)
        key = kind, num_bytes, len(ranks), link, id(cost)
        if key not in self._known_s:
            if not cost.collectives.is_measured(kind, len(ranks), link):
                self.unmeasured.add(f"{kind.bare} between ranks: ring formula over the cluster's links")
            self._known_s[key] = cost.between_ranks_s(kind, num_bytes, len(ranks), link)
        return self._known_s[key]

    def round_s(self, kind: Pass, num_bytes: float, ranks: Sequence[int]) -> float:
        """Of one tensor of sharded parameters, with what the runtime does around the collective."""
        return self.collective_s(_ROUND[kind], num_bytes, ranks)

    def link(self, ranks: Sequence[int]) -> Link:
        """What a ring of these ranks runs over."""
        key = tuple(ranks)
        if key not in self._links:
            cluster = self._plan.cluster
            self._links[key] = _LINKS.get_or((Identity(cluster), key), lambda: ring_link(cluster, key))
        return self._links[key]


class WeightPrices(CollectivePrices):
    """Prices of gradient groups, each over the link of its own ranks.

    What runs in a lane of its own, beside passes, is the sum's; what the runtime does when it
    waits for that, or after the update, is the STEP's.

    Args:
        lowered: the plan.
        cost_of: the machine that some ranks are.
    """

    def __init__(self, lowered: Lowered, cost_of: Callable[[Sequence[int]], CostModel]) -> None:
        super().__init__(lowered.plan, cost_of)
        self._lowered = lowered
        self._reductions_s: dict[int, float] = {}  # by group
        self._divided: dict[int, tuple[int, ...]] = {}  # stage -> its layers that divide tokens

    def reduce_s(self, action: Action, ranks: Sequence[int]) -> float:
        """Of a sum of gradients: its groups one after the other, on the rank that has most of them."""
        by_rank = dict.fromkeys(ranks, 0.0)
        for index in self._lowered.reductions.get(action, ()):
            group = self._lowered.groups[index]
            if index not in self._reductions_s:
                self._reductions_s[index] = self._reduction_s(group)
            for rank in group.members.intersection(ranks):
                by_rank[rank] += self._reductions_s[index]
        return max(by_rank.values())

    def step_s(self, group: GradientGroup) -> float:
        """What a group adds to its ranks' STEP.

        Parts are added up over instances when the sum inside each has ended; updated parts are gathered;
        where one rank has the weights to itself, tensor-parallel ranks add up their parts only then.
        """
        shards = optimizer_shards(self._plan, group)
        instance = shards.instances[0]
        found = self._partial_s(group) if len(group.ranks) == 1 else 0.0
        if len(instance) == 1:
            return found
        run = self._cost_of(instance[:1]).execution
        if run.instance_sums is InstanceSums.AT_STEP:
            found += self._instances_s(group, shards)
        num_bytes = group.num_elements * self._plan.settings.precision.num_bytes
        if run.updated_weights is UpdatedWeights.GATHERED:
            return found + self.collective_s(Collective.ALL_GATHER, num_bytes, instance)
        return found + self._owners_s(group, num_bytes, instance)

    def _owners_s(self, group: GradientGroup, num_bytes: float, instance: Sequence[int]) -> float:
        """One broadcast after another, each of what one rank owns; a sum at its owner is the mirror image."""
        num_owners = min(len(instance), self._num_tensors(group))
        return num_owners * self.collective_s(Collective.BROADCAST, num_bytes / num_owners, instance)

    def _num_tensors(self, group: GradientGroup) -> int:
        found = 0
        for weights in group.weights:
            layers = self._plan.model.module(weights.module).layers
            found += 1 if weights.layer is None else len(layers[weights.layer].parameters())
        return found

    def _instances_s(self, group: GradientGroup, shards: OptimizerShards) -> float:
        """One rank's part of a group added up over instances."""
        part_bytes = group.num_elements * self._plan.settings.gradient_bytes / shards.num_shards
        return self.collective_s(Collective.ALL_REDUCE, part_bytes, shards.peers(group.ranks[0]))

    def _reduction_s(self, group: GradientGroup) -> float:
        """One all-reduce; where an optimizer updates parts, they are all that a rank needs the sum of."""
        num_bytes = group.num_elements * self._plan.settings.gradient_bytes
        shards = optimizer_shards(self._plan, group)
        if shards.num_shards == 1:
            return self.collective_s(Collective.ALL_REDUCE, num_bytes, group.ranks) + self._partial_s(group)
        instance = shards.instances[0]
        run, found = self._cost_of(instance[:1]).execution, self._partial_s(group)
        if run.updated_weights is UpdatedWeights.GATHERED:
            found += self.collective_s(Collective.REDUCE_SCATTER, num_bytes, instance)
        else:
            found += self._owners_s(group, num_bytes, instance)
        if run.instance_sums is InstanceSums.BEHIND_EACH:
            found += self._instances_s(group, shards)
        return found

    def _partial_s(self, group: GradientGroup) -> float:
        """The sum over tensor-parallel ranks that divide tokens: of weights that all of them hold whole."""
        if not self._plan.settings.divides_tokens(group.weights[0].module):
            return 0.0
        whole, row = 0, group.ranks[:1]
        rank = next(filter(self._plan.stages_on.__contains__, group.ranks), None)  # it stands for the others
        for weights in group.weights:
            stage = self._stage_dividing(rank, weights)
            if stage is None or weights.layer is None or weights.experts:
                continue
            layer = self._plan.model.module(weights.module).layers[weights.layer]
            if can_divide(layer):
                whole += sum(p.num_elements for p in layer.parameters() if p.shard is Shard.REPLICATED)
                row = next(row for row in stage.ranks if rank in row)
        return self.collective_s(Collective.ALL_REDUCE, whole * self._plan.settings.gradient_bytes, row)

    def _stage_dividing(self, rank: int | None, weights: Weights) -> Stage | None:
        """The rank's stage that divides tokens in the layer of these weights."""
        held = () if rank is None else self._plan.stages_on[rank]
        stages = (stage for stage in held if stage.module == weights.module)
        return next((each for each in stages if weights.layer in self._layers_dividing(each)), None)

    def _layers_dividing(self, stage: Stage) -> Collection[int]:
        if stage.id not in self._divided:
            self._divided[stage.id] = token_borders(self._plan, stage).divided
        return self._divided[stage.id]
