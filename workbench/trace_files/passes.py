"""Detect the passes of a recording: by names, by module ranges, or by order on streams."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from workbench.schedule.action import COMPUTE, Pass
from workbench.trace_files.exchanges import POINT_TO_POINT, collective_of
from workbench.trace_files.kineto import Event, Recording

ANNOTATED = "annotations"
HOW_TO_NAME = (
    "name them: with torch.profiler.record_function(f'PP:{stage}F{microbatch}'): around forwards, "
    "with torch.profiler.record_function(f'PP:{stage}B{microbatch}'): around backwards"
)
# torch.distributed.pipelining names a pass `PP:2F0` (its actions), or `Forward 0` and `Backward 0`.
_ACTION = re.compile(r"(?:^|[:/ ])(\d+)(F|B|I|W)(\d+)$")
_WORD = re.compile(
    r"(?:^|[:/.]|## )(forward|backward)(?:[-_ ]?(?:compute|step|pass))?(?:[-_ #:]?(\d+))?(?: ##)?$",
    re.IGNORECASE,
)
_UPDATE = re.compile(r"(?:^|[:/])STEP$|^Optimizer\.step#|(?:^|[:/.])optimizer[-_ .]?step$", re.IGNORECASE)
_STEP = re.compile(
    r"^ProfilerStep#\d+$|(?:^|[:/])(?:train(?:ing)?[-_ ])?(?:iteration|step)[-_ #:]?\d*$", re.IGNORECASE
)
_BACKWARD_KERNEL = re.compile(r"bwd|backward|dgrad|wgrad", re.IGNORECASE)
_UPDATE_KERNEL = re.compile(r"adam|sgd|optimizer|lamb_", re.IGNORECASE)
_MODULE = "nn.Module: "
_ENGINE = "run_backward"


class Part(NamedTuple):
    """A pass or an optimizer update, as far as the recording identifies it.

    Args:
        kind: F, B, I, W or STEP.
        stage, microbatch: by its name; None if that lacks them.
        issued_s: when its host started it, which determines its step.
        start_s, end_s: on the device.
    """

    kind: Pass
    stage: int | None
    microbatch: int | None
    issued_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class DetectedPasses:
    """Passes of one recording.

    Args:
        by: how they were detected.
        parts: ordered by when they were issued.
        steps_s: [N] when each of its steps starts and ends on the host.
    """

    by: str
    parts: tuple[Part, ...]
    steps_s: tuple[tuple[float, float], ...]

    def of_step(self, step: int) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if self.is_of(step, part.issued_s))

    def is_of(self, step: int, issued_s: float) -> bool:
        """Whether what a host started at that time belongs to the step."""
        begin_s, end_s = self.steps_s[step]
        return begin_s <= issued_s < end_s


def find_passes(recording: Recording) -> DetectedPasses:
    """Detect passes by the first method that yields both directions, else by the first that yields any.

    Raises:
        ValueError: none does; the message has the two lines that a training script lacks.
    """
    methods: tuple[tuple[str, Callable[[Recording], Sequence[Part]]], ...] = (
        (ANNOTATED, by_annotations),
        ("module ranges", by_modules),
        ("stream order", by_streams),
    )
    parts_by_method = {
        name: _one_update(sorted(method(recording), key=lambda p: p.issued_s)) for name, method in methods
    }
    kinds = {name: {part.kind for part in parts} for name, parts in parts_by_method.items()}
    trained = [name for name in parts_by_method if Pass.F in kinds[name] and kinds[name] & {Pass.B, Pass.I}]
    for name in (*trained, *(name for name in parts_by_method if kinds[name].intersection(COMPUTE))):
        return DetectedPasses(name, tuple(parts_by_method[name]), _steps(recording, parts_by_method[name]))
    raise ValueError(f"{recording.path}: no passes in it; {HOW_TO_NAME}")


def by_annotations(recording: Recording) -> list[Part]:
    """Outermost ranges of `torch.profiler.record_function` whose names identify a pass."""
    if recording.kernels and not recording.launched_s:
        return [_part(event, event, *meant) for event, meant in _outermost(recording.device_annotations)]
    return list(_on_device(recording, _outermost(recording.annotations)))


def by_modules(recording: Recording) -> list[Part]:
    """Outermost module calls are forwards, calls of the autograd engine backwards (`with_stack=True`)."""
    engine = [event for event in recording.calls if _ENGINE in event.name]
    meant: list[tuple[Event, _Meant]] = [(event, (Pass.B, None, None)) for event in _disjoint(engine)]
    modules = [event for event in recording.calls if event.name.startswith(_MODULE)]
    outside = [event for event in modules if not any(e.holds(event.start_s) for e, _ in meant)]
    meant += [(event, (Pass.F, None, None)) for event in _disjoint(outside)]
    named = _outermost(recording.annotations)
    meant += [(event, what) for event, what in named if what[0] is Pass.STEP]
    return list(_on_device(recording, meant))


def by_streams(recording: Recording) -> list[Part]:
    """Groups of kernels between the ends of sends and receives; backward kernels are identified by name.

    A send starts when a pass ends, and a receive ends when one may start: kernels are split at both, and
    where an update or a backward starts. Two cases are ambiguous without the plan: a forward directly after
    a backward that sends nothing, and recomputation, which looks like a forward.
    """
    kernels = [event for event in recording.kernels if collective_of(event.name) is None]
    wires = [event for event in recording.kernels if collective_of(event.name) == POINT_TO_POINT]
    edges_s = sorted({edge_s for event in wires for edge_s in (event.start_s, event.end_s)})
    return [_unnamed(recording, group) for group in _cut(sorted(kernels, key=lambda k: k.start_s), edges_s)]


# Names


_Meant = tuple[Pass, int | None, int | None]


def meaning_of(name: str) -> _Meant | None:
    """(kind, stage, microbatch) that a range's name denotes; None if it is no pass.

    >>> meaning_of("PP:2F0")
    (<Pass.F: 'F'>, 2, 0)
    >>> meaning_of("backward-compute")
    (<Pass.B: 'B'>, None, None)
    """
    action = _ACTION.search(name)
    if action is not None and max(len(action[1]), len(action[3])) < 9:
        return Pass(action[2]), int(action[1]), int(action[3])
    word = _WORD.search(name)
    if word is not None:
        number = word[2] if word[2] and len(word[2]) < 9 else None
        kind = Pass.F if word[1].lower() == "forward" else Pass.B
        return kind, None, None if number is None else int(number)
    return (Pass.STEP, None, None) if _UPDATE.search(name) else None


def _outermost(events: Sequence[Event]) -> list[tuple[Event, _Meant]]:
    """Ranges with a meaning that are in no other such range of their thread."""
    meant = {id(event): what for event in events if (what := meaning_of(event.name)) is not None}
    return [(event, meant[id(event)]) for event in _disjoint([e for e in events if id(e) in meant])]


def _disjoint(events: Sequence[Event]) -> list[Event]:
    """Events by start, without those that start inside a previous one on their thread. O(n)."""
    reached_s: dict[tuple[str, str], float] = {}
    kept = []
    for event in sorted(events, key=lambda event: (event.start_s, -event.end_s)):
        if event.start_s >= reached_s.get(event.thread, float("-inf")):
            kept.append(event)
            reached_s[event.thread] = event.end_s
    return kept


# From the host to the device


def _on_device(recording: Recording, meant: Sequence[tuple[Event, _Meant]]) -> Iterator[Part]:
    """Map host ranges to the times of the kernels launched in them, by whichever thread.

    Without kernels the host did the work, and its ranges count. Autograd launches from a thread of its own
    while the caller waits, so kernels are matched by time instead of by thread.
    """
    if not recording.kernels:
        yield from (_part(event, event, *what) for event, what in meant)
        return
    issued = sorted(
        ((recording.issued_s(k), k) for k in recording.kernels if collective_of(k.name) is None),
        key=lambda pair: (pair[0], pair[1].start_s),
    )
    position = 0
    for event, what in sorted(meant, key=lambda pair: pair[0].start_s):
        while position < len(issued) and issued[position][0] < event.start_s:
            position += 1
        inside = []
        while position < len(issued) and issued[position][0] < event.end_s:
            inside.append(issued[position][1])
            position += 1
        if inside:
            whole = event._replace(start_s=min(k.start_s for k in inside), end_s=max(k.end_s for k in inside))
            yield _part(event, whole, *what)


def _part(host: Event, device: Event, kind: Pass, stage: int | None, microbatch: int | None) -> Part:
    return Part(kind, stage, microbatch, host.start_s, device.start_s, device.end_s)


def _cut(kernels: Sequence[Event], edges_s: Sequence[float]) -> Iterator[list[Event]]:
    """Groups of kernels by start, split at the edges, where updates start or end and where backwards
    start.
    """
    if not kernels:
        return
    group, position = [kernels[0]], 0
    for before, kernel in pairwise(kernels):
        while position < len(edges_s) and edges_s[position] < before.end_s:
            position += 1  # ignore an edge during a kernel
        is_edge = position < len(edges_s) and edges_s[position] <= kernel.start_s
        turns = _is_backward(kernel) and not any(map(_is_backward, group))
        if is_edge or turns or _is_update(before) is not _is_update(kernel):
            yield group
            group = []
        group.append(kernel)
    yield group


def _unnamed(recording: Recording, group: Sequence[Event]) -> Part:
    direction = Pass.B if any(map(_is_backward, group)) else Pass.F
    kind = Pass.STEP if _is_update(group[0]) else direction
    whole = group[0]._replace(end_s=max(kernel.end_s for kernel in group))
    return _part(group[0]._replace(start_s=recording.issued_s(group[0])), whole, kind, None, None)


def _is_backward(kernel: Event) -> bool:
    return _BACKWARD_KERNEL.search(kernel.name) is not None


def _is_update(kernel: Event) -> bool:
    return _UPDATE_KERNEL.search(kernel.name) is not None


# Steps


def _one_update(parts: Sequence[Part]) -> list[Part]:
    """Merge consecutive updates: several optimizers, or groups of weights."""
    merged: list[Part] = []
    for part in parts:
        if merged and part.kind is Pass.STEP and merged[-1].kind is Pass.STEP:
            merged[-1] = merged[-1]._replace(end_s=max(merged[-1].end_s, part.end_s))
        else:
            merged.append(part)
    return merged


def _steps(recording: Recording, parts: Sequence[Part]) -> tuple[tuple[float, float], ...]:
    """Ranges named as steps that contain a pass; if there are none, intervals that end with an update."""
    step_ranges = _disjoint([event for event in recording.annotations if _STEP.search(event.name)])
    step_ranges = [event for event in step_ranges if meaning_of(event.name) is None]
    with_passes = [
        (event.start_s, event.end_s)
        for event in step_ranges
        if any(event.holds(part.issued_s) for part in parts if part.kind in COMPUTE)
    ]
    if with_passes:
        return tuple(with_passes)
    updates_s = [before.issued_s for before, part in pairwise(parts) if before.kind is Pass.STEP]
    # What is launched after an update belongs to the next step.
    after_updates_s = [math.nextafter(update_s, math.inf) for update_s in updates_s]
    return tuple(pairwise([-math.inf, *after_updates_s, math.inf]))
