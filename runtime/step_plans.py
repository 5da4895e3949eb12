"""The plan of each step: always the same, or the next batch's, planned while the previous step runs."""

import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, cycle, islice

import torch
import torch.distributed as dist

from runtime.next_plan import Planned, Planner, Rule, planned
from runtime.world.communicators import open_pairs, pairs_of
from runtime.world.failure import RankError, first_line
from runtime.world.mesh import Mesh, PairKey
from workbench.data.sample import Sample
from workbench.plan.following import next_plan
from workbench.plan.lowered import Lowered


@dataclass(frozen=True, slots=True, kw_only=True)
class NextBatches:
    """The batches of the steps after the first; after the last one, the plan's own batch repeats.

    Args:
        batches: each with as many samples as the plan's.
        rule: by which each of them is planned; by default the i-th sample replaces the plan's i-th one.
    """

    batches: tuple[tuple[Sample, ...], ...] = ()
    rule: Rule = next_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """How the plan of one step was obtained, with times on the machine's monotonic clock.

    Args:
        start_s, end_s: of planning, checks and lowering, in the planner's process.
        waited_s: wait of the first rank for the planner, after the previous step.
    """

    step: int
    start_s: float
    end_s: float
    waited_s: float


class StepPlans:
    """The plans of one repetition on one rank; the first rank owns the planner.

    The plan of a step is requested when the previous step starts, computed once, in a separate process, and
    sent to all ranks, so all of them run the same plan. Waiting for it is bounded.

    Args:
        start: index of the first step, where earlier ones are already taken.
    """

    def __init__(
        self, first: Lowered, following: NextBatches, mesh: Mesh, *, timeout_s: float, start: int = 0
    ) -> None:
        self._first, self._following, self._mesh = first, following, mesh
        self._timeout_s = timeout_s
        self.plannings: list[Planning] = []
        self._planner: Planner | None = None
        batches = (first.plan.batch, *following.batches)
        self._asked = islice(cycle(batches), start % len(batches), None)
        if start % len(batches) == 0:
            next(self._asked)  # its plan exists already
        self._start, self._has_first = start, start % len(batches) == 0
        self._steps = count(start)
        self._opened: set[PairKey] = set(pairs_of(first))
        if following.batches and not dist.is_initialized():
            raise ValueError("batches that follow the first one need a process per rank")
        if following.batches and mesh.rank == mesh.ranks[0]:
            self._planner = Planner(first.plan, rule=following.rule)

    def next(self, steps_left: int) -> Lowered:
        """The plan of the next step; a collective of all ranks if further batches follow.

        Args:
            steps_left: number of steps after it; for the last, no further plan is requested.

        Raises:
            ValueError: the batch was refused, or its plan was not ready in time.
        """
        step = next(self._steps)
        if not self._following.batches:
            return self._first
        if step == self._start and not self._has_first and self._planner is not None:
            self._planner.ask(next(self._asked))
        lowered = self._first if step == self._start and self._has_first else self._take(step)
        if self._planner is not None and steps_left > 0:
            self._planner.ask(next(self._asked))
        return lowered

    def close(self) -> None:
        """End the planner."""
        if self._planner is not None:
            self._planner.close()

    def _take(self, step: int) -> Lowered:
        start_s = time.perf_counter()
        content = self._fetch()
        waited_s = time.perf_counter() - start_s
        answer = planned(self._spread(step, content))
        if answer.lowered is None:
            raise ValueError(f"step {step}: {answer.refusal}")
        self.plannings.append(
            Planning(step=step, start_s=answer.start_s, end_s=answer.end_s, waited_s=waited_s)
        )
        open_pairs(self._mesh, answer.lowered, self._opened)
        return answer.lowered

    def _fetch(self) -> bytes | None:
        """The planner's answer, on the rank that owns it; a failure is an answer too."""
        if self._planner is None:
            return None
        try:
            return self._planner.fetch(self._timeout_s / 2)  # other ranks wait longer
        except ValueError as error:
            return pickle.dumps(Planned(lowered=None, refusal=str(error), start_s=0.0, end_s=0.0))

    def _spread(self, step: int, content: bytes | None) -> bytes:
        """Broadcast the first rank's bytes to all ranks."""
        size = torch.tensor([0 if content is None else len(content)])
        try:
            dist.broadcast(size, 0)
            received = torch.empty(int(size), dtype=torch.uint8)
            if content is not None:
                received = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            dist.broadcast(received, 0)
        except RuntimeError as error:
            message = f"rank {self._mesh.rank} at the plan of step {step}: {first_line(error)}"
            raise RankError(message, peers=(self._mesh.ranks[0],)) from error
        return received.numpy().tobytes()


def batches_after(plan_batch: Sequence[Sample], samples: Sequence[Sample]) -> NextBatches:
    """The samples after the plan's batch, in order, as complete batches of its size.

    Raises:
        ValueError: too few samples for another batch.
    """
    size = len(plan_batch)
    known = {sample.id for sample in plan_batch}
    rest = [sample for sample in samples if sample.id not in known]
    if len(rest) < size:
        raise ValueError(
            f"next batches: want at least {size} samples besides the plan's own {size}, got {len(rest)}"
        )
    starts = range(0, len(rest) - size + 1, size)
    return NextBatches(batches=tuple(tuple(rest[start : start + size]) for start in starts))
