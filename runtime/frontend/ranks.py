"""Runners of users' models: on processes started for them, in an existing process group, or emulated."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from runtime.data.batches import DataSource
from runtime.emulation.emulate import emulate
from runtime.frontend.architecture import Weight
from runtime.frontend.stage import UserStage
from runtime.launch import result_of, run_lowered
from runtime.rank_job import run_steps
from runtime.rank_report import RankReport, RankState
from runtime.run_settings import RunSettings
from runtime.world.communicators import build_mesh, open_pairs, pairs_of
from runtime.world.device import launched_device
from runtime.world.mesh import Mesh, PairKey
from runtime.world.pool import Place, Pool
from workbench.plan.lowered import Lowered
from workbench.plan.plan import Plan
from workbench.trace import Trace

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Result of a run, as this process has it.

    Args:
        losses: of every step.
        states: of the ranks for which this process answers.
        trace: of the last step; None where ranks were emulated.
    """

    losses: tuple[float, ...]
    states: tuple[RankState, ...]
    trace: Trace | None


class Runner(ABC):
    """Runs lowered plans one after the other; by default this process owns all ranks."""

    def agree(self, make: Callable[[], Plan], own: Plan | None) -> Plan:
        """The plan that all processes follow; `own` is the previous batch's plan, if it is still valid."""
        return make() if own is None else own

    def modules(self, plan: Plan) -> tuple[str, ...]:
        """Names of the modules whose weights this process must supply."""
        return tuple(module.name for module in plan.model.modules)

    @abstractmethod
    def run(self, lowered: Lowered, settings: RunSettings, source: DataSource, build: UserStage) -> Ran:
        """Run the number of steps in the settings."""

    def close(self) -> None:  # noqa: B027  (some started nothing)
        """Release processes and other resources."""


class LocalRanks(Runner):
    """Ranks as forked processes of a pool."""

    def __init__(self, num_ranks: int, pool: Pool | None = None) -> None:
        self._given, self._own = pool, None if pool is not None else Pool(num_ranks)

    def run(self, lowered: Lowered, settings: RunSettings, source: DataSource, build: UserStage) -> Ran:
        build.check_pickles()
        pool = self._given or self._own
        if pool is None:
            raise ValueError("this model was closed; lay it out again")
        result = run_lowered(lowered, settings, source=source, build=build, pool=pool)
        return Ran(losses=result.losses, states=result.states, trace=result.traces[-1])

    def close(self) -> None:
        if self._own is not None:
            self._own.close()
            self._own = None


class EmulatedRanks(Runner):
    """Ranks emulated in this process, one action at a time."""

    def run(self, lowered: Lowered, settings: RunSettings, source: DataSource, build: UserStage) -> Ran:
        emulated = emulate(lowered, settings, source=source, build=build)
        return Ran(losses=emulated.losses, states=emulated.states, trace=None)


class GroupRanks(Runner):
    """This process as one rank among those of the default process group, e.g. under torchrun.

    Every process has the whole model and gets the whole batch; the first one plans. Objects are sent over
    the group's CPU backend (gloo). Groups of a plan are opened once. Waits within a step end after
    `timeout_s`, those between steps after the group's own timeout.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._meshes: dict[object, tuple[Mesh, set[PairKey]]] = {}

    def agree(self, make: Callable[[], Plan], own: Plan | None) -> Plan:
        """The first process's plan.

        Raises:
            ValueError: on every process, where one was refused or differs; the message names it.
        """
        answer: list[Plan | str | None] = [None]
        if dist.get_rank() == 0:
            answer = [_plan_or_refusal(make, own)]
        dist.broadcast_object_list(answer, src=0)
        if not isinstance(answer[0], Plan):
            raise ValueError(str(answer[0]))
        return answer[0]

    def modules(self, plan: Plan) -> tuple[str, ...]:
        rank = _rank_of(plan)
        return tuple(dict.fromkeys(s.module for s in plan.stages if rank in s.flat_ranks))

    def run(self, lowered: Lowered, settings: RunSettings, source: DataSource, build: UserStage) -> Ran:
        mesh = self._mesh(lowered)
        here = Place(dist.get_rank(), dist.get_world_size(), lambda position: None)
        report = run_steps(here, mesh, lowered, settings, source, build)
        reports: list[RankReport | None] = [None] * here.size
        dist.all_gather_object(reports, replace(report, state=None))
        result = result_of(lowered, [each for each in reports if each is not None], settings, mesh.device)
        assert report.state is not None, "settings ask for it"
        return Ran(
            losses=result.losses, states=_with_peers(lowered.plan, report.state), trace=result.traces[-1]
        )

    def close(self) -> None:
        for mesh, _ in self._meshes.values():
            mesh.clock.close()
        self._meshes.clear()

    def _mesh(self, lowered: Lowered) -> Mesh:
        grids = tuple(stage.ranks for stage in lowered.plan.stages)
        wanted = (grids, tuple(sorted({group.ranks for group in lowered.groups})))
        if wanted not in self._meshes:
            name = None if "nccl" in dist.get_backend_config() else "cpu"
            mesh = build_mesh(lowered, launched_device(name), self._timeout_s)
            self._meshes[wanted] = (mesh, set(pairs_of(lowered)))
        mesh, opened = self._meshes[wanted]
        open_pairs(mesh, lowered, opened)
        return mesh


def _with_peers(plan: Plan, own: RankState) -> tuple[RankState, ...]:
    """This rank's state, and those of ranks with other parts of its weights, by a collective."""
    if all(stage.tp == 1 for stage in plan.stages):
        return (own,)
    states: list[RankState | None] = [None] * dist.get_world_size()
    dist.all_gather_object(states, own)
    rows = [row for stage in plan.stages for row in stage.ranks if own.rank in row]
    peers = {own.rank, *(rank for row in rows for rank in row)}
    return tuple(state for state in states if state is not None and state.rank in peers)


def _plan_or_refusal(make: Callable[[], Plan], own: Plan | None) -> Plan | str:
    """The plan, or why it was refused, to be sent to all processes."""
    try:
        return make() if own is None else own
    except ValueError as error:
        return str(error)


def _rank_of(plan: Plan) -> int:
    if dist.get_world_size() != len(plan.ranks):
        raise ValueError(f"the plan runs on {len(plan.ranks)} ranks, got {dist.get_world_size()} processes")
    return plan.ranks[dist.get_rank()]


def has_group() -> bool:
    """Whether this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def raise_complaints(complaint: str | None) -> None:
    """Raise the first complaint of any process on all of them; a collective.

    Raises:
        ValueError: on every process, the first complaint.
    """
    complaints: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(complaints, complaint)
    for process, text in enumerate(complaints):
        if text is not None:
            raise ValueError(f"process {process}: {text}")


def made_by_all(make: Callable[[], Made]) -> Made:
    """The result of `make`, once all processes succeeded; a collective, raises as `raise_complaints`."""
    made: list[Made] = []
    complaint = None
    try:
        made.append(make())
    except ValueError as error:
        complaint = str(error)
    except Exception as error:  # the other processes wait for this one's answer
        complaint = f"{type(error).__name__}: {error}"
    raise_complaints(complaint)
    return made[0]


def gather_weights(own_weights: dict[Weight, Tensor]) -> dict[Weight, Tensor]:
    """Every weight, from the first process that has it; a collective that sends all to all."""
    parts: list[dict[Weight, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, own_weights)
    weights: dict[Weight, Tensor] = {}
    for part in parts:
        weights = part | weights
    return weights
