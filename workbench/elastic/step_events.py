"""What happens to the nodes of a training, by step: who is killed, warned and joins, checked by name."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from workbench.elastic.availability import Availability, Change
from workbench.job.notations.checked_values import nearest_of


class Happening(StrEnum):
    """What becomes of a node."""

    KILL = "kill"  # while the step runs
    WARN = "warn"  # before the step: it gives what it holds, then goes
    JOIN = "join"  # before the step


class During(StrEnum):
    """What an event comes into."""

    STEP = "step"
    RECOVERY = "recovery"  # from a kill in the same step, while the ranks that are left connect


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """Something happens to a node when `step` steps have been taken; a kill comes while the next one runs."""

    step: int
    what: Happening
    node: str
    during: During = During.STEP

    def __str__(self) -> str:
        return f"{self.step if self.during is During.STEP else self.during}:{self.what}:{self.node}"


def parse_event(text: str, before: StepEvent | None = None) -> StepEvent:
    """STEP:kill|warn|join:NODE, or recovery:kill:NODE.

    Args:
        before: the event listed before, whose recovery is meant.

    Raises:
        ValueError: it is none, or in the recovery from no kill; the message names the nearest.
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
    """All that happens around one step, in the order in which it takes effect."""

    joins: tuple[str, ...] = ()
    warned: tuple[str, ...] = ()
    killed: tuple[str, ...] = ()
    killed_in_recovery: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvents:
    """The nodes at the first step, and what happens to them later.

    A node that comes back has a new name, and cannot be taken for the one that went.

    Args:
        first: steps taken before.
        start: nodes that are there then.
        events: by step, each from `first` on.
    """

    first: int
    start: tuple[str, ...]
    events: tuple[StepEvent, ...]

    def at(self, step: int) -> AtStep:
        """What happens after so many steps; who is warned before having worked does not count."""
        now = [event for event in self.events if event.step == step]
        in_step = [event for event in now if event.during is During.STEP]
        of = {what: tuple(event.node for event in in_step if event.what is what) for what in Happening}
        joins, warned = of[Happening.JOIN], of[Happening.WARN]
        return AtStep(
            joins=tuple(node for node in joins if node not in warned),
            warned=tuple(node for node in warned if node not in joins),
            killed=of[Happening.KILL],
            killed_in_recovery=tuple(event.node for event in now if event.during is During.RECOVERY),
        )

    @property
    def most_nodes(self) -> int:
        """At any time."""
        present = most = len(self.start)
        for event in self.events:
            present += 1 if event.what is Happening.JOIN else -1
            most = max(most, present)
        return most


def told_events(texts: Iterable[str], num_nodes: int, *, first: int, steps: int) -> StepEvents:
    """Events as a user lists them, of nodes node0, node1, ... that are there from the start.

    Args:
        texts: see `parse_event`.
        first: steps taken before.
        steps: in all.

    Raises:
        ValueError: an event outside [first, steps), or what `_Presence` refuses; the message names it.
    """
    listed: list[StepEvent] = []
    for text in texts:
        listed.append(parse_event(text, listed[-1] if listed else None))
    found = sorted(listed, key=lambda event: event.step)
    for event in found:
        if not first <= event.step < steps:
            begun = f", and {first} are taken already" if first else ""
            raise ValueError(
                f"event {str(event)!r}: training ends after {steps} steps{begun}; "
                f"nearest: {min(max(event.step, first), steps - 1)}:{event.what}:{event.node}"
            )
    start = tuple(f"node{number}" for number in range(num_nodes))
    presence = _Presence(start)
    return StepEvents(first=first, start=start, events=tuple(presence.follow(event) for event in found))


def traced_events(
    trace: Availability, step_s: float, notice_s: float, *, first: int, steps: int
) -> tuple[StepEvents, int]:
    """A trace where a step stands for `step_s` seconds, and how many of its events come after the last step.

    Time counts from the first event. A node that leaves is killed in the step of that moment; where notice
    is given it is warned so much earlier instead. What happened in earlier steps than `first` says who is
    there at the start.

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
    """(time since the first event, what, node), warnings no earlier than their node's arrival."""
    origin_s = trace.events[0].time_s
    arrived_s: dict[str, float] = {}
    found = []
    for event in trace.events:
        time_s = event.time_s - origin_s
        if event.change is Change.JOIN:
            arrived_s[event.node] = time_s
            found.append((time_s, Happening.JOIN, event.node))
        elif notice_s:
            found.append((max(arrived_s[event.node], time_s - notice_s), Happening.WARN, event.node))
        else:
            found.append((time_s, Happening.KILL, event.node))
    return sorted(found, key=lambda item: item[0])


class _Presence:
    """Who is there, while events are followed in order."""

    def __init__(self, start: Sequence[str]) -> None:
        self._now = {node: node for node in start}  # what a user calls it -> its name
        self._used = set(start)
        self._went: dict[str, StepEvent] = {}

    def follow(self, event: StepEvent) -> StepEvent:
        """The same event, of the node by its own name.

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
