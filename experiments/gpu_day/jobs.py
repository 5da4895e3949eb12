"""The job of the plans: SigLIP, a Whisper encoder and Llama, as published or tiny ones of their kind."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from experiments.fidelity.work import LLM, Cuts, Work, emulated_machine, plan_of, sample, with_encoders
from experiments.gpu_day.campaign import Extent, Session
from runtime.step.first_weights import DrawnWeights
from runtime.world.device import device_of
from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import ModelGraph, Module
from workbench.model.projector import Projector
from workbench.model.trainable import Trainable
from workbench.model.zoo import from_shape
from workbench.plan.kernels import Kernels
from workbench.plan.plan import Plan, Precision, Recompute
from workbench.schedule.choice import Schedule, ScheduleKind, usual

VISION, AUDIO = "vision", "audio"
DRAWN = DrawnWeights()  # all plans are of one model: its weights are drawn once a process
SAMPLES = {Extent.FULL: 8, Extent.SMALL: 4}
MIXES = {  # what is trained of the encoders, and of the language model
    "projectors": (Trainable.PROJECTOR, Trainable.NONE),
    "projectors and llm": (Trainable.PROJECTOR, Trainable.ALL),
    "everything": (Trainable.ALL, Trainable.ALL),
}
FULL_PARTS = (("text", 256), ("image", 729), ("text", 256), ("audio", 1500), ("text", 512))
SMALL_PARTS = (("text", 8), ("image", 16), ("text", 8), ("audio", 20), ("text", 16))
SMALL_LLM = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}
SMALL_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
SMALL_AUDIO = {
    "model_type": "whisper",
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "num_mel_bins": 80,
    "max_source_positions": 20,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A plan by name."""

    name: str
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the modules lie: for each its ranks, one a stage."""

    name: str
    vision: tuple[int, ...]
    audio: tuple[int, ...]
    llm: tuple[int, ...]

    def cuts(self, model: ModelGraph) -> Cuts:
        """Every module cut into as many even runs of layers as it has ranks."""
        ranks = {VISION: self.vision, AUDIO: self.audio, LLM: self.llm}
        return {
            name: tuple(
                zip(even(len(model.module(name).layers), len(on)), ((rank,) for rank in on), strict=True)
            )
            for name, on in ranks.items()
        }


ONE_RANK = Layout(name="one rank", vision=(0,), audio=(0,), llm=(0,))
FIRST = Layout(name="encoders first", vision=(0,), audio=(0,), llm=(1, 2, 3))
APART = Layout(name="encoders apart", vision=(0,), audio=(1,), llm=(2, 3))
EVERYWHERE = Layout(name="encoders everywhere", vision=(0, 1, 2, 3), audio=(0, 1, 2, 3), llm=(0, 1, 2, 3))
PAIR = Layout(name="two ranks", vision=(0,), audio=(0,), llm=(0, 1))
ROUND = Layout(name="llm twice round", vision=(0,), audio=(1,), llm=(0, 1, 2, 3, 0, 1, 2, 3))


def even(total: int, parts: int) -> tuple[int, ...]:
    """Whole numbers that differ by at most 1 and sum to `total`, larger ones first."""
    return tuple(total // parts + (index < total % parts) for index in range(parts))


def work(extent: Extent, mix: str, device: str) -> Work:
    """Samples of text, an image and a sound each; in bfloat16 on a GPU."""
    parts = FULL_PARTS if extent is Extent.FULL else SMALL_PARTS
    return Work(
        name=mix,
        model=model(extent, mix),
        batch=tuple(sample(index, *parts) for index in range(SAMPLES[extent])),
        precision=Precision.BFLOAT16 if device == "cuda" else Precision.FLOAT32,
        kernels=Kernels.EAGER,
    )


@cache
def model(extent: Extent, mix: str) -> ModelGraph:
    """The three modules, trained as the mix says."""
    encoders, llm = MIXES[mix]
    if extent is Extent.SMALL:
        language = module_from_config(SMALL_LLM, name=LLM, modality="text", trainable=llm)
        return with_encoders(
            language,
            _tiny(SMALL_VISION, VISION, "image", encoders),
            _tiny(SMALL_AUDIO, AUDIO, "audio", encoders),
        )
    language = from_shape("llama-3.2-1b", module=LLM, trainable=llm)
    width = language.layers[0].out_width
    vision = from_shape(
        "siglip-so400m-14-384", module=VISION, llm_width=width, projector=Projector.MLP, trainable=encoders
    )
    audio = from_shape(
        "whisper-large-v3-enc", module=AUDIO, llm_width=width, projector=Projector.MLP, trainable=encoders
    )
    return with_encoders(language, replace(vision, modality="image"), audio)


def _tiny(config: dict[str, object], name: str, modality: str, trainable: Trainable) -> Module:
    return module_from_config(
        config, name=name, modality=modality, trainable=trainable, projector=Projector.MLP, llm_width=128
    )


def plan(
    session: Session,
    mix: str,
    layout: Layout,
    samples: Sequence[int],
    *,
    kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B,
    recompute: Recompute = Recompute.NONE,
) -> Named:
    """A plan of the job, named by all that tells it from others.

    Args:
        mix: of `MIXES`.
        samples: of every microbatch.
        kind: of the schedule.
        recompute: of every module.

    Raises:
        ValueError: what the schedule or the plan's check refuses.
    """
    one = work(session.extent, mix, session.device)
    schedule: Schedule = usual(kind)
    name = f"{mix}, {layout.name}, {kind}, {'+'.join(map(str, samples))}"
    if recompute is not Recompute.NONE:
        name += ", recompute"
    num_ranks = 1 + max(*layout.vision, *layout.audio, *layout.llm)
    cluster = emulated_machine(device_of(session.device), num_ranks)
    built = plan_of(
        one, cluster, layout.cuts(one.model), samples=samples, schedule=schedule, recompute=recompute
    )
    return Named(name=name, plan=built)


def _sizes(extent: Extent) -> list[tuple[int, ...]]:
    """Microbatches of one, two and four samples that make up the batch."""
    return [(size,) * (SAMPLES[extent] // size) for size in (1, 2, 4)]


@cache
def rehearsed(session: Session) -> tuple[Named, ...]:
    """Plans that run to calibrate and are never judged: every kind of pass, of every module that has it."""
    ones, twos, _ = _sizes(session.extent)
    return (
        plan(session, "projectors and llm", APART, ones),
        plan(session, "everything", FIRST, ones),
        plan(session, "projectors and llm", EVERYWHERE, ones, kind=ScheduleKind.ZB_H1),
        plan(session, "projectors and llm", PAIR, twos, recompute=Recompute.FULL),
    )


@cache
def judged(session: Session) -> tuple[Named, ...]:
    """Plans that are predicted before any of them runs."""
    ones, twos, fours = _sizes(session.extent)
    both = "projectors and llm"
    few = (
        plan(session, both, FIRST, ones),
        plan(session, "projectors", FIRST, twos, kind=ScheduleKind.GPIPE),
        plan(session, both, FIRST, ones, kind=ScheduleKind.ZB_H1),
        plan(session, both, FIRST, fours, recompute=Recompute.FULL),
        plan(session, both, APART, twos),
        plan(session, "everything", APART, ones),
        plan(session, "projectors", APART, ones),
        plan(session, both, EVERYWHERE, ones),
    )
    if session.extent is Extent.SMALL:
        return few
    return (
        *few,
        plan(session, "everything", EVERYWHERE, ones, recompute=Recompute.FULL),
        plan(session, both, ROUND, ones, kind=ScheduleKind.INTERLEAVED),
        plan(session, both, PAIR, twos),
        plan(session, "projectors", PAIR, (3, *twos[2:], 1)),
    )


@cache
def on_one_rank(session: Session) -> tuple[Named, ...]:
    """Plans whose peak memory one allocator can show."""
    ones, twos, _ = _sizes(session.extent)
    both = "projectors and llm"
    few = (
        plan(session, both, ONE_RANK, ones),
        plan(session, both, ONE_RANK, twos, recompute=Recompute.FULL),
    )
    if session.extent is Extent.SMALL:
        return few
    return (
        *few,
        plan(session, "projectors", ONE_RANK, ones),
        plan(session, "everything", ONE_RANK, ones),
        plan(session, "everything", ONE_RANK, twos, recompute=Recompute.FULL),
    )
