"""The description of a strategy: its name, planner, summary, and the search space of its paper."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from workbench.cost.model import CostModel
from workbench.job.job import Job
from workbench.job.notations.cornstarch import EncoderPlacing
from workbench.plan.plan import Plan
from workbench.planner.stage_counts import Progress, silent
from workbench.schedule.choice import Schedule, ScheduleKind, usual

Planner = Callable[[Job, CostModel, Progress], Plan]  # ValueError where it has no plan for the job

Regroup = Callable[[Plan, Job, CostModel], Plan]
"""Assigns the job's batch anew to a plan's stages; ValueError where that is impossible."""

Check = Callable[[Job], None]

Shortlist = Callable[[Job, CostModel, Progress, int], tuple[Plan, ...]]
"""The best plans by a strategy's own estimates, its planner's choice first; at most so many for each
estimate. ValueError where there is none."""


def accepts_all(job: Job) -> None:
    """A strategy that learns what it refuses from its search."""


@dataclass(frozen=True)
class First:
    """The planner of a strategy as published: the first plan of its shortlist, with the same errors."""

    shortlist: Shortlist

    def __call__(self, job: Job, cost: CostModel, progress: Progress = silent) -> Plan:
        return self.shortlist(job, cost, progress, 1)[0]


class Chooser(Enum):
    """Who chooses tp, cp and dp: the planner, or the user for each module or for all modules at once."""

    ITSELF = "searched by the strategy"
    EACH = "of every module"
    ALIKE = "of all modules alike"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSpace:
    """The search space of one strategy.

    Args:
        degrees: how layouts are chosen.
        where: the paper's section.
        has_cp: whether its modules may be context-parallel.
        shares_ranks: whether modules are on the same ranks.
        schedules: the paper's.
        says_memory: whether the strategy itself decides sharding and replicas, whatever a job requests, and
            recomputation that it does not state.
        reshards: whether its users choose how long sharded parameters stay gathered.
        sizes_microbatches: whether the strategy itself decides the samples of a microbatch.
        effort: cost of planning and judging once, in candidates of a search that single moves make; measured
            on two jobs, see the decisions; 1 where not measured.
    """

    degrees: Chooser
    where: str
    has_cp: bool = True
    shares_ranks: bool = False
    schedules: tuple[Schedule, ...] = (Schedule(),)
    says_memory: bool = False
    reshards: bool = False
    sizes_microbatches: bool = False
    effort: float = 1.0


PLAIN_OR_INTERLEAVED = (Schedule(), usual(ScheduleKind.INTERLEAVED))
PLAIN_OR_SPLIT = (Schedule(), usual(ScheduleKind.ZB_H1), usual(ScheduleKind.ZB_H2))

KARNATI = "Karnati et al., section 4: layouts, recomputation, batch size, optimizer instances, LLM layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySpec:
    """One strategy.

    Args:
        name: as the user types it.
        planner: makes its plans, as published.
        own_space: the search space of its paper.
        placing: where it places encoders; None: nowhere that a specification can express.
        stands_for_placing: whether it is the default for a specification with that placing and no strategy.
        shortlist: the plans that a judge chooses from, see `planner.judged`.
        summary: what it does, in one line.
        batch_level: whether its split of the ranks is meant for every batch of the data, for which batches
            may be too small.
        searches_layouts: whether it also chooses degrees of modules to which the job gives no layout.
        wants_prices: whether it plans only for pools of ranks that have a price.
        regroup: groups the samples of every batch anew; None: samples take the positions of those of the
            first batch, see `plan.following`.
        check: raises the ValueError of jobs that the planner refuses before it searches.
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
    check: Check = accepts_all
