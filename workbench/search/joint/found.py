"""What a search found: the best plan, where it came from, and every candidate."""

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.plan.plan import Plan
from workbench.search.joint.proposals import Moves
from workbench.search.joint.starts import Start


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One candidate of a search's log.

    Args:
        index: from 1; starts have none.
        base: what the moves are from: a candidate's index, or a start's name.
        value: None: refused.
        accepted: whether it became one of the choices that others are made from.
    """

    index: int
    base: int | str
    moves: Moves
    value: float | None
    refusal: str = ""
    accepted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How far a search is."""

    best: float
    best_from: str
    lower_bound: float
    candidates: int
    seconds: float

    @property
    def gap(self) -> float:
        """What the best may be above the optimum, as a part of the best."""
        return gap_of(self.best, self.lower_bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found.

    Args:
        plan: the best; the plan of a start where nothing was better.
        value: the judge's.
        best_from: the strategy whose plan it came from.
        path: the candidates from that plan to the best, in order.
        lower_bound: no plan has a lower value; 0 where none is known.
        candidates: that were built, checked, priced and judged, starts aside.
        seconds: all of the search.
        search_s: of these, behind the starts.
        starts: every strategy, with its plan or its refusal.
        log: every candidate.
        front: where it is kept, candidates by their place in the log whose plans, among all that had a value,
            no other beats by more than a little in time, memory, GPUs and dollars; the fastest first.
        runners_up: plans of the other choices that the search held, with their values, best first.
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
        """Of the time behind the starts."""
        return self.candidates / self.search_s if self.search_s > 0 else 0.0

    @property
    def gap(self) -> float:
        """What the value may be above the optimum, as a part of the value."""
        return gap_of(self.value, self.lower_bound)

    @property
    def best_start(self) -> Start:
        """The best of the strategies' plans."""
        return min((each for each in self.starts if each.value is not None), key=value_of)


def gap_of(value: float, lower_bound: float) -> float:
    """(value - lower bound) / value."""
    return (value - lower_bound) / value if value > 0 else 0.0


def path_of(log: Sequence[Entry], index: int | str) -> tuple[Entry, ...]:
    """The candidates from a start to one of them."""
    found: list[Entry] = []
    while isinstance(index, int):
        entry = log[index - 1]
        found.append(entry)
        index = entry.base
    return tuple(reversed(found))


def value_of(start: Start) -> float:
    """Of a start that has a plan."""
    assert start.value is not None, "of starts with a plan"
    return start.value
