"""A process's part of one world: its stages, and the executor of the current step."""

import gc
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from runtime.elastic.job import ElasticJob, Reduction
from runtime.elastic.layerwise import LayerwiseGradients, last_backwards
from runtime.elastic.moves import CPU, Holdings, Kept, Owner
from runtime.models.adapter import StageLayer
from runtime.step.executor import Executor
from runtime.step.feed import feed_of
from runtime.step.fsdp.gradients import ShardedGradients
from runtime.step.fsdp.stages import ShardedStages
from runtime.step.gradients import Gradients
from runtime.step.optimizer import step_count
from runtime.step.stage_module import StageModule, build_stage_module
from runtime.step.tied_weights import share_weights
from runtime.step.timing import Recorder
from runtime.step.transfers import Wires
from runtime.world.mesh import Mesh
from workbench.plan.lowered import Lowered
from workbench.plan.parameter_shards import sharded_stages
from workbench.plan.plan import Plan
from workbench.plan.runnable import check_targets
from workbench.plan.shard_unit import ShardUnit
from workbench.plan.stage import Stage
from workbench.plan.tied import equal_stages

Moments = tuple[Tensor, Tensor]


class ElasticExecutor(Executor):
    """An executor whose optimizer continues with existing moments."""

    def adopt(self, held: Holdings, modules: Iterable[StageModule], step: int) -> None:
        """Continue with the moments of kept weights after `step` steps, in place."""
        if self._optimizer is None:
            return
        for module in modules:
            for owner, named in weights_of(module, self._sharded).items():
                for name, parameter in named.items():
                    moments = held[owner][name].moments
                    if moments is not None:
                        self._optimizer.state[parameter] = {
                            "step": step_count(self._optimizer, parameter, step),
                            "exp_avg": moments[0],
                            "exp_avg_sq": moments[1],
                        }

    def steps_taken(self) -> set[int]:
        """Numbers of steps that weights have seen: one number, or none where nothing is trained."""
        states = () if self._optimizer is None else self._optimizer.state.values()
        return {int(state["step"]) for state in states}


def weights_of(module: StageModule, sharded: ShardedStages) -> dict[Owner, dict[str, nn.Parameter]]:
    """Parameters of a stage by layer and Hugging Face name; a tied one under each of its layers.

    For a stage with sharded parameters, this rank's parts.
    """
    stage = module.stage
    if stage.id in sharded:
        return {(stage.module, stage.layers[0]): sharded.parts_of(stage.id)}
    weights = {}
    for index, layer in enumerate(module.layers, start=module.stage.layers[0]):
        assert isinstance(layer, StageLayer)
        named = layer.named_parameters(remove_duplicate=False)
        weights[module.stage.module, index] = {
            layer.hugging_face_name(name): parameter for name, parameter in named
        }
    return weights


def empty_state(modules: Iterable[StageModule], sharded: ShardedStages) -> Holdings:
    """State of every layer of the modules, with zero moments; one pair of moments for a tied weight."""
    moments: dict[int, Moments] = {}

    def kept(parameter: nn.Parameter) -> Kept:
        if not parameter.requires_grad:
            return Kept(weight=parameter.detach(), moments=None)
        zeros = moments.setdefault(id(parameter), (torch.zeros_like(parameter), torch.zeros_like(parameter)))
        return Kept(weight=parameter.detach(), moments=(zeros[0].detach(), zeros[1].detach()))

    return {
        owner: {name: kept(parameter) for name, parameter in named.items()}
        for module in modules
        for owner, named in weights_of(module, sharded).items()
    }


def empty_layers(job: ElasticJob, plan: Plan, rank: int, owners: Iterable[Owner]) -> Holdings:
    """Empty state of layers outside this process's stages, or of parts of them with sharded parameters."""
    stages = [
        Stage(id=index, module=name, replica=0, layers=(layer, layer + 1), ranks=((rank,),))
        for index, (name, layer) in enumerate(owners)
    ]
    width = job.lanes
    ranks = tuple(range(rank - rank % width, rank - rank % width + width))
    units = {
        stage.id: ShardUnit(stages=(stage.id,), holders=(ranks,), trained=(), frozen=())
        for stage in stages
        if job.is_sharded
    }
    sharded = ShardedStages(units, Mesh(rank=rank, ranks=ranks, device=CPU))
    return empty_state([sharded.take(build(job, plan, stage)) for stage in stages], sharded)


def build(job: ElasticJob, plan: Plan, stage: Stage) -> StageModule:
    """Build a stage with weights from the seed."""
    return build_stage_module(plan, stage, seed=job.seed, dtype=job.dtype, weights=None, device=CPU)


def read_lowered(path: Path) -> Lowered:
    """Read a lowered plan that the supervisor wrote."""
    lowered = pickle.loads(path.read_bytes())
    assert isinstance(lowered, Lowered)
    return lowered


class World:
    """Groups and modules of one world, used until the layout changes."""

    def __init__(self, job: ElasticJob, plan: Plan, mesh: Mesh) -> None:
        self.mesh, self._job = mesh, job
        self._sharded = ShardedStages(sharded_stages(plan), mesh)
        self.modules = {
            stage.id: self._sharded.take(build(job, plan, stage)) for stage in plan.stages_on[mesh.rank]
        }
        share_weights(plan, mesh.rank, self.modules)
        self._executor: ElasticExecutor | None = None
        self._wires: Wires | None = None

    def empty(self) -> Holdings:
        """State of every layer of this rank, backed by the modules' own weights."""
        return empty_state(self.modules.values(), self._sharded)

    def take_over(self, held: Holdings) -> Holdings:
        """Copy kept values into the modules' weights; returns the state to keep from then on.

        Raises:
            ValueError: a layer of this rank is missing.
        """
        own_layers = self.empty()
        for owner, state in own_layers.items():
            if owner not in held:
                raise ValueError(f"rank {self.mesh.rank}: layer {owner} was neither kept nor copied")
            for name, kept in state.items():
                for target, source in zip(kept.tensors(), held[owner][name].tensors(), strict=True):
                    target.copy_(source)
        return own_layers

    def run_step(
        self,
        lowered: Lowered,
        held: Holdings,
        step: int,
        *,
        progress: Callable[[int], None],
        vote: Callable[[float], None],
    ) -> None:
        """Run one step: gradients, the vote with this rank's part of the loss, and then the update.

        Raises:
            RankError: a rank is gone or hangs.
        """
        recorder = Recorder(self.mesh.rank, self.mesh.clock)
        executor = self._prepare(lowered, recorder, progress, lambda: vote(recorder.loss_sum))
        if self._executor is None:
            executor.adopt(held, self.modules.values(), step)
        else:
            executor.resume(self._executor)
        self._executor = executor
        executor.clear_gradients()
        recorder.start_step()
        executor.run_step()

    def is_at(self, step: int | None) -> bool:
        """Whether all weights have seen `step` steps; they have not if an update was interrupted."""
        return self._executor is None or self._executor.steps_taken() <= {step}

    def close(self) -> None:
        """End the communication thread and release the step's memory."""
        if self._wires is not None:
            self._wires.close()
            self._wires = None
        gc.collect()  # the error of an aborted step and its frames form a reference cycle

    def _prepare(
        self,
        lowered: Lowered,
        recorder: Recorder,
        progress: Callable[[int], None],
        on_gradients: Callable[[], None],
    ) -> ElasticExecutor:
        if self._wires is not None:
            self._wires.close()
        job, mesh, plan = self._job, self.mesh, lowered.plan
        gradients, before = self._gradients(lowered, recorder, progress)
        self._wires = Wires(lowered, mesh, dtype=job.dtype, recorder=recorder)
        return ElasticExecutor(
            lowered,
            mesh.rank,
            modules=self.modules,
            feed=feed_of(plan, mesh, job.source, job.dtype, lambda mesh, stage: None),
            wires=self._wires,
            gradients=gradients,
            sharded=self._sharded,
            recorder=recorder,
            optimizer=job.optimizer,
            loss_scale=1.0 / check_targets(plan),
            progress=before,
            on_gradients=on_gradients,
        )

    def _gradients(
        self, lowered: Lowered, recorder: Recorder, progress: Callable[[int], None]
    ) -> tuple[Gradients, Callable[[int], None]]:
        """The gradient reduction, and a function to call before each action."""
        modules = list(self.modules.values())
        if self._job.is_sharded:
            shared = ShardedGradients(self._sharded, lowered, self.mesh, modules, recorder=recorder)
            return shared, progress
        if self._job.reduction is Reduction.AFTER_BACKWARD:
            return Gradients(lowered, self.mesh, modules, recorder=recorder), progress
        gradients = LayerwiseGradients(lowered, self.mesh, modules, recorder=recorder)
        plan, rank = lowered.plan, self.mesh.rank
        equal = {stage.id: equal_stages(plan, stage) for stage in plan.stages_on[rank]}
        last = last_backwards(plan.program.get(rank, ()), equal)

        def before(position: int) -> None:
            progress(position)
            if position in last:
                gradients.watch(last[position])

        return gradients, before
