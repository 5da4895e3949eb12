"""The joint search in spaces that are listed in full: its distance from the optimum.

Setup:   seven jobs of a vision or audio encoder, or both, and a language model, on one or two nodes of seven
         kinds of device, four drawn samples of unequal sizes; see `spaces`. Each space combines shapes of
         modules and cuts next to even ones, three schedules, every order of samples in microbatches, and all
         rules by which context-parallel ranks own tokens and ways in which keys travel. Every plan is built,
         checked for soundness, deadlock and memory, and timed by the sweep: no bound skips any.
Ours:    the joint search with a judge that has a value only for the listed plans, and so many candidates with
         a value, in CPU seconds of one process; it starts from four plans that are drawn, since strategies'
         plans lie outside.
"""

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from experiments.search.listed_space import Listed, ListedSpace, answers_of, key_of
from sim.predict import IterationJudge
from workbench.collector import collector_paused
from workbench.explain.timeline import Timeline
from workbench.job.job import Job
from workbench.plan.plan import Plan
from workbench.search.joint.choice import Choice, build
from workbench.search.joint.drive import joint_search
from workbench.search.joint.result import SearchResult
from workbench.search.joint.starts import Start
from workbench.search.joint.terms import Scope, Stop

CANDIDATES = 1000
LIMIT_S = 600.0
STARTS = 4
REPORT_EVERY = 1000  # choices between two reports


@dataclass(frozen=True, slots=True)
class ListedJudge:
    """A judge of only the plans of a space."""

    job: Job
    listed: Listed
    judge: IterationJudge

    def value(self, plan: Plan) -> float:
        """The value of a listed plan; ValueError for any other."""
        job = self.job
        value = self.listed.values.get(key_of(plan))
        if value is None or (plan.model, plan.cluster, plan.batch) != (job.model, job.cluster, job.batch):
            raise ValueError("a plan outside the space")
        return value

    def timeline(self, plan: Plan) -> Timeline:
        """The timeline of the underlying judge."""
        return self.judge.timeline(plan)


def listed(space: ListedSpace, progress: Callable[[int], None] = lambda done: None) -> Listed:
    """All plans of a space with their values, None for refused ones.

    Plans of several choices are judged once.
    """
    values: dict[str, float | None] = {}
    answers: dict[str, set[str]] = {}
    choices = space.choices()
    for number, some in enumerate(iter(lambda: tuple(islice(choices, REPORT_EVERY)), ())):
        progress(number * REPORT_EVERY)
        with collector_paused():
            _list(space, some, values, answers)
        gc.collect()  # what was derived of plans that are gone
    return Listed(values, {question: len(question_answers) for question, question_answers in answers.items()})


def _list(
    space: ListedSpace,
    choices: tuple[Choice, ...],
    values: dict[str, float | None],
    answers: dict[str, set[str]],
) -> None:
    judge = IterationJudge(space.cost)
    for plan in space.plans(choices):
        key = key_of(plan)
        if key in values:
            continue
        try:
            values[key] = judge.value(plan)
        except ValueError:  # it does not fit, or can deadlock
            values[key] = None
            continue
        for question, answer in answers_of(plan).items():
            answers.setdefault(question, set()).add(answer)


def searched(space: ListedSpace, whole: Listed, *, candidates: int, seed: int) -> SearchResult:
    """The joint search in the space from some of its plans; ValueError where none of them is feasible."""
    return joint_search(
        space.job,
        space.cost,
        ListedJudge(space.job, whole, IterationJudge(space.cost)),
        stop=Stop(candidates=candidates, seconds=LIMIT_S, clock=time.process_time),
        scope=Scope(seed=seed, starts=drawn_starts(space, whole, seed)),
    )


def drawn_starts(space: ListedSpace, whole: Listed, seed: int) -> tuple[Start, ...]:
    """Feasible plans of the space, drawn uniformly."""
    choices = list(space.choices())
    random.Random(seed).shuffle(choices)
    starts: list[Start] = []
    for number, choice in enumerate(choices):
        try:
            plan = build(space.job, choice, space.cost)
        except ValueError:  # a schedule that is not for such stages
            continue
        value = whole.values.get(key_of(plan))
        if value is not None:
            starts.append(Start(name=f"drawn {number}", plan=plan, choice=choice, value=value))
        if len(starts) == STARTS:
            break
    return tuple(starts)


def regret_of(
    space: ListedSpace, *, candidates: int, seed: int, progress: Callable[[int], None]
) -> dict[str, Any]:
    """A space's record: its size, digest and optimum, and the search's result."""
    started_s = time.process_time()
    whole = listed(space, progress)
    listed_s = time.process_time() - started_s
    result = searched(space, whole, candidates=candidates, seed=seed)
    return {
        "space": space.name,
        "plans": len(whole.feasible),
        "refused": len(whole.values) - len(whole.feasible),
        "answers": dict(whole.answers),
        "digest": whole.digest,
        "optimum_s": whole.optimum,
        "worst_s": max(whole.feasible.values()),
        "optimal_plans": sum(value == whole.optimum for value in whole.feasible.values()),
        "best_start": result.best_start.name,
        "best_start_s": result.best_start.value,
        "joint_s": result.value,
        "regret": result.value / whole.optimum - 1,
        "candidates": result.candidates,
        "proposed": len(result.log),
        "listed_seconds": listed_s,
        "seconds": result.seconds,
    }
