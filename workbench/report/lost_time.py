"""Where executed steps lose time against their prediction: by stage and kind, and in waiting."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from workbench.metrics import busy_s, exposed_communication_s
from workbench.trace import Trace
from workbench.units import ms

MOST_TOLD = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Seconds of one step in which a rank does one thing.

    Args:
        stage: whose; None: in the mean over all ranks.
        what: kind of the action, "communication" that no computation hides, or "idle" without any.
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
    """What takes longer than predicted, worst first, then what takes less; ValueError without spans."""
    predicted = dict(_seconds(simulated))
    found = [dict(_seconds(trace)) for trace in executed]
    keys = dict.fromkeys((*predicted, *(key for each in found for key in each)))
    lost = [
        Lost(
            stage=stage,
            what=what,
            simulated_s=predicted.get((stage, what), 0.0),
            executed_s=median(each.get((stage, what), 0.0) for each in found),
        )
        for stage, what in keys
    ]
    return tuple(sorted(lost, key=lambda each: -each.lost_s))


def lost_text(lost: Sequence[Lost]) -> str:
    """The worst of them in one line."""
    worst = [str(each) for each in lost if each.lost_s > 0][:MOST_TOLD]
    return f"time lost by a rank against the prediction: {', '.join(worst) or 'none'}"


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
