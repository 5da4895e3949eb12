"""Moves that let a strategy plan anew, to reach the whole space that its own paper searches."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.job.other_layouts import with_layouts
from workbench.plan.lru_cache import Identity, LruCache
from workbench.plan.plan import ModuleSettings, Plan
from workbench.planner.groupings import groups_of
from workbench.planner.layout_choice import degrees_of
from workbench.planner.stage_counts import PlannerStopped, StopWatch
from workbench.planner.strategy_spec import Chooser, Planner
from workbench.schedule.choice import Schedule
from workbench.schedule.sharded import ReshardAfter
from workbench.search.joint.choice import NAME, Choice, choice_of, draft_of, num_actions
from workbench.search.joint.move import Space
from workbench.search.joint.own_spaces import OWN_SPACES, Draws
from workbench.search.joint.question import Question

MOST_CANDIDATES = 100  # a planner's own, after which it stops with its best: here its plan is one candidate
NEAR_SHARE = 0.7  # share of draws near a strategy's best plan, once it has one
UNTRIED = 5  # draws that halve the optimism about a strategy
REPEATED = 20  # consecutive repeated draws after which a strategy is skipped this time
PROMISE = 4  # exponent of the quality of a strategy's best plan
MOST_ACTIONS = 500_000  # of all cached plans together: those that become incumbents are built again
_PLANS: LruCache[Plan] = LruCache(MOST_ACTIONS, num_actions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """The plan that a strategy makes of the job with other layouts, microbatches, schedule and settings.

    It answers all questions, and so also reaches plans that no placement describes.

    Args:
        strategy: name of the planner.
        layouts: of modules; none: the strategy chooses them.
        replicas: of modules whose layout does not state its own.
        microbatch_samples: samples per microbatch, of all joint replicas.
        schedule: to plan under.
        modules: settings by module.
        joint_replicas: those in each replica of the LLM.
    """

    question: ClassVar[Question] = Question.LAYOUT
    strategy: str
    layouts: tuple[ModuleLayout, ...]
    replicas: int
    microbatch_samples: int
    schedule: Schedule
    modules: tuple[ModuleSettings, ...]
    joint_replicas: int = 1

    def job_of(self, job: Job) -> Job:
        """The job that the strategy plans."""
        return replace(
            job,
            layouts=self.layouts,
            replicas=self.replicas,
            microbatch_samples=self.microbatch_samples,
            schedule=self.schedule,
            settings=replace(job.settings, modules=self.modules),
            joint_replicas=self.joint_replicas,
        )

    def plan(self, space: Space) -> Plan:
        """The strategy's plan, under this search's name; ValueError where it has none."""
        return _PLANS.get_or((Identity(space), self), lambda: self._planned(space))

    def _planned(self, space: Space) -> Plan:
        planner = space.planners.get(self.strategy)
        if planner is None:
            raise ValueError(f"strategy {self.strategy!r} does not plan in this search")
        try:
            plan = planner(self.job_of(space.job), space.cost, StopWatch(most=MOST_CANDIDATES + 1))
        except PlannerStopped:
            raise ValueError(
                f"{self.strategy} has no plan among the first {MOST_CANDIDATES} candidates of its own"
            ) from None
        return replace(plan, strategy=NAME)

    def apply(self, space: Space, choice: Choice) -> Choice:
        return choice_of(self.job_of(space.job), self.plan(space), space.cost)


def replan_of(strategy: str, job: Job) -> Replan:
    """The move that plans this job."""
    return Replan(
        strategy=strategy,
        layouts=job.layouts,
        replicas=job.replicas,
        microbatch_samples=job.microbatch_samples,
        schedule=job.schedule,
        modules=job.settings.modules,
        joint_replicas=job.joint_replicas,
    )


@dataclass(slots=True)
class _Arm:
    """One strategy as an arm of a multi-armed bandit: its space, and its best plan so far."""

    draws: Draws
    value: float | None
    job: Job | None
    tried: int = 0
    is_empty: bool = False

    @property
    def effort(self) -> float:
        """Cost of one more draw."""
        return self.draws.space.effort

    def weight(self, best: float) -> float:
        """Weight of the strategy in the next draw: its promise per effort, given the best value of all
        strategies.
        """
        if self.is_empty:
            return 0.0
        promise = 0.0 if self.value is None else (best / self.value) ** PROMISE
        return max(promise, 1 / (1 + self.effort * self.tried / UNTRIED)) / self.effort


class Replans:
    """Draw jobs from all strategies' own spaces, preferring strategies with good plans and quick planners.

    Jobs are drawn near a strategy's best job or anywhere in its space. Each strategy counts as the best
    until it was tried, and less the more effort was spent on it. The effort of planning is a constant per
    strategy instead of a measured time, so that draws do not depend on the machine's load.

    Args:
        planners: used in this search; those without a space of their own are ignored.
        valued: starts with their values.
    """

    def __init__(
        self,
        job: Job,
        planners: Mapping[str, Planner],
        valued: Iterable[tuple[str, float, Choice]],
        rng: random.Random,
    ) -> None:
        open_job = with_layouts(job, (), replicas=1)
        self._arms = {
            name: _Arm(Draws(open_job, OWN_SPACES[name], open_share=0.0), None, None)
            for name in planners
            if name in OWN_SPACES
        }
        for name, value, choice in valued:
            if name in self._arms:
                arm = self._arms[name]
                arm.value, arm.job = value, _job_of(open_job, choice, arm.draws.space.degrees)
        self._rng = rng
        self._seen: set[Replan] = set()
        self._due = 0.0

    def next(self, effort: float) -> list[Replan]:
        """New draws that take so much effort together, or none if none are left.

        A surplus or deficit is carried over to the next call.
        """
        self._due += effort
        moves: list[Replan] = []
        while self._due > 0 and any(weights := self._weights()):
            (name,) = self._rng.choices(list(self._arms), weights)
            move = self._drawn(name)
            if move is None:
                self._arms[name].is_empty = True
                continue
            self._due -= self._arms[name].effort
            moves.append(move)
        return moves

    def limit(self, move: Replan) -> float:
        """The best value of the move's strategy, above which it learns nothing."""
        best = self._arms[move.strategy].value
        return inf if best is None else best

    def learn(self, move: Replan, value: float | None, job: Job) -> None:
        """Record the value of a draw; None: it was refused."""
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
            except ValueError:  # incompatible layouts and batch
                continue
            move = replan_of(name, _without_memory(drawn) if arm.draws.space.says_memory else drawn)
            if move not in self._seen and arm.draws.has_ranks_for(drawn):
                self._seen.add(move)
                return move
        return None


def _without_memory(job: Job) -> Job:
    """The job without recomputation and numbers of shards, for strategies that choose them."""
    modules = tuple(map(_without_memory_settings, job.settings.modules))
    return replace(job, settings=replace(job.settings, modules=modules))


def _without_memory_settings(own: ModuleSettings) -> ModuleSettings:
    kept = ModuleSettings(module=own.module, products=own.products)
    if own.reshard_after is ReshardAfter.PASS:
        return replace(kept, sequence_parallel=own.sequence_parallel)
    return replace(kept, sharding=own.sharding, reshard_after=own.reshard_after)


def _job_of(open_job: Job, choice: Choice, degrees: Chooser) -> Job:
    """The job that a strategy's plan answers, with its degrees if users choose them."""
    draft = draft_of(open_job, choice)
    degrees_by_module = {module.name: degrees_of(draft, module.name) for module in open_job.model.modules}
    llm = degrees_by_module[open_job.model.llm.name]
    samples = max(1, len(open_job.batch) // len(groups_of(open_job, choice.microbatches)))
    job = replace(open_job, microbatch_samples=samples, schedule=choice.schedule, settings=choice.settings)
    if degrees is Chooser.ITSELF:
        return replace(job, microbatch_samples=max(1, samples // llm.joint_replicas))
    layouts = tuple(replace(module_degrees.layout, dp=None) for module_degrees in degrees_by_module.values())
    return replace(job, layouts=layouts, replicas=llm.dp, joint_replicas=llm.joint_replicas)
