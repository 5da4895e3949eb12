"""Memory of every rank over a step: what it always holds, and what each action takes and gives back."""

from collections import Counter
from dataclasses import dataclass
from math import ceil

from workbench.cost.memory import saved_bytes, state_bytes, working_bytes
from workbench.cost.roofline import Grid, Work
from workbench.graph.frozen import Needs
from workbench.graph.layer import Layer, Parameter, Shard
from workbench.plan.lowered import Lowered, Route
from workbench.plan.plan import Microbatch, Plan, Recompute, Sharding, Stage
from workbench.plan.routing import Routing
from workbench.plan.work import work_of
from workbench.schedule.action import Action, Pass
from workbench.units import gib

NUM_HOLDERS_NAMED = 3


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """Bytes by rank.

    Args:
        static_bytes: rank -> parameters, gradients and optimizer state.
        acquired_bytes: (rank, action) -> taken when the action starts.
        released_bytes: (rank, action) -> given back when it ends.
    """

    static_bytes: dict[int, int]
    acquired_bytes: dict[tuple[int, Action], int]
    released_bytes: dict[tuple[int, Action], int]


def memory_table(lowered: Lowered) -> MemoryTable:
    """Account for parameters, gradients, optimizer state, activations and boundary tensors.

    A forward takes what its backward needs (with recompute: the inputs of layers that will
    be computed again), plus its received boundary tensors and one layer's working set, which
    it gives back at its end. A backward takes the working set and the boundary gradients
    (with recompute: the activations of the largest layer too); the last of a microbatch's
    backwards gives the activations back. A tensor handed to a stage on the same rank stays
    until its consumer ends.

    Complexity: O(actions x layers of a stage + rows).
    """
    accounts = _Accounts(lowered)
    for stage in lowered.plan.stages:
        for microbatch in lowered.plan.microbatches_of.get((stage.module, stage.replica), ()):
            accounts.add_passes(stage, microbatch)
    accounts.add_local_boundaries()
    static = {rank: sum(static_holders(lowered.plan, rank).values()) for rank in lowered.plan.ranks}
    return MemoryTable(static, dict(accounts.acquired), dict(accounts.released))


def static_holders(plan: Plan, rank: int) -> dict[str, int]:
    """Bytes that a rank holds throughout, by what holds them; a tied weight counts once.

    Complexity: O(parameters of the rank's stages).
    """
    holders: Counter[str] = Counter()
    seen: set[tuple[str, str]] = set()
    for stage in plan.stages:
        if rank not in stage.flat_ranks:
            continue
        for layer in plan.model.module(stage.module).layers[slice(*stage.layers)]:
            for parameter in layer.parameters():
                if (stage.module, parameter.name) in seen:
                    continue
                seen.add((stage.module, parameter.name))
                _add_parameter(holders, plan, stage, (layer, parameter))
    return dict(holders)


def peak_bytes(lowered: Lowered, table: MemoryTable) -> dict[int, int]:
    """Rank -> most bytes held at once, walking its program in order."""
    return {rank: _peak(lowered.plan, table, rank)[0] for rank in lowered.plan.ranks}


def check_memory(lowered: Lowered, table: MemoryTable) -> None:
    """Refuse a plan that does not fit: ValueError with rank, action, largest holders and what would do.

    A node whose ranks share cores shares its memory too: the peaks of its ranks are added.
    """
    plan = lowered.plan
    peaks = {rank: _peak(plan, table, rank) for rank in plan.ranks}
    for index, node in enumerate(plan.cluster.nodes):
        ranks = [rank for rank in plan.ranks if plan.cluster.node_of(rank) == index]
        groups = [ranks] if node.num_cores is not None else [[rank] for rank in ranks]
        for group in groups:
            total = sum(peaks[rank][0] for rank in group)
            if total <= node.memory_bytes:
                continue
            worst = max(group, key=lambda rank: (peaks[rank][0], -rank))
            raise ValueError(
                f"rank {worst}{_others(group)} does not fit: {_gib(total)} {_during(peaks[worst][1])}, "
                f"but node {index} ({node.device}) has {_gib(node.memory_bytes)}; largest holders: "
                f"{_holders(lowered, table, worst)}; want memory_bytes >= {total} ({_gib(total)}), "
                "or recompute, sharding or more stages"
            )


def _gib(num_bytes: int) -> str:
    return f"{gib(num_bytes):.3g} GiB"


def _during(action: Action | None) -> str:
    return "at rest" if action is None else f"during {action}"


def _peak(plan: Plan, table: MemoryTable, rank: int) -> tuple[int, Action | None]:
    held = most = table.static_bytes[rank]
    moment: Action | None = None
    for action in plan.program.get(rank, ()):
        held += table.acquired_bytes.get((rank, action), 0)
        if held > most:
            most, moment = held, action
        held -= table.released_bytes.get((rank, action), 0)
    return most, moment


def _others(group: list[int]) -> str:
    return f" (with the {len(group) - 1} others of its node)" if len(group) > 1 else ""


def _holders(lowered: Lowered, table: MemoryTable, rank: int) -> str:
    """The largest holders at the rank's peak, e.g. `optimizer of llm 4.20 GiB`."""
    holders = Counter(static_holders(lowered.plan, rank))
    moment = _peak(lowered.plan, table, rank)[1]
    if moment is not None:
        for action in lowered.plan.program.get(rank, ()):
            holders[_alive(action)] += table.acquired_bytes.get((rank, action), 0)
            if action == moment:
                break
            name = _alive(action)
            holders[name] -= table.released_bytes.get((rank, action), 0)
    largest = sorted(holders.items(), key=lambda item: (-item[1], item[0]))[:NUM_HOLDERS_NAMED]
    return ", ".join(f"{name} {_gib(num_bytes)}" for name, num_bytes in largest)


def _alive(action: Action) -> str:
    return f"activations of stage {action.stage}"


def _add_parameter(holders: Counter[str], plan: Plan, stage: Stage, owned: tuple[Layer, Parameter]) -> None:
    layer, parameter = owned
    settings = plan.settings.of(stage.module)
    per_parameter = state_bytes(plan.settings.precision.num_bytes)
    elements = parameter.num_elements / (1 if parameter.shard is Shard.REPLICATED else stage.tp)
    # Parts of a sharded state: its holders over the copies that are kept.
    parts = max(1, len(plan.replicas(stage.module)) * stage.cp // settings.instances)
    cut = {level: parts if settings.sharding in levels else 1 for level, levels in _SHARDED.items()}
    name = stage.module
    holders[f"parameters of {name}"] += ceil(elements * per_parameter.weight / cut["weight"])
    if layer.trainable:
        holders[f"gradients of {name}"] += ceil(elements * per_parameter.gradient / cut["gradient"])
        holders[f"optimizer of {name}"] += ceil(elements * per_parameter.optimizer / cut["optimizer"])


# What each level of sharding cuts (Rajbhandari et al. 2020, "ZeRO": stages 1, 2 and 3).
_SHARDED = {
    "weight": (Sharding.PARAMETERS,),
    "gradient": (Sharding.GRADIENTS, Sharding.PARAMETERS),
    "optimizer": (Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS),
}


@dataclass(frozen=True, slots=True)
class _StageBytes:
    """Bytes of one stage over one microbatch on one rank."""

    saved: int
    forward_working: int
    backward_working: int


class _Accounts:
    """Collects what every action takes and gives back."""

    def __init__(self, lowered: Lowered) -> None:
        self._lowered, self._plan = lowered, lowered.plan
        self._routing = Routing(self._plan)
        self._known: dict[tuple[object, ...], _StageBytes] = {}
        self._backwards: dict[tuple[int | None, int | None], list[Action]] = {}
        for program in self._plan.programs:
            for action in program.actions:
                if action.kind in (Pass.B, Pass.I, Pass.W):
                    passes = self._backwards.setdefault((action.stage, action.microbatch), [])
                    if action not in passes:
                        passes.append(action)
        self.acquired: Counter[tuple[int, Action]] = Counter()
        self.released: Counter[tuple[int, Action]] = Counter()

    def add_passes(self, stage: Stage, microbatch: Microbatch) -> None:
        forward = Action(stage.id, Pass.F, microbatch.index)
        backwards = self._backwards.get((stage.id, microbatch.index), [])
        size = self._stage_bytes(stage, microbatch)
        saved = size.saved if backwards else 0
        for rank in stage.flat_ranks:
            self._hold(rank, forward, size.forward_working + self._received(forward, rank))
            for backward in backwards:
                self._hold(rank, backward, size.backward_working + self._received(backward, rank))
            if backwards:
                self.acquired[rank, forward] += saved
                self.released[rank, backwards[-1]] += saved

    def add_local_boundaries(self) -> None:
        """A tensor that stays on its rank lives from its producer's start to its consumer's end."""
        for transfer in self._lowered.transfers:
            if transfer.route is Route.LOCAL:
                self.acquired[transfer.source_rank, transfer.producer] += transfer.num_bytes
                self.released[transfer.source_rank, transfer.consumer] += transfer.num_bytes

    def _hold(self, rank: int, action: Action, num_bytes: int) -> None:
        """Taken at the start, given back at the end."""
        self.acquired[rank, action] += num_bytes
        self.released[rank, action] += num_bytes

    def _received(self, action: Action, rank: int) -> int:
        rows = (self._lowered.transfers[row] for row in self._lowered.inputs.get(action, ()))
        return sum(
            row.num_bytes for row in rows if row.route is not Route.LOCAL and rank in row.destination_ranks
        )

    def _stage_bytes(self, stage: Stage, microbatch: Microbatch) -> _StageBytes:
        needs = self._routing.flow(microbatch).needs[stage.module][slice(*stage.layers)]
        work = work_of(self._plan, microbatch)
        key = (stage.module, stage.layers, stage.tp, stage.cp, needs, work)
        if key not in self._known:
            self._known[key] = self._sum(stage, needs, work)
        return self._known[key]

    def _sum(self, stage: Stage, needs: tuple[Needs, ...], work: Work) -> _StageBytes:
        plan, grid, size = self._plan, Grid(stage.tp, stage.cp), self._plan.settings.precision.num_bytes
        layers = plan.model.module(stage.module).layers[slice(*stage.layers)]
        saved = [
            saved_bytes(layer, need, work, grid, size) for layer, need in zip(layers, needs, strict=True)
        ]
        working = max(working_bytes(layer, work, grid, size) for layer in layers)
        if plan.settings.of(stage.module).recompute is Recompute.NONE:
            return _StageBytes(sum(saved), working, working)
        entering = [self._entering(stage, index, work) for index in range(*stage.layers)]
        kept = sum(num_bytes for num_bytes, need in zip(entering, needs, strict=True) if need.any)
        return _StageBytes(kept, working, working + max(saved))

    def _entering(self, stage: Stage, index: int, work: Work) -> int:
        """Bytes of a layer's input; a module's first layer reads indices or pixels, which are not counted."""
        if index == 0:
            return 0
        before = self._plan.model.module(stage.module).layers[index - 1]
        tokens = work.tokens(before.emits) / stage.cp
        return round(tokens * before.out_width * self._plan.settings.precision.num_bytes)
