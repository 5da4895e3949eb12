"""The jobs of the fidelity suite, and plans for them out of cuts, microbatch sizes and a schedule."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from runtime.emulation.memory import capacity_of
from runtime.world.device import kind_of_device
from workbench.cost.hardware import Cluster, Link, Node
from workbench.data.sample import Sample, Segment
from workbench.job.job import Job
from workbench.model.hf_config import module_from_config
from workbench.model.model_graph import ModelGraph, Module, connect
from workbench.model.projector import Projector
from workbench.model.trainable import Trainable
from workbench.plan.build import with_programs
from workbench.plan.kernels import Kernels
from workbench.plan.plan import Microbatch, ModuleSettings, Plan, Precision, Recompute, Settings
from workbench.plan.routing import routing_of
from workbench.plan.stage import Stage
from workbench.planner.assembly import empty_draft
from workbench.schedule.choice import Schedule

LLM = "llm"
VOCABULARY = 512
UNMEASURED = Link(name="unmeasured", bytes_per_s=1e9, latency_s=0.0)
MEMORY_BYTES = 2**34

# Between ranks that one device plays there is no link to measure: prediction and emulation both take this
# one, so it judges neither.
ASSUMED = Link(name="assumed", bytes_per_s=2e11, latency_s=1e-5)

Ranks = tuple[int, ...]  # of one stage, its context-parallel axis
Plans = Iterator[tuple[str, Callable[[], Plan]]]  # names, and how to make what they name
Cuts = Mapping[str, Sequence[tuple[int, Ranks]]]  # module -> (number of layers, ranks) of each stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one step; plans of one job do the same work, so their times can be ranked.

    `kernels` decides which activations the memory model counts as kept.
    """

    name: str
    model: ModelGraph
    batch: tuple[Sample, ...]
    precision: Precision = Precision.FLOAT32
    kernels: Kernels = Kernels.EAGER


def decoder(architecture: str, *, width: int, blocks: int, trainable: Trainable = Trainable.ALL) -> Module:
    """A language model: embedding, blocks, head."""
    config = {
        "model_type": architecture,
        "hidden_size": width,
        "intermediate_size": width * 11 // 4,
        "num_hidden_layers": blocks,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 128,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }
    return module_from_config(config, name=LLM, modality="text", trainable=trainable)


def image_encoder(
    architecture: str, *, width: int, blocks: int, llm_width: int, trainable: Trainable
) -> Module:
    """SigLIP or CLIP on images of 224 x 224 pixels in patches of 16."""
    config = {
        "model_type": architecture,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": blocks,
        "num_attention_heads": width // 64,
        "image_size": 224,
        "patch_size": 16,
    }
    return module_from_config(
        config,
        name="vision",
        modality="image",
        trainable=trainable,
        projector=Projector.MLP,
        llm_width=llm_width,
    )


def audio_encoder(*, width: int, blocks: int, frames: int, llm_width: int, trainable: Trainable) -> Module:
    """A Whisper encoder on clips of up to that many frames."""
    config = {
        "model_type": "whisper",
        "d_model": width,
        "encoder_layers": blocks,
        "encoder_attention_heads": width // 64,
        "encoder_ffn_dim": 4 * width,
        "num_mel_bins": 80,
        "max_source_positions": frames,
    }
    return module_from_config(
        config,
        name="audio",
        modality="audio",
        trainable=trainable,
        projector=Projector.LINEAR,
        llm_width=llm_width,
    )


def text_only(llm: Module) -> ModelGraph:
    """A language model by itself."""
    return ModelGraph(name="text", modules=(llm,), edges=())


def with_encoders(llm: Module, *encoders: Module) -> ModelGraph:
    """Encoders whose outputs are inserted into the text."""
    return connect("+".join(module.modality for module in (*encoders, llm)), *((e, llm) for e in encoders))


def text_samples(lengths: Sequence[int]) -> tuple[Sample, ...]:
    """One text of each length."""
    return tuple(Sample(index, (Segment("text", 0, n, n),)) for index, n in enumerate(lengths))


def sample(
    index: int, *parts: tuple[str, int], mask: str = "causal", class_tokens: Mapping[str, int] | None = None
) -> Sample:
    """Segments in the order of `parts`, each (modality, tokens in the language model's sequence).

    Args:
        class_tokens: modality -> additional tokens that its encoder processes and then drops.
    """
    counts: dict[str, int] = {}
    segments = []
    for modality, tokens in parts:
        dropped = (class_tokens or {}).get(modality, 0)
        segments.append(Segment(modality, counts.get(modality, 0), tokens + dropped, tokens))
        counts[modality] = counts.get(modality, 0) + 1
    return Sample(index, tuple(segments), mask)


def this_machine(link: Link, num_ranks: int, *, num_cores: int | None = None) -> Cluster:
    """The ranks of this machine; they share its cores where there are fewer cores than ranks."""
    cores = len(os.sched_getaffinity(0)) if num_cores is None else num_cores
    node = Node(device="cpu", num_ranks=num_ranks, memory_bytes=MEMORY_BYTES // num_ranks, num_cores=cores)
    return Cluster(name="this machine", nodes=(node,), intra=link, inter=link)


def emulated_machine(device: torch.device, num_ranks: int, link: Link = ASSUMED) -> Cluster:
    """Ranks with a device of this kind each, emulated on one such device."""
    memory_bytes = capacity_of(device) or MEMORY_BYTES
    node = Node(device=kind_of_device(device), num_ranks=num_ranks, memory_bytes=memory_bytes)
    return Cluster(name=f"emulated on {device}", nodes=(node,), intra=link, inter=link)


def plan_of(
    work: Work,
    cluster: Cluster,
    cuts: Cuts | Sequence[Cuts],
    *,
    samples: Sequence[int] | Mapping[str, Sequence[int]],
    schedule: Schedule | None = None,
    recompute: Recompute = Recompute.NONE,
    divided: Callable[[Plan], Plan] = lambda draft: draft,
) -> Plan:
    """Make a checked plan.

    Args:
        work: what is trained.
        cluster: where it is trained.
        cuts: the stages of every module, for each replica.
        samples: number of consecutive samples in each microbatch, for every module or by module;
            microbatches go to the replicas in turn.
        schedule: None: 1F1B.
        recompute: of every module.
        divided: changes the plan's parallelism within stages or replicas, before programs are made.

    Raises:
        ValueError: the schedule or the plan's check refuses it.
    """
    replicas = [cuts] if isinstance(cuts, Mapping) else list(cuts)
    settings = Settings(
        precision=work.precision,
        kernels=work.kernels,
        modules=tuple(ModuleSettings(module=m.name, recompute=recompute) for m in work.model.modules),
    )
    job = Job(name=work.name, model=work.model, cluster=cluster, batch=work.batch, settings=settings)
    draft = replace(empty_draft(job, "by hand"), stages=_stages(replicas))
    drafted = replace(draft, microbatches=_microbatches(draft, samples, len(replicas)))
    return with_programs(divided(drafted), schedule or Schedule())


def _stages(replicas: Sequence[Cuts]) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    for replica, cuts in enumerate(replicas):
        for module, parts in cuts.items():
            first = 0
            for num_layers, ranks in parts:
                stages.append(
                    Stage(
                        id=len(stages),
                        module=module,
                        replica=replica,
                        layers=(first, first + num_layers),
                        ranks=tuple((rank,) for rank in ranks),
                    )
                )
                first += num_layers
    return tuple(stages)


def _microbatches(
    draft: Plan, samples: Sequence[int] | Mapping[str, Sequence[int]], num_replicas: int
) -> tuple[Microbatch, ...]:
    """Group consecutive samples; a module without items among them skips the microbatch."""
    routing = routing_of(draft)
    microbatches: list[Microbatch] = []
    for module in draft.model.modules:
        sizes = samples[module.name] if isinstance(samples, Mapping) else samples
        if sum(sizes) != len(draft.batch):
            raise ValueError(
                f"module {module.name!r}: microbatches of {list(sizes)} samples do not make up "
                f"a batch of {len(draft.batch)}"
            )
        counts = [0] * num_replicas
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        for turn, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            chunk = draft.batch[start : start + size]
            rows = tuple((item,) for s in chunk for item in routing.items(module.name, s.id))
            replica = turn % num_replicas
            if rows:
                microbatches.append(
                    Microbatch(module=module.name, replica=replica, index=counts[replica], rows=rows)
                )
                counts[replica] += 1
    return tuple(microbatches)
