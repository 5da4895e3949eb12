"""A schedule as its users know it: a name, the order of passes, and what it asks of stages and ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from workbench.schedule.action import Action
from workbench.schedule.graph_aware import ScheduleNode
from workbench.schedule.parts import Group, Programs

ChainOrder = Callable[[Sequence[int], int, int], tuple[tuple[Action, ...], ...]]
"""From [p v] stages, first to last, p ranks and m microbatches to [p] programs."""


class StagePlacement(StrEnum):
    """How the stages of a chain lie on its p blocks of ranks; with one stage on each the two are the same."""

    ROUND = "round the ranks"
    VEE = "down the ranks and up again"

    def block(self, position: int, num_stages: int, virtual_stages: int) -> int:
        """Which of the num_stages / virtual_stages blocks the stage at this place of the chain lies on."""
        num_blocks = num_stages // virtual_stages
        if self is StagePlacement.VEE and position >= num_blocks:
            return num_stages - 1 - position
        return position % num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a schedule of a whole DAG is made for.

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
        name: as it is typed.
        summary: what it does, in one line.
        chain: the order of passes of a chain of stages with equal microbatches.
        dag: programs of any DAG of stages. None: the chains that nobody reads get their order from `chain`,
            and a list schedule fits all other stages around them.
        layout: how the stages of a module lie on its ranks.
        usual_virtual_stages: v, stages of one module on a rank where nobody says another number.
        takes_more_stages: v may be greater.
        splits_backward: whether backwards stand as I and W; where `chain` has a whole one, that stays.
        most_in_flight: the most microbatches that a rank may hold, of p, or of those that it holds under
            1F1B. Of list schedules and the order of `chain` the fastest within it is taken. None: no
            limit and no choice.
        parameters: fields of `choice.Schedule` that it takes besides.
        torch_name: of the schedule of torch.distributed.pipelining that is the same, without "Schedule".
        shares_ranks_in_part: its stages may lie on ranks that overlap without being equal.
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

    def takes(self, parameter: str) -> bool:
        """Whether the schedule has this parameter; a memory limit is for those that choose within it."""
        if parameter == "memory_limit":
            return self.most_in_flight is not None
        return parameter in self.parameters
