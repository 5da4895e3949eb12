"""How long an action takes that was timed alone: its ranks' own work, and the collectives between them."""

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from runtime.emulation.thread_mesh import CollectiveSpan
from workbench.schedule.action import STEP, Action

ExchangeSeconds = Callable[[CollectiveSpan], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWork:
    """One action on one rank, with the time of others taken out.

    Args:
        own_s: what the rank itself was busy.
        exchanges: collectives in the order in which the rank waited for them; their times count
            from the action's start, in the rank's own time.
    """

    own_s: float
    exchanges: tuple[CollectiveSpan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """What the actions of one step took, each timed alone; or the medians of several steps.

    Args:
        works: pass -> rank of its stage -> its own work.
        steps_s: rank -> seconds of its STEP.
    """

    works: Mapping[Action, Mapping[int, OwnWork]]
    steps_s: Mapping[int, float]

    def durations_s(self, exchange_s: ExchangeSeconds) -> dict[Action, float]:
        """Seconds of every pass, and of the slowest STEP.

        Args:
            exchange_s: seconds of a collective inside a pass, as the links would have it.
        """
        passes = {action: composed_s(works, exchange_s) for action, works in self.works.items()}
        return passes | {STEP: max(self.steps_s.values())}


def median_timings(steps: Sequence[Timings]) -> Timings:
    """The median of everything over steps of one plan."""
    first = steps[0]
    return Timings(
        works={
            action: {rank: median_work([step.works[action][rank] for step in steps]) for rank in by_rank}
            for action, by_rank in first.works.items()
        },
        steps_s={rank: statistics.median(step.steps_s[rank] for step in steps) for rank in first.steps_s},
    )


class Absences:
    """Times in which a rank did not run for itself, ascending and disjoint; look-ups are O(log n)."""

    def __init__(self, away_s: Sequence[tuple[float, float]]) -> None:
        self._from = [start_s for start_s, _ in away_s]
        self._until = [end_s for _, end_s in away_s]
        self._before = [0.0]
        for start_s, end_s in away_s:
            self._before.append(self._before[-1] + end_s - start_s)

    def own_s(self, start_s: float, end_s: float) -> float:
        """Seconds of [start, end] in which it was not away; neither end lies inside an absence."""
        first, last = bisect_left(self._from, start_s), bisect_right(self._until, end_s)
        return end_s - start_s - max(0.0, self._before[last] - self._before[min(first, last)])


def own_work(
    start_s: float,
    end_s: float,
    absences: Absences,
    exchanges: Sequence[CollectiveSpan],
    starts_s: Sequence[float],
) -> OwnWork:
    """An action's span as own time; `starts_s` are those of the exchanges, ascending."""
    inside = exchanges[bisect_left(starts_s, start_s) : bisect_right(starts_s, end_s)]
    return OwnWork(
        own_s=absences.own_s(start_s, end_s),
        exchanges=tuple(
            replace(
                exchange,
                start_s=absences.own_s(start_s, exchange.start_s),
                wait_s=(absences.own_s(start_s, exchange.wait_s[0]),) * 2,
            )
            for exchange in inside
        ),
    )


def median_work(works: Sequence[OwnWork]) -> OwnWork:
    """The median of every time over repetitions of one action on one rank."""
    median = statistics.median
    exchanges = [
        replace(
            repeats[0],
            start_s=median(exchange.start_s for exchange in repeats),
            wait_s=(median(exchange.wait_s[0] for exchange in repeats),) * 2,
        )
        for repeats in zip(*(work.exchanges for work in works), strict=True)
    ]
    return OwnWork(own_s=median(work.own_s for work in works), exchanges=tuple(exchanges))


def composed_s(works: Mapping[int, OwnWork], exchange_s: ExchangeSeconds) -> float:
    """Seconds from when all ranks of an action start it together until the last one ends.

    A rank works until it waits for a collective; that starts when all of its group have come to it
    and the one before has ended for each of them, and takes `exchange_s`. Without collectives it is
    the slowest rank's work.

    Complexity: O(ranks x exchanges) where a collective starts soon before it is waited for.
    """
    delays_s: dict[int, list[tuple[float, float]]] = {rank: [(0.0, 0.0)] for rank in works}
    ended_s = dict.fromkeys(works, 0.0)
    for met in _meetings(works):
        came_s = max(_moment_s(delays_s[rank], exchange.start_s) for rank, exchange in met.items())
        end_s = max(came_s, *(ended_s[rank] for rank in met)) + exchange_s(next(iter(met.values())))
        for rank, exchange in met.items():
            ended_s[rank] = end_s
            waits_s = exchange.wait_s[0]
            here_s = _moment_s(delays_s[rank], waits_s)
            delays_s[rank].append((waits_s, max(here_s, end_s) - waits_s))
    return max(delays_s[rank][-1][1] + work.own_s for rank, work in works.items())


def _meetings(works: Mapping[int, OwnWork]) -> Iterator[dict[int, CollectiveSpan]]:
    """Collectives by rank, each when it is next on all ranks of its group; groups may differ in number.

    Raises:
        ValueError: some rank's next one never is.
    """
    done = dict.fromkeys(works, 0)
    waiting = list(works)
    for rank in waiting:  # grows while we walk it
        if done[rank] == len(works[rank].exchanges):
            continue
        members = works[rank].exchanges[done[rank]].ranks
        met = {
            other: works[other].exchanges[done[other]]
            for other in members
            if other in works and done[other] < len(works[other].exchanges)
        }
        if len(met) == len(members) and {exchange.ranks for exchange in met.values()} == {members}:
            for other in met:
                done[other] += 1
            yield met
            waiting.extend(met)
    if any(done[rank] < len(work.exchanges) for rank, work in works.items()):
        counts = sorted({len(work.exchanges) for work in works.values()})
        raise ValueError(f"ranks {list(works)} reached different numbers of collectives: {counts}")


def _moment_s(delays_s: Sequence[tuple[float, float]], own_s: float) -> float:
    """When a rank has worked so long; `delays_s` are (own time of a wait, all waiting until after it)."""
    return own_s + next(delay_s for since_s, delay_s in reversed(delays_s) if since_s <= own_s)
