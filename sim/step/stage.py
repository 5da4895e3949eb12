"""Compute lanes: an action starts when it is next on every rank of its stage and its inputs are there."""

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import partial
from math import isnan, nan

from simpy.core import Environment

from sim.clock import after
from sim.cores import SharedCores
from sim.step.exchange import ExchangeNames
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Program
from workbench.schedule.action import STEP, Action, Pass


class Turn:
    """An action, and how much it still waits for: programs, input rows, reductions."""

    __slots__ = (
        "action",
        "cores",
        "duration_s",
        "end_s",
        "missing",
        "programs",
        "rows",
        "start_s",
        "working",
    )

    def __init__(self, action: Action, duration_s: float) -> None:
        self.action = action
        self.duration_s = duration_s
        self.missing = 0
        self.programs: list[int] = []
        self.rows: tuple[int, ...] = ()  # that its end makes ready
        self.cores: tuple[SharedCores[Turn] | None, ...] = (None,)  # one entry per part of the work
        self.working = 0  # parts that have not ended
        self.start_s = nan
        self.end_s = nan

    @property
    def has_ended(self) -> bool:
        return not isnan(self.end_s)


class _Aside(Enum):
    """What a program issues and another lane does."""

    REDUCTION = "reduction"
    EXCHANGE = "exchange"


_Turns = tuple[Turn, ...] | _Aside


class ComputeLanes:
    """The passes and steps of all ranks, in program order.

    Ranks with the same program advance together, so a lane here is a program. The STEP is
    each rank's own, because it waits for that rank's reductions; it is the last action.
    Gathers and reductions of sharded weights are issued on the way; passes wait for those they need.

    Args:
        env: the clock.
        lowered: programs, and the rows that actions wait for and make ready.
        duration_s: price of each action.
        step_s: price of each rank's STEP.
    """

    def __init__(
        self,
        env: Environment,
        lowered: Lowered,
        duration_s: Mapping[Action, float],
        step_s: Mapping[int, float],
    ) -> None:
        self._env = env
        self._send: Callable[[int], None]
        self._issue: Callable[[int, int], None]
        self._issue_exchange: Callable[[int], None]
        self._began: Callable[[Action, float], None]
        self._programs = lowered.plan.programs
        self.position = [-1] * len(self._programs)
        self._num_issued = [0] * len(self._programs)
        self._place = _places(lowered, partial(SharedCores, env, done=self._end_part))
        self.turns: dict[Action, Turn] = {}
        self.steps: dict[int, Turn] = {}
        self._step_s = step_s
        self._names = ExchangeNames(lowered)
        self._lanes = [self._lane(index, program, duration_s) for index, program in enumerate(self._programs)]
        self._readers: dict[int, list[Turn]] = {}
        self._waiting: dict[Action, dict[Turn, None]] = {}  # by exchange
        self._connect(lowered)

    def start(
        self,
        *,
        send: Callable[[int], None],
        issue: Callable[[int, int], None],
        issue_exchange: Callable[[int], None],
        began: Callable[[Action, float], None],
    ) -> None:
        """Let every program come to its first action.

        Args:
            send: called with a row that has become ready.
            issue: called with (rank, n) when the rank may do its nth REDUCE_GRAD of whole weights.
            issue_exchange: called with a rank when it may do its next exchange of sharded ones.
            began: called with a pass that has begun, and its duration alone on its cores.
        """
        self._send, self._issue, self._issue_exchange = send, issue, issue_exchange
        self._began = began
        for index in range(len(self._programs)):
            self._advance(index)

    @property
    def shares_cores(self) -> bool:
        """Whether some ranks share fewer cores than they are."""
        return any(cores is not None for cores in self._place)

    def arrived(self, row: int) -> None:
        """A row is there."""
        for turn in self._readers.get(row, ()):
            self._less_to_wait(turn)

    def reduced(self, rank: int) -> None:
        """One of the rank's reductions has ended."""
        if rank in self.steps:
            self._less_to_wait(self.steps[rank])

    def exchanged(self, name: Action) -> None:
        """A gather or a reduction of sharded weights has ended."""
        for turn in self._waiting.get(name, ()):
            self._less_to_wait(turn)

    def _lane(self, index: int, program: Program, duration_s: Mapping[Action, float]) -> list[_Turns]:
        """What each action of a program is here: a turn, a turn per rank, or what another lane does."""
        lane: list[_Turns] = []
        for action in program.actions:
            if self._names.is_one(action):
                lane.append(_Aside.EXCHANGE)
            elif action.kind is Pass.REDUCE_GRAD:
                lane.append(_Aside.REDUCTION)
            elif action.kind is Pass.STEP:
                steps = {rank: Turn(action, self._step_s[rank]) for rank in program.ranks}
                for rank, step in steps.items():
                    step.missing = 1 + lane.count(_Aside.REDUCTION)
                    step.cores = self._parts((rank,))
                self.steps |= steps
                lane.append(tuple(steps.values()))
            else:
                if action not in self.turns:
                    self.turns[action] = Turn(action, duration_s[action])
                self.turns[action].programs.append(index)
                lane.append((self.turns[action],))
        return lane

    def _connect(self, lowered: Lowered) -> None:
        """Tell every turn its place, its inputs and its outputs."""
        parts = {stage.id: self._parts(stage.flat_ranks) for stage in lowered.plan.stages}
        after = {row.row for row in lowered.transfers if row.after is not None}
        for action, turn in self.turns.items():
            turn.cores = parts[action.stage or 0]
            # A row that follows another, like a broadcast, is sent by the network.
            turn.rows = tuple(row for row in lowered.outputs.get(action, ()) if row not in after)
            rows = lowered.inputs.get(action, ())
            turn.missing = len(turn.programs) + len(rows)
            for row in rows:
                self._readers.setdefault(row, []).append(turn)
        for program in lowered.plan.programs:
            for action, names in self._names.awaited(program.actions).items():
                if action.kind is Pass.REDUCE_GRAD:  # of the reduce lane
                    continue
                turns = [self.turns[action]] if action != STEP else [self.steps[r] for r in program.ranks]
                for turn in turns:
                    self._wait_for(turn, names)

    def _wait_for(self, turn: Turn, names: Iterable[Action]) -> None:
        """Programs that share a turn wait for the same exchanges: each counts once."""
        for name in names:
            waiting = self._waiting.setdefault(name, {})
            turn.missing += turn not in waiting
            waiting[turn] = None

    def _parts(self, ranks: tuple[int, ...]) -> tuple[SharedCores[Turn] | None, ...]:
        """Where the work is done: one part per rank on shared cores, one for all other ranks."""
        places = [self._place[rank] for rank in ranks]
        shared = tuple(place for place in places if place is not None)
        return shared if len(shared) == len(places) else (*shared, None)

    def _advance(self, index: int) -> None:
        """Come to the program's next pass; reductions on the way are issued, not waited for."""
        lane = self._lanes[index]
        self.position[index] += 1
        while self.position[index] < len(lane):
            found = lane[self.position[index]]
            if not isinstance(found, _Aside):
                for turn in found:
                    self._less_to_wait(turn)
                return
            self._issue_on(index, found)
            self.position[index] += 1

    def _issue_on(self, index: int, aside: _Aside) -> None:
        for rank in self._programs[index].ranks:
            if aside is _Aside.EXCHANGE:
                self._issue_exchange(rank)
            else:
                self._issue(rank, self._num_issued[index])
        self._num_issued[index] += aside is _Aside.REDUCTION

    def _less_to_wait(self, turn: Turn) -> None:
        turn.missing -= 1
        if turn.missing == 0:
            self._begin(turn)

    def _begin(self, turn: Turn) -> None:
        turn.start_s = self._env.now
        self._began(turn.action, turn.duration_s)
        turn.working = len(turn.cores)
        for cores in turn.cores:
            if cores is None:
                after(self._env, turn.duration_s, self._end_part, turn)
            else:
                cores.work(turn.duration_s, turn)

    def _end_part(self, turn: Turn) -> None:
        turn.working -= 1
        if turn.working:
            return
        turn.end_s = self._env.now
        for row in turn.rows:
            self._send(row)
        for index in turn.programs:
            self._advance(index)


def _places(
    lowered: Lowered, shared_cores: Callable[[int], SharedCores[Turn]]
) -> list[SharedCores[Turn] | None]:
    """Rank -> the cores it shares, None where it has a device of its own."""
    places: list[SharedCores[Turn] | None] = []
    for node in lowered.plan.cluster.nodes:
        is_shared = node.num_cores is not None and node.num_cores < node.num_ranks
        cores = shared_cores(node.num_cores or 1) if is_shared else None
        places.extend([cores] * node.num_ranks)
    return places
