"""Jobs whose data-parallel replicas distribute the experts of a tiny language model among all of them."""

from collections.abc import Sequence

from tests import tiny_models
from tests.plans import cluster
from tests.test_expert_plan import MIXTRAL
from workbench.data.sample import Sample, Segment
from workbench.job.job import Job
from workbench.job.joint_layouts import join
from workbench.job.module_layout import ModuleLayout
from workbench.model.model_graph import TEXT, ModelGraph, connect
from workbench.plan.plan import ModuleSettings, Precision, Settings

LLM = MIXTRAL | {"num_hidden_layers": 2}


def joint_job(
    *,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    dp: int = 1,
    pp: int = 1,
    samples: int = 4,
    microbatch: int = 1,
    images: Sequence[int] = (),
    encoder_dp: int | None = None,
    shares_ranks: bool = False,
    encoder_cp: int = 1,
    settings: tuple[ModuleSettings, ...] = (),
) -> Job:
    """A language model with experts, and an encoder where samples have images; degrees as in a job file.

    Args:
        images: of each sample; empty: no encoder.
        encoder_dp: replicas of the encoder; None: as many as the language model's.
        encoder_cp: context-parallel ranks of the encoder.
        shares_ranks: the encoder has no layout of its own.
    """
    layouts = [ModuleLayout(module="llm", tp=tp, cp=cp, pp=pp, ep=ep)]
    if images and not shares_ranks:
        layouts.append(ModuleLayout(module="vision", pp=1, cp=encoder_cp, dp=encoder_dp))
    joined = join(layouts, "llm", replicas=dp, microbatch_samples=microbatch, where="job 'joint'")
    return Job(
        name="joint",
        model=model_of(with_encoder=bool(images)),
        cluster=cluster(16),
        batch=samples_of(images) if images else samples_of((0,) * samples),
        settings=Settings(precision=Precision.FLOAT64, modules=settings),
        profile="A40",
        **joined._asdict(),
    )


def model_of(*, with_encoder: bool) -> ModelGraph:
    """The language model, alone or with an encoder before it."""
    llm = tiny_models.llm(LLM)
    if not with_encoder:
        return ModelGraph(name="joint", modules=(llm,), edges=())
    return connect("joint", (tiny_models.encoder(tiny_models.SIGLIP, "vision"), llm))


def samples_of(images: Sequence[int]) -> tuple[Sample, ...]:
    """One sample for each number of images, of unequal lengths."""
    return tuple(
        Sample(
            index,
            (
                Segment(TEXT, 0, 4 + index, 4 + index),
                *(Segment("vision", k, 9, 9) for k in range(count)),
                Segment(TEXT, 1, 2, 2),
            ),
        )
        for index, count in enumerate(images)
    )
