"""The result of a joint search: the best plan, how it was derived, and every candidate."""

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.plan.plan import Plan
from workbench.search.joint.proposals import Moves
from workbench.search.joint.starts import Start


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One candidate in the search's log.

    Args:
        index: from 1; starts have none.
        base: what the moves were applied to: a candidate's index or a start's name.
        value: None: refused.
        accepted: whether it became an incumbent.
    """

    index: int
    base: int | str
    moves: Moves
    value: float | None
    refusal: str = ""
    accepted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Progress of a running search."""

    best: float
    best_from: str
    lower_bound: float
    candidates: int
    seconds: float

    @property
    def gap(self) -> float:
        """Upper bound on the distance to the optimum, relative to the best value."""
        return gap_of(self.best, self.lower_bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The result of a joint search.

    Args:
        plan: the best one; a start's own plan if nothing was better.
        value: the judge's value of it.
        best_from: name of the start that it was derived from.
        path: the candidates from that start to the best, in order.
        lower_bound: no plan has a lower value; 0 if none is known.
        candidates: number of those built, checked, priced and judged, without the starts.
        seconds: of the whole search.
        search_s: of these, those after the starts.
        starts: every strategy, with its plan or its refusal.
        log: every candidate.
        front: if kept, the candidates, by index in the log, whose plans no other beats by more than a
            little in time, memory, GPUs and dollars; fastest first.
        runners_up: plans of the other incumbents with their values, best first.
    """

    plan: Plan
    value: float
    best_from: str
    path: tuple[Entry, ...]
    lower_bound: float
    candidates: int
    seconds: float
    search_s: float
    starts: tuple[Start, ...]
    log: tuple[Entry, ...]
    runners_up: tuple[tuple[float, Plan], ...] = ()
    front: tuple[tuple[int, Plan], ...] = ()

    @property
    def candidates_per_s(self) -> float:
        """Candidates per second after the starts."""
        return self.candidates / self.search_s if self.search_s > 0 else 0.0

    @property
    def gap(self) -> float:
        """Upper bound on the distance to the optimum, relative to the value."""
        return gap_of(self.value, self.lower_bound)

    @property
    def best_start(self) -> Start:
        """The best of the strategies' plans."""
        return min((start for start in self.starts if start.value is not None), key=value_of)


def gap_of(value: float, lower_bound: float) -> float:
    """(value - lower bound) / value."""
    return (value - lower_bound) / value if value > 0 else 0.0


def path_of(log: Sequence[Entry], index: int | str) -> tuple[Entry, ...]:
    """The candidates from a start to the one of this index."""
    path: list[Entry] = []
    while isinstance(index, int):
        entry = log[index - 1]
        path.append(entry)
        index = entry.base
    return tuple(reversed(path))


def value_of(start: Start) -> float:
    """The value of a start that has a plan."""
    assert start.value is not None, "the start has a plan"
    return start.value
