"""Traces of nodes that join and leave: validated, and random ones."""

import csv
import io
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from workbench.units import S_PER_HOUR

MOST_S = 10 * 365 * 86_400.0  # longest trace: ten years


class Change(StrEnum):
    JOIN = "add"
    LEAVE = "remove"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent:
    """A node joins or leaves; its leaving is announced `warned_s` in advance."""

    time_s: float
    change: Change
    node: str
    warned_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """One node from its arrival until it leaves, announced at `warned_s`; infinity means never."""

    node: str
    join_s: float
    warned_s: float
    leave_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """Joins and leaves in order of time; nodes that join at 0 are present from the start.

    Raises:
        ValueError: times that decrease or are negative, an absent node that leaves, or a present one that
            joins.
    """

    name: str
    events: tuple[NodeEvent, ...]

    def __post_init__(self) -> None:
        present: set[str] = set()
        now_s = 0.0
        for number, event in enumerate(self.events, start=1):
            prefix = f"{self.name}, event {number}"
            if not (math.isfinite(event.time_s) and event.time_s >= now_s):
                raise ValueError(
                    f"{prefix}: time goes back from {now_s} s to {event.time_s} s; want ascending times >= 0"
                )
            if event.warned_s < 0:
                raise ValueError(f"{prefix}: a warning is >= 0 s ahead, got {event.warned_s} s")
            now_s = event.time_s
            if event.change is Change.JOIN and event.node in present:
                raise ValueError(f"{prefix}: node {event.node!r} joins at {now_s} s but is there already")
            if event.change is Change.LEAVE and event.node not in present:
                raise ValueError(
                    f"{prefix}: node {event.node!r} is removed at {now_s} s but is not there; it was removed "
                    f"before, or never added: want an add event before, for initial nodes 0,add,{event.node}"
                )
            (present.add if event.change is Change.JOIN else present.remove)(event.node)

    @property
    def last_leave_s(self) -> float:
        """When the last node leaves; 0 if none does."""
        return max((e.time_s for e in self.events if e.change is Change.LEAVE), default=0.0)

    @property
    def end_s(self) -> float:
        return self.events[-1].time_s if self.events else 0.0

    @property
    def mean_between_leaves_s(self) -> float:
        """Mean gap between distinct instants at which nodes leave."""
        instants = sorted({e.time_s for e in self.events if e.change is Change.LEAVE})
        if len(instants) < 2:
            return math.inf
        return (instants[-1] - instants[0]) / (len(instants) - 1)

    def stays(self) -> tuple[Stay, ...]:
        """Every stay of positive duration, in order of arrival; no warning precedes its node's arrival.

        Complexity: O(events log events).
        """
        joined: dict[str, float] = {}
        stays: list[Stay] = []
        for event in self.events:
            if event.change is Change.JOIN:
                joined[event.node] = event.time_s
                continue
            join_s, leave_s = joined.pop(event.node), event.time_s
            warned_s = max(join_s, leave_s - event.warned_s)
            if join_s < leave_s:
                stays.append(Stay(node=event.node, join_s=join_s, warned_s=warned_s, leave_s=leave_s))
        for node, join_s in joined.items():
            stays.append(Stay(node=node, join_s=join_s, warned_s=math.inf, leave_s=math.inf))
        return tuple(sorted(stays, key=lambda stay: stay.join_s))

    def num_nodes(self) -> tuple[tuple[float, int], ...]:
        """(time, nodes from then on) at every time of change."""
        counts: dict[float, int] = {}
        present = 0
        for event in self.events:
            present += 1 if event.change is Change.JOIN else -1
            counts[event.time_s] = present
        return tuple(counts.items())


def parse_trace(name: str, text: str) -> Availability:
    """A trace from CSV with the columns t_s, event (add or remove), node.

    Raises:
        ValueError: a missing column, a cell that cannot be read, or what Availability refuses; with the line.
    """
    try:
        rows = list(csv.DictReader(io.StringIO(text)))
    except csv.Error as error:
        raise ValueError(f"{name}: want a CSV file: {error}") from None
    events = []
    for line, row in enumerate(rows, start=2):
        if not row.keys() >= {"t_s", "event", "node"}:
            raise ValueError(f"{name}, line 1: want the columns t_s, event, node, got {list(row)}")
        try:
            events.append(NodeEvent(time_s=float(row["t_s"]), change=Change(row["event"]), node=row["node"]))
            if not abs(events[-1].time_s) <= MOST_S:
                raise ValueError("too far away")
        except (TypeError, ValueError):
            raise ValueError(
                f"{name}, line {line}: want seconds up to {MOST_S:,.0f}, add or remove, and a node, got "
                f"{list(row.values())}"
            ) from None
    return Availability(name=name, events=tuple(events))


def from_counts(name: str, counts: Iterable[tuple[float, int]]) -> Availability:
    """A trace from (time, number of nodes); names are generated, the last to join leaves first.

    Raises:
        ValueError: a negative count, or times that go back.
    """
    events: list[NodeEvent] = []
    present: list[str] = []
    num_named = 0
    for time_s, count in counts:
        if count < 0:
            raise ValueError(f"{name}: {count} nodes at {time_s} s, want >= 0")
        while len(present) < count:
            num_named += 1
            present.append(f"node{num_named}")
            events.append(NodeEvent(time_s=time_s, change=Change.JOIN, node=present[-1]))
        while len(present) > count:
            events.append(NodeEvent(time_s=time_s, change=Change.LEAVE, node=present.pop()))
    return Availability(name=name, events=tuple(events))


def rescaled(trace: Availability, fewest: int, most: int, name: str) -> Availability:
    """The same times with fewest + (most - fewest) x (n - least) / (largest - least) nodes, rounded down.

    This is how the traces of Oobleck's Figure 2.10 were made from those of Bamboo; `least` is taken after
    the first join.

    Raises:
        ValueError: a trace whose number of nodes never changes, or fewest > most.
    """
    counts = trace.num_nodes()
    values = [count for _, count in counts]
    low, high = min(values), max(values)
    if low == high or not 0 <= fewest <= most:
        raise ValueError(f"{trace.name}: cannot scale {low}..{high} nodes to {fewest}..{most}")
    return from_counts(
        name, ((time, fewest + (most - fewest) * (count - low) // (high - low)) for time, count in counts)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates per node and hour at which nodes leave and missing ones are replaced."""

    leaves_per_node_h: float
    joins_per_missing_h: float = 0.0

    def __post_init__(self) -> None:
        if min(self.leaves_per_node_h, self.joins_per_missing_h) < 0:
            raise ValueError(f"rates must be >= 0, got {self}")

    @classmethod
    def of_losses(cls, mtbf_s: float, num_nodes: int, joins_per_missing_h: float = 0.0) -> "Rates":
        """Rates of a cluster that loses one of its nodes every `mtbf_s` seconds on average."""
        leaves_per_node_h = S_PER_HOUR / mtbf_s / num_nodes
        return cls(leaves_per_node_h=leaves_per_node_h, joins_per_missing_h=joins_per_missing_h)

    def mtbf_s(self, num_nodes: int) -> float:
        """Mean seconds between losses of a cluster of so many nodes; inf: none is lost."""
        losses_per_h = self.leaves_per_node_h * num_nodes
        return S_PER_HOUR / losses_per_h if losses_per_h else math.inf


def random_trace(num_nodes: int, rates: Rates, until_s: float, seed: int) -> Availability:
    """A trace of nodes that leave and return after exponential times, starting with `num_nodes`.

    Complexity: O(events), by competing rates (Gillespie 1977).
    """
    rng = random.Random(seed)
    present = [f"node{k}" for k in range(num_nodes)]
    missing: list[str] = []
    events = [NodeEvent(time_s=0.0, change=Change.JOIN, node=node) for node in present]
    now_s = 0.0
    while True:
        leave_rate = len(present) * rates.leaves_per_node_h / 3600
        arrive_rate = len(missing) * rates.joins_per_missing_h / 3600
        if leave_rate + arrive_rate == 0:
            break
        now_s += rng.expovariate(leave_rate + arrive_rate)
        if now_s > until_s:
            break
        leaves = rng.random() * (leave_rate + arrive_rate) < leave_rate
        source, target = (present, missing) if leaves else (missing, present)
        node = source.pop(rng.randrange(len(source)))
        target.append(node)
        events.append(NodeEvent(time_s=now_s, change=Change.LEAVE if leaves else Change.JOIN, node=node))
    return Availability(name=f"random, seed {seed}", events=tuple(events))


def warned(trace: Availability, notice_s: float) -> Availability:
    """The same trace with a warning before every leave."""
    return Availability(
        name=trace.name,
        events=tuple(
            NodeEvent(time_s=e.time_s, change=e.change, node=e.node, warned_s=notice_s)
            if e.change is Change.LEAVE
            else e
            for e in trace.events
        ),
    )


def by_nodes(table: Mapping[int, float], largest: int) -> Sequence[float]:
    """[largest + 1] values of a table by node count: 0 below its first count, its last value beyond its end.

    Raises:
        ValueError: an empty table, a gap in its counts, or a negative value.
    """
    counts = sorted(table)
    if not counts or counts != list(range(counts[0], counts[-1] + 1)) or min(table.values()) < 0:
        raise ValueError(f"want values >= 0 for consecutive node counts, got counts {counts}")
    return [table.get(min(count, counts[-1]), 0.0) for count in range(largest + 1)]
