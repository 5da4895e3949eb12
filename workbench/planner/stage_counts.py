"""Finds the stage counts that a job leaves open: the fastest plan under its rank budget."""

from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import product
from math import inf
from operator import itemgetter, mul
from time import monotonic

from workbench.job.device_pools import Aim
from workbench.job.job import Job
from workbench.memory.account import check_memory, memory_table
from workbench.plan.lower import lower
from workbench.plan.plan import Plan
from workbench.planner.assembly import dp_of, layout_of, virtual_stages
from workbench.planner.cut_candidates import CutCandidates

Progress = Callable[[int, int, float], None]  # (candidates done, candidates in all, best seconds so far)


ROUNDING = 1 - 1e-9  # a bound is a sum in another order than the path it bounds
REACH = 1.25  # of the best estimate: worse plans are not passed to a judge


class PlannerStopped(Exception):  # noqa: N818  (no error: the planner is told to stop)
    """Raised by a progress callback: the search ends with its best plans so far, or raises this on.

    A callback that stopped a planner stops it again at every further report.
    """


OUT_OF_TIME = "out of time"  # refusal of a strategy that was stopped before it had a plan


def silent(done: int, total: int, best_s: float) -> None:
    """A progress callback that does nothing."""


class StopWatch:
    """Progress callback that stops a planner at the end of its time or number of reports, and passes them on.

    `stopped_at` is the number of reports at which it did so first. A planner is deterministic, so that equal
    numbers give equal plans.
    """

    def __init__(
        self,
        clock: Callable[[], float] = monotonic,
        *,
        end_s: float = inf,
        most: float = inf,
        progress: Progress = silent,
    ) -> None:
        self._clock, self._end_s, self._most, self._progress = clock, end_s, most, progress
        self._num_reports = 0
        self.stopped_at: int | None = None

    @property
    def counts_reports(self) -> bool:
        """Whether a number of reports may stop the planner."""
        return self._most < inf

    def __call__(self, done: int, total: int, best_s: float) -> None:
        self._progress(done, total, best_s)
        self._num_reports += 1
        is_over = self._num_reports >= self._most or self._clock() > self._end_s
        if self.stopped_at is None and is_over:
            self.stopped_at = self._num_reports
        if self.stopped_at is not None:
            raise PlannerStopped


def best_counts(candidates: CutCandidates, progress: Progress, most: int) -> tuple[Plan, ...]:
    """The best plans by the planner's estimate, among all stage counts that fit, best first.

    Exact branch and bound: combinations of the open counts within the rank budget are visited by ascending
    bound, which is tightened before a plan is built; the search ends where the bound exceeds the last of
    `most` plans, or `REACH` times the best. Plans that do not fit in memory are left out. Among equals the
    plan with fewer ranks is first, then the one with lexicographically smaller counts.
    Differs: Cornstarch v1 Algorithm 1 tries one count per encoder and LLM depth; this tries all.

    Args:
        candidates: how a planner bounds, builds and prices plans.
        most: the largest number of plans.

    Raises:
        ValueError: a given count is impossible, or no combination fits (the last reason is named).
        PlannerStopped: stopped before any plan was found.

    Complexity: at worst O(product of the open ranges) plans.
    """
    job, ranks_per_stage = candidates.job, candidates.ranks_per_stage
    options = {name: _options(job, name) for name in ranks_per_stage}
    if all(len(counts) == 1 for counts in options.values()):
        return (candidates.plan({name: counts[0] for name, counts in options.items()}),)
    worth = _Worth(job, ranks_per_stage, tuple(options))
    waiting = _CountQueue(candidates, worth, _within_budget(job, ranks_per_stage, options))
    best = _Best(most)
    least = sum(dp_of(job, name) * size * options[name][0] for name, size in ranks_per_stage.items())
    refusal = ""

    def report() -> None:
        progress(waiting.num_settled, waiting.num_all, best.seconds)

    try:
        for bound, stage_counts in waiting.by_bound(report):
            if bound * ROUNDING > best.limit:
                break
            counts = dict(zip(options, stage_counts, strict=True))
            try:
                candidates.check_memory(counts)
                plan = candidates.plan(counts)
                lowered = lower(plan)
                seconds = candidates.believed_s(lowered)
                key = (worth.of_plan(seconds, plan), len(plan.ranks), stage_counts)
                if best.takes(key):
                    check_memory(lowered, memory_table(lowered))
                    best.add(key, plan, seconds)
            except ValueError as error:
                refusal = str(error)
            report()
    except PlannerStopped:
        if not best.plans:
            raise
    if not best.plans:
        more = f"max_ranks {least}" if least <= job.cluster.num_ranks else f"a cluster of {least}"
        none = f"no stage counts fit {job.usable_ranks} ranks; nearest: {more}, or smaller tp, cp and dp"
        raise ValueError(f"job {job.name!r}: {refusal or waiting.refusal or none}")
    return best.plans


def worth_of(job: Job, seconds: float, ranks: Sequence[int]) -> float:
    """The value that the job's aim minimises: seconds, or seconds times the dollars an hour of the ranks.

    ValueError where dollars are the aim and one of the ranks has no price.
    """
    if job.aim is Aim.SECONDS:
        return seconds
    rate = job.dollars_per_hour(ranks)
    if rate is None:
        raise ValueError(f"job {job.name!r}: aim {Aim.DOLLARS} needs dollars_per_hour for every pool")
    return seconds * rate


_Key = tuple[float, int, tuple[int, ...]]  # worth, ranks, counts


class _Best:
    """The best plans so far, and the limit on bounds above which no plan can join them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: list[tuple[_Key, Plan, float]] = []

    def takes(self, key: _Key) -> bool:
        return len(self._found) < self._most or key < self._found[-1][0]

    def add(self, key: _Key, plan: Plan, seconds: float) -> None:
        insort(self._found, (key, plan, seconds), key=itemgetter(0))
        del self._found[self._most :]

    @property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(plan for _, plan, _ in self._found)

    @property
    def seconds(self) -> float:
        """Seconds of the best plan."""
        return self._found[0][2] if self._found else float("inf")

    @property
    def limit(self) -> float:
        if not self._found:
            return float("inf")
        reach = self._found[0][0][0] * REACH
        return min(self._found[-1][0][0], reach) if len(self._found) == self._most else reach


class _Worth:
    """`worth_of` for plans, and a lower bound on it for counts whose plan is not built yet."""

    def __init__(self, job: Job, ranks_per_stage: Mapping[str, int], names: tuple[str, ...]) -> None:
        self._job = job
        self._ranks_each = [dp_of(job, name) * ranks_per_stage[name] for name in names]
        self._lowest = job.cheapest_per_hour

    def of_plan(self, seconds: float, plan: Plan) -> float:
        """The worth of a plan or a draft with stages; ValueError where one of its ranks has no price."""
        return worth_of(self._job, seconds, plan.ranks)

    def at_least(self, seconds: float, stage_counts: tuple[int, ...]) -> float:
        """A lower bound for stage counts whose ranks are not known yet."""
        if self._job.aim is Aim.SECONDS:
            return seconds
        ranks = sum(num * count for num, count in zip(self._ranks_each, stage_counts, strict=True))
        return seconds * ranks * self._lowest


class _CountQueue:
    """A queue of stage counts by ascending bound; tight bounds are computed only when cheap ones come up.

    `num_settled` of `num_all` were yielded or refused.
    """

    def __init__(
        self, candidates: CutCandidates, worth: _Worth, all_counts: Iterator[dict[str, int]]
    ) -> None:
        self._candidates, self._worth = candidates, worth
        self._counts = {tuple(counts.values()): counts for counts in all_counts}
        self.num_all, self.num_settled = len(self._counts), 0
        self.refusal = ""

    def by_bound(self, report: Callable[[], None]) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Yield bounds on the worth with their counts, ascending; ties by the counts.

        Args:
            report: called after every tight bound, since each takes a draft with stages.
        """
        cheap = ((self._candidates.bound_s(c), stage_counts) for stage_counts, c in self._counts.items())
        waiting = [
            (self._worth.at_least(seconds, stage_counts), stage_counts, False)
            for seconds, stage_counts in cheap
        ]
        heapify(waiting)
        while waiting:
            bound, stage_counts, is_close = heappop(waiting)
            if is_close:
                self.num_settled += 1
                yield bound, stage_counts
                continue
            try:
                closer_s, draft = self._candidates.closer_s(self._counts[stage_counts])
                closer = self._worth.of_plan(closer_s, draft)
            except ValueError as error:
                self.num_settled += 1
                self.refusal = str(error)
            else:
                heappush(waiting, (max(bound, closer), stage_counts, True))
            report()


def _options(job: Job, name: str) -> tuple[int, ...]:
    """Stage counts to try: the given one, or all that the layers and the rank budget allow."""
    modules = [m for m in job.model.modules if m.name == name] or job.model.encoders
    layout = layout_of(job, modules[0].name)
    given = layout.pp or len(layout.stage_layers) // virtual_stages(job, modules[0].name)
    if given:
        return (given,)
    layers = min(len(module.stage_starts) // virtual_stages(job, module.name) for module in modules)
    return tuple(range(1, min(layers, job.usable_ranks) + 1))


def _within_budget(
    job: Job, ranks_per_stage: Mapping[str, int], options: Mapping[str, tuple[int, ...]]
) -> Iterator[dict[str, int]]:
    ranks_each = [dp_of(job, name) * ranks_per_stage[name] for name in options]
    for counts in product(*options.values()):
        if sum(map(mul, ranks_each, counts)) <= job.usable_ranks:
            yield dict(zip(options, counts, strict=True))
