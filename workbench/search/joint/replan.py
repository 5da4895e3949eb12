"""Strategies that plan anew: moves that reach all of the space that a strategy's own paper searches."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

from workbench.job.job import Job, ModuleLayout
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.plan import ModuleSettings, Plan
from workbench.planner.groupings import groups_of, llm_of
from workbench.planner.layout_choice import degrees_of
from workbench.planner.strategy_spec import Chooser, Planner
from workbench.schedule.choice import Schedule
from workbench.search.joint.choice import NAME, Choice, choice_of, draft_of, num_actions
from workbench.search.joint.move import Space
from workbench.search.joint.own_spaces import OWN_SPACES, Draws
from workbench.search.joint.question import Question

MOST_TOLD = 100  # candidates of a planner's own, after which it is stopped: a plan is one candidate here
NEAR_SHARE = 0.7  # of the draws of a strategy that has a plan: next to its best
UNTRIED = 5  # draws after which a strategy counts half as one that may be the best
REPEATED = 20  # draws one after the other that were made before: a strategy gives none this time
PROMISE = 4  # power of how good a strategy's best plan is
MOST_ACTIONS = 500_000  # of all plans that are cached: one that becomes an incumbent is asked for again
_PLANS: LruCache[Plan] = LruCache(MOST_ACTIONS, num_actions)


class _TooMany(Exception):  # noqa: N818  (no error: the planner is told to stop)
    """A planner has more candidates of its own than one move is worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """The plan that a strategy makes of the job with other layouts, microbatches, schedule and settings.

    It answers all questions, so that it stands for every plan that no placement says as well.

    Args:
        strategy: whose planner it is.
        layouts: of modules; none: the strategy chooses them.
        replicas: of modules whose layout has no number of its own.
        microbatch_samples: samples of a microbatch.
        schedule: that it plans under.
        modules: their settings.
    """

    question: ClassVar[Question] = Question.LAYOUT
    strategy: str
    layouts: tuple[ModuleLayout, ...]
    replicas: int
    microbatch_samples: int
    schedule: Schedule
    modules: tuple[ModuleSettings, ...]

    def job_of(self, job: Job) -> Job:
        """What the strategy plans."""
        return replace(
            job,
            layouts=self.layouts,
            replicas=self.replicas,
            microbatch_samples=self.microbatch_samples,
            schedule=self.schedule,
            settings=replace(job.settings, modules=self.modules),
        )

    def plan(self, space: Space) -> Plan:
        """The strategy's, under this search's name; ValueError where it has none."""
        return _PLANS.get_or((Identity(space), self), lambda: self._planned(space))

    def _planned(self, space: Space) -> Plan:
        planner = space.planners.get(self.strategy)
        if planner is None:
            raise ValueError(f"strategy {self.strategy!r} does not plan in this search")
        told = 0

        def count(done: int, total: int, best_s: float) -> None:
            nonlocal told
            told += 1
            if told > MOST_TOLD:
                raise _TooMany

        try:
            plan = planner(self.job_of(space.job), space.cost, count)
        except _TooMany:
            raise ValueError(f"{self.strategy} has more than {MOST_TOLD} candidates of its own") from None
        return replace(plan, strategy=NAME)

    def apply(self, space: Space, choice: Choice) -> Choice:
        return choice_of(self.job_of(space.job), self.plan(space), space.cost)


def replan_of(strategy: str, job: Job) -> Replan:
    """The move whose job this is."""
    return Replan(
        strategy=strategy,
        layouts=job.layouts,
        replicas=job.replicas,
        microbatch_samples=job.microbatch_samples,
        schedule=job.schedule,
        modules=job.settings.modules,
    )


@dataclass(slots=True)
class _Arm:
    """One strategy: what it may be asked, and the best that it answered."""

    draws: Draws
    value: float | None
    job: Job | None
    tried: int = 0
    is_empty: bool = False

    @property
    def effort(self) -> float:
        """Of one more draw."""
        return self.draws.space.effort

    def weight(self, best: float) -> float:
        """Of its draws, given the best value of all strategies; so that its time goes by what it promises."""
        if self.is_empty:
            return 0.0
        promise = 0.0 if self.value is None else (best / self.value) ** PROMISE
        return max(promise, 1 / (1 + self.effort * self.tried / UNTRIED)) / self.effort


class Replans:
    """Draws jobs of all strategies' own spaces, more of those whose best plan is better and soon planned.

    Next to a strategy's best job or anywhere in its space. Every strategy counts as the best until it was
    tried, and less with all that was spent on it. What planning takes is a known number for each strategy and
    is not timed, so that a search draws the same whatever the machine does meanwhile.

    Args:
        planners: that plan in this search; those without a space of their own are not asked.
        valued: starts with their values.
    """

    def __init__(
        self,
        job: Job,
        planners: Mapping[str, Planner],
        valued: Iterable[tuple[str, float, Choice]],
        rng: random.Random,
    ) -> None:
        free = replace(job, layouts=(), replicas=1)
        self._arms = {
            name: _Arm(Draws(free, OWN_SPACES[name], open_share=0.0), None, None)
            for name in planners
            if name in OWN_SPACES
        }
        for name, value, choice in valued:
            if name in self._arms:
                arm = self._arms[name]
                arm.value, arm.job = value, _job_of(free, choice, arm.draws.space.degrees)
        self._rng = rng
        self._seen: set[Replan] = set()
        self._due = 0.0

    def next(self, effort: float) -> list[Replan]:
        """Draws that were not made before, that take so much effort together; none where none is left.

        What is over or missing is made up for next time.
        """
        self._due += effort
        found: list[Replan] = []
        while self._due > 0 and any(weights := self._weights()):
            (name,) = self._rng.choices(list(self._arms), weights)
            move = self._drawn(name)
            if move is None:
                self._arms[name].is_empty = True
                continue
            self._due -= self._arms[name].effort
            found.append(move)
        return found

    def limit(self, move: Replan) -> float:
        """Of the values that its strategy learns from."""
        best = self._arms[move.strategy].value
        return inf if best is None else best

    def learn(self, move: Replan, value: float | None, job: Job) -> None:
        """What a draw gave; None: it was refused."""
        arm = self._arms[move.strategy]
        arm.tried += 1
        if value is not None and (arm.value is None or arm.job is None or value < arm.value):
            arm.value, arm.job, arm.is_empty = value, move.job_of(job), False

    def _weights(self) -> list[float]:
        known = [arm.value for arm in self._arms.values() if arm.value is not None]
        best = min(known, default=1.0)
        return [arm.weight(best) for arm in self._arms.values()]

    def _drawn(self, name: str) -> Replan | None:
        arm = self._arms[name]
        for _ in range(REPEATED):
            try:
                if arm.job is not None and self._rng.random() < NEAR_SHARE:
                    drawn = arm.draws.near(arm.job, self._rng)
                else:
                    drawn = arm.draws.fresh(self._rng)
            except ValueError:  # layouts and batch that do not go together
                continue
            move = replan_of(name, _unsaid(drawn) if arm.draws.space.says_memory else drawn)
            if move not in self._seen and arm.draws.has_ranks_for(drawn):
                self._seen.add(move)
                return move
        return None


def _unsaid(job: Job) -> Job:
    """The job with no word on what is sharded and computed again, for strategies that say it themselves."""
    modules = tuple(
        ModuleSettings(module=each.module, sequence_parallel=each.sequence_parallel)
        for each in job.settings.modules
    )
    return replace(job, settings=replace(job.settings, modules=modules))


def _job_of(free: Job, choice: Choice, degrees: Chooser) -> Job:
    """The job that a strategy's plan answers, with degrees where its users choose them."""
    job = replace(
        free,
        microbatch_samples=max(1, len(free.batch) // len(groups_of(free, choice.microbatches))),
        schedule=choice.schedule,
        settings=choice.settings,
    )
    if degrees is Chooser.ITSELF:
        return job
    draft = draft_of(free, choice)
    found = {module.name: degrees_of(draft, module.name) for module in free.model.modules}
    layouts = tuple(replace(each.layout, dp=None) for each in found.values())
    return replace(job, layouts=layouts, replicas=found[llm_of(free)].dp)
