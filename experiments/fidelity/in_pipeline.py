"""How much longer actions take in a running pipeline than their parts do alone in a loop."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import harmonic_mean, median
from typing import NamedTuple

from workbench.calibrate.tables import quality
from workbench.cost.profile import Fit, Profile
from workbench.drift import yardstick_s
from workbench.float_sum import float_sum
from workbench.schedule.action import COMPUTE, FSDP, Pass
from workbench.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """A plan that was run for calibration: simulated with a profile, and its executed steps."""

    simulated: Trace
    executed: tuple[Trace, ...]

    @property
    def has_rounds(self) -> bool:
        """Whether parameters are sharded: passes then include their share of a core and waits."""
        return any(span.action.kind in FSDP for span in self.simulated.spans)


def with_pipeline_factors(profile: Profile, rehearsals: Sequence[Rehearsal]) -> Profile:
    """Add to a profile the ratio of executed to simulated seconds of each kind of action.

    Layers are timed alone, over and over; in a pipeline, other microbatches' activations, messages and
    other layers' gradients intervene between two calls of one. The ratio is that of sums over all
    rehearsals, of the median step of each, minus the executor's own overhead. Plans without messages have
    factors of their own. Plans to be predicted must be others.

    Args:
        profile: that the rehearsals were simulated with; it must not have such factors yet.
        rehearsals: at least one step of each; they ran one rank per core.

    Returns:
        The profile; its fits say how well the ratio of the other rehearsals predicts each one. Its factors
            hold for the machine as it ran then, so its yardstick is the one read during the rehearsals.

    Raises:
        ValueError: a profile with factors, or no executed step.
    """
    if profile.in_pipeline or profile.without_messages:
        raise ValueError(f"profile {profile.name!r} has factors of passes in a pipeline already")
    if not all(one.executed for one in rehearsals):
        raise ValueError("want at least one executed step of every rehearsal, got none")
    passes = [one for one in rehearsals if not one.has_rounds]
    with_messages = [one for one in passes if one.simulated.messages]
    without_messages = [one for one in passes if not one.simulated.messages]
    other_kinds = [kind for kind in Pass if kind not in (*COMPUTE, *FSDP)]
    pipeline_factors = [_factor(profile, with_messages, kind, "in a pipeline") for kind in COMPUTE]
    pipeline_factors += [_factor(profile, rehearsals, kind, "in a pipeline") for kind in other_kinds]
    silent_factors = [_factor(profile, without_messages, kind, "without messages") for kind in COMPUTE]
    readings = [yardstick_s(trace) for one in rehearsals for trace in one.executed]
    yardsticks_s = [reading for reading in readings if reading is not None]
    return replace(
        profile,
        in_pipeline=tuple(sorted((one.kind, one.factor) for one in pipeline_factors if one.factor > 0)),
        without_messages=tuple(sorted((one.kind, one.factor) for one in silent_factors if one.factor > 0)),
        fits=(
            *profile.fits,
            *(one.fit for one in (*pipeline_factors, *silent_factors) if one.fit is not None),
        ),
        yardstick_s=harmonic_mean(yardsticks_s) if yardsticks_s else profile.yardstick_s,
    )


class _Factor(NamedTuple):
    """The factor of one kind of action; 0 if no rehearsal has any."""

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
    simulated_s = float_sum(simulated for simulated, _ in pairs)
    return float_sum(executed for _, executed in pairs) / simulated_s if simulated_s > 0 else 0.0


def _seconds(rehearsal: Rehearsal, kind: str, overhead_s: float) -> tuple[float, float]:
    """Simulated and median executed seconds of a kind on all ranks, without the executor's overhead."""
    simulated_s, count = _sum(rehearsal.simulated, kind)
    executed_s = median(_sum(trace, kind)[0] for trace in rehearsal.executed)
    return simulated_s - count * overhead_s, executed_s - count * overhead_s


def _sum(trace: Trace, kind: str) -> tuple[float, int]:
    lengths = [span.end_s - span.start_s for span in trace.spans if span.action.kind == kind]
    return float_sum(lengths), len(lengths)
