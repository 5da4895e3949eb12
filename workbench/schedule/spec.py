"""What defines a schedule: its name, the order of passes, and its demands on stages and ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from workbench.field_kinds import check_kinds
from workbench.schedule.action import Action
from workbench.schedule.graph_aware import ScheduleNode
from workbench.schedule.parts import Group, Programs

ChainOrder = Callable[[Sequence[int], int, int], tuple[tuple[Action, ...], ...]]
"""From [p v] stages, first to last, p ranks and m microbatches to [p] programs."""


PARAMETERS = ("window", "run_ahead", "offload")  # of `choice.Schedule`, which some schedules take


class StagePlacement(StrEnum):
    """How the stages of a chain map to its p blocks of ranks; with one stage per block the two are equal."""

    ROUND = "round the ranks"
    VEE = "down the ranks and up again"

    def block(self, position: int, num_stages: int, virtual_stages: int) -> int:
        """Return which of the num_stages / virtual_stages blocks holds the stage at this position."""
        num_blocks = num_stages // virtual_stages
        if self is StagePlacement.VEE and position >= num_blocks:
            return num_stages - 1 - position
        return position % num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The inputs of a schedule of a whole DAG.

    Args:
        nodes: the stages; any order.
        groups: [G] the stages that some ranks hold, in forward order.
        inner: stages of the LLM and of what reads it.
        frozen_sources: stages of modules that read no other and train nothing but a projector.
        duration: time of a pass in any one unit.
        window, run_ahead, offload: as those of `choice.Schedule`.
    """

    nodes: Sequence[ScheduleNode]
    groups: Sequence[Group]
    inner: Sequence[int]
    frozen_sources: Sequence[int]
    duration: Callable[[Action], float]
    window: int | None
    run_ahead: int
    offload: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """One schedule.

    Args:
        name: as users type it.
        summary: what it does, in one line.
        chain: the order of passes of a chain of stages with equal microbatches.
        dag: programs of any DAG of stages. None: the chains that nobody reads get their order from `chain`,
            and a list schedule fits all other stages around them.
        layout: how the stages of a module map to its ranks.
        usual_virtual_stages: default v, stages of one module per rank.
        takes_more_stages: v may be greater.
        splits_backward: whether backwards are split into I and W; a whole one in `chain` stays whole.
        most_in_flight: the most microbatches that a rank may hold, as a function of p, or of those that it
            holds under 1F1B. The fastest of list schedules and the order of `chain` within it is taken.
            None: no limit and no choice.
        parameters: further fields of `choice.Schedule` that it takes.
        torch_name: of the equal schedule in torch.distributed.pipelining, without "Schedule".
        shares_ranks_in_part: its stages may be on ranks that overlap without being equal.
    """

    name: str
    summary: str
    chain: ChainOrder
    dag: Callable[[Problem], Programs] | None = None
    layout: StagePlacement = StagePlacement.ROUND
    usual_virtual_stages: int = 1
    takes_more_stages: bool = False
    splits_backward: bool = False
    most_in_flight: Callable[[float], float] | None = None
    parameters: tuple[str, ...] = ()
    torch_name: str | None = None
    shares_ranks_in_part: bool = False

    def __post_init__(self) -> None:
        check_kinds(self, "schedule: ")
        if not self.name.strip() or not self.name.isprintable():
            raise ValueError(f"schedule: name must be one line of text, got {self.name!r:.60}")
        if self.usual_virtual_stages < 1:
            raise ValueError(
                f"schedule {self}: want usual_virtual_stages >= 1, got {self.usual_virtual_stages}"
            )
        if self.parameters and self.dag is None:
            raise ValueError(
                f"schedule {self}: parameters {', '.join(self.parameters)} reach dag alone, which is not "
                "given; nearest: a function with that argument that returns the chain"
            )
        if unknown := [each for each in self.parameters if each not in PARAMETERS]:
            raise ValueError(
                f"schedule {self}: parameters are of {', '.join(PARAMETERS)}, got {unknown[0]!r}"
            )
        for what, function in (
            ("chain", self.chain),
            ("dag", self.dag),
            ("most_in_flight", self.most_in_flight),
        ):
            if function is not None and not callable(function):
                raise ValueError(f"schedule {self}: {what} must be a function, got {function!r:.60}")

    def __str__(self) -> str:
        return self.name

    def takes(self, parameter: str) -> bool:
        """Whether the schedule has this parameter; a memory limit is for those that choose within it."""
        if parameter == "memory_limit":
            return self.most_in_flight is not None
        return parameter in self.parameters


def check_chain(stages: Sequence[int], num_microbatches: int) -> None:
    """Raise ValueError unless a chain has distinct stages and at least one microbatch."""
    if len(set(stages)) != len(stages) or not stages:
        raise ValueError(f"stages of a chain must be there and differ, got {list(stages)}")
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches must be >= 1, got {num_microbatches}")
