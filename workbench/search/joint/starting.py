"""Plan the starts of a search within their share of its time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf

from workbench.job.job import Job
from workbench.planner.stage_counts import OUT_OF_TIME
from workbench.search.joint.fewer_ranks import Part
from workbench.search.joint.move import Space
from workbench.search.joint.nearest_fit import nearest_fit
from workbench.search.joint.result import value_of
from workbench.search.joint.starts import Start, Task, start_tasks
from workbench.search.joint.terms import Stop
from workbench.search.joint.workers import Workers

CHOOSING_SHARE = 0.25  # of the time, at most, for strategies that choose degrees themselves
EACH_CHOOSING_SHARE = 0.6  # until then, each of these gets a first slice of time
FEWER_SHARE = 0.1  # after that, for their plans on fewer ranks
OTHER_SHARE = 0.15  # after that, for all others: strategies also plan anew during the search
EACH_OTHER_SHARE = 0.4  # until then, each of the others gets a first slice
TOO_LARGE = "does not fit"  # part of refusals for lack of memory

_Planned = Callable[[Sequence[Task]], Iterator[Start]]


def planned_starts(
    space: Space,
    pool: Workers,
    stop: Stop,
    began_s: float,
    report: Callable[[Start], None] = lambda best: None,
    parts: Sequence[Part] = (),
) -> tuple[Start, ...]:
    """Plan with all strategies, those with layouts also without the job's, within their share of the time.

    Args:
        parts: of the cluster, on which strategies that choose degrees plan as well.
        report: called with the best start so far, after each start, once one has a value.
    """
    job = space.job
    tasks = list(start_tasks(job, space.planners, parts))
    best: list[Start] = []

    def starts(chosen_tasks: Sequence[Task]) -> Iterator[Start]:
        for start in pool.starts(chosen_tasks):
            if start.value is not None:
                best[:] = [min((*best, start), key=value_of)]
            if best:
                report(best[0])
            yield start
            if best and stop.is_asked():
                return

    if stop.seconds is None:
        planned = tuple(starts(tasks))
    else:
        slices = _Slices(tasks, starts, pool.num, stop, began_s)
        for share, first_share, group in _groups(tasks):
            slices.plan(group, share, first_share)
        planned = tuple(slices.starts.values())
    if all(start.value is None for start in planned):
        nearest = nearest_fit(job, space.cost, _refused(tasks, planned, stop))
        raise ValueError(_none_text(job, planned, nearest))
    return planned


def _groups(tasks: Sequence[Task]) -> Iterator[tuple[float, float, list[Task]]]:
    """Groups of tasks, each with its share of the time and that in which every task gets a first slice.

    Strategies that choose degrees themselves come first: their plans are the best of most jobs, and they
    plan with estimates, in less time than others take for one plan.
    """
    whole = [task for task in tasks if task.part is None]
    yield CHOOSING_SHARE, EACH_CHOOSING_SHARE, [task for task in whole if task.chooses]
    yield FEWER_SHARE, EACH_CHOOSING_SHARE, [task for task in tasks if task.part is not None]
    yield OTHER_SHARE, EACH_OTHER_SHARE, [task for task in whole if not task.chooses]


class _Slices:
    """Gives tasks slices of time; unfinished ones restart with twice as much, while time remains.

    So quick tasks finish first, whichever they are. As long as none has a plan, the starts may use the whole
    time.
    """

    def __init__(
        self, tasks: Sequence[Task], planned: _Planned, num_workers: int, stop: Stop, began_s: float
    ) -> None:
        self._planned, self._num_workers, self._stop, self._began_s = planned, num_workers, stop, began_s
        self._seconds = inf if stop.seconds is None else stop.seconds
        self._tried_s = {task.name: 0.0 for task in tasks}  # inf: finished
        self.starts = {task.name: Start(name=task.name, refusal=OUT_OF_TIME) for task in tasks}

    def plan(self, tasks: Sequence[Task], more_share: float, first_share: float) -> None:
        """Plan a group of tasks.

        Args:
            tasks: in the order of `waiting_tasks`, first slices too.
            more_share: of the whole time, for this group at most.
            first_share: of the whole time since it began: until then every task gets a first slice.
        """
        share = more_share + self._used_share
        self._round(tasks, self._left_s(share) / (2 * max(1, len(tasks))), max(share, first_share))
        slice_s = 0.0
        while waiting := waiting_tasks(tasks, self.starts, self._tried_s):
            left_s = self._left_s(share)
            if left_s <= 2 * slice_s:
                return
            slice_s = max(2 * slice_s, left_s / (2 * len(waiting)))
            num = max(1, int(left_s / slice_s))
            if num == 1:  # no other follows
                slice_s = left_s
            due = [task for task in waiting if 2 * self._tried_s[task.name] <= slice_s]
            self._round(due[:num], slice_s, share)

    def _round(self, tasks: Sequence[Task], slice_s: float, share: float) -> None:
        """Give each task such a slice, until that share of the whole time is over."""
        waiting = waiting_tasks(tasks, self.starts, self._tried_s)
        slices = [task._replace(seconds=slice_s, clock=self._stop.clock) for task in waiting]
        for start in self._planned(slices):
            self._tried_s[start.name] = slice_s if start.is_late else inf
            self.starts[start.name] = _better(self.starts[start.name], start)
            if self._left_s(share) < 0:
                return

    def _left_s(self, share: float) -> float:
        """Seconds of all workers until that share of the time is over; all of it while none has a plan."""
        if all(start.value is None for start in self.starts.values()):
            share = 1.0
        elif self._stop.is_asked():
            return -inf
        return (share - self._used_share) * self._seconds * self._num_workers

    @property
    def _used_share(self) -> float:
        return (self._stop.clock() - self._began_s) / self._seconds


def waiting_tasks(
    tasks: Sequence[Task], starts_by_name: Mapping[str, Start], tried_s: Mapping[str, float]
) -> list[Task]:
    """The unfinished tasks, those with the best plans so far first, then those of little effort."""
    unfinished = [task for task in tasks if tried_s[task.name] < inf]
    return sorted(unfinished, key=lambda task: (_worth(starts_by_name[task.name]), task.effort))


def _better(before: Start, after: Start) -> Start:
    """The start with the better plan of two tries, or the later one."""
    return before if _worth(before) < _worth(after) else after


def _worth(start: Start) -> float:
    return inf if start.value is None else start.value


def _refused(tasks: Sequence[Task], starts: Sequence[Start], stop: Stop) -> Iterator[Task]:
    """Tasks whose plans do not fit, to plan again; each within a tenth of the time."""
    limit_s = inf if stop.seconds is None else stop.seconds / 10
    for task, start in zip(tasks, starts, strict=True):
        if task.part is None and TOO_LARGE in start.refusal:
            yield task._replace(seconds=limit_s, clock=stop.clock)


def _none_text(job: Job, starts: Sequence[Start], nearest: str) -> str:
    """Why there is no plan: none meets a limit, or none fits, with the nearest miss."""
    missing = {start.misses_by: start for start in starts if start.misses_by is not None}
    if missing:
        miss = missing[min(missing)]
        return f"no plan of job {job.name!r} meets the limit; nearest: {miss.name}: {miss.refusal}"
    refusals = [start.refusal for start in starts]
    too_large = [refusal for refusal in refusals if TOO_LARGE in refusal]
    first = f"{TOO_LARGE}: " if too_large else ""
    return f"{first}no strategy has a plan for job {job.name!r}; {nearest or (too_large or refusals)[0]}"
