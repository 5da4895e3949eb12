"""Seconds of collectives of weights: gradients reduced, updated or sharded weights gathered."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from workbench.cost.collectives import Collective
from workbench.cost.group_link import ring_link
from workbench.cost.hardware import Link
from workbench.cost.model import CostModel
from workbench.cost.weight_update import InstanceSums, UpdatedWeights
from workbench.float_sum import float_sum
from workbench.model.layer import Parameter
from workbench.model.trained import trained_parameters
from workbench.plan.contents import layer_numbers
from workbench.plan.lowered import GradientGroup, Lowered, Weights
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.optimizer_shards import OptimizerShards, optimizer_shards
from workbench.plan.partial_weights import may_have_partial_weights, partial_weights
from workbench.plan.plan import Plan
from workbench.schedule.action import Action, Pass

_LINKS: LruCache[Link] = LruCache(16_384)
_ROUND = {
    Pass.ALL_GATHER: Collective.PARAMETERS_GATHER,
    Pass.REDUCE_SCATTER: Collective.PARAMETERS_SCATTER,
}


class CollectivePrices:
    """Prices of collectives between a plan's ranks, each over its own link.

    Args:
        plan: for its cluster.
        cost_of: machine of some ranks.
    """

    def __init__(self, plan: Plan, cost_of: Callable[[Sequence[int]], CostModel]) -> None:
        self._plan, self._cost_of = plan, cost_of
        self._links: dict[tuple[int, ...], Link] = {}
        self._seconds: dict[tuple[object, ...], float] = {}
        self.unmeasured: set[str] = set()

    def collective_s(self, kind: Collective, num_bytes: float, ranks: Sequence[int]) -> float:
        """Return the seconds on a ring of these ranks; 0 for one rank."""
        if len(ranks) == 1:
            return 0.0
        cost, link = self._cost_of(ranks[:1]), self.link(ranks)
        key = kind, num_bytes, len(ranks), link, id(cost)
        if key not in self._seconds:
            if basis := cost.collectives.basis(kind, len(ranks), link):
                self.unmeasured.add(f"{kind.bare} between ranks: {basis} over the cluster's links")
            self._seconds[key] = cost.between_ranks_s(kind, num_bytes, len(ranks), link)
        return self._seconds[key]

    def round_s(self, kind: Pass, num_bytes: float, ranks: Sequence[int]) -> float:
        """Return the seconds of a round's collective of one tensor, with the runtime's work around it."""
        return self.collective_s(_ROUND[kind], num_bytes, ranks)

    def partial_s(self, parameters: Iterable[Parameter], row: Sequence[int]) -> float:
        """Return the seconds of summing weights' gradients over tp ranks with parts of them."""
        num_elements = sum(parameter.num_elements for parameter in parameters)
        return self.collective_s(
            Collective.ALL_REDUCE, num_elements * self._plan.settings.gradient_bytes, row
        )

    def link(self, ranks: Sequence[int]) -> Link:
        """Return the link that a ring of these ranks uses."""
        key = tuple(ranks)
        if key not in self._links:
            cluster = self._plan.cluster
            self._links[key] = _LINKS.get_or((Identity(cluster), key), lambda: ring_link(cluster, key))
        return self._links[key]


class _Parts(NamedTuple):
    """Weights of a layer that each rank of a row holds whole, with a part of the gradient."""

    row: tuple[int, ...]
    parameters: tuple[Parameter, ...]


class WeightPrices(CollectivePrices):
    """Prices of gradient groups, each over the link of its own ranks.

    What runs in a lane of its own, beside passes, counts for the reduction; what the runtime does when it
    waits for that, or after the update, counts for STEP.

    Args:
        lowered: the plan.
        cost_of: machine of some ranks.
    """

    def __init__(self, lowered: Lowered, cost_of: Callable[[Sequence[int]], CostModel]) -> None:
        super().__init__(lowered.plan, cost_of)
        self._lowered = lowered
        self._in_turns_s: dict[tuple[int, ...], float] = {}  # by indices of groups
        self._reductions_s: dict[int, float] = {}  # by kind of group
        self._steps_s: dict[int, float] = {}
        self._kinds: dict[int, int] = {}  # by index of group
        self._kind_numbers: dict[Hashable, int] = {}
        self._modules: dict[str, tuple[Sequence[int], bool]] = {}  # kinds of layers, and if any is summed
        self._parts: dict[int | None, dict[tuple[str, int], _Parts]] = {}  # by rank, module and layer

    def reduce_s(self, action: Action) -> float:
        """Return the seconds of a gradient reduction: its groups in turn, on the rank with most of them."""
        reducers = self._lowered.reducers.get(action, ())
        return max((self._in_turn_s(each.groups) for each in reducers), default=0.0)

    def _in_turn_s(self, indices: tuple[int, ...]) -> float:
        """Return the seconds of reductions of groups in turn; replicas have the same groups."""
        if indices not in self._in_turns_s:
            groups = map(self._lowered.groups.__getitem__, indices)
            self._in_turns_s[indices] = float_sum(map(self._summed_s, groups))
        return self._in_turns_s[indices]

    def _summed_s(self, group: GradientGroup) -> float:
        kind = self._kind(group)
        if kind not in self._reductions_s:
            self._reductions_s[kind] = self._reduction_s(group)
        return self._reductions_s[kind]

    def step_s(self, group: GradientGroup) -> float:
        """Return the seconds that a group adds to its ranks' STEP."""
        kind = self._kind(group)
        if kind not in self._steps_s:
            self._steps_s[kind] = self._step_s(group)
        return self._steps_s[kind]

    def _kind(self, group: GradientGroup) -> int:
        """Return a number, equal for groups whose collectives take equal times: most layers of a stage."""
        if group.index not in self._kinds:
            kinds = [self._kind_of(group, weights) for weights in group.weights]
            shape = group.ranks, group.num_elements, *kinds
            self._kinds[group.index] = self._kind_numbers.setdefault(shape, len(self._kind_numbers))
        return self._kinds[group.index]

    def _kind_of(self, group: GradientGroup, weights: Weights) -> Hashable:
        module, layer, shared, experts = weights
        kinds, has_parts = self._of_module(module)
        parts = self._parts_of(group, weights) if has_parts else None
        row = None if parts is None else parts.row
        return module, None if layer is None else kinds[layer], shared, experts, row

    def _of_module(self, module: str) -> tuple[Sequence[int], bool]:
        if module not in self._modules:
            has_parts = may_have_partial_weights(self._plan, module)
            self._modules[module] = layer_numbers(self._plan, module), has_parts
        return self._modules[module]

    def _step_s(self, group: GradientGroup) -> float:
        """Return the seconds of collectives of one group in STEP.

        Shards are reduced over instances when the reduction inside each has ended; updated shards are
        gathered; where one rank has the weights to itself, tensor-parallel ranks sum their parts only then.
        """
        shards = optimizer_shards(self._plan, group)
        instance = shards.instances[0]
        seconds = self._partial_s(group) if len(group.ranks) == 1 else 0.0
        if len(instance) == 1:
            return seconds
        run = self._cost_of(instance[:1]).execution
        if run.instance_sums is InstanceSums.AT_STEP:
            seconds += self._instances_s(group, shards)
        num_bytes = group.num_elements * self._plan.settings.precision.num_bytes
        if run.updated_weights is UpdatedWeights.GATHERED:
            return seconds + self.collective_s(Collective.ALL_GATHER, num_bytes, instance)
        return seconds + self._owners_s(group, num_bytes, instance)

    def _owners_s(self, group: GradientGroup, num_bytes: float, instance: Sequence[int]) -> float:
        """Return the seconds of a broadcast per owner in turn; reductions to owners take as long."""
        num_owners = min(len(instance), self._num_tensors(group))
        return num_owners * self.collective_s(Collective.BROADCAST, num_bytes / num_owners, instance)

    def _num_tensors(self, group: GradientGroup) -> int:
        count = 0
        for weights in group.weights:
            layers = self._plan.model.module(weights.module).layers
            count += 1 if weights.layer is None else len(trained_parameters(layers[weights.layer]))
        return count

    def _instances_s(self, group: GradientGroup, shards: OptimizerShards) -> float:
        """Return the seconds in which one rank's shard of a group is reduced over instances."""
        part_bytes = group.num_elements * self._plan.settings.gradient_bytes / shards.num_shards
        return self.collective_s(Collective.ALL_REDUCE, part_bytes, shards.peers(group.ranks[0]))

    def _reduction_s(self, group: GradientGroup) -> float:
        """Return the seconds of an all-reduce; where the optimizer is sharded, of a reduction of shards."""
        num_bytes = group.num_elements * self._plan.settings.gradient_bytes
        shards = optimizer_shards(self._plan, group)
        if shards.num_shards == 1:
            return self.collective_s(Collective.ALL_REDUCE, num_bytes, group.ranks) + self._partial_s(group)
        instance = shards.instances[0]
        run, seconds = self._cost_of(instance[:1]).execution, self._partial_s(group)
        if run.updated_weights is UpdatedWeights.GATHERED:
            seconds += self.collective_s(Collective.REDUCE_SCATTER, num_bytes, instance)
        else:
            seconds += self._owners_s(group, num_bytes, instance)
        if run.instance_sums is InstanceSums.BEHIND_EACH:
            seconds += self._instances_s(group, shards)
        return seconds

    def _partial_s(self, group: GradientGroup) -> float:
        """Return the seconds of summing replicated weights' gradients over tp ranks with parts of them.

        Sharded weights are summed in their rounds.
        """
        module = group.weights[0].module
        if self._plan.settings.of(module).shards_parameters or not self._of_module(module)[1]:
            return 0.0
        parameters: list[Parameter] = []
        row = group.ranks[:1]
        for weights in group.weights:
            if (parts := self._parts_of(group, weights)) is not None:
                row = parts.row
                parameters += parts.parameters
        return self.partial_s(parameters, row)

    def _parts_of(self, group: GradientGroup, weights: Weights) -> _Parts | None:
        """Return the ranks of one stage that have parts of these weights' gradients; None: none do."""
        if weights.layer is None or weights.experts:
            return None
        rank = next(filter(self._plan.stages_on.__contains__, group.ranks), None)  # it represents the others
        if rank not in self._parts:
            self._parts[rank] = {
                (stage.module, layer): _Parts(next(row for row in stage.ranks if rank in row), parameters)
                for stage in reversed(() if rank is None else self._plan.stages_on[rank])
                for layer, parameters in partial_weights(self._plan, stage).items()
            }
        return self._parts[rank].get((weights.module, weights.layer))
