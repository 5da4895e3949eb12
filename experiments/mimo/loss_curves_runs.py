"""A tiny LLaVA under the printed layouts: its training runs, and the same training by one process."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch

from experiments.harness.printed import printed_rows
from experiments.mimo import parity_grid_runs
from runtime.data.batches import SyntheticSource
from runtime.launch import run_lowered
from runtime.reference import Reference, ReferenceResult
from runtime.run_settings import Collect, RunSettings
from runtime.step.optimizer import OptimizerSettings
from runtime.step_plans import NextBatches
from runtime.world.pool import Pool
from workbench.data.sample import Sample, Segment
from workbench.model.hf_config import module_from_config
from workbench.model.item_tokens import native_tokens
from workbench.model.model_graph import TEXT, ModelGraph, connect
from workbench.model.trainable import Trainable
from workbench.plan.lower import lower
from workbench.plan.plan import Plan, Precision
from workbench.planner.rank_spans import Placement
from workbench.schedule.choice import Schedule, ScheduleKind

SEED = 5
MICROBATCH = 2  # printed for the trainable sweep, the least here
MOST_MICROBATCHES = 4  # of a replica of the LLM
NUM_SAMPLES = 16  # divides by a microbatch of every replica, of eight at most; 96 are printed
TIMEOUT_S = 120.0
_CLIP = parity_grid_runs.SIGLIP | {"model_type": "clip_vision_model", "num_hidden_layers": 1}
_VICUNA = parity_grid_runs.LLAMA | {"vocab_size": 48}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A configuration of a figure, which gives one curve."""

    figure: str
    config: str
    placement: Placement
    llm: parity_grid_runs.Layout
    vision: parity_grid_runs.Layout
    trains_llm: bool

    @property
    def name(self) -> str:
        return f"figure {self.figure}: {self.config}"

    @property
    def schedule(self) -> Schedule:
        """The schedule: plain for equal grids on the same ranks, three phases for unequal ones."""
        if self.placement is Placement.APART or self.llm == self.vision:
            return Schedule()
        return Schedule(kind=ScheduleKind.THREE_PHASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The data of a run.

    Args:
        num_samples: samples of a batch.
        num_batches: distinct batches, one a step, which repeat cyclically.
    """

    num_samples: int = NUM_SAMPLES
    num_batches: int = 1

    def batches(self, graph: ModelGraph) -> tuple[tuple[Sample, ...], ...]:
        """Batches with one image in every sample, and text of several lengths."""
        tokens = native_tokens(graph.module("vision"))
        assert tokens is not None
        return tuple(
            tuple(
                Sample(index, (Segment("image", 0, *tokens), Segment(TEXT, 0, 4 + index % 5, 4 + index % 5)))
                for index in range(number * self.num_samples, (number + 1) * self.num_samples)
            )
            for number in range(self.num_batches)
        )


ONE_BATCH = Data()


@dataclass(frozen=True, slots=True)
class Curve:
    """Losses of all steps, and the distance of the last state from one process's."""

    losses: tuple[float, ...]
    state: parity_grid_runs.Gap


def runs() -> tuple[Run, ...]:
    """All printed curves of the float32 figures: baselines, then the sweeps of Tables A7 and A8."""
    all_runs = [
        *_controlled("10", trains_llm=False),
        *_controlled("6", trains_llm=True),
    ]
    for table, figure, trains_llm in (("A7", "12", False), ("A8", "13", True)):
        for row in printed_rows(f"mimo_table{table}"):
            for part, placement, times in (("a", Placement.APART, 1), ("b", Placement.SHARED, 2)):
                all_runs.append(
                    Run(
                        figure=figure + part,
                        config=row["config"],
                        placement=placement,
                        llm=_layout(row, "llm", times),
                        vision=_layout(row, "vision", times),
                        trains_llm=trains_llm,
                    )
                )
    return tuple(all_runs)


def _controlled(figure: str, *, trains_llm: bool) -> list[Run]:
    """The homogeneous baseline and two variations; the two figures differ in the trained modules."""
    return [
        Run(
            figure=figure,
            config=row["config"],
            placement=Placement.SHARED if not row["llm_rank_first"] else Placement.APART,
            llm=_layout(row, "llm", 1),
            vision=_layout(row, "vision", 1),
            trains_llm=trains_llm,
        )
        for row in printed_rows("mimo_figure6")
    ]


def _layout(row: Mapping[str, str], module: str, times: int) -> parity_grid_runs.Layout:
    """The printed degrees, with `times` as many replicas."""
    return parity_grid_runs.Layout(
        tp=int(row[f"{module}_tp"]),
        dp=times * int(row[f"{module}_dp"]),
        pp=int(row.get(f"{module}_pp", "1")),
        cp=1,
    )


@cache
def model(trains_llm: bool) -> ModelGraph:  # noqa: FBT001  (the one thing in which models differ)
    """The model: a frozen CLIP with a trained projector, and a Llama."""
    vision = module_from_config(
        _CLIP,
        name="vision",
        modality="image",
        trainable=Trainable.PROJECTOR,
        llm_width=parity_grid_runs.WIDTH,
    )
    trainable = Trainable.ALL if trains_llm else Trainable.NONE
    llm = module_from_config(_VICUNA, name="llm", modality=TEXT, trainable=trainable)
    return connect("tiny-llava", (vision, llm))


def optimizer(run: Run) -> OptimizerSettings:
    """Table A6's optimizer at its first learning rate."""
    return OptimizerSettings(
        learning_rate=1e-4 if run.trains_llm else 1e-3, betas=(0.9, 0.95), weight_decay=0.0
    )


def microbatch_samples(run: Run, num_samples: int = NUM_SAMPLES) -> int:
    """Samples of a microbatch, given those of a batch."""
    return max(MICROBATCH, num_samples // (MOST_MICROBATCHES * run.llm.dp))


def plan_of(run: Run, samples: tuple[Sample, ...] = (), microbatch: int | None = None) -> Plan:
    """The plan of a curve on eight ranks or fewer.

    Args:
        run: which.
        samples: the batch; none: the first of `ONE_BATCH`.
        microbatch: samples of one; None: as `microbatch_samples` says.
    """
    graph = model(run.trains_llm)
    layouts = {"vision": run.vision, "llm": run.llm}
    job = parity_grid_runs.processes_job(
        "llava", graph, samples or ONE_BATCH.batches(graph)[0], layouts, run.placement
    )
    size = microbatch or microbatch_samples(run, len(samples) or NUM_SAMPLES)
    return parity_grid_runs.planned(replace(job, microbatch_samples=size, schedule=run.schedule))


def train(run: Run, steps: int, pool: Pool, data: Data = ONE_BATCH) -> Curve:
    """Train on real processes in float64; compare gradients, weights and moments of the last step.

    Raises:
        WorldFailed: a rank raised or did not finish in time.
    """
    first, *others = data.batches(model(run.trains_llm))
    plan = plan_of(run, first)
    settings = RunSettings(
        steps=steps,
        following=NextBatches(batches=tuple(others)),
        seed=SEED,
        precision=Precision.FLOAT64,
        collect=Collect.STATE,
        optimizer=optimizer(run),
        timeout_s=TIMEOUT_S,
    )
    result = run_lowered(lower(plan), settings, pool=pool)
    _, last, moments = one_process(run.trains_llm, steps, data)
    return Curve(result.losses, parity_grid_runs.gap(plan, result, last, moments))


@cache
def one_process(
    trains_llm: bool,  # noqa: FBT001  (the key of the cache)
    steps: int,
    data: Data = ONE_BATCH,
) -> tuple[tuple[float, ...], ReferenceResult, dict[parity_grid_runs.Key, parity_grid_runs.Moments]]:
    """Reference in one process: losses, the last step, and AdamW's moments from every step's gradients."""
    torch.set_num_threads(1)
    run = next(run for run in runs() if run.trains_llm is trains_llm)
    settings = optimizer(run)
    batches = data.batches(model(trains_llm))
    reference = Reference(plan_of(run, batches[0]), seed=SEED, dtype=torch.float64, optimizer=settings)
    losses, moments = [], dict[parity_grid_runs.Key, parity_grid_runs.Moments]()
    for step in range(steps):
        reference.plan = replace(reference.plan, batch=batches[step % len(batches)])
        result = reference.step(SyntheticSource(SEED))
        losses.append(result.loss)
        for key, gradient in result.gradients.items():
            zero = torch.zeros_like(gradient)
            first, second = moments.get(key, (zero, zero))
            fast, slow = settings.betas
            moments[key] = (
                fast * first + (1 - fast) * gradient,
                slow * second + (1 - slow) * gradient**2,
            )
    return tuple(losses), result, moments
