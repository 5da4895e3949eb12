"""Recordings of all ranks of a job as traces: one for each step that they recorded."""

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
from workbench.trace_files.passes import ANNOTATED, HOW_TO_NAME, Found, Part, find_passes

NO_PLAN = ""  # the hash of a trace that belongs to none
MOST_FILES = 4096
SUFFIXES = (".json", ".json.gz")
_EDGE = "p2p"


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of one rank, when it begins and ends on its device, and what was launched in it."""

    begin_s: float
    end_s: float
    parts: tuple[Part, ...]
    collectives: tuple[tuple[Pass, Event], ...]
    wires: tuple[Wire, ...]

    def holds(self, time_s: float) -> bool:
        return self.begin_s <= time_s <= self.end_s


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank of a job, its clock set to that of the first."""

    rank: int
    recording: Recording
    found: Found

    @property
    def num_steps(self) -> int:
        return len(self.found.steps_s)

    def step(self, step: int) -> _Step:
        """On a host it begins as its range says, on a device with its first pass or the gather before it."""
        parts = self.found.of_step(step)
        within = [(part.start_s, part.end_s, part.kind) for part in parts if part.kind in COMPUTE]
        beside = tuple(
            (kind, event)
            for kind, event in collectives(self.recording, within)
            if self.found.is_of(step, self.recording.issued_s(event))
        )
        begins_s = [part.start_s for part in parts]
        begins_s += [event.start_s for kind, event in beside if MEANING[kind].weights > 0]
        if not self.recording.kernels and math.isfinite(self.found.steps_s[step][0]):
            begins_s.append(self.found.steps_s[step][0])
        return _Step(
            begin_s=min(begins_s),
            end_s=max(part.end_s for part in parts),
            parts=parts,
            collectives=beside,
            wires=tuple(
                wire for wire in wires(self.recording, self.rank) if self.found.is_of(step, wire.issued_s)
            ),
        )


def files_of(places: Sequence[Path]) -> tuple[Path, ...]:
    """Files as they are, of a folder those in it by name; ValueError where it has none."""
    files: list[Path] = []
    for path in places:
        inside = sorted(p for p in path.iterdir() if p.name.endswith(SUFFIXES)) if path.is_dir() else [path]
        if not inside:
            raise ValueError(f"{path}: want recordings of torch.profiler in it, *.json or *.json.gz")
        files += inside
    if not 1 <= len(files) <= MOST_FILES:
        raise ValueError(f"want 1 to {MOST_FILES:,} files of recordings, got {len(files):,}")
    return tuple(files)


def ingest(recordings: Sequence[Recording], *, plan: Plan | None = None, pp: int = 1) -> tuple[Trace, ...]:
    """Traces of a job's steps, one for each that its ranks recorded.

    With a plan, a pass is the plan's: by its name where all names of a rank are the plan's own, else by
    order, the k-th forward of a rank being the k-th of its program. Without, its stage is by name, or its
    rank's place in `pp` equal blocks of ranks; such a trace belongs to no plan and cannot be compared.

    Raises:
        ValueError: no passes, files that are not of one run, ranks that are missing, or not the passes of
            the plan.
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
    return tuple(_trace(ranks, step, plan, pp) for step in range(len(ranks[0].found.steps_s)))


def read_ranks(paths: Sequence[Path]) -> tuple[Recording, ...]:
    """The recordings of files; see `read_recording`."""
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
        _Rank(rank, found, find_passes(found))
        for rank, found in ((r, _shifted(by_rank[r], first)) for r in sorted(by_rank))
    )


def _shifted(recording: Recording, first: Recording) -> Recording:
    """With times that count from the same moment as those of the first."""
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
        memory=tuple(held._replace(time_s=held.time_s + shift_s) for held in recording.memory),
        base_ns=first.base_ns,
    )


def _check_together(ranks: Sequence[_Rank]) -> None:
    """All of one world, with equally many steps, each of them at the same time on all."""
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
    for index, (rank, mine) in enumerate(zip(ranks, steps, strict=True)):
        stage = index * pp // len(ranks)
        actions = _numbered(mine.parts, stage) if plan is None else _planned(rank, mine.parts, plan)
        passes = [
            Span(rank.rank, Lane.COMPUTE, action, part.start_s, part.end_s)
            for part, action in zip(mine.parts, actions, strict=True)
        ]
        spans += [*passes, *_reductions(rank, mine, passes)]
        held = [held for held in rank.recording.memory if mine.holds(held.time_s)]
        samples += [MemorySample(rank.rank, each.time_s - zero_s, each.num_bytes) for each in thinned(held)]
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
            ("passes found by", ", ".join(sorted({each.found.by for each in ranks}))),
            ("recorded by", "torch.profiler"),
            ("step", str(step + 1)),
        ),
    )


def _reductions(rank: _Rank, step: _Step, passes: Sequence[Span]) -> Iterator[Span]:
    """Collectives beside the passes, on their lane: rounds one by one, what has no number as one.

    A collective is of the stage of the pass that began last before it.
    """
    computing = [span for span in passes if span.action.kind in COMPUTE]
    counts: Counter[tuple[int | None, Pass]] = Counter()
    sums: dict[Action, list[Event]] = {}
    for kind, event in step.collectives:
        begun = [span for span in computing if span.start_s <= event.start_s]
        stage = (begun[-1] if begun else computing[0]).action.stage
        if MEANING[kind].number is Number.NOTHING:
            sums.setdefault(Action(stage, kind), []).append(event)
        else:
            action = Action(stage, kind, counts[stage, kind])
            counts[stage, kind] += 1
            yield Span(rank.rank, Lane.REDUCE, action, event.start_s, event.end_s)
    for action, events in sums.items():
        start_s, end_s = min(e.start_s for e in events), max(e.end_s for e in events)
        yield Span(rank.rank, Lane.REDUCE, action, start_s, end_s)


def _messages(ranks: Sequence[_Rank], steps: Sequence[_Step], zero_s: float) -> Iterator[Message]:
    """The k-th send from one rank to another with the k-th receive of the same; one side alone is left out.

    The message is on the link while both sides are in it, and ready when its sender is.
    """
    sent: dict[tuple[int, int], list[Wire]] = {}
    received: dict[tuple[int, int], list[Wire]] = {}
    for rank, step in zip(ranks, steps, strict=True):
        for wire in step.wires:
            side = sent if wire.source == rank.rank else received
            side.setdefault((wire.source, wire.destination), []).append(wire)
    both = [pair for ends in sent for pair in zip(sent[ends], received.get(ends, ()), strict=False)]
    for row, (left, arrived) in enumerate(sorted(both)):
        yield Message(
            row=row,
            edge=_EDGE,
            source_rank=left.source,
            destination_rank=left.destination,
            num_bytes=max(left.num_bytes, arrived.num_bytes),
            ready_s=left.start_s - zero_s,
            start_s=max(left.start_s, arrived.start_s) - zero_s,
            end_s=max(left.end_s, arrived.end_s) - zero_s,
        )


# Which action a pass is


def _planned(rank: _Rank, parts: Sequence[Part], plan: Plan) -> list[Action]:
    """The plan's actions of a rank's passes, in their order; ValueError where they are not as many."""
    program = [action for action in plan.program.get(rank.rank, ()) if action.kind in COMPUTE]
    named = [_named(part) for part in parts]
    if Counter(action for action in named if action.kind in COMPUTE) == Counter(program):
        return named
    wanted, got = Counter(action.kind for action in program), Counter(part.kind for part in parts)
    for kind in COMPUTE:
        if wanted[kind] != got[kind]:
            raise ValueError(
                f"{rank.recording.path}: rank {rank.rank} recorded {got[kind]} {kind} of a step (found by "
                f"{rank.found.by}), the plan has {wanted[kind]}"
                + ("" if rank.found.by == ANNOTATED else f"; {HOW_TO_NAME}")
            )
    left = {kind: iter([action for action in program if action.kind is kind]) for kind in COMPUTE}
    return [STEP if part.kind is Pass.STEP else next(left[part.kind]) for part in parts]


def _named(part: Part) -> Action:
    return STEP if part.kind is Pass.STEP else Action(part.stage, part.kind, part.microbatch)


def _numbered(parts: Sequence[Part], stage: int) -> list[Action]:
    """By their names, and where these are silent by the rank's stage and in order."""
    counts: Counter[tuple[int, Pass]] = Counter()
    actions = []
    for part in parts:
        if part.kind is Pass.STEP:
            actions.append(STEP)
            continue
        of_stage = stage if part.stage is None else part.stage
        number = counts[of_stage, part.kind] if part.microbatch is None else part.microbatch
        counts[of_stage, part.kind] += 1
        actions.append(Action(of_stage, part.kind, number))
    return actions
