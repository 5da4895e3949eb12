"""What the paper of a strategy searches: who chooses degrees, which schedules, what its users may ask."""

from dataclasses import dataclass
from enum import Enum

from workbench.schedule.choice import Schedule, ScheduleKind, usual


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
