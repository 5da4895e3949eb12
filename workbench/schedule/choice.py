"""All schedules, and a job's choice among them, or a schedule of its own: a kind and its parameters."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from workbench.field_kinds import check_kinds
from workbench.schedule import dualpipe_v, interleaved, one_f_one_b, three_phase, zero_bubble
from workbench.schedule.spec import ScheduleSpec


class ScheduleKind(StrEnum):
    """Schedules by the names users type, in the order in which they are listed.

    Each is one line here; its own file defines the rest, found in `spec`.
    """

    spec: ScheduleSpec

    def __new__(cls, spec: ScheduleSpec | str) -> Self:
        assert isinstance(spec, ScheduleSpec)  # a look-up by name does not come here
        kind = str.__new__(cls, spec.name)
        kind._value_ = spec.name
        kind.spec = spec
        return kind

    ONE_F_ONE_B = one_f_one_b.SPEC
    GPIPE = one_f_one_b.SPEC_GPIPE
    INTERLEAVED = interleaved.SPEC
    ZB_H1 = zero_bubble.SPEC_H1
    ZB_H2 = zero_bubble.SPEC_H2
    ZB_V = zero_bubble.SPEC_V
    DUALPIPE_V = dualpipe_v.SPEC
    THREE_PHASE = three_phase.SPEC

    @property
    def splits_backward(self) -> bool:
        """Whether backwards are split into I and W."""
        return self.spec.splits_backward

    @property
    def usual_virtual_stages(self) -> int:
        """Default number of stages of one module on a rank."""
        return self.spec.usual_virtual_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A kind of schedule with its parameters; a kind refuses those that its spec does not take.

    Args:
        kind: which one, or the spec of one of your own.
        virtual_stages: v, stages of the LLM on each of its ranks.
        memory_limit: most microbatches whose activations a rank of the LLM may hold at once, each from
            its F to its W (to its I where it has no W); on one of v stages it counts 1/v. None: the kind's
            own limit on p sets of ranks. What feeds the LLM may hold what it holds under graph-aware
            1F1B, or what the kind's own limit makes of that.
        window: microbatches of the LLM between two changes of module. None: all.
        run_ahead: windows by which the encoders' forwards come early; for kinds without windows,
            microbatches by which forwards of frozen encoders may come earlier: strategies take as many
            as fit in memory.
        offload: in one window: weights and optimizer state of the encoders are on the host while the
            LLM runs.
    """

    kind: ScheduleKind | ScheduleSpec = ScheduleKind.ONE_F_ONE_B
    virtual_stages: int = 1
    memory_limit: int | None = None
    window: int | None = None
    run_ahead: int = 0
    offload: bool = False

    def __post_init__(self) -> None:
        check_kinds(self, "schedule: ")
        _check_kind(self.kind)
        for parameter, least in (("window", 1), ("run_ahead", 0), ("offload", 0), ("memory_limit", 1)):
            self._check_parameter(parameter, least)
        spec = self.spec
        usual = spec.usual_virtual_stages
        if self.virtual_stages < usual or (self.virtual_stages > usual and not spec.takes_more_stages):
            bound = ">= " if spec.takes_more_stages else ""
            raise ValueError(
                f"schedule {self.kind}: want virtual_stages {bound}{usual}, got {self.virtual_stages}"
            )
        if self.offload and self.window is not None:
            raise ValueError(
                f"schedule {self.kind}: offload wants {self.kind} without a window, got window {self.window}"
            )
        if self.run_ahead and self.window is None and spec.takes("window"):
            raise ValueError(
                f"schedule {self.kind}: run_ahead {self.run_ahead} wants a window, all microbatches are one"
            )

    @property
    def spec(self) -> ScheduleSpec:
        """What defines the kind."""
        return self.kind if isinstance(self.kind, ScheduleSpec) else self.kind.spec

    @property
    def own_name(self) -> str:
        """The name of a schedule that is not registered, else empty."""
        return self.kind.name if isinstance(self.kind, ScheduleSpec) else ""

    def _check_parameter(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value not in (None, 0) and not self.spec.takes(name):
            takers = [str(kind) for kind in ScheduleKind if kind.spec.takes(name)]
            verb = "has" if len(takers) == 1 else "have"
            raise ValueError(
                f"schedule {self.kind} has no {name}, got {value}; {', '.join(takers)} {verb} one"
            )
        if value is not None and value < least:
            raise ValueError(f"schedule {self.kind}: {name} must be >= {least}, got {value}")


def _check_kind(kind: object) -> None:
    """ValueError for anything but a kind, and for an own schedule under a registered name."""
    if isinstance(kind, ScheduleKind):
        return
    if not isinstance(kind, ScheduleSpec):
        near = f"; nearest: ScheduleKind({kind!r})" if kind in list(ScheduleKind) else ""
        raise ValueError(
            f"schedule: kind must be a ScheduleKind, or a ScheduleSpec of your own, got {kind!r:.60}{near}"
        )
    if kind.name in list(ScheduleKind):
        raise ValueError(
            f"schedule {kind.name!r} of your own: the name is that of a registered schedule; nearest: "
            f"'my-{kind.name}'"
        )


def usual(kind: ScheduleKind | ScheduleSpec) -> Schedule:
    """Return the kind with its default number of virtual stages and its own memory limit."""
    return Schedule(kind=kind, virtual_stages=kind.usual_virtual_stages)


def usual_in_phases() -> Schedule:
    """Return the first kind whose modules may share ranks in part, with its defaults."""
    return usual(next(kind for kind in ScheduleKind if kind.spec.shares_ranks_in_part))


def rank_block(schedule: Schedule, position: int, num_stages: int) -> int:
    """Return which of the num_stages / v blocks of ranks holds the stage at a position of the chain."""
    return schedule.spec.layout.block(position, num_stages, schedule.virtual_stages)
