"""Users' multimodal models on the ranks of a plan: the layout of each part, and steps on batches.

Source: Cornstarch v1, section 3 and Listing 1 (`MultimodalParallelSpec.apply`); ICML version, Listing 1
(`MultimodalParallelModule` with `modality_parallelism`).
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.frontend.architecture import Weight, model_buffers, whole_weights
from runtime.frontend.batch import PreparedBatch
from runtime.frontend.multimodal import LLM, MultimodalModule
from runtime.frontend.ranks import (
    EmulatedRanks,
    GroupRanks,
    LocalRanks,
    Ran,
    Runner,
    gather_weights,
    has_group,
    made_by_all,
    raise_complaints,
)
from runtime.frontend.stage import UserStage
from runtime.models.stored_tensors import write_tensors
from runtime.run_settings import TORCH_TYPE, Collect, RunSettings
from runtime.step.optimizer import OptimizerSettings
from runtime.world.pool import Pool
from runtime.world.scratch import ScratchFolder
from workbench.cost.hardware import Cluster, Link, Node, uniform
from workbench.cost.model import CostModel
from workbench.cost.profile import MachineLink, Profile, ideal_profile
from workbench.data.sample import Sample
from workbench.job.job import Job
from workbench.job.notations.cornstarch import MultimodalSpec, ParallelSpec, layouts_of
from workbench.model.checkpoint import SINGLE
from workbench.plan.kernels import Kernels
from workbench.plan.plan import Plan, Settings
from workbench.planner.stage_counts import silent
from workbench.strategies.encoder_placement import MEANT
from workbench.timing.accept import accept
from workbench.trace import Trace

_LINK = Link(name="local", bytes_per_s=1e30, latency_s=0.0)  # its figures only matter to a simulator


class Ranks(Enum):
    """What a rank is.

    PROCESSES: those of the existing process group (one per rank, as torchrun starts them), or else processes
    that this one starts on this machine. EMULATED: inside this process, one at a time.
    """

    PROCESSES = "processes"
    EMULATED = "emulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class MultimodalParallelSpec(MultimodalSpec):
    """Layout of a whole model, nested like the model; see `MultimodalSpec`."""

    def apply(self, model: MultimodalModule, **where: Any) -> "MultimodalParallelModule":
        """The model with this layout; `where` as in `MultimodalParallelModule`."""
        return MultimodalParallelModule(
            model,
            modality_parallelism=self.modality_parallelism,
            encoder_specs=self.encoder_specs,
            language_model_spec=self.language_model_spec,
            num_microbatches=self.num_microbatches,
            microbatch_size=self.microbatch_size,
            dp_size=self.dp_size,
            **where,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Result of steps on the ranks.

    Args:
        losses: mean over the next text tokens of the batch, before each step.
        plan: that the ranks executed.
        trace: of the last step; None where ranks were emulated.
    """

    losses: tuple[float, ...]
    plan: Plan
    trace: Trace | None

    @property
    def loss(self) -> float:
        """Loss of the last step."""
        return self.losses[-1]


class MultimodalParallelModule:
    """A model with a layout. Every batch becomes a job, which a strategy plans and ranks execute.

    Without a process group, this process starts the ranks and keeps the models: every call sends weights to
    the ranks, and gradients or weights come back. Use it as a context manager, or `close` it, to end them.
    In a process group, every process has the models and gets the gradients of its rank's weights; the
    optimizer then skips the others, and `collect_weights` makes all copies equal again.

    Args:
        model: to train.
        encoder_specs, language_model_spec, num_microbatches, microbatch_size, modality_parallelism,
            dp_size: as in `MultimodalSpec`.
        ranks: what a rank is.
        pool: processes to use; None: this module's own, where it needs any.
        profile: costs by which stages are balanced; None: FLOP only.
        cluster: whose ranks the plan names; None: this machine as one node.
        timeout_s: of each wait.

    Raises:
        ValueError: what the runtime cannot execute, unknown names, degrees that do not fit.
    """

    def __init__(
        self,
        model: MultimodalModule,
        *,
        modality_parallelism: str = "parallel",
        encoder_specs: Mapping[str, ParallelSpec | MultimodalSpec] | None = None,
        language_model_spec: ParallelSpec | None = None,
        num_microbatches: int = 1,
        microbatch_size: int = 1,
        dp_size: int = 1,
        ranks: Ranks = Ranks.PROCESSES,
        pool: Pool | None = None,
        profile: Profile | None = None,
        cluster: Cluster | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.model = model
        self.spec = MultimodalSpec(
            encoder_specs=encoder_specs or {},
            language_model_spec=language_model_spec,
            num_microbatches=num_microbatches,
            microbatch_size=microbatch_size,
            modality_parallelism=modality_parallelism,
            dp_size=dp_size,
        )
        num_ranks = _checked_ranks(model, self.spec)
        self._timeout_s = timeout_s
        self._cost = CostModel(profile or _flop_alone())
        self._cluster = cluster or _this_machine(num_ranks)
        self._is_group = ranks is Ranks.PROCESSES and has_group()
        self._runner: Runner
        if ranks is Ranks.EMULATED:
            self._runner = EmulatedRanks()
        else:
            self._runner = GroupRanks(timeout_s) if self._is_group else LocalRanks(num_ranks, pool)
        self._planned: tuple[Job, Plan] | None = None
        self._held: frozenset[Weight] = frozenset()

    def __enter__(self) -> "MultimodalParallelModule":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes that this module started, if any."""
        self._runner.close()

    def execute(self, batch: Mapping[str, Any]) -> StepOutput:
        """Run forward and backward on the ranks, and add gradients to `.grad` of the user's parameters.

        The optimizer is the caller's, over the user's parameters. Updates by the plan's STEP on the ranks are
        discarded.

        Raises:
            ValueError: a batch of another size, or that does not fit the model.
            WorldFailed, RankError: a rank failed; the message names it.
        """
        plan, ran = self._run(batch, 1, OptimizerSettings())
        weights = self.model.weights()
        for (module, name), gradient in self._whole(plan, {s.rank: s.gradients for s in ran.states}).items():
            parameter = weights[module][name]
            addition = gradient.to(parameter.device, parameter.dtype)
            parameter.grad = addition if parameter.grad is None else parameter.grad.add_(addition)
        return _output(plan, ran)

    def train_steps(
        self, batch: Mapping[str, Any], *, steps: int = 1, optimizer: OptimizerSettings | None = None
    ) -> StepOutput:
        """Run AdamW steps on the ranks, from a new optimizer state; the user's models get the weights.

        Raises:
            ValueError, WorldFailed, RankError: as `execute`; the user's models are then unchanged.
        """
        plan, ran = self._run(batch, steps, optimizer or OptimizerSettings())
        self._take(self._whole(plan, {state.rank: state.weights for state in ran.states}))
        return _output(plan, ran)

    def collect_weights(self) -> None:
        """In a process group, copy every rank's current weights to all processes; a collective."""
        if self._is_group:
            weights = self.model.weights()
            self._take(gather_weights({key: weights[key[0]][key[1]].detach() for key in self._held}))

    def plan(self, batch: Mapping[str, Any]) -> Plan:
        """The plan by which a batch would run."""
        return self._plan_of(self._ready(batch)[1])

    def _whole(self, plan: Plan, parts: Mapping[int, Mapping[Weight, Tensor]]) -> dict[Weight, Tensor]:
        return whole_weights(plan, self.model.architectures(), parts)

    def _take(self, weights: Mapping[Weight, Tensor]) -> None:
        parameters = self.model.weights()
        with torch.no_grad():
            for (module, name), weight in weights.items():
                parameters[module][name].copy_(weight)

    def _run(self, batch: Mapping[str, Any], steps: int, optimizer: OptimizerSettings) -> tuple[Plan, Ran]:
        prepared, job = self._ready(batch)
        plan = self._plan_of(job)
        lowered, _ = accept(plan)
        with ScratchFolder("weights-") as folder:
            self._save(folder, self._runner.modules(plan))
            settings = RunSettings(
                steps=steps,
                timeout_s=self._timeout_s,
                weights=folder,
                optimizer=optimizer,
                collect=Collect.STATE,
            )
            ran = self._runner.run(lowered, settings, prepared.source, self._build())
        weights = self._whole(plan, {state.rank: state.weights for state in ran.states})
        self._held = frozenset(weights)
        return plan, ran

    def _ready(self, batch: Mapping[str, Any]) -> tuple[PreparedBatch, Job]:
        """The prepared batch and its job; in a process group, all processes raise where one does."""

        def make() -> tuple[PreparedBatch, Job]:
            prepared = self.model.prepare(batch)
            return prepared, self._job(prepared.samples)

        return made_by_all(make) if self._is_group else make()

    def _job(self, samples: tuple[Sample, ...]) -> Job:
        spec = self.spec
        if len(samples) != spec.num_samples:
            raise ValueError(
                f"the batch must have {spec.num_samples} samples ({spec.dp_size} replicas x "
                f"{spec.num_microbatches} microbatches x {spec.microbatch_size}), got {len(samples)}"
            )
        dtype = self.model.parts()[LLM].module.dtype
        precision = next((p for p, torch_type in TORCH_TYPE.items() if torch_type == dtype), None)
        if precision is None:
            raise ValueError(f"models must be of {', '.join(map(str, TORCH_TYPE.values()))}, got {dtype}")
        return Job(
            name="multimodal",
            model=self.model.graph(),
            cluster=self._cluster,
            batch=samples,
            microbatch_samples=spec.microbatch_size,
            replicas=spec.dp_size,
            layouts=layouts_of(spec, encoders=_encoders(self.model), llm=LLM),
            settings=Settings(precision=precision, kernels=Kernels.EAGER),
        )

    def _plan_of(self, job: Job) -> Plan:
        """The strategy's plan; the previous one where the job is the same."""
        own = self._planned[1] if self._planned is not None and self._planned[0] == job else None
        planner = MEANT[self.spec.modality_parallelism].planner
        plan = self._runner.agree(lambda: planner(job, self._cost, silent), own)
        if self._is_group:
            raise_complaints(_difference(plan, job))
        self._planned = (job, plan)
        return plan

    def _build(self) -> UserStage:
        parts = self.model.parts()
        frozen = {
            (module, name)
            for module, weights in self.model.weights().items()
            for name, weight in weights.items()
            if not parts[module].trains(name, weight)
        }
        callbacks = {
            name: part.around
            for name, part in self.model.leaves()
            if part.around.after_encoder is not None or part.around.after_projector is not None
        }
        known = self.model.architectures()
        buffers = {name: model_buffers(part.module, known[name]) for name, part in parts.items()}
        return UserStage(callbacks=callbacks, frozen=frozenset(frozen), buffers=buffers)

    def _save(self, folder: Path, modules: Iterable[str]) -> None:
        """Write every module to a folder, from which ranks read their weights and constants."""
        weights, parts, known = self.model.weights(), self.model.parts(), self.model.architectures()
        for module in modules:
            (folder / module).mkdir()
            buffers = model_buffers(parts[module].module, known[module])
            stored = weights[module] | {name: buffers[name] for name in known[module].constants}
            tensors = {name: each.detach().cpu().contiguous() for name, each in stored.items()}
            write_tensors(tensors, folder / module / SINGLE)


def _output(plan: Plan, ran: Ran) -> StepOutput:
    return StepOutput(losses=ran.losses, plan=plan, trace=ran.trace)


def _encoders(model: MultimodalModule) -> list[str]:
    return [name for name in model.parts() if name != LLM]


def _checked_ranks(model: MultimodalModule, spec: MultimodalSpec) -> int:
    """Maximum number of ranks of the plan.

    Raises:
        ValueError: an unknown encoder, or a degree that the runtime does not execute.
    """
    encoders = spec.of_encoders(_encoders(model))
    llm = spec.language_model_spec or ParallelSpec()
    for name, each in (encoders | {LLM: llm}).items():
        around = model.parts()[name].around
        if each.cp_size > 1 and (around.after_encoder or around.after_projector):
            raise ValueError(
                f"module {name!r}: callbacks around the projector see whole items, want cp_size 1, got "
                f"{each.cp_size}"
            )
    return spec.dp_size * (llm.num_ranks + sum(each.num_ranks for each in encoders.values()))


def _difference(plan: Plan, job: Job) -> str | None:
    """Description of how this process's job differs from the plan's; None where it does not."""
    if plan.batch != job.batch:
        return "its batch differs from the first process's: give every process the whole batch"
    if plan.model != job.model:
        return "its model, or its trained part, differs from the first process's"
    return None


def _this_machine(num_ranks: int) -> Cluster:
    """This machine as one node with that many ranks."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    node = Node(device="cpu", num_ranks=num_ranks, memory_bytes=memory_bytes, num_cores=os.cpu_count())
    return uniform("this machine", node, num_nodes=1, intra=_LINK, inter=_LINK)


def _flop_alone() -> Profile:
    """An ideal machine, on which only FLOP take noticeable time."""
    link = MachineLink(scope="intra", measured=False, source="ideal", **asdict(_LINK))
    return replace(ideal_profile(), links=(link,))
