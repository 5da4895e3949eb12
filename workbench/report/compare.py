"""Compare a simulated trace with executed ones: per action kind, per stage and in total."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from statistics import fmean, median
from typing import Any

from workbench.drift import Drifted, Run, drift_between, drifted
from workbench.metrics import busy_s, exposed_communication_s, peak_bytes
from workbench.schedule.action import COMPUTE, Pass
from workbench.trace import Executor, Span, Trace
from workbench.units import ms


class Group(StrEnum):
    """What a row of the comparison summarizes."""

    KIND = "action kind"
    STAGE = "stage"
    MEMORY = "peak memory"
    TOTAL = "total"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow:
    """One quantity, simulated once and executed in each repetition.

    Args:
        name: of the kind ("F"), stage ("2"), rank ("3") or total ("iteration").
        count: spans in one trace; ranks of one stage have a span each.
        simulated: seconds, or bytes in the memory group.
        executed: [repetitions] of the same.
    """

    group: Group
    name: str
    count: int
    simulated: float
    executed: tuple[float, ...]

    @property
    def executed_median(self) -> float:
        return median(self.executed)

    @property
    def error_fraction(self) -> float | None:
        """Simulated over executed median, minus one; None if nothing was executed."""
        return self.simulated / self.executed_median - 1 if self.executed_median else None

    @property
    def spread_fraction(self) -> float | None:
        """(Slowest - fastest) / median of the repetitions; None for a single one."""
        if len(self.executed) < 2 or not self.executed_median:
            return None
        return (max(self.executed) - min(self.executed)) / self.executed_median


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Rows in the order of `Group`; within a group by kind, stage or rank.

    Args:
        executor: of the traces that the simulated one is compared with, executed or emulated.
        drift: of the machine since it was calibrated, see `workbench.drift`; None if it was not read.
    """

    plan_hash: str
    rows: tuple[ComparedRow, ...]
    executor: Executor = Executor.EXECUTED
    drift: float | None = None

    @property
    def total(self) -> ComparedRow:
        return next(row for row in self.rows if row.group is Group.TOTAL)

    @property
    def drifted(self) -> Drifted | None:
        """The error of the iteration with and without drift; None if an iteration took no time."""
        total = self.total
        run = Run(predicted_s=total.simulated, executed_s=total.executed, drift=self.drift)
        return drifted([run]) if min(total.executed) > 0 else None

    def of(self, group: Group) -> tuple[ComparedRow, ...]:
        return tuple(row for row in self.rows if row.group is group)

    def as_json(self) -> dict[str, Any]:
        """Data for `--json`: seconds (bytes for memory), fractions, None where undefined."""
        return {
            "plan_hash": self.plan_hash,
            "executor": self.executor.value,
            "repetitions": len(self.total.executed),
            "error_fraction": self.total.error_fraction,
            **({} if self.drifted is None else asdict(self.drifted)),
            "spread_fraction": self.total.spread_fraction,
            "rows": [
                {
                    "group": row.group.value,
                    "name": row.name,
                    "count": row.count,
                    "simulated": row.simulated,
                    "executed_median": row.executed_median,
                    "executed": list(row.executed),
                    "error_fraction": row.error_fraction,
                    "spread_fraction": row.spread_fraction,
                }
                for row in self.rows
            ],
        }


def compare(simulated: Trace, executed: Sequence[Trace]) -> Comparison:
    """Compare one prediction with the repetitions of its execution.

    Durations of a kind or a stage are summed over all spans (lane time); the total is the iteration time;
    both of the timed repetitions. Memory rows are of the watched ones, for ranks with samples in all of
    them.

    Raises:
        TypeError: other than traces.
        ValueError: no executed trace, executed and emulated ones together, a simulated one among them, a
            trace of another plan, or one that lacks passes.
    """
    _check(simulated, executed)
    times = timed(executed)
    traces = (simulated, *times)
    rows = [
        *_span_rows(Group.KIND, traces, _kind_of, [kind.value for kind in Pass]),
        *_span_rows(Group.STAGE, traces, _stage_of, _stages(simulated)),
        *_memory_rows((simulated, *watched(executed))),
        ComparedRow(
            group=Group.TOTAL,
            name="iteration",
            count=1,
            simulated=simulated.iteration_s,
            executed=tuple(trace.iteration_s for trace in times),
        ),
    ]
    return Comparison(
        plan_hash=simulated.plan_hash,
        rows=tuple(rows),
        executor=executed[0].executor,
        drift=drift_between(simulated, times),
    )


def timed(executed: Sequence[Trace]) -> tuple[Trace, ...]:
    """The repetitions whose times count: those without memory, as watching it slows a step down.

    Where every one was watched, all of them.
    """
    return tuple(trace for trace in executed if not trace.memory) or tuple(executed)


def watched(executed: Sequence[Trace]) -> tuple[Trace, ...]:
    """The repetitions that have memory samples."""
    return tuple(trace for trace in executed if trace.memory)


def _kind_of(span: Span) -> str:
    return span.action.kind.value


def _stage_of(span: Span) -> str | None:
    """Stage of a pass; reductions and STEP appear only in their kinds' rows."""
    return str(span.action.stage) if span.action.kind in COMPUTE else None


def _stages(trace: Trace) -> list[str]:
    return [
        str(stage) for stage in sorted({s.action.stage for s in trace.spans if s.action.stage is not None})
    ]


def _span_rows(
    group: Group, traces: Sequence[Trace], key: Callable[[Span], str | None], names: Iterable[str]
) -> list[ComparedRow]:
    sums = [_sums(trace, key) for trace in traces]
    counts = Counter(key(span) for span in traces[0].spans)
    return [
        ComparedRow(
            group=group,
            name=name,
            count=counts[name],
            simulated=sums[0][name],
            executed=tuple(of_trace.get(name, 0.0) for of_trace in sums[1:]),
        )
        for name in names
        if name in sums[0]
    ]


def _sums(trace: Trace, key: Callable[[Span], str | None]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for span in trace.spans:
        name = key(span)
        if name is not None:
            sums[name] = sums.get(name, 0.0) + span.end_s - span.start_s
    return sums


def _memory_rows(traces: Sequence[Trace]) -> list[ComparedRow]:
    if len(traces) < 2:
        return []
    peaks = [peak_bytes(trace) for trace in traces]
    shared = sorted(set.intersection(*(set(of_trace) for of_trace in peaks)))
    return [
        ComparedRow(
            group=Group.MEMORY,
            name=str(rank),
            count=sum(sample.rank == rank for sample in traces[0].memory),
            simulated=peaks[0][rank],
            executed=tuple(of_trace[rank] for of_trace in peaks[1:]),
        )
        for rank in shared
    ]


def _check(simulated: Trace, executed: Sequence[Trace]) -> None:
    if not isinstance(simulated, Trace) or not isinstance(executed, Sequence):
        given = executed if isinstance(simulated, Trace) else simulated
        raise TypeError(
            "compare: want a simulated Trace and a sequence of executed ones, such as `traces` of what "
            f"workbench.run returns, got {type(given).__name__}"
        )
    if not executed:
        raise ValueError("compare: want at least one executed trace, got none")
    if simulated.executor is not Executor.SIMULATED:
        raise ValueError(f"compare: the first trace must be simulated, got an {simulated.executor} one")
    want = _passes(simulated)
    for index, trace in enumerate(executed, 1):
        if trace.executor is Executor.SIMULATED or trace.executor is not executed[0].executor:
            raise ValueError(
                f"compare: trace {index} of {len(executed)} to hold against the simulated one is "
                f"{trace.executor}; want executed ones, or emulated ones"
            )
        if not trace.plan_hash:
            raise ValueError(
                f"compare: executed trace {index} belongs to no plan; ingest it again with --plan PLAN"
            )
        if trace.plan_hash != simulated.plan_hash:
            raise ValueError(
                f"compare: traces must be of one plan; the simulated one is of plan "
                f"{simulated.plan_hash:.16}, executed trace {index} of plan {trace.plan_hash:.16}"
            )
        missing = sorted(want - _passes(trace), key=lambda pair: (pair[0], str(pair[1])))
        if missing:
            rank, action = missing[0]
            raise ValueError(
                f"compare: executed trace {index} is incomplete: rank {rank} has no {action} "
                f"({len(missing)} of {len(want)} passes are missing)"
            )


def _passes(trace: Trace) -> set[tuple[int, object]]:
    return {(span.rank, span.action) for span in trace.spans if span.action.kind in COMPUTE}


MOST_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Seconds of one step that a rank spends on one thing.

    Args:
        stage: of the actions; None: the mean over all ranks.
        what: kind of the action, exposed "communication", or "idle" time without any.
        simulated_s, executed_s: a rank's, in the mean over those that do it; the median of the repetitions.
    """

    stage: int | None
    what: str
    simulated_s: float
    executed_s: float

    @property
    def lost_s(self) -> float:
        return self.executed_s - self.simulated_s

    def __str__(self) -> str:
        where = "" if self.stage is None else f"stage {self.stage} "
        share = f" ({self.lost_s / self.simulated_s:+.0%})" if self.simulated_s > 0 else ""
        return f"{where}{self.what} {ms(self.lost_s):+.4g} ms{share}"


def lost_time(simulated: Trace, executed: Sequence[Trace]) -> tuple[Lost, ...]:
    """Excess over the prediction, worst first, then savings; ValueError without spans."""
    predicted = dict(_seconds(simulated))
    executed_seconds = [dict(_seconds(trace)) for trace in executed]
    keys = dict.fromkeys((*predicted, *(key for each in executed_seconds for key in each)))
    lost = [
        Lost(
            stage=stage,
            what=what,
            simulated_s=predicted.get((stage, what), 0.0),
            executed_s=median(each.get((stage, what), 0.0) for each in executed_seconds),
        )
        for stage, what in keys
    ]
    return tuple(sorted(lost, key=lambda each: -each.lost_s))


def lost_text(lost: Sequence[Lost]) -> str:
    """The worst excesses in one line."""
    worst = [str(each) for each in lost if each.lost_s > 0][:MOST_SHOWN]
    return f"largest losses of a rank against the prediction: {', '.join(worst) or 'none'}"


def _seconds(trace: Trace) -> Iterator[tuple[tuple[int | None, str], float]]:
    """(stage, what) -> seconds of a rank."""
    by_rank: dict[tuple[int | None, str], dict[int, float]] = {}
    for span in trace.spans:
        stage, kind, _ = span.action
        of_ranks = by_rank.setdefault((stage, str(kind)), {})
        of_ranks[span.rank] = of_ranks.get(span.rank, 0.0) + span.end_s - span.start_s
    yield from ((key, fmean(of_ranks.values())) for key, of_ranks in by_rank.items())
    exposed_s, busy = exposed_communication_s(trace), busy_s(trace)
    yield (None, "communication"), fmean(exposed_s.values())
    idle_s = [trace.iteration_s - busy[rank] - exposed_s[rank] for rank in busy]
    yield (None, "idle"), fmean(idle_s)
