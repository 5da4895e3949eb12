"""Which schedule a job asks for: its kind and the kind's parameters."""

from dataclasses import dataclass
from enum import StrEnum


class ScheduleKind(StrEnum):
    """Schedules by the names users type.

    The `zb-` kinds split the backward into I and W; `interleaved` and `zb-v` give each rank several
    stages of one module. `three-phase` is for modules that share ranks under grids of their own.
    """

    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb-h1"
    ZB_H2 = "zb-h2"
    ZB_V = "zb-v"
    THREE_PHASE = "three-phase"

    @property
    def splits_backward(self) -> bool:
        """Whether backwards stand as I and W instead of B."""
        return self in (ScheduleKind.ZB_H1, ScheduleKind.ZB_H2, ScheduleKind.ZB_V)

    @property
    def usual_virtual_stages(self) -> int:
        """Stages of one module on a rank where nobody says another number."""
        return 2 if self in (ScheduleKind.INTERLEAVED, ScheduleKind.ZB_V) else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A kind of schedule with its parameters.

    Args:
        kind: which one.
        virtual_stages: v, stages of the LLM on each of its ranks; `interleaved` wants >= 2, `zb-v`
            is a V of exactly 2, `zb-h1` wants >= 1, the others have 1.
        memory_limit: most microbatches whose activations a rank of the LLM may hold at once, each from
            its F to its W (to its I where it has no W); on one of v stages it counts 1/v. For the
            `zb-` kinds; None: the kind's own limit, p, 2p - 1 and p on p sets of ranks. What feeds
            the LLM may hold what it holds under graph-aware 1F1B, twice that for `zb-h2`.
        window: for `three-phase`: microbatches of the LLM between two changes of module. None: all.
        run_ahead: for `three-phase`: windows by which the encoders' forwards come early. For `1f1b`:
            microbatches by which forwards of frozen encoders may come earlier than it has them; strategies
            take as many as fit in memory.
        offload: for `three-phase` in one window: weights and optimizer state of the encoders are on the
            host while the LLM runs.
    """

    kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    virtual_stages: int = 1
    memory_limit: int | None = None
    window: int | None = None
    run_ahead: int = 0
    offload: bool = False

    def __post_init__(self) -> None:
        self._check_window()
        usual = self.kind.usual_virtual_stages
        takes_more = self.kind in (ScheduleKind.INTERLEAVED, ScheduleKind.ZB_H1)
        if self.virtual_stages != usual and not (takes_more and self.virtual_stages > usual):
            least = ">= " if takes_more else ""
            raise ValueError(
                f"schedule {self.kind}: want virtual_stages {least}{usual}, got {self.virtual_stages}"
            )
        if self.memory_limit is None:
            return
        if not self.kind.splits_backward:
            kinds = ", ".join(kind for kind in ScheduleKind if kind.splits_backward)
            raise ValueError(
                f"schedule {self.kind} has no memory_limit, got {self.memory_limit}; {kinds} have one"
            )
        if self.memory_limit < 1:
            raise ValueError(f"schedule {self.kind}: memory_limit must be >= 1, got {self.memory_limit}")

    def _check_window(self) -> None:
        three_phase, one_f_one_b = ScheduleKind.THREE_PHASE, ScheduleKind.ONE_F_ONE_B
        for name, given, least, kinds in (
            ("window", self.window, 1, (three_phase,)),
            ("run_ahead", self.run_ahead, 0, (three_phase, one_f_one_b)),
        ):
            if given and self.kind not in kinds:
                others = f"{' and '.join(kinds)} {'has' if len(kinds) == 1 else 'have'} one"
                raise ValueError(f"schedule {self.kind} has no {name}, got {given}; {others}")
            if given is not None and given < least:
                raise ValueError(f"schedule {self.kind}: {name} must be >= {least}, got {given}")
        if self.offload and self.kind is not three_phase:
            raise ValueError(f"schedule {self.kind} has no offload; {three_phase} has one")
        if self.offload and self.window is not None:
            raise ValueError(
                f"schedule {self.kind}: offload wants {three_phase} without a window, "
                f"got window {self.window}"
            )
        if self.run_ahead and self.window is None and self.kind is three_phase:
            raise ValueError(
                f"schedule {self.kind}: run_ahead {self.run_ahead} wants a window, all microbatches are one"
            )


def usual(kind: ScheduleKind) -> Schedule:
    """The kind with its usual number of virtual stages and its own memory limit."""
    return Schedule(kind=kind, virtual_stages=kind.usual_virtual_stages)


def rank_block(schedule: Schedule, position: int, num_stages: int) -> int:
    """Which of the num_stages / v blocks of ranks a stage of the chain lies on: round them, or in a V."""
    num_blocks = num_stages // schedule.virtual_stages
    if schedule.kind is ScheduleKind.ZB_V and position >= num_blocks:
        return num_stages - 1 - position
    return position % num_blocks
