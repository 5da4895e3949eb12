"""Checks that programs gather sharded weights before use, free them, and reduce their gradients."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from workbench.plan.instance_cache import cached_on_instance
from workbench.plan.plan import Plan
from workbench.plan.shard_unit import ShardUnit
from workbench.schedule.action import COMPUTE, FSDP, ROUND, Action, Order, Pass, by_stage

_IN_ROUNDS = frozenset((*COMPUTE, *ROUND))


def check_rounds(plan: Plan, units: tuple[ShardUnit, ...], twins: Mapping[int, int]) -> None:
    """Raise ValueError where programs of sharded stages do not gather, free and reduce as they must.

    The rounds of every stage are ALL_GATHER n, passes, FREE n, and REDUCE_SCATTER n after a backward that
    trains; all stages of a unit have the same rounds. `waits_of` says what waits for what.

    Args:
        plan: with programs.
        units: its shard units.
        twins: stage -> another one with the same rounds; of a unit, one of them is checked.
    """
    rounds_of: dict[tuple[Order, bool], Order] = {}  # most layers are alike
    ranks_of: dict[tuple[tuple[int, ...], ...], list[int]] = {}  # one rank per program, by grid
    orders_on: dict[int, Mapping[int | None, Order]] = {}  # by rank
    for unit in units:
        expected: Order | None = None
        distinct: dict[int, int] = {}
        for stage in unit.stages:
            distinct.setdefault(twins.get(stage, stage), stage)
        for stage in distinct.values():
            grid = plan.stage[stage].ranks
            if grid not in ranks_of:
                first: dict[int, int] = {}  # ranks of one program break the same rules
                for rank in plan.stage[stage].flat_ranks:
                    first.setdefault(id(plan.program.get(rank)), rank)
                ranks_of[grid] = [*first.values()]
                orders_on |= {rank: _by_stage(plan, rank) for rank in ranks_of[grid]}
            for rank in ranks_of[grid]:
                key = orders_on[rank].get(stage, ()), bool(unit.trained)
                if key not in rounds_of:
                    rounds_of[key] = tuple(_rounds(rank, stage, *key))
                if expected is not None and rounds_of[key] != expected:
                    raise ValueError(
                        f"stages {unit.stages[0]} and {stage} shard their weights but differ in their "
                        f"rounds: {_spell(unit.stages[0], expected)} and "
                        f"{_spell(unit.stages[0], rounds_of[key])}"
                    )
                expected = rounds_of[key]


def _spell(stage: int, order: Order) -> str:
    return " ".join(str(Action(stage, *entry)) for entry in order)


def _rounds(rank: int, stage: int, order: Order, is_trained: bool) -> Iterator[tuple[Pass, int | None]]:  # noqa: FBT001  (part of a cache key)
    """Yield the collectives of a stage's rounds, in order."""
    state = _RoundState()
    for kind, number in order:
        if kind in _IN_ROUNDS:
            state.do(rank, Action(stage, kind, number), is_trained=is_trained)
        if kind in FSDP:
            yield kind, number
    if state.is_whole or state.owes:
        kind = Pass.FREE if state.is_whole else Pass.REDUCE_SCATTER
        raise ValueError(f"rank {rank}: {Action(stage, kind, state.number)} is missing from the program")


@cached_on_instance
def _by_stage(plan: Plan, rank: int) -> Mapping[int | None, Order]:
    return by_stage(plan.program.get(rank, ()))


@dataclass(slots=True)
class _RoundState:
    """A stage's state in its program: current round, weights gathered or not, gradients to reduce or not."""

    number: int = -1
    is_whole: bool = False
    owes: bool = False

    def do(self, rank: int, action: Action, *, is_trained: bool) -> None:
        rule = {
            Pass.ALL_GATHER: self._gather,
            Pass.FREE: self._free,
            Pass.REDUCE_SCATTER: self._scatter,
        }.get(action.kind, self._use)(action, is_trained=is_trained)
        if rule is not None:
            raise ValueError(
                f"rank {rank}: action {action} of a stage whose weights are sharded: want {rule}"
            )

    def _gather(self, action: Action, *, is_trained: bool) -> str | None:
        if self.is_whole or self.owes or action.microbatch != self.number + 1:
            return f"round {self.number + 1} here, behind all of the one before"
        self.number, self.is_whole = self.number + 1, True
        return None

    def _free(self, action: Action, *, is_trained: bool) -> str | None:
        if not self.is_whole or action.microbatch != self.number:
            return "it once, behind the ALL_GATHER of its round"
        self.is_whole = False
        return None

    def _scatter(self, action: Action, *, is_trained: bool) -> str | None:
        if self.is_whole or action.microbatch != self.number or not is_trained:
            return "it behind the FREE of its round, where weights train"
        self.owes = False
        return None

    def _use(self, action: Action, *, is_trained: bool) -> str | None:
        if not self.is_whole or action.kind in (Pass.I, Pass.W):
            return "F or B, between ALL_GATHER and FREE"
        self.owes = self.owes or (action.kind is Pass.B and is_trained)
        return None
