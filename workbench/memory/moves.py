"""Weights that a rank's actions move: to and from a host, and of sharded layers from and to their peers."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from workbench.memory.accounts import Accounts
from workbench.memory.holdings import Part
from workbench.memory.stage import GRADIENTS
from workbench.plan.parameter_shards import kept_stages
from workbench.plan.shard_unit import ShardUnit
from workbench.schedule.action import MEANING, MOVES, Action, Pass

PART_OF = {"parameters": Part.WEIGHTS, GRADIENTS: Part.GRADIENTS, "optimizer": Part.OPTIMIZER}


class Moved(NamedTuple):
    """What is moved at once: bytes by part, and of all parts."""

    parts: Mapping[Part, int]
    num_bytes: int


class Move(NamedTuple):
    """What appears when an action of a rank's program starts, or goes when it ends.

    Args:
        position: of the action in the program.
        is_acquired: whether it appears.
        stage: whose it is.
        moved: what.
    """

    position: int
    is_acquired: bool
    stage: int
    moved: Moved


class Moves:
    """Moves of ranks; equal units are added up once."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts, self._plan = accounts, accounts.plan
        self._kept = kept_stages(accounts.plan)
        self._whole: dict[int, Moved] = {}
        self._sent: dict[int, Moved] = {}

    def of(self, rank: int) -> Iterator[Move]:
        """Yield what a rank offloads, onloads, gathers and frees.

        Complexity: O(length of the program x distance of a stage's actions).
        """
        program, units = self._plan.program.get(rank, ()), self._accounts.units
        moves = [(index, a.kind, a.stage) for index, a in enumerate(program) if a.kind in MOVES]
        offloaded = {stage for _, _, stage in moves if stage is not None and stage not in units}
        moved = self._state(rank, offloaded) if offloaded else {}
        for index, kind, stage in moves:
            assert stage is not None
            held = self._whole_of(units[stage]) if stage in units else moved.get(stage)
            if held is not None:
                yield Move(index, MEANING[kind].weights > 0, stage, held)
            if kind is Pass.ALL_GATHER and stage in self._kept:
                sent = self._sent_of(units[stage])
                yield Move(index, True, stage, sent)  # noqa: FBT003  (a keyword takes twice as long)
                yield Move(_next_of(program, index), False, stage, sent)  # noqa: FBT003

    def _state(self, rank: int, stages: Collection[int]) -> dict[int, Moved]:
        """Return weights and optimizer state of stages."""
        by_stage: dict[int, Counter[Part]] = {}
        for stage, kind, num_bytes in self._accounts.state(rank):
            if stage.id in stages and kind.part != GRADIENTS:
                by_stage.setdefault(stage.id, Counter())[PART_OF[kind.part]] += num_bytes
        return {stage: Moved(parts, sum(parts.values())) for stage, parts in by_stage.items()}

    def _whole_of(self, unit: ShardUnit) -> Moved:
        """Return what a round holds from its gather to FREE: the whole weights, padded.

        Of weights that are freed after every pass also the rank's own shard as it is sent.
        """
        if id(unit) not in self._whole:
            size = self._plan.settings.precision.num_bytes
            parts = {Part.GATHERED: sum(map(unit.padded, unit.gathered)) * size}
            if unit.stages[0] not in self._kept:
                parts |= self._sent_of(unit).parts
            self._whole[id(unit)] = Moved(parts, sum(parts.values()))
        return self._whole[id(unit)]

    def _sent_of(self, unit: ShardUnit) -> Moved:
        """Return the rank's own shard as it is sent."""
        if id(unit) not in self._sent:
            num_bytes = sum(map(unit.part, unit.gathered)) * self._plan.settings.precision.num_bytes
            self._sent[id(unit)] = Moved({Part.COLLECTIVES: num_bytes}, num_bytes)
        return self._sent[id(unit)]


def _next_of(program: Sequence[Action], index: int) -> int:
    """Return the position of the next action of the same stage."""
    stage = program[index].stage
    return next(other for other in range(index + 1, len(program)) if program[other].stage == stage)
