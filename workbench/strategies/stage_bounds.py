"""How fast a plan is at best, and what its ranks hold at least, told from its stages before it is built."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.cost.model import CostModel
from workbench.graph.model_graph import Edge
from workbench.plan.plan import KeyExchange, Plan, Stage
from workbench.plan.stage_memory import GRADIENTS, state_of
from workbench.schedule.choice import Schedule
from workbench.strategies.belief import Belief
from workbench.strategies.stage_seconds import Flags, PassSeconds, Seconds, StageSeconds
from workbench.units import gib

_Key = tuple[str, int]  # module and replica


class _Stage(NamedTuple):
    """[kinds] what a planner believes of a stage: `leaving_s` is of its backward what others wait for."""

    forward_s: Seconds
    backward_s: Seconds
    leaving_s: Seconds
    has_backward: Flags


class _Chain(NamedTuple):
    """The stages of a replica in layer order, and [kinds] of microbatches that it has.

    `ahead_s`, `behind_s`, `after_s`: by stage, what stands ahead of a forward, behind a backward, and behind
    a forward that has none.
    """

    stages: tuple[Stage, ...]
    passes: tuple[_Stage, ...]
    counts: NDArray[np.int64]
    ahead_s: list[Seconds]
    behind_s: list[Seconds]
    after_s: list[Seconds]

    @property
    def used(self) -> Flags:
        return self.counts > 0


class StageBounds:
    """Bounds on the plans of one draft, whatever stages it is given.

    Args:
        draft: with microbatches.
        cost: the machine, and others beside it.
        belief: of the planner whose plans are bounded.
        schedule: of the plans.
    """

    def __init__(self, draft: Plan, cost: CostModel, belief: Belief, schedule: Schedule) -> None:
        self._seconds = StageSeconds(draft, cost)
        self._belief, self._schedule = belief, schedule
        self._state: dict[tuple[object, ...], int] = {}

    def seconds(self, plan: Plan) -> float:
        """Seconds that the planner believes no order of these stages' passes to beat.

        Ranks do all their passes; ahead of the first stands what its input comes from, behind the last
        what waits for its output; and a microbatch goes all the way. Messages take no time.

        Raises:
            ValueError: a stage on ranks of several kinds.

        Complexity: O(stages x distinct microbatches), but for grids seen for the first time.
        """
        if any(stage.cp > 1 and _exchanges_otherwise(plan, stage) for stage in plan.stages):
            return 0.0  # another kernel's attention, which may be faster than the one summed up here
        read = {module.name: _is_read(plan, module.name) for module in plan.model.modules}
        chains = {key: self._chain(plan, key, read) for key in plan.chain}
        _Ways(plan, self._seconds, chains)
        most_s = 0.0
        lines: dict[tuple[int, ...], list[tuple[float, float, float]]] = {}
        for chain in chains.values():
            if chain.used.any():
                most_s = max(most_s, self._path_s(chain))
                for stage, line in zip(chain.stages, self._lines(chain), strict=True):
                    lines.setdefault(tuple(sorted(stage.flat_ranks)), []).append(line)
        for held in lines.values():
            ahead, own, behind = zip(*held, strict=True)
            most_s = max(most_s, min(ahead) + sum(own) + min(behind))
        return most_s

    def check_state(self, plan: Plan) -> None:
        """ValueError for stages whose weights, gradients and optimizer state alone do not fit.

        Complexity: O(ranks), but for stages seen for the first time.
        """
        if self._schedule.offload:
            return
        held: Counter[int] = Counter()
        for rank in plan.ranks:
            index = plan.cluster.node_of(rank)
            node = plan.cluster.nodes[index]
            if node.num_cores is None:
                held[index] = 0
            held[index] += self.state_bytes(plan, rank)
            if held[index] > node.memory_bytes:
                raise ValueError(
                    f"rank {rank} does not fit: {gib(held[index]):.3g} GiB of weights, gradients and "
                    f"optimizer state alone, but node {index} ({node.device}) has "
                    f"{gib(node.memory_bytes):.3g} GiB; want sharding or more stages"
                )

    def state_bytes(self, plan: Plan, rank: int) -> int:
        """What a rank holds at least in its STEP; gradients where some microbatch trains all of a stage."""
        stages = plan.stages_on[rank]
        key = tuple((s.module, s.layers, s.tp, s.cp, s.ep, len(plan.replicas(s.module))) for s in stages)
        if key not in self._state:
            trained = {stage.id for stage in stages if self._is_trained(plan, stage)}
            self._state[key] = sum(
                num_bytes
                for stage, kind, num_bytes in state_of(plan, rank)
                if kind.part != GRADIENTS or stage.id in trained
            )
        return self._state[key]

    def _is_trained(self, plan: Plan, stage: Stage) -> bool:
        passes = self._seconds.passes(plan, stage)
        mine = [self._seconds.kind_of(m) for m in plan.microbatches_of.get((stage.module, stage.replica), ())]
        return _is_read(plan, stage.module) and bool(passes.trains_all[mine].any())

    def _chain(self, plan: Plan, key: _Key, read: dict[str, bool]) -> _Chain:
        module, _ = key
        counts = np.zeros(len(self._seconds.kinds(module)), dtype=np.int64)
        for microbatch in plan.microbatches_of.get(key, ()):
            counts[self._seconds.kind_of(microbatch)] += 1
        stages = plan.chain[key]
        passes = (self._seconds.passes(plan, stage) for stage in stages)
        believed = tuple(self._believed(found, found.has_backward & read[module]) for found in passes)
        return _Chain(stages, believed, counts, [], [], [])

    def _believed(self, found: PassSeconds, has: Flags) -> _Stage:
        if not self._schedule.kind.splits_backward:
            forward_s, backward_s = self._belief.passes_s(found.forward_s, found.whole_s, has)
            return _Stage(forward_s, backward_s, backward_s, has)
        shorter_s = np.minimum(found.whole_s, found.through_s + found.weights_s)
        forward_s, backward_s = self._belief.passes_s(found.forward_s, shorter_s, has)
        return _Stage(forward_s, backward_s, np.zeros_like(backward_s), has)

    def _lines(self, chain: _Chain) -> Iterator[tuple[float, float, float]]:
        """Of every stage: what is ahead of its first pass, all of its passes, what is behind its last."""
        for place, passes in enumerate(chain.passes):
            last_s = np.where(passes.has_backward, chain.behind_s[place], chain.after_s[place])
            if self._schedule.kind.splits_backward:  # the last may be a W, for which nobody waits
                last_s = np.where(passes.has_backward, 0.0, last_s)
            own_s = (passes.forward_s + passes.backward_s) @ chain.counts
            ahead_s, behind_s = chain.ahead_s[place][chain.used], last_s[chain.used]
            yield float(ahead_s.min()), float(own_s), float(behind_s.min())

    def _path_s(self, chain: _Chain) -> float:
        """The longest way of one microbatch."""
        whole_s = chain.ahead_s[0] + chain.passes[0].forward_s + chain.after_s[0]
        return float(whole_s[chain.used].max())


def _exchanges_otherwise(plan: Plan, stage: Stage) -> bool:
    return plan.settings.of(stage.module).key_exchange is not KeyExchange.ALL_GATHER


def _is_read(plan: Plan, module: str) -> bool:
    """Whether every microbatch of a module is read: it has a loss, or the only copy of what others want."""
    if plan.model.module(module).has_loss:
        return True
    if not plan.model.edges_out_of(module):
        return False
    items = [item for m in plan.microbatches if m.module == module for item in m.items]
    return len(items) == len(set(items))


class _Ways:
    """What lies on the way to and from every stage, from module to module along the edges."""

    def __init__(self, plan: Plan, seconds: StageSeconds, chains: dict[_Key, _Chain]) -> None:
        self._model, self._seconds, self._chains = plan.model, seconds, chains
        order = self._order()
        for module in order:
            for chain in self._of(module):
                self._add_ahead(module, chain)
                self._add_behind(module, chain)
        for module in reversed(order):
            for chain in self._of(module):
                self._add_after(module, chain)

    def _order(self) -> list[str]:
        """Modules, each behind those that it reads."""
        left = [module.name for module in self._model.modules]
        found: list[str] = []
        while left:
            name = next(n for n in left if all(e.source in found for e in self._model.edges_into(n)))
            left.remove(name)
            found.append(name)
        return found

    def _of(self, module: str) -> list[_Chain]:
        return [chain for (name, _), chain in self._chains.items() if name == module]

    def _reading(self, edge: Edge) -> Flags:
        """[kinds] of the target's microbatches whether the source has items in them."""
        return np.array(
            [edge.source in kind.present for kind in self._seconds.kinds(edge.target)], dtype=bool
        )

    def _add_ahead(self, module: str, chain: _Chain) -> None:
        ahead_s = np.zeros(len(chain.counts))
        for stage, passes in zip(chain.stages, chain.passes, strict=True):
            for edge in self._model.edges_into(module):
                if edge.entered_in(stage.layers):
                    arrives_s = np.where(self._reading(edge), self._least_ahead_s(edge), 0.0)
                    ahead_s = np.maximum(ahead_s, arrives_s)
            chain.ahead_s.append(ahead_s)
            ahead_s = ahead_s + passes.forward_s

    def _least_ahead_s(self, edge: Edge) -> float:
        """Until the first of the source's microbatches is there."""
        found = []
        for chain in self._of(edge.source):
            place = _place(chain, edge.after_layer)
            done_s = chain.ahead_s[place] + chain.passes[place].forward_s
            found += list(done_s[chain.used])
        return float(min(found, default=0.0))

    def _add_behind(self, module: str, chain: _Chain) -> None:
        behind_s = np.zeros(len(chain.counts))
        for stage, passes in zip(chain.stages, chain.passes, strict=True):
            for edge in self._model.edges_into(module):
                if edge.entered_in(stage.layers):
                    returned_s = np.where(self._reading(edge), self._least_behind_s(edge), 0.0)
                    behind_s = np.maximum(behind_s, returned_s)
            chain.behind_s.append(behind_s)
            behind_s = np.where(passes.has_backward, behind_s + passes.leaving_s, 0.0)

    def _least_behind_s(self, edge: Edge) -> float:
        """From a gradient of the source's output to the end of its backwards."""
        found = []
        for chain in self._of(edge.source):
            place = _place(chain, edge.after_layer)
            passes = chain.passes[place]
            way_s = np.where(passes.has_backward, passes.leaving_s + chain.behind_s[place], 0.0)
            found += list(way_s[chain.used])
        return float(min(found, default=0.0))

    def _add_after(self, module: str, chain: _Chain) -> None:
        leaving = [(_place(chain, e.after_layer), e) for e in self._model.edges_out_of(module)]
        after_s = np.zeros(len(chain.counts))
        for place in reversed(range(len(chain.stages))):
            passes = chain.passes[place]
            own_s = np.where(passes.has_backward, passes.leaving_s + chain.behind_s[place], 0.0)
            after_s = np.maximum(after_s, own_s)
            for at, edge in leaving:
                if at == place:
                    after_s = np.maximum(after_s, self._least_after_s(edge))
            chain.after_s.append(after_s)
            after_s = after_s + passes.forward_s
        chain.after_s.reverse()

    def _least_after_s(self, edge: Edge) -> float:
        """From the source's output to the end of a microbatch that reads it."""
        found = []
        for chain in self._of(edge.target):
            place = _place(chain, edge.before_layer)
            way_s = chain.passes[place].forward_s + chain.after_s[place]
            found += list(way_s[chain.used & self._reading(edge)])
        return float(min(found, default=0.0))


def _place(chain: _Chain, layer: int) -> int:
    """The stage with that layer."""
    return next(at for at, stage in enumerate(chain.stages) if stage.layers[0] <= layer < stage.layers[1])
