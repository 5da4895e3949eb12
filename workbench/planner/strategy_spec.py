"""A strategy as its users know it: a name, what makes its plans, what its paper searches, a line about it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.job.notations.cornstarch import EncoderPlacing
from workbench.plan.plan import Plan
from workbench.planner.stage_counts import Progress, silent
from workbench.schedule.choice import Schedule, ScheduleKind, usual

Planner = Callable[[Job, CostModel, Progress], Plan]  # ValueError where it has no plan of the job

Regroup = Callable[[Plan, Job, CostModel], Plan]
"""The job's batch on the stages of a plan whose degrees the job has; ValueError where it does not go."""

Shortlist = Callable[[Job, CostModel, Progress, int], tuple[Plan, ...]]
"""The best plans by a strategy's own estimates, its planner's first: so many of each estimate at most.
ValueError where it has none."""


@dataclass(frozen=True)
class First:
    """The planner of a strategy as it was published: the first plan of its shortlist, with its errors."""

    shortlist: Shortlist

    def __call__(self, job: Job, cost: CostModel, progress: Progress = silent) -> Plan:
        return self.shortlist(job, cost, progress, 1)[0]


class Chooser(Enum):
    """Who chooses tp, cp and dp: the strategy's planner, or the user for every module, or for all alike."""

    ITSELF = "searched by the strategy"
    EACH = "of every module"
    ALIKE = "of all modules alike"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSpace:
    """What is searched for one strategy.

    Args:
        degrees: how layouts are chosen.
        where: the paper's section.
        has_cp: whether its modules may be context-parallel.
        shares_ranks: whether modules lie on the same ranks.
        schedules: the paper's.
        says_memory: whether the strategy itself says what is sharded and computed again.
        effort: of planning and judging once, in candidates of a search that single moves make; measured on
            two jobs, see the decisions; 1 where nobody measured more.
    """

    degrees: Chooser
    where: str
    has_cp: bool = True
    shares_ranks: bool = False
    schedules: tuple[Schedule, ...] = (Schedule(),)
    says_memory: bool = False
    effort: float = 1.0


PLAIN_OR_INTERLEAVED = (Schedule(), usual(ScheduleKind.INTERLEAVED))
PLAIN_OR_SPLIT = (Schedule(), usual(ScheduleKind.ZB_H1), usual(ScheduleKind.ZB_H2))

KARNATI = "Karnati et al., section 4: layouts, recomputation, batch size, optimizer instances, LLM layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySpec:
    """One strategy.

    Args:
        name: as it is typed.
        planner: makes its plans, as it was published.
        own_space: what its own paper searches.
        placing: where it puts encoders; None: nowhere that a specification says.
        stands_for_placing: a specification that says that placing and no strategy means this one.
        shortlist: what a judge chooses from, see `planner.judged`.
        summary: what it does, in one line.
        batch_level: its split of the ranks is meant for every batch of the data; batches may be too small
            for that.
        searches_layouts: it chooses degrees as well, of modules to which the job gives no layout.
        wants_prices: it plans only for pools of ranks that have a price.
        regroup: decides anew for every batch which samples go together; None: they stand where those of
            the first batch stood, see `plan.following`.
    """

    name: str
    planner: Planner
    shortlist: Shortlist
    summary: str
    own_space: OwnSpace
    placing: EncoderPlacing | None = EncoderPlacing.PARALLEL
    stands_for_placing: bool = False
    batch_level: bool = False
    searches_layouts: bool = False
    wants_prices: bool = False
    regroup: Regroup | None = None
