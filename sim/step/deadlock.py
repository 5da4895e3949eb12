"""Reports which programs never finished, and what each waits for, when a simulation ends too early."""

from collections.abc import Iterable, Sequence
from math import isnan

from workbench.plan.lowered import Lowered
from workbench.plan.plan import Program
from workbench.plan.task_graph import Joined
from workbench.schedule.action import STEP, Action

MOST_PROGRAMS = 8  # listed in a report


class DeadlockError(ValueError):
    """Some actions of a plan never ran: the orders of its programs, or its times, contradict each other."""


def check_finished(lowered: Lowered, task_end_s: Sequence[float], row_end_s: Sequence[float]) -> None:
    """Raise DeadlockError naming ranks, actions and what they wait for, unless all tasks have ended.

    Args:
        task_end_s: [T] end of every task, NaN where it never ended.
        row_end_s: [R] end of every row, likewise.
    """
    if not any(map(isnan, task_end_s)):
        return
    unfinished = _Unfinished(lowered, task_end_s, row_end_s)
    programs = lowered.plan.programs
    stuck = [
        (program, reason)
        for index, program in enumerate(programs)
        if (reason := unfinished.reason(index)) is not None
    ]
    num_stuck = sum(len(program.ranks) for program, _ in stuck)
    num_ranks = sum(len(program.ranks) for program in programs)
    reports = [f"{_name(program)} {reason}" for program, reason in stuck[:MOST_PROGRAMS]]
    if len(stuck) > MOST_PROGRAMS:
        reports.append(f"and {len(stuck) - MOST_PROGRAMS} more programs")
    raise DeadlockError(f"{num_stuck} of {num_ranks} ranks never finished: {'; '.join(reports)}")


class _Unfinished:
    """The unfinished tasks of a step."""

    def __init__(self, lowered: Lowered, task_end_s: Sequence[float], row_end_s: Sequence[float]) -> None:
        self._lowered, self._graph = lowered, lowered.tasks
        self._task_end_s, self._row_end_s = task_end_s, row_end_s
        self._programs = lowered.plan.programs
        self._number_of = {
            rank: number for number, program in enumerate(self._programs) for rank in program.ranks
        }

    def reason(self, number: int) -> str | None:
        """Where a program is blocked and what it waits for; None where it has ended."""
        program = self._programs[number]
        reductions = {rank: self._reduction(rank) for rank in program.ranks}
        late = next((rank for rank, reduction in reductions.items() if reduction is not None), None)
        action = self._next(program)
        if action is None:
            return None if late is None else f"in {reductions[late]}"
        if action == STEP and late is not None:
            return f"before STEP (rank {late} in {reductions[late]})"
        waits = [] if action == STEP else self._missing(action)
        collective = self._at(self._graph.fsdp[number])
        if collective is not None:
            task = self._graph.tasks[collective]
            absent = next(rank for rank in task.ranks if not self._is_at(rank, collective))
            waits.append(f"{task.action} of its weights, which waits for rank {absent}")
        return f"before {action} (waits for {', '.join(waits)})"

    def _next(self, program: Program) -> Action | None:
        """The first action of a program that never ended: a pass or its STEP."""
        for action in program.actions:
            task = self._graph.passes.get(action)
            tasks = [self._graph.steps[rank] for rank in program.ranks] if action == STEP else [task]
            if any(task is not None and not self._has_ended(task) for task in tasks):
                return action
        return None

    def _missing(self, action: Action) -> list[str]:
        rows = [row for row in self._lowered.inputs.get(action, ()) if isnan(self._row_end_s[row])]
        waits = [f"row {row} from {self._lowered.transfers[row].producer}" for row in rows]
        for program in self._programs:
            earlier = self._next(program)
            if action in program.actions and earlier != action:
                waits.append(f"{_name(program)}, which is before {earlier}")
        return waits

    def _reduction(self, rank: int) -> str | None:
        """Description of the all-reduce that a rank is in, with the first rank that it waits for."""
        task = self._at(self._graph.reductions[rank])
        if task is None:
            return None
        all_reduce = self._graph.tasks[task]
        action = next(joined.action for joined in self._graph.reductions[rank] if task in joined.tasks)
        absent = min(other for other in all_reduce.ranks if not self._is_at(other, task))
        return f"{action}: gradient group {all_reduce.group} waits for rank {absent}"

    def _is_at(self, rank: int, task: int) -> bool:
        if rank not in self._number_of:
            return False
        lanes = self._graph.fsdp[self._number_of[rank]], self._graph.reductions[rank]
        return task in map(self._at, lanes)

    def _at(self, lane: Iterable[Joined]) -> int | None:
        """The first collective of a lane that never ended."""
        for joined in lane:
            before = (*joined.awaited, *(() if joined.last_pass is None else (joined.last_pass,)))
            if not all(map(self._has_ended, before)):
                return None
            for task in joined.tasks:
                if not self._has_ended(task):
                    return task
        return None

    def _has_ended(self, task: int) -> bool:
        return not isnan(self._task_end_s[task])


def _name(program: Program) -> str:
    if len(program.ranks) == 1:
        return f"rank {program.ranks[0]}"
    return f"ranks {', '.join(map(str, program.ranks))}"
