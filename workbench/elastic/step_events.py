"""Events of a training's nodes by step: kills, warnings and joins, validated by name."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from workbench.elastic.availability import Availability, Change
from workbench.job.notations.checked_values import nearest_of


class Happening(StrEnum):
    """What happens to a node."""

    KILL = "kill"  # while the step runs
    WARN = "warn"  # before the step: it sends its state, then leaves
    JOIN = "join"  # before the step


class During(StrEnum):
    """When an event happens."""

    STEP = "step"
    RECOVERY = "recovery"  # from a kill in the same step, while the remaining ranks connect


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """An event after `step` steps; a kill happens during the next one."""

    step: int
    what: Happening
    node: str
    during: During = During.STEP

    def __str__(self) -> str:
        return f"{self.step if self.during is During.STEP else self.during}:{self.what}:{self.node}"


def parse_event(text: str, before: StepEvent | None = None) -> StepEvent:
    """Parse STEP:kill|warn|join:NODE, or recovery:kill:NODE.

    Args:
        before: the previous event, to whose recovery the event may belong.

    Raises:
        ValueError: malformed text, or a recovery without a kill before; names the nearest valid event.
    """
    when, _, rest = text.partition(":")
    what, _, node = rest.partition(":")
    in_recovery = when == During.RECOVERY
    if not (in_recovery or (when.isascii() and when.isdigit())) or not node:
        raise ValueError(
            f"event {text!r}: want STEP:kill|warn|join:NODE or recovery:kill:NODE, e.g. '3:kill:node1'"
        )
    if what not in list(Happening):
        raise ValueError(f"event {text!r}: {nearest_of(what, Happening)}")
    if not in_recovery:
        return StepEvent(step=int(when), what=Happening(what), node=node)
    if what != Happening.KILL:
        raise ValueError(f"event {text!r}: want a kill in a recovery; nearest: recovery:kill:{node}")
    if before is None or before.what is not Happening.KILL:
        raise ValueError(
            f"event {text!r}: falls into the recovery from the kill listed before it, and there "
            f"{'is no event' if before is None else f'stands {str(before)!r}'}; "
            "want e.g. '3:kill:OTHER' there"
        )
    return replace(before, node=node, during=During.RECOVERY)


@dataclass(frozen=True, slots=True, kw_only=True)
class AtStep:
    """All events around one step, in the order in which they take effect."""

    joins: tuple[str, ...] = ()
    warned: tuple[str, ...] = ()
    killed: tuple[str, ...] = ()
    killed_in_recovery: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvents:
    """The nodes at the first step, and later events.

    A node that returns gets a new name, so that it cannot be confused with its predecessor.

    Args:
        first: steps taken before.
        start: nodes present then.
        events: by step, each from `first` on.
    """

    first: int
    start: tuple[str, ...]
    events: tuple[StepEvent, ...]

    def at(self, step: int) -> AtStep:
        """Events after `step` steps; a node warned before it has worked is omitted."""
        here = [event for event in self.events if event.step == step]
        in_step = [event for event in here if event.during is During.STEP]
        nodes_by_kind = {
            what: tuple(event.node for event in in_step if event.what is what) for what in Happening
        }
        joins, warned = nodes_by_kind[Happening.JOIN], nodes_by_kind[Happening.WARN]
        return AtStep(
            joins=tuple(node for node in joins if node not in warned),
            warned=tuple(node for node in warned if node not in joins),
            killed=nodes_by_kind[Happening.KILL],
            killed_in_recovery=tuple(event.node for event in here if event.during is During.RECOVERY),
        )

    @property
    def most_nodes(self) -> int:
        """The largest number of nodes at any time."""
        present = most = len(self.start)
        for event in self.events:
            present += 1 if event.what is Happening.JOIN else -1
            most = max(most, present)
        return most


def told_events(texts: Iterable[str], num_nodes: int, *, first: int, steps: int) -> StepEvents:
    """Parse events as a user lists them, for nodes node0, node1, ... that are present from the start.

    Args:
        texts: see `parse_event`.
        first: steps taken before.
        steps: total steps.

    Raises:
        ValueError: an event outside [first, steps), or what `_Presence` refuses; names the event.
    """
    listed: list[StepEvent] = []
    for text in texts:
        listed.append(parse_event(text, listed[-1] if listed else None))
    in_order = sorted(listed, key=lambda event: event.step)
    for event in in_order:
        if not first <= event.step < steps:
            note = f", and {first} are taken already" if first else ""
            raise ValueError(
                f"event {str(event)!r}: training ends after {steps} steps{note}; "
                f"nearest: {min(max(event.step, first), steps - 1)}:{event.what}:{event.node}"
            )
    start = tuple(f"node{number}" for number in range(num_nodes))
    presence = _Presence(start)
    return StepEvents(first=first, start=start, events=tuple(presence.follow(event) for event in in_order))


def traced_events(
    trace: Availability, step_s: float, notice_s: float, *, first: int, steps: int
) -> tuple[StepEvents, int]:
    """Convert a trace to events by step of `step_s` seconds; also returns the number of events after the last
    step.

    Time counts from the first event. A node that leaves is killed in the step of that time; with notice, it
    is warned that much earlier instead. Events before step `first` determine which nodes are present at the
    start.

    Raises:
        ValueError: an empty trace, seconds that are not positive, or a negative notice.
    """
    if not 0 < step_s < float("inf") or not 0 <= notice_s < float("inf"):
        raise ValueError(
            f"{trace.name}: want steps of > 0 s and a notice of >= 0 s, got {step_s} and {notice_s}"
        )
    if not trace.events:
        raise ValueError(
            f"{trace.name}: no node ever joins; those of the first instant are there at the start"
        )
    presence = _Presence(())
    start: list[str] = []
    events: list[StepEvent] = []
    num_late = 0
    for time_s, what, node in _in_order(trace, notice_s):
        step = int(time_s // step_s)
        if step >= steps:
            num_late += 1
            continue
        event = presence.follow(StepEvent(step=step, what=what, node=node))
        if step >= first and time_s > 0:
            events.append(event)
        elif what is Happening.JOIN:
            start.append(event.node)
        else:
            start.remove(event.node)
    return StepEvents(first=first, start=tuple(start), events=tuple(events)), num_late


def _in_order(trace: Availability, notice_s: float) -> list[tuple[float, Happening, str]]:
    """(time since the first event, what, node) in order of time; no warning precedes its node's arrival."""
    origin_s = trace.events[0].time_s
    arrived_s: dict[str, float] = {}
    events = []
    for event in trace.events:
        time_s = event.time_s - origin_s
        if event.change is Change.JOIN:
            arrived_s[event.node] = time_s
            events.append((time_s, Happening.JOIN, event.node))
        elif notice_s:
            events.append((max(arrived_s[event.node], time_s - notice_s), Happening.WARN, event.node))
        else:
            events.append((time_s, Happening.KILL, event.node))
    return sorted(events, key=lambda item: item[0])


class _Presence:
    """Tracks which nodes are present while events are processed in order."""

    def __init__(self, start: Sequence[str]) -> None:
        self._now = {node: node for node in start}  # the user's name -> unique name
        self._used = set(start)
        self._went: dict[str, StepEvent] = {}

    def follow(self, event: StepEvent) -> StepEvent:
        """Apply an event and return it with the node's unique name.

        Raises:
            ValueError: a node that joins but is there, or goes but is not.
        """
        node = event.node
        if event.what is Happening.JOIN:
            if node in self._now:
                raise ValueError(f"event {str(event)!r}: node {node!r} is there already")
            self._now[node] = self._new_name(node)
        elif node not in self._now:
            raise ValueError(f"event {str(event)!r}: {self._why_missing(node)}")
        name = self._now[node]
        if event.what is not Happening.JOIN:
            del self._now[node]
            self._went[node] = event
        return replace(event, node=name)

    def _new_name(self, node: str) -> str:
        names = (node, *(f"{node}.{number}" for number in range(2, len(self._used) + 3)))
        name = next(name for name in names if name not in self._used)
        self._used.add(name)
        return name

    def _why_missing(self, node: str) -> str:
        if node in self._went:
            return f"node {node!r} is gone since {str(self._went[node])!r}; there are {', '.join(self._now)}"
        return f"no node {node!r}; {nearest_of(node, self._now)}"
