"""Executes tiny models under arbitrary layouts, and compares them with one process."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from runtime.data.batches import SyntheticSource
from runtime.launch import RunResult, run_lowered
from runtime.parallel.expert.cuts import held_parts
from runtime.reference import ReferenceResult, reference_step
from runtime.run_settings import Collect, RunSettings
from runtime.world.pool import Pool
from workbench.cost.hardware import Cluster, Link, Node
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.data.sample import Sample, Segment
from workbench.float_sum import float_sum
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import TEXT, ModelGraph, connect
from workbench.model.trainable import Trainable
from workbench.plan.lower import lower
from workbench.plan.plan import Plan, Precision, Settings
from workbench.planner.rank_spans import Placement
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.strategies import megatron_heterogeneous

WIDTH = 16  # of a small LLM
HEADS = 4  # divides by every tensor-parallel degree that runs

SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_channels": 3,
    "image_size": 8,
    "patch_size": 4,
}
WHISPER: dict[str, Any] = {
    "model_type": "whisper",
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "encoder_ffn_dim": 32,
    "num_mel_bins": 8,
    "max_source_positions": 12,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": 40,
    "tie_word_embeddings": False,
}


Key = tuple[str, str]  # module and Hugging Face name
Moments = tuple[Tensor, Tensor]

NUM_RANKS = 8
NUM_SAMPLES = 12  # divides by every data-parallel degree of the grid
WINDOW = 2  # microbatches of the LLM between two changes of module, on shared ranks
SEED = 11
NEGLIGIBLE = 1e-12  # of the global norm: such a gradient is rounding
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """Degrees of one module."""

    tp: int
    dp: int
    pp: int
    cp: int

    @property
    def num_ranks(self) -> int:
        return self.tp * self.dp * self.pp * self.cp

    def __str__(self) -> str:
        return f"tp{self.tp} dp{self.dp} pp{self.pp} cp{self.cp}"


@dataclass(frozen=True, slots=True)
class Gap:
    """Largest differences from one process, each relative to the norm of its reference."""

    loss: float
    gradient: float
    weight: float
    moment: float = 0.0

    @property
    def worst(self) -> float:
        return max(self.loss, self.gradient, self.weight, self.moment)


@cache
def model(modules: tuple[str, ...]) -> ModelGraph:
    """The model, all of it trained: vision, audio or both before the LLM."""
    llm = module_from_config(LLAMA, name="llm", modality=TEXT, trainable=Trainable.ALL)
    modality = {"vision": ("image", SIGLIP), "audio": ("audio", WHISPER)}
    encoders = [
        module_from_config(
            modality[name][1],
            name=name,
            modality=modality[name][0],
            trainable=Trainable.ALL,
            llm_width=WIDTH,
        )
        for name in modules
        if name != "llm"
    ]
    return connect("grid", *((encoder, llm) for encoder in encoders))


@cache
def batch(modules: tuple[str, ...]) -> tuple[Sample, ...]:
    """Samples with none to two images and clips, so that some microbatches lack a module."""
    return tuple(_sample(index, modules) for index in range(NUM_SAMPLES))


def _sample(index: int, modules: tuple[str, ...]) -> Sample:
    segments = [Segment(TEXT, 0, 2 + index % 3, 2 + index % 3)]
    if "vision" in modules:
        segments += [Segment("image", k, 4, 4) for k in range((index + 1) % 3)]
    if "audio" in modules:
        segments += [Segment("audio", k, 5 + 2 * k, 5 + 2 * k) for k in range(index % 2 + index % 4 // 3)]
    return Sample(index, (*segments, Segment(TEXT, 1, 3, 3)))


def plan_of(layouts: Mapping[str, Layout], placement: Placement) -> Plan:
    """The plan of one point of the grid, encoders first.

    Raises:
        ValueError: the planner refuses it.
    """
    names, schedule = tuple(layouts), Schedule(kind=ScheduleKind.THREE_PHASE, window=WINDOW)
    shared = placement is Placement.SHARED
    job = processes_job("grid", model(names), batch(names), layouts, placement)
    job = replace(job, cluster=replace(job.cluster, name="grid"))
    return planned(replace(job, schedule=schedule) if shared else job)


def processes_job(
    name: str,
    graph: ModelGraph,
    samples: tuple[Sample, ...],
    layouts: Mapping[str, Layout],
    placement: Placement,
) -> Job:
    """A job with layouts on eight processes, in float64; in three phases where modules share ranks."""
    shared = placement is Placement.SHARED
    node = Node(device="process", num_ranks=NUM_RANKS, memory_bytes=2**34)
    link = Link(name="wire", bytes_per_s=1e9, latency_s=1e-6)
    return Job(
        name=name,
        model=graph,
        cluster=Cluster(name="processes", nodes=(node,), intra=link, inter=link),
        batch=samples,
        layouts=tuple(
            ModuleLayout(module=module, **asdict(layout), rank_offset=0 if shared else None)
            for module, layout in layouts.items()
        ),
        schedule=Schedule(kind=ScheduleKind.THREE_PHASE) if shared else Schedule(),
        settings=Settings(precision=Precision.FLOAT64),
        profile="A40",
    )


def planned(job: Job) -> Plan:
    """The plan by the strategy for arbitrary layouts; ValueError where it refuses them."""
    return megatron_heterogeneous.plan(job, CostModel(load_profile(job.profile)))


def gap_of(plan: Plan, pool: Pool) -> Gap:
    """One optimizer step on real processes, in float64, against one process on the whole batch.

    Raises:
        WorldFailed: a rank raised or did not finish in time.
    """
    settings = RunSettings(seed=SEED, precision=Precision.FLOAT64, collect=Collect.STATE, timeout_s=TIMEOUT_S)
    return gap(plan, run_lowered(lower(plan), settings, pool=pool), _reference(_names(plan)))


def gap(
    plan: Plan, result: RunResult, reference: ReferenceResult, moments: Mapping[Key, Moments] | None = None
) -> Gap:
    """The distance of a run's last step from one process, over all tensors of all ranks.

    A gradient that is only rounding (a key bias, to which softmax is invariant) is compared with the norm of
    all gradients, and its weight is left out, as Adam divides rounding by rounding. Where a rank lacks a
    weight that it should hold, or has another shape, the gap is infinite.
    """
    norm = math.sqrt(float_sum(float(g.norm()) ** 2 for g in reference.gradients.values()))
    rounding = {key for key, g in reference.gradients.items() if 0 < float(g.norm()) <= NEGLIGIBLE * norm}
    worst = _Worst()
    for state in result.states:
        parts = held_parts(plan, state.rank)
        for key, ours in state.gradients.items():
            whole = reference.gradients[key]
            worst.add("gradient", ours, _own(parts.get(key), whole), norm if key in rounding else None)
        for key in state.weights.keys() - rounding:
            worst.add("weight", state.weights[key], _own(parts.get(key), reference.weights[key]))
        for key in (moments or {}).keys() & state.gradients.keys() - rounding:
            rank_moments = state.moments.get(key, ())
            for ours, whole in zip_longest(rank_moments, moments[key] if moments else ()):
                worst.add("moment", ours, _own(parts.get(key), whole))
    if {key for state in result.states for key in state.gradients} != set(reference.gradients):
        worst.found["gradient"] = math.inf
    return Gap(loss=abs(result.losses[-1] - reference.loss) / abs(reference.loss), **worst.found)


class _Worst:
    """Accumulates the largest distances, by kind."""

    def __init__(self) -> None:
        self.found = dict.fromkeys(("gradient", "weight", "moment"), 0.0)

    def add(self, kind: str, ours: Tensor | None, reference: Tensor, scale: float | None = None) -> None:
        """Add a distance relative to the reference's norm, or to the scale; infinite for a wrong shape."""
        if ours is None or ours.shape != reference.shape:
            distance = math.inf
        else:
            distance = float((ours - reference).norm())
            norm = float(reference.norm()) if scale is None else scale
            distance = distance / norm if norm else (math.inf if distance else 0.0)
        self.found[kind] = max(self.found[kind], distance)


def _own(part: object, whole: Tensor) -> Tensor:
    part_of_whole: Tensor = part(whole) if callable(part) else whole
    return part_of_whole


def _names(plan: Plan) -> tuple[str, ...]:
    return tuple(module.name for module in plan.model.modules)


@cache
def _reference(names: tuple[str, ...]) -> ReferenceResult:
    """The reference, the same for all layouts: stages and microbatches do not matter in one process."""
    torch.set_num_threads(1)
    whole = dict.fromkeys(names, Layout(1, 1, 1, 1))
    return reference_step(
        plan_of(whole, Placement.APART), seed=SEED, dtype=torch.float64, source=SyntheticSource(SEED)
    )
