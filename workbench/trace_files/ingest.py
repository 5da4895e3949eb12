"""Convert the recordings of all ranks of a job to traces, one for each recorded step."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from workbench.plan.codec import plan_hash
from workbench.plan.plan import Plan
from workbench.schedule.action import COMPUTE, MEANING, STEP, Action, Number, Pass
from workbench.timing.provenance import DEVICE
from workbench.trace import Executor, Lane, MemorySample, Message, Span, Trace
from workbench.trace_files.exchanges import Wire, collectives, wires
from workbench.trace_files.kineto import Event, Recording, read_recording, thinned
from workbench.trace_files.passes import ANNOTATED, HOW_TO_NAME, DetectedPasses, Part, find_passes

NO_PLAN = ""  # plan hash of a trace without a plan
MOST_FILES = 4096
SUFFIXES = (".json", ".json.gz")
_EDGE = "p2p"


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of one rank: its time on the device, and what was launched in it."""

    begin_s: float
    end_s: float
    parts: tuple[Part, ...]
    collectives: tuple[tuple[Pass, Event], ...]
    wires: tuple[Wire, ...]

    def holds(self, time_s: float) -> bool:
        return self.begin_s <= time_s <= self.end_s


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank of a job, with its clock aligned to the first rank's."""

    rank: int
    recording: Recording
    detected: DetectedPasses

    @property
    def num_steps(self) -> int:
        return len(self.detected.steps_s)

    def step(self, step: int) -> _Step:
        """A step starts with its range on a host, on a device with its first pass or the gather before it."""
        parts = self.detected.of_step(step)
        passes_s = [(part.start_s, part.end_s, part.kind) for part in parts if part.kind in COMPUTE]
        collectives_beside = tuple(
            (kind, event)
            for kind, event in collectives(self.recording, passes_s)
            if self.detected.is_of(step, self.recording.issued_s(event))
        )
        begins_s = [part.start_s for part in parts]
        begins_s += [event.start_s for kind, event in collectives_beside if MEANING[kind].weights > 0]
        if not self.recording.kernels and math.isfinite(self.detected.steps_s[step][0]):
            begins_s.append(self.detected.steps_s[step][0])
        return _Step(
            begin_s=min(begins_s),
            end_s=max(part.end_s for part in parts),
            parts=parts,
            collectives=collectives_beside,
            wires=tuple(
                wire for wire in wires(self.recording, self.rank) if self.detected.is_of(step, wire.issued_s)
            ),
        )


def files_of(paths: Sequence[Path]) -> tuple[Path, ...]:
    """The given files, and those in given folders by name; ValueError for a folder without any."""
    files: list[Path] = []
    for path in paths:
        members = sorted(p for p in path.iterdir() if p.name.endswith(SUFFIXES)) if path.is_dir() else [path]
        if not members:
            raise ValueError(f"{path}: want recordings of torch.profiler in it, *.json or *.json.gz")
        files += members
    if not 1 <= len(files) <= MOST_FILES:
        raise ValueError(f"want 1 to {MOST_FILES:,} files of recordings, got {len(files):,}")
    return tuple(files)


def ingest(recordings: Sequence[Recording], *, plan: Plan | None = None, pp: int = 1) -> tuple[Trace, ...]:
    """Traces of a job's steps, one for each that its ranks recorded.

    With a plan, passes are mapped to the plan's: by name if all names of a rank are the plan's own, else by
    order, the k-th forward of a rank being the k-th in its program. Without, a pass's stage is taken from
    its name, or from its rank's position in `pp` equal blocks of ranks; such a trace belongs to no plan and
    cannot be compared.

    Raises:
        ValueError: no passes, files of different runs, missing ranks, or passes that differ from the
            plan's.
    """
    ranks = _ranks(recordings)
    _check_together(ranks)
    if plan is not None:
        missing = sorted(set(plan.ranks) - {each.rank for each in ranks})
        beyond = sorted({each.rank for each in ranks} - set(plan.ranks))
        if missing or beyond:
            raise ValueError(
                f"want recordings of the plan's ranks {list(plan.ranks)}: "
                + (f"rank {missing[0]} is missing" if missing else f"rank {beyond[0]} is none of them")
            )
    elif not 1 <= pp <= len(ranks):
        raise ValueError(f"pp must be 1 to {len(ranks)}, the number of recorded ranks, got {pp}")
    return tuple(_trace(ranks, step, plan, pp) for step in range(ranks[0].num_steps))


def read_ranks(paths: Sequence[Path]) -> tuple[Recording, ...]:
    """Read the recordings in files; see `read_recording`."""
    return tuple(read_recording(path) for path in paths)


# Which files belong together


def _ranks(recordings: Sequence[Recording]) -> tuple[_Rank, ...]:
    by_rank: dict[int, Recording] = {}
    for each in recordings:
        rank = 0 if each.rank is None and len(recordings) == 1 else each.rank
        if rank is None:
            raise ValueError(
                f"{each.path}: does not say of which rank it is; record while torch.distributed runs, or "
                "name it rank<N>.json"
            )
        if rank in by_rank:
            raise ValueError(f"{by_rank[rank].path} and {each.path}: both are of rank {rank}")
        by_rank[rank] = each
    first = next(iter(by_rank.values()))
    return tuple(
        _Rank(rank, recording, find_passes(recording))
        for rank, recording in ((r, _shifted(by_rank[r], first)) for r in sorted(by_rank))
    )


def _shifted(recording: Recording, first: Recording) -> Recording:
    """The recording with times relative to the same origin as the first one's."""
    shift_s = (recording.base_ns - first.base_ns) / 1e9
    if not shift_s:
        return recording

    def moved(events: Sequence[Event]) -> tuple[Event, ...]:
        return tuple(
            event._replace(start_s=event.start_s + shift_s, end_s=event.end_s + shift_s) for event in events
        )

    return replace(
        recording,
        annotations=moved(recording.annotations),
        device_annotations=moved(recording.device_annotations),
        calls=moved(recording.calls),
        kernels=moved(recording.kernels),
        launched_s={key: time_s + shift_s for key, time_s in recording.launched_s.items()},
        memory=tuple(sample._replace(time_s=sample.time_s + shift_s) for sample in recording.memory),
        base_ns=first.base_ns,
    )


def _check_together(ranks: Sequence[_Rank]) -> None:
    """Check that all ranks are of one world, with equally many steps at the same times."""
    first = ranks[0]
    for other in ranks[1:]:
        both = f"{first.recording.path} and {other.recording.path}: not of one run"
        worlds = first.recording.world_size, other.recording.world_size
        if worlds[0] != worlds[1]:
            raise ValueError(f"{both}: world sizes {worlds[0]} and {worlds[1]}")
        steps = first.num_steps, other.num_steps
        if steps[0] != steps[1]:
            raise ValueError(f"{both}: {steps[0]} and {steps[1]} steps")
        for step in range(steps[0]):
            one, two = first.step(step), other.step(step)
            apart_s = max(one.begin_s - two.end_s, two.begin_s - one.end_s)
            if apart_s >= 0:
                raise ValueError(f"{both}: step {step + 1} lies {apart_s:.3g} s apart")


# One step


def _trace(ranks: Sequence[_Rank], step: int, plan: Plan | None, pp: int) -> Trace:
    steps = [each.step(step) for each in ranks]
    zero_s = min(each.begin_s for each in steps)
    spans: list[Span] = []
    samples: list[MemorySample] = []
    for index, (rank, rank_step) in enumerate(zip(ranks, steps, strict=True)):
        stage = index * pp // len(ranks)
        actions = _numbered(rank_step.parts, stage) if plan is None else _planned(rank, rank_step.parts, plan)
        passes = [
            Span(rank.rank, Lane.COMPUTE, action, part.start_s, part.end_s)
            for part, action in zip(rank_step.parts, actions, strict=True)
        ]
        spans += [*passes, *_reductions(rank, rank_step, passes)]
        allocated = [sample for sample in rank.recording.memory if rank_step.holds(sample.time_s)]
        samples += [
            MemorySample(rank.rank, sample.time_s - zero_s, sample.num_bytes) for sample in thinned(allocated)
        ]
    return Trace(
        plan_hash=NO_PLAN if plan is None else plan_hash(plan),
        executor=Executor.EXECUTED,
        spans=tuple(
            span._replace(start_s=span.start_s - zero_s, end_s=span.end_s - zero_s)
            for span in sorted(spans, key=lambda span: (span.rank, span.lane, span.start_s))
        ),
        messages=tuple(_messages(ranks, steps, zero_s)),
        memory=tuple(sorted(samples, key=lambda sample: (sample.rank, sample.time_s))),
        details=(
            (DEVICE, ranks[0].recording.device),
            ("passes found by", ", ".join(sorted({each.detected.by for each in ranks}))),
            ("recorded by", "torch.profiler"),
            ("step", str(step + 1)),
        ),
    )


def _reductions(rank: _Rank, step: _Step, passes: Sequence[Span]) -> Iterator[Span]:
    """Spans of collectives beside the passes: numbered ones one by one, all others of an action as one.

    A collective belongs to the stage of the last pass that started before it.
    """
    computing = [span for span in passes if span.action.kind in COMPUTE]
    counts: Counter[tuple[int | None, Pass]] = Counter()
    unnumbered: dict[Action, list[Event]] = {}
    for kind, event in step.collectives:
        started = [span for span in computing if span.start_s <= event.start_s]
        stage = (started[-1] if started else computing[0]).action.stage
        if MEANING[kind].number is Number.NOTHING:
            unnumbered.setdefault(Action(stage, kind), []).append(event)
        else:
            action = Action(stage, kind, counts[stage, kind])
            counts[stage, kind] += 1
            yield Span(rank.rank, Lane.REDUCE, action, event.start_s, event.end_s)
    for action, events in unnumbered.items():
        start_s, end_s = min(e.start_s for e in events), max(e.end_s for e in events)
        yield Span(rank.rank, Lane.REDUCE, action, start_s, end_s)


def _messages(ranks: Sequence[_Rank], steps: Sequence[_Step], zero_s: float) -> Iterator[Message]:
    """Match the k-th send between two ranks with the k-th receive; unmatched sides are dropped.

    A message is on the link while both sides are in it, and ready when its sender is.
    """
    sent: dict[tuple[int, int], list[Wire]] = {}
    received: dict[tuple[int, int], list[Wire]] = {}
    for rank, step in zip(ranks, steps, strict=True):
        for wire in step.wires:
            side = sent if wire.source == rank.rank else received
            side.setdefault((wire.source, wire.destination), []).append(wire)
    matched = [pair for ends in sent for pair in zip(sent[ends], received.get(ends, ()), strict=False)]
    for row, (send, receive) in enumerate(sorted(matched)):
        yield Message(
            row=row,
            edge=_EDGE,
            source_rank=send.source,
            destination_rank=send.destination,
            num_bytes=max(send.num_bytes, receive.num_bytes),
            ready_s=send.start_s - zero_s,
            start_s=max(send.start_s, receive.start_s) - zero_s,
            end_s=max(send.end_s, receive.end_s) - zero_s,
        )


# Which action a pass is


def _planned(rank: _Rank, parts: Sequence[Part], plan: Plan) -> list[Action]:
    """The plan's actions of a rank's passes, in their order; ValueError if the numbers differ."""
    program = [action for action in plan.program.get(rank.rank, ()) if action.kind in COMPUTE]
    named = [_named(part) for part in parts]
    if Counter(action for action in named if action.kind in COMPUTE) == Counter(program):
        return named
    planned, seen = (
        Counter(action.kind for action in program),
        Counter(part.kind for part in parts),
    )
    for kind in COMPUTE:
        if planned[kind] != seen[kind]:
            raise ValueError(
                f"{rank.recording.path}: rank {rank.rank} recorded {seen[kind]} {kind} of a step (found by "
                f"{rank.detected.by}), the plan has {planned[kind]}"
                + ("" if rank.detected.by == ANNOTATED and seen[kind] else f"; {HOW_TO_NAME}")
            )
    remaining = {kind: iter([action for action in program if action.kind is kind]) for kind in COMPUTE}
    return [STEP if part.kind is Pass.STEP else next(remaining[part.kind]) for part in parts]


def _named(part: Part) -> Action:
    return STEP if part.kind is Pass.STEP else Action(part.stage, part.kind, part.microbatch)


def _numbered(parts: Sequence[Part], stage: int) -> list[Action]:
    """Actions by the passes' names, or if these lack them by the rank's stage and in order."""
    counts: Counter[tuple[int, Pass]] = Counter()
    actions = []
    for part in parts:
        if part.kind is Pass.STEP:
            actions.append(STEP)
            continue
        part_stage = stage if part.stage is None else part.stage
        number = counts[part_stage, part.kind] if part.microbatch is None else part.microbatch
        counts[part_stage, part.kind] += 1
        actions.append(Action(part_stage, part.kind, number))
    return actions
