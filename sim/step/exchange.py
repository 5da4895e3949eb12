"""Rounds of sharded weights: gathers and reductions of a unit, each a rendezvous of all its ranks."""

from collections.abc import Callable, Iterator, Mapping
from math import isnan, nan

from simpy.core import Environment

from sim.clock import after
from workbench.plan.lowered import Lowered
from workbench.plan.parameter_shards import ShardUnit, sharded_stages
from workbench.schedule.action import Action
from workbench.schedule.sharded import is_exchange, waits_of


class Exchange:
    """One gather or reduction: starts when all ranks of the unit are at it, holds them until it ends."""

    __slots__ = ("duration_s", "end_s", "missing", "name", "ranks", "start_s")

    def __init__(self, name: Action, unit: ShardUnit, duration_s: float) -> None:
        self.name = name
        self.ranks = unit.ranks
        self.missing = len(unit.ranks)
        self.duration_s = duration_s
        self.start_s = nan
        self.end_s = nan

    @property
    def has_ended(self) -> bool:
        return not isnan(self.end_s)


class ExchangeNames:
    """Exchanges by the name that all replicas give them: the action of the unit's first stage."""

    def __init__(self, lowered: Lowered) -> None:
        self.units = sharded_stages(lowered.plan)

    def of(self, action: Action) -> Action:
        """What an UNSHARD or REDUCE_GRAD of any replica is called."""
        return action._replace(stage=self.units[action.stage or 0].stages[0])

    def is_one(self, action: Action) -> bool:
        """Whether an action is an exchange."""
        return is_exchange(action, self.units)

    def on(self, actions: tuple[Action, ...]) -> Iterator[Action]:
        """The exchanges of a program, in order, by the program's own names."""
        return filter(self.is_one, actions)

    def awaited(self, actions: tuple[Action, ...]) -> dict[Action, tuple[Action, ...]]:
        """Action of a program -> exchanges that it waits for."""
        waits = waits_of(actions, self.units)
        return {action: tuple(map(self.of, found)) for action, found in waits.items()}

    def durations_s(self, lowered: Lowered, duration_s: Mapping[Action, float]) -> dict[Action, float]:
        """Seconds of every exchange: the most that any replica's action is priced at."""
        found: dict[Action, float] = {}
        for action in filter(self.is_one, lowered.plan.program_actions):
            name = self.of(action)
            found[name] = max(found.get(name, 0.0), duration_s[action])
        return found


class ExchangeLanes:
    """Runs exchanges beside the passes, each rank's in program order.

    Args:
        env: the clock.
        lowered: programs and units.
        duration_s: price of each action.
        ended: called with the name of an exchange when it ends.
    """

    def __init__(
        self,
        env: Environment,
        lowered: Lowered,
        duration_s: Mapping[Action, float],
        ended: Callable[[Action], None],
    ) -> None:
        self._env, self._ended = env, ended
        self.names = ExchangeNames(lowered)
        prices = self.names.durations_s(lowered, duration_s)
        units = self.names.units
        self.exchanges = {name: Exchange(name, units[name.stage or 0], s) for name, s in prices.items()}
        self._lanes: dict[int, list[Exchange]] = {}
        for program in lowered.plan.programs:
            lane = [self.exchanges[self.names.of(action)] for action in self.names.on(program.actions)]
            self._lanes |= dict.fromkeys(program.ranks, lane) if lane else {}
        self._position = dict.fromkeys(self._lanes, 0)
        self._num_issued = dict.fromkeys(self._lanes, 0)

    def issue(self, rank: int) -> None:
        """The passes before the rank's next exchange have ended."""
        self._num_issued[rank] += 1
        if self._num_issued[rank] == self._position[rank] + 1:
            self._join(self._lanes[rank][self._position[rank]])

    def of(self, action: Action) -> Exchange:
        """The exchange that an action is part of."""
        return self.exchanges[self.names.of(action)]

    def stuck(self, rank: int) -> tuple[Action, list[int]] | None:
        """The issued exchange of a rank that never ended, and the ranks that it waits for."""
        if rank not in self._lanes or self._position[rank] == self._num_issued[rank]:
            return None
        found = self._lanes[rank][self._position[rank]]
        return found.name, [other for other in found.ranks if not self._is_at(other, found)]

    def _is_at(self, rank: int, exchange: Exchange) -> bool:
        position = self._position[rank]
        return position < self._num_issued[rank] and self._lanes[rank][position] is exchange

    def _join(self, exchange: Exchange) -> None:
        exchange.missing -= 1
        if exchange.missing == 0:
            exchange.start_s = self._env.now
            after(self._env, exchange.duration_s, self._end, exchange)

    def _end(self, exchange: Exchange) -> None:
        exchange.end_s = self._env.now
        for rank in exchange.ranks:
            self._position[rank] += 1
            if self._position[rank] < self._num_issued[rank]:
                self._join(self._lanes[rank][self._position[rank]])
        self._ended(exchange.name)
