"""Stopping rule and scope of a search."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from workbench.planner.strategy_spec import Planner
from workbench.search.joint.bounds import LowerBound, lower_bound_s
from workbench.search.joint.question import Question
from workbench.search.joint.starts import Start


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """When a search ends: at the first limit reached, or when nothing is left to try.

    Args:
        seconds: None: no limit.
        gap: of the best value to the lower bound, relative to the best; None: no limit.
        candidates: number of those with a value, without the starts; None: no limit.
        clock: measures the seconds. A clock of CPU time, such as `time.process_time`, ignores other load;
            it is for a search in one process.
        is_asked: whether the user wants the best so far now; checked after every outcome.
    """

    seconds: float | None = None
    gap: float | None = None
    candidates: int | None = None
    clock: Callable[[], float] = field(default=time.monotonic, repr=False, compare=False)
    is_asked: Callable[[], bool] = field(default=_never, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, least in (("seconds", 0.0), ("candidates", 0)):
            given = getattr(self, name)
            if given is not None and not least < given < math.inf:
                raise ValueError(f"joint search: want {name} > 0, got {given}; nearest: 1")
        if self.gap is not None and not 0 <= self.gap < 1:
            raise ValueError(f"joint search: want a gap of 0 to 1, got {self.gap}; nearest: 0.02")
        if self.seconds is None and self.gap is None and self.candidates is None:
            raise ValueError("joint search: want an end: seconds, a gap or a number of candidates")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What a search may change, and what it starts from.

    Args:
        seed: of all draws.
        fixed: questions left as some strategy's plan answers them.
        planners: of the starts; None: all registered ones, those that need prices only if ranks have them.
        starts: planned and judged before, used instead of the planners'; None: not yet.
        lower: lower bound on the judge's values, by default for the seconds of the job's own step;
            `no_bound` for other judges.
        keeps_front: whether to keep the plans of all candidates that no other beats by more than a little.
    """

    seed: int = 0
    fixed: Mapping[Question, str] = field(default_factory=dict)
    planners: Mapping[str, Planner] | None = None
    starts: tuple[Start, ...] | None = None
    lower: LowerBound = lower_bound_s
    keeps_front: bool = False
