"""The work of every rank of a run: build its stages, then run steps."""

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from runtime.data.batches import DataSource
from runtime.models.mixture import Experts
from runtime.parallel.expert.group import ExpertGroup
from runtime.parallel.stage_groups import StageGroups
from runtime.parallel.tensor.group import TensorGroup
from runtime.rank_report import RankReport, RankState
from runtime.readings import Readings
from runtime.run_settings import Collect, RunSettings
from runtime.state.checkpoint import RankCheckpoints, Shared, live_tensors
from runtime.state.checkpoint_files import identity_of
from runtime.state.weights_export import write_part
from runtime.step.activations import watch
from runtime.step.annotations import STEP, named
from runtime.step.executor import Executor
from runtime.step.feed import feed_of
from runtime.step.fsdp.gradients import ShardedGradients
from runtime.step.fsdp.stages import ShardedStages
from runtime.step.stage_module import StageModule, build_stage_module
from runtime.step.tied_weights import share_weights
from runtime.step.timing import Notes, Recorder, check_order
from runtime.step.transfers import Wires
from runtime.step.weight_bucket import weight_buckets
from runtime.step_plans import Planning, StepPlans
from runtime.world.communicators import build_mesh
from runtime.world.device import CPU
from runtime.world.mesh import Mesh
from runtime.world.pool import Place
from runtime.world.yardstick import Yardstick, yardstick_of
from workbench.plan.lowered import Lowered
from workbench.plan.parameter_shards import kept_stages, sharded_stages
from workbench.plan.plan import Plan
from workbench.plan.runnable import check_targets
from workbench.plan.stage import Stage
from workbench.plan.state_writers import has_whole_optimizer, state_writers

PROCESSES = StageGroups()
MOST_TIMED = 256  # last steps whose times are kept, which bounds the memory of long runs


class Build(Protocol):
    """Builds the module of a stage; `build_stage_module`, except in tests."""

    def __call__(
        self,
        plan: Plan,
        stage: Stage,
        *,
        seed: int,
        dtype: torch.dtype,
        weights: Path | None,
        device: torch.device | str,
        tensor: TensorGroup | None,
        experts: ExpertGroup | None,
    ) -> StageModule: ...


def run_rank(
    place: Place,
    lowered: Lowered,
    settings: RunSettings,
    source: DataSource,
    build: Build = build_stage_module,
    device: torch.device = CPU,
) -> RankReport:
    """Run this process's rank of the plan on a device. The process group must exist already."""
    torch.set_num_threads(settings.threads)
    mesh = build_mesh(lowered, device, settings.timeout_s)
    try:
        yardstick = yardstick_of(place.process, device)
        return run_steps(place, mesh, lowered, settings, source, build, yardstick=yardstick)
    finally:
        mesh.clock.close()


def run_steps(
    place: Place,
    mesh: Mesh,
    lowered: Lowered,
    settings: RunSettings,
    source: DataSource,
    build: Build,
    groups: StageGroups = PROCESSES,
    *,
    yardstick: Yardstick | None = None,
) -> RankReport:
    """Run all steps of all repetitions of one rank; every step reports its part of the loss.

    Args:
        groups: finds the groups with which the rank shares a stage.
        yardstick: read between steps, when all ranks are idle; None: only other ranks read it.
    """
    history, state = _History(), None
    for repetition in range(settings.repetitions):
        rank = _Rank(lowered, mesh, settings, source, build, place.report, groups)
        readings = Readings(mesh, yardstick)
        _repeat(rank, place, mesh, settings, readings, history, is_first=repetition == 0)
        if repetition == 0 and settings.export is not None:
            rank.write_weights(settings.export)
        state = state or rank.state()
        rank.close()
    tells = bool(settings.following.batches) and mesh.rank == mesh.ranks[0]
    return RankReport(
        rank=mesh.rank,
        losses=tuple(history.losses),
        notes=tuple(history.notes),
        state=state,
        plans=tuple(history.lowereds) if tells else (),
        plannings=tuple(history.plannings) if tells else (),
        save_stalls_s=tuple(history.save_stalls_s),
    )


@dataclass(slots=True)
class _History:
    """Records of a rank's steps.

    Args:
        losses: its part of each step's loss, of the first repetition and of the steps before its start.
        notes, lowereds: of timed steps, and the plan of each.
        plannings: of the batches after the first.
        save_stalls_s: of the last repetition.
    """

    losses: list[float] = field(default_factory=list)
    notes: deque[Notes] = field(default_factory=lambda: deque(maxlen=MOST_TIMED))
    lowereds: deque[Lowered] = field(default_factory=lambda: deque(maxlen=MOST_TIMED))
    plannings: list[Planning] = field(default_factory=list)
    save_stalls_s: Sequence[float] = ()


def _repeat(
    rank: "_Rank",
    place: Place,
    mesh: Mesh,
    settings: RunSettings,
    readings: Readings,
    history: _History,
    *,
    is_first: bool,
) -> None:
    """Run all steps of one repetition, from resuming until its saves have ended."""
    num_steps = settings.warmup + settings.steps
    with ExitStack() as resources:
        saves = resources.enter_context(closing(_saves(rank.lowered, mesh, settings)))
        start = saves.resume(rank.tensors, history.losses)
        plans = resources.enter_context(
            closing(
                StepPlans(rank.lowered, settings.following, mesh, timeout_s=settings.timeout_s, start=start)
            )
        )
        for step in range(start, num_steps):
            last = step + 1 == num_steps
            rank.collects = settings.collect if is_first and last else Collect.NOTHING
            rank.follow(plans.next(num_steps - 1 - step))
            notes = readings.beside(rank.step, step)
            if is_first:
                history.losses.append(notes.loss_sum)
            if step >= settings.warmup:
                history.notes.append(notes)
                history.lowereds.append(rank.lowered)
            place.tell(notes.loss_sum)
            saves.after_step(step + 1, rank.tensors, history.losses, is_last=last)
        saves.wait()
    history.plannings += plans.plannings
    history.save_stalls_s = saves.stalls_s


def _saves(lowered: Lowered, mesh: Mesh, settings: RunSettings) -> RankCheckpoints:
    saves, plan = settings.checkpoints, lowered.plan
    if saves is None:
        return RankCheckpoints(None, None, mesh.rank, timeout_s=settings.timeout_s)
    identity = identity_of(plan, settings.dtype(plan), settings.seed, data=saves.data)
    return RankCheckpoints(
        saves, identity, mesh.rank, shared=_shared(plan, mesh.rank), timeout_s=settings.timeout_s
    )


def _shared(plan: Plan, rank: int) -> Shared | None:
    """What another rank writes of this one's state: whole weights, and whole optimizer state."""
    writer = state_writers(plan)[rank]
    if writer == rank:
        return None
    kinds = ("weight", "constant", "optimizer") if has_whole_optimizer(plan, rank) else ("weight", "constant")
    return Shared(writer=writer, kinds=kinds)


class _Rank:
    """Modules, executor and state of one rank for one repetition."""

    def __init__(
        self,
        lowered: Lowered,
        mesh: Mesh,
        settings: RunSettings,
        source: DataSource,
        build: Build,
        report: Callable[[int], None],
        groups: StageGroups,
    ) -> None:
        plan = lowered.plan
        dtype = settings.dtype(plan)
        stages = [stage for stage in plan.stages if mesh.rank in stage.flat_ranks]
        self._sharded = ShardedStages(
            sharded_stages(plan), mesh, wide=settings.optimizer_dtype(plan), kept=kept_stages(plan)
        )
        build_one = self._sharded.building(build)
        self._modules = {
            stage.id: build_one(
                plan,
                stage,
                seed=settings.seed,
                dtype=dtype,
                weights=settings.weights,
                device=mesh.device,
                tensor=groups.tensor(mesh, stage),
                experts=groups.experts(mesh, stage),
            )
            for stage in stages
        }
        share_weights(plan, mesh.rank, self._modules)
        self._tallies = [
            (module.stage.module, part.tally)
            for module in self._modules.values()
            for part in module.modules()
            if isinstance(part, Experts)
        ]
        self._mesh, self._settings, self._source = mesh, settings, source
        self._report, self._groups = report, groups
        self._recorder = Recorder(mesh.rank, mesh.clock)
        self._buckets = weight_buckets(
            lowered, mesh.rank, list(self._modules.values()), settings.optimizer_dtype(plan)
        )
        watched = settings.collect is Collect.MEMORY
        tensors: list[Tensor] = [p for _, p in self._named()]
        tensors += [bucket.own for bucket in self._buckets.values()]
        tensors += [*self._sharded.parameters(), *self._sharded.parts().values()]
        self._memory = self._sharded.memory = watch(tensors, mesh.device) if watched else None
        self.lowered = lowered
        self._wires = self._new_wires()
        self._executor = self._new_executor()
        self.collects = Collect.NOTHING
        self._gradients: dict[tuple[str, str], Tensor] = {}

    def _new_wires(self) -> Wires:
        dtype = self._settings.dtype(self.lowered.plan)
        return Wires(self.lowered, self._mesh, dtype=dtype, recorder=self._recorder)

    def _new_executor(self) -> Executor:
        plan, mesh, settings = self.lowered.plan, self._mesh, self._settings
        self._summed = ShardedGradients(
            self._sharded,
            self.lowered,
            mesh,
            list(self._modules.values()),
            recorder=self._recorder,
            buckets=self._buckets,
        )
        return Executor(
            self.lowered,
            mesh.rank,
            modules=self._modules,
            feed=feed_of(plan, mesh, self._source, settings.dtype(plan), self._groups.context),
            wires=self._wires,
            gradients=self._summed,
            sharded=self._sharded,
            recorder=self._recorder,
            optimizer=settings.optimizer,
            loss_scale=1.0 / check_targets(plan),
            progress=self._report,
            on_gradients=self._copy_gradients,
            memory=self._memory,
        )

    def follow(self, lowered: Lowered) -> None:
        """Continue with the plan of another batch; weights and optimizer state stay."""
        if lowered is self.lowered:
            return
        self._wires.close()
        self.lowered = lowered
        self._wires = self._new_wires()
        before = self._executor
        self._executor = self._new_executor()
        self._executor.resume(before)

    def step(self, step: int) -> Notes:
        """Run one step, with all ranks synchronised at its start and Python's garbage collector off."""
        self._executor.clear_gradients()
        gc.collect()
        gc.disable()
        try:
            self._mesh.align(f"at the start of step {step}")
            self._recorder.start_step()
            with named(STEP), nullcontext() if self._memory is None else self._memory:
                self._executor.run_step()
        finally:
            gc.enable()
        loads = tuple(tally.take(module) for module, tally in self._tallies)
        notes = replace(self._recorder.notes(), expert_loads=loads)
        check_order(self.lowered, notes)
        return notes

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that a step changes, as they are stored, and the constants that it reads."""
        whole = (module for module in self._modules.values() if module.stage.id not in self._sharded)
        constants = {
            f"constant/{module.stage.module}/{name}": constant
            for module in self._modules.values()
            for name, constant in module.named_constants().items()
        }
        return live_tensors(_named(whole), self._executor.optimizer) | self._sharded.parts() | constants

    def state(self) -> RankState | None:
        """Copies of this rank's state; None unless the last step collected it."""
        if self.collects is Collect.GRADIENTS:
            return RankState(rank=self._mesh.rank, gradients=self._gradients, weights={})
        if self.collects is not Collect.STATE:
            return None
        weights: dict[tuple[str, str], Tensor] = {}
        for module in self._sharded.each_gathered(self._modules.values()):
            weights |= {key: parameter.detach().cpu().clone() for key, parameter in _named((module,))}
        known = self._executor.moments()
        moments = {
            key: tuple(moment.cpu().clone() for moment in known[parameter])
            for key, parameter in self._named()
            if parameter in known
        }
        return RankState(rank=self._mesh.rank, gradients=self._gradients, weights=weights, moments=moments)

    def write_weights(self, folder: Path) -> None:
        """Write this rank's part of an export: stages of replica 0, each by its first rank."""
        for module in self._sharded.each_gathered(self._modules.values()):
            stage = module.stage
            if stage.replica == 0 and self._mesh.rank in stage.whole_weights:
                weights = module.owned_weights()  # a collective of the ranks that share them
                if stage.flat_ranks[0] == self._mesh.rank:
                    write_part(folder, stage.module, stage.layers[0], weights)

    def close(self) -> None:
        self._wires.close()

    def _copy_gradients(self) -> None:
        if self.collects in {Collect.GRADIENTS, Collect.STATE}:
            summed = {id(weight): gradient for weight, gradient in self._summed.whole()}
            self._gradients = {
                key: summed[id(parameter)].detach().cpu().clone()
                for key, parameter in self._named()
                if id(parameter) in summed
            }

    def _named(self) -> Iterator[tuple[tuple[str, str], nn.Parameter]]:
        return _named(self._modules.values())


def _named(modules: Iterable[StageModule]) -> Iterator[tuple[tuple[str, str], nn.Parameter]]:
    """Yield ((module, Hugging Face name), weight) of all stages."""
    for module in modules:
        for name, parameter in module.named_weights():
            yield (module.stage.module, name), parameter
