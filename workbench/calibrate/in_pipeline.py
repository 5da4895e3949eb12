"""How much longer actions take in a running pipeline than their parts do alone in a loop."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import harmonic_mean, median
from typing import NamedTuple

from workbench.calibrate.tables import quality
from workbench.cost.profile import Fit, Profile
from workbench.drift import yardstick_s
from workbench.schedule.action import COMPUTE, FSDP, Pass
from workbench.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """A plan that ran in order to calibrate: as simulated with a profile, and its executed steps."""

    simulated: Trace
    executed: tuple[Trace, ...]

    @property
    def has_rounds(self) -> bool:
        """Of sharded parameters: passes hold what they take of a core, and they hold waits."""
        return any(span.action.kind in FSDP for span in self.simulated.spans)


def with_pipeline_factors(profile: Profile, rehearsals: Sequence[Rehearsal]) -> Profile:
    """The profile with the ratio of executed to simulated seconds of each kind of action.

    Layers are timed alone, over and over; in a pipeline, activations of other microbatches,
    messages and gradients of other layers stand between two calls of one. The ratio is that of
    sums over all rehearsals, of the median step of each, less the executor's own overhead. Ranks that
    nobody hands rows to have factors of their own. Plans to be predicted must be others.

    Args:
        profile: that the rehearsals were simulated with; it has no such factors yet.
        rehearsals: one step at least of each; they ran one rank to a core.

    Returns:
        the profile; its fits say how well the ratio of the other rehearsals predicts each one. Its factors
        hold for the machine as it ran then, so its yardstick is what was read beside the rehearsals.

    Raises:
        ValueError: a profile with factors, or no executed step.
    """
    if profile.in_pipeline or profile.without_messages:
        raise ValueError(f"profile {profile.name!r} has factors of passes in a pipeline already")
    if not all(one.executed for one in rehearsals):
        raise ValueError("want at least one executed step of every rehearsal, got none")
    passes = [one for one in rehearsals if not one.has_rounds]
    talking = [one for one in passes if one.simulated.messages]
    alone = [one for one in passes if not one.simulated.messages]
    beside = [kind for kind in Pass if kind not in (*COMPUTE, *FSDP)]
    pipeline = [_factor(profile, talking, kind, "in a pipeline") for kind in COMPUTE]
    pipeline += [_factor(profile, rehearsals, kind, "in a pipeline") for kind in beside]
    silent = [_factor(profile, alone, kind, "without messages") for kind in COMPUTE]
    readings = [yardstick_s(trace) for one in rehearsals for trace in one.executed]
    known = [reading for reading in readings if reading is not None]
    return replace(
        profile,
        in_pipeline=tuple(sorted((one.kind, one.factor) for one in pipeline if one.factor > 0)),
        without_messages=tuple(sorted((one.kind, one.factor) for one in silent if one.factor > 0)),
        fits=(*profile.fits, *(one.fit for one in (*pipeline, *silent) if one.fit is not None)),
        yardstick_s=harmonic_mean(known) if known else profile.yardstick_s,
    )


class _Factor(NamedTuple):
    """Of one kind of action; 0 where no rehearsal has any."""

    kind: str
    factor: float
    fit: Fit | None


def _factor(profile: Profile, rehearsals: Sequence[Rehearsal], kind: str, where: str) -> _Factor:
    pairs = [_seconds(one, kind, profile.overhead_s(kind)) for one in rehearsals]
    pairs = [(simulated_s, executed_s) for simulated_s, executed_s in pairs if simulated_s > 0]
    factor = _ratio(pairs)
    if len(pairs) < 2 or factor <= 0:
        return _Factor(str(kind), factor, None)
    errors = [
        abs(_ratio([*pairs[:index], *pairs[index + 1 :]]) * simulated_s / executed_s - 1)
        for index, (simulated_s, executed_s) in enumerate(pairs)
        if executed_s > 0
    ]
    return _Factor(str(kind), factor, quality(f"{kind} {where}, x {factor:.3f}", errors))


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    simulated_s = sum(simulated for simulated, _ in pairs)
    return sum(executed for _, executed in pairs) / simulated_s if simulated_s > 0 else 0.0


def _seconds(rehearsal: Rehearsal, kind: str, overhead_s: float) -> tuple[float, float]:
    """Simulated and median executed seconds of a kind on all ranks, without the executor's."""
    simulated_s, count = _sum(rehearsal.simulated, kind)
    executed_s = median(_sum(trace, kind)[0] for trace in rehearsal.executed)
    return simulated_s - count * overhead_s, executed_s - count * overhead_s


def _sum(trace: Trace, kind: str) -> tuple[float, int]:
    lengths = [span.end_s - span.start_s for span in trace.spans if span.action.kind == kind]
    return sum(lengths), len(lengths)
