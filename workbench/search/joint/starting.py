"""Plan the starts of a search within their share of its time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf

from workbench.job.job import Job
from workbench.search.joint.fewer_ranks import Part
from workbench.search.joint.move import Space
from workbench.search.joint.nearest_fit import nearest_fit
from workbench.search.joint.result import value_of
from workbench.search.joint.starts import OUT_OF_TIME, Start, Task, start_tasks
from workbench.search.joint.terms import Stop
from workbench.search.joint.workers import Workers

LIKELY_SHARE = 0.3  # of the time, at most, for plans that are likely to be good
OTHER_SHARE = 0.1  # after that, for all others: strategies also plan anew during the search
FEWER_SHARE = 0.1  # after that, for plans on fewer ranks
TOO_LARGE = "does not fit"  # part of refusals for lack of memory


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
        planned = _in_slices(tasks, starts, pool.num, stop, began_s)
    if all(start.value is None for start in planned):
        nearest = nearest_fit(job, space.cost, _refused(tasks, planned, stop))
        raise ValueError(_none_text(job, planned, nearest))
    return planned


def _in_slices(
    tasks: list[Task],
    starts: Callable[[Sequence[Task]], Iterator[Start]],
    num_workers: int,
    stop: Stop,
    began_s: float,
) -> tuple[Start, ...]:
    """Give each task a slice of time; unfinished ones restart with twice as much, while time remains.

    So quick tasks finish first, whichever they are, and likely ones before all others. Tasks of little effort
    come first, then, of those that were stopped, the ones with the best plans so far. Every likely task gets
    a first slice, and as long as none has a plan, the starts may use the whole time.
    """
    starts_by_name = {task.name: Start(name=task.name, refusal=OUT_OF_TIME) for task in tasks}
    seconds = stop.seconds or inf

    def has_plan() -> bool:
        return any(start.value is not None for start in starts_by_name.values())

    def left_s(share: float) -> float:
        if has_plan() and stop.is_asked():
            return -inf
        return (began_s + share * seconds - stop.clock()) * num_workers

    whole = [task for task in tasks if task.part is None]
    likely = [task for task in whole if task.is_likely]
    groups = (
        (LIKELY_SHARE, likely),
        (OTHER_SHARE, whole),
        (FEWER_SHARE, [task for task in tasks if task.part is not None]),
    )
    tried_s = dict.fromkeys(starts_by_name, 0.0)  # inf: finished
    for extra_share, group in groups:
        slice_s, share = 0.0, extra_share + (stop.clock() - began_s) / seconds
        waiting = waiting_tasks(group, starts_by_name, tried_s)
        while waiting and left_s(share if has_plan() else 1.0) > 2 * slice_s:
            is_owed = group is likely and slice_s == 0.0
            slice_s = max(2 * slice_s, left_s(share) / (2 * len(waiting)))
            num = max(1, int(left_s(share if has_plan() else 1.0) / slice_s))
            if num == 1:  # no other follows
                slice_s = max(slice_s, left_s(share if has_plan() else 1.0))
            due = [task for task in waiting if 2 * tried_s[task.name] <= slice_s]
            slices = [task._replace(seconds=slice_s, clock=stop.clock) for task in due[:num]]
            for start in starts(slices):
                tried_s[start.name] = slice_s if start.is_late else inf
                starts_by_name[start.name] = _better(starts_by_name[start.name], start)
                if left_s(1.0 if is_owed or not has_plan() else share) < 0:
                    break
            waiting = waiting_tasks(group, starts_by_name, tried_s)
    return tuple(starts_by_name.values())


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
