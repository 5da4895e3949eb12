"""The joint search in spaces that are listed whole: how far from the optimum it stays.

Setup:   five jobs of a vision or audio encoder, or both, and a language model on four or five A40s, four
         drawn samples of unequal sizes. Each space combines shapes of modules and cuts next to even ones,
         three schedules, every order of samples in microbatches, and all rules by which context-parallel
         ranks own tokens and ways in which keys travel. Every plan is built, checked and timed by the sweep.
Ours:    the joint search with a judge that knows the listed plans alone, and so many candidates with a
         value, in CPU seconds of one process; it starts from four plans that are drawn, since strategies'
         plans lie outside.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from experiments.search.judging import StepJudge
from experiments.search.spaces import Listed, ListedSpace, key_of
from workbench.plan.plan import Plan
from workbench.search.joint.choice import build
from workbench.search.joint.drive import joint_search
from workbench.search.joint.found import Found
from workbench.search.joint.starts import Start
from workbench.search.joint.terms import Scope, Stop
from workbench.trace import Trace

CANDIDATES = 1000
LIMIT_S = 600.0
STARTS = 4
TOLD = 1000  # plans between two reports


@dataclass(frozen=True, slots=True)
class ListedJudge:
    """Knows the plans of a space and no other."""

    listed: Listed
    judge: StepJudge

    def value(self, plan: Plan) -> float:
        """Of a listed plan; ValueError for any other."""
        value = self.listed.values.get(key_of(plan))
        if value is None:
            raise ValueError("a plan outside the space")
        return value

    def replay(self, plan: Plan) -> Trace:
        """By the engine."""
        return self.judge.replay(plan)


def listed(space: ListedSpace, progress: Callable[[int], None] = lambda done: None) -> Listed:
    """Every feasible plan of a space with its value."""
    judge = StepJudge(space.cost)
    values: dict[str, float] = {}
    for done, plan in enumerate(space.plans()):
        try:
            value = judge.value(plan)
        except ValueError:  # it does not fit, or can deadlock
            continue
        values[key_of(plan)] = value
        if done % TOLD == 0:
            progress(done)
    return Listed(values)


def searched(space: ListedSpace, whole: Listed, *, candidates: int, seed: int) -> Found:
    """The joint search in the space, from some of its plans; ValueError where none of these is feasible."""
    return joint_search(
        space.job,
        space.cost,
        ListedJudge(whole, StepJudge(space.cost)),
        stop=Stop(candidates=candidates, seconds=LIMIT_S, clock=time.process_time),
        scope=Scope(seed=seed, starts=drawn_starts(space, whole, seed)),
    )


def drawn_starts(space: ListedSpace, whole: Listed, seed: int) -> tuple[Start, ...]:
    """Feasible plans of the space, drawn evenly."""
    choices = list(space.choices())
    random.Random(seed).shuffle(choices)
    found: list[Start] = []
    for number, choice in enumerate(choices):
        try:
            plan = build(space.job, choice, space.cost)
        except ValueError:  # a schedule that is not for such stages
            continue
        value = whole.values.get(key_of(plan))
        if value is not None:
            found.append(Start(name=f"drawn {number}", plan=plan, choice=choice, value=value))
        if len(found) == STARTS:
            break
    return tuple(found)


def regret_of(
    space: ListedSpace, *, candidates: int, seed: int, progress: Callable[[int], None]
) -> dict[str, Any]:
    """A space's record: its size, digest and optimum, and what the search came to."""
    started_s = time.process_time()
    whole = listed(space, progress)
    listed_s = time.process_time() - started_s
    found = searched(space, whole, candidates=candidates, seed=seed)
    return {
        "space": space.name,
        "plans": len(whole.values),
        "digest": whole.digest,
        "optimum_s": whole.optimum,
        "worst_s": max(whole.values.values()),
        "optimal_plans": sum(value == whole.optimum for value in whole.values.values()),
        "best_start": found.best_start.name,
        "best_start_s": found.best_start.value,
        "joint_s": found.value,
        "regret": found.value / whole.optimum - 1,
        "candidates": found.candidates,
        "proposed": len(found.log),
        "listed_seconds": listed_s,
        "seconds": found.seconds,
    }
