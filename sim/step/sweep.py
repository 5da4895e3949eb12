"""The engine's times by one compiled pass over arrays, for searches."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sim.step.deadlock import DeadlockError
from sim.step.durations import task_durations_s
from sim.step.lanes import shares_cores
from sim.step.sweep_loop import run
from sim.step.wire import wires
from workbench.arrays import Floats
from workbench.collector import collector_paused
from workbench.explain.timeline import Timeline, earlier
from workbench.plan.lowered import Lowered
from workbench.schedule.action import STEP, Action


@dataclass(frozen=True, slots=True)
class Times:
    """Times of a step, in seconds.

    Args:
        iteration_s: the last end.
        passes: action -> (start, end).
        steps: rank -> (start, end) of its STEP.
        messages: row -> (ready, start, end); rows that stay on their rank are not messages.
    """

    iteration_s: float
    passes: dict[Action, tuple[float, float]]
    steps: dict[int, tuple[float, float]]
    messages: dict[int, tuple[float, float, float]]


class Sweep:
    """A lowered plan compiled for repeated timing with different durations.

    A walk over the arrays of the plan's task graph: a task starts when its last predecessor has ended; every
    row of the plan is a message with a port. Same semantics as `sim.step.engine.simulate`,
    and the same floating-point operations in the same association, so times agree to the last bit.

    Raises:
        ValueError: cores that are time-shared, by ranks or with exchanges; only the engine simulates that.

    Complexity: a timing of N nodes, E edges and P messages is O(N + E + P log P), in compiled code.
    """

    @collector_paused()
    def __init__(self, lowered: Lowered) -> None:
        for node in lowered.plan.cluster.nodes:
            if shares_cores(lowered, node):
                raise ValueError(
                    f"the sweep needs a core for each rank that nothing else uses, a node of "
                    f"{lowered.plan.cluster.name!r} has {node.num_cores} for {node.num_ranks}; use the engine"
                )
        self._lowered = lowered
        self._wires = wires(lowered)
        self._missing, self._adjacency = lowered.tasks.num_missing, lowered.tasks.adjacency

    def times(
        self, duration_s: Callable[[Action], float], step_s: Callable[[int], float] | None = None
    ) -> Times:
        """The same times as `simulate`; arguments and DeadlockError as there."""
        start_s, end_s, ready_s = self._run(duration_s, step_s)
        graph = self._lowered.tasks
        first_row = graph.num_tasks
        return Times(
            iteration_s=float(end_s.max(initial=0.0)),
            passes={
                action: (float(start_s[task]), float(end_s[task])) for action, task in graph.passes.items()
            },
            steps={rank: (float(start_s[task]), float(end_s[task])) for rank, task in graph.steps.items()},
            messages={
                row: (float(ready_s[row]), float(start_s[first_row + row]), float(end_s[first_row + row]))
                for row in np.flatnonzero(self._wires.port >= 0).tolist()
            },
        )

    def timeline(
        self, duration_s: Callable[[Action], float], step_s: Callable[[int], float] | None = None
    ) -> Timeline:
        """The times of every node of the task graph, also of those that no trace has; arguments as there."""
        start_s, end_s, ready_s = self._run(duration_s, step_s)
        tasks_s, sent_s = np.split(start_s, [self._lowered.tasks.num_tasks])
        return Timeline(
            lowered=self._lowered,
            start_s=[*tasks_s.tolist(), *ready_s.tolist()],
            end_s=end_s.tolist(),
            sent_s=np.where(self._wires.port >= 0, sent_s, ready_s).tolist(),
            earlier=earlier(self._lowered.tasks),
            iteration_s=float(end_s.max(initial=0.0)),
        )

    def iteration_s(
        self, duration_s: Callable[[Action], float], step_s: Callable[[int], float] | None = None
    ) -> float:
        """The iteration time alone; arguments as `simulate`."""
        return float(self._run(duration_s, step_s)[1].max(initial=0.0))

    def _run(
        self, duration_s: Callable[[Action], float], step_s: Callable[[int], float] | None
    ) -> tuple[Floats, Floats, Floats]:
        graph = self._lowered.tasks
        prices = {action: float(duration_s(action)) for action in self._lowered.plan.program_actions}
        steps_s = {rank: prices[STEP] if step_s is None else float(step_s(rank)) for rank in graph.steps}
        start_s, end_s, ready_s = run(
            np.array(task_durations_s(self._lowered, prices, steps_s)),
            (self._wires.transmit_s, self._wires.latency_s, self._wires.port),
            self._missing.copy(),
            *self._adjacency,
        )
        stuck = int(np.isnan(end_s).sum())
        if stuck:
            raise DeadlockError(f"{stuck} actions and rows never ended; `simulate` names them")
        return start_s, end_s, ready_s
