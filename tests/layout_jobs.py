"""Plans of modules with layouts of their own: the jobs that several tests share."""

from collections.abc import Mapping, Sequence

from tests.plans import cluster
from tests.tiny_valm import tiny_batch, tiny_valm
from workbench.cost.model import CostModel
from workbench.cost.profile import load_profile
from workbench.job.job import Job
from workbench.job.module_layout import ModuleLayout
from workbench.model.model_graph import ModelGraph, connect
from workbench.model.trainable import Trainable
from workbench.plan.plan import Plan, Precision, Settings
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.strategies import megatron_heterogeneous

Degrees = tuple[int, ...]  # dp, pp, cp and, where it is not 1, tp
APART = Schedule()


def three_phase(window: int | None = None, run_ahead: int = 0) -> Schedule:
    return Schedule(kind=ScheduleKind.THREE_PHASE, window=window, run_ahead=run_ahead)


def vision_language() -> ModelGraph:
    model = tiny_valm(vision=Trainable.ALL)
    return connect("tiny-vlm", (model.module("vision"), model.module("llm")))


def layout(name: str, degrees: Degrees, schedule: Schedule) -> ModuleLayout:
    dp, pp, cp, tp = (*degrees, 1)[:4]
    offset = None if schedule.kind is not ScheduleKind.THREE_PHASE else 0
    return ModuleLayout(module=name, dp=dp, pp=pp, cp=cp, tp=tp, rank_offset=offset)


def layout_job(
    model: ModelGraph,
    layouts: Mapping[str, Degrees],
    *,
    microbatch: int,
    images: Sequence[int],
    schedule: Schedule = APART,
    num_ranks: int = 8,
) -> Job:
    """Modules apart in the order of the model, or all from rank 0 on where the schedule is three-phase."""
    clips = tuple(1 - count % 2 for count in images) if "audio" in layouts else (0,) * len(images)
    return Job(
        name="layouts",
        model=model,
        cluster=cluster(num_ranks),
        batch=tiny_batch(images, clips),
        microbatch_samples=microbatch,
        layouts=tuple(layout(name, degrees, schedule) for name, degrees in layouts.items()),
        schedule=schedule,
        settings=Settings(precision=Precision.FLOAT64),
        profile="A40",
    )


def planned(model: ModelGraph, layouts: Mapping[str, Degrees], **job) -> Plan:
    return megatron_heterogeneous.plan(layout_job(model, layouts, **job), CostModel(load_profile("A40")))
