"""From a row to a plan: the model, the cluster, and one replica's stages on its ranks."""

from dataclasses import replace
from functools import lru_cache

from workbench.cost.hardware import Cluster, Link, Node, uniform
from workbench.cost.profile import Profile
from workbench.data.sample import Item, Sample, Segment
from workbench.llm_table.llm_row import Architecture, LlmRow, Number, Optimizer, Recomputed, Scores, YesNo
from workbench.model.layer import Layer
from workbench.model.model_graph import TEXT, ModelGraph, Module
from workbench.model.module_layers import block_layers, learned_positions, lm_head, token_embedding
from workbench.model.transformer import Block, Heads, Mlp, Norm
from workbench.plan.build import with_programs
from workbench.plan.kernels import Kernels
from workbench.plan.plan import (
    Microbatch,
    ModuleSettings,
    Plan,
    Precision,
    Recompute,
    Settings,
    Sharding,
    Stage,
)
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.units import GB

MODULE = "llm"
MICRO = 1e-6


def plan_of(row: LlmRow, profile: Profile) -> Plan:
    """The plan of the row's first replica, on its own ranks of the whole cluster.

    Ranks are numbered as Megatron does: tensor-parallel places next to each other, then
    context-parallel ones, replicas, stages (Narayanan et al. 2021, "Efficient Large-Scale
    Language Model Training on GPU Clusters", section 3).

    Raises:
        ValueError: what the planner refuses.

    Complexity: O(stages x microbatches x ranks of a stage).
    """
    draft = Plan(
        strategy="row",
        model=model_of(row),
        cluster=cluster_of(row, profile),
        batch=_samples(row),
        stages=stages_of(row),
        microbatches=_microbatches(row),
        programs=(),
        settings=settings_of(row),
    )
    return with_programs(draft, schedule_of(row))


def schedule_of(row: LlmRow) -> Schedule:
    """1F1B, interleaved where ranks have several stages."""
    if row.virtual_stages == 1:
        return Schedule()
    return Schedule(kind=ScheduleKind.INTERLEAVED, virtual_stages=row.virtual_stages)


def model_of(row: LlmRow) -> ModelGraph:
    """Embedding, blocks and head."""
    shape = (row.hidden, row.layers, row.heads, row.kv_heads, row.ffn)
    layers = _layers(shape, row.padded_vocab, row.sequence, row.architecture, row.tied)
    return ModelGraph(name=MODULE, modules=(Module(name=MODULE, modality=TEXT, layers=layers),))


@lru_cache(maxsize=512)
def _layers(
    shape: tuple[int, ...], vocab: int, sequence: int, architecture: Architecture, tied: YesNo
) -> tuple[Layer, ...]:
    hidden, num_layers, heads, kv_heads, ffn = shape
    is_gpt = architecture is Architecture.GPT
    norm = Norm.LAYER if is_gpt else Norm.RMS
    block = Block(
        width=hidden,
        heads=Heads(
            num=heads,
            num_kv=kv_heads,
            dim=hidden // heads,
            causal=True,
            bias="qkvo" if is_gpt else "",
            fused=True,
            rotary=not is_gpt,
        ),
        mlp=Mlp(
            width=ffn, gated=not is_gpt, activation="gelu" if is_gpt else "silu", bias=is_gpt, fused=True
        ),
        norm=norm,
    )
    is_tied = tied is YesNo.YES
    positions = learned_positions(sequence, hidden) if is_gpt else ()
    return (
        token_embedding(vocab, hidden, more=positions, tied=is_tied),
        *block_layers(block, num_layers),
        lm_head(vocab, hidden, norm, tied=is_tied),
    )


def cluster_of(row: LlmRow, profile: Profile) -> Cluster:
    """Enough equal nodes for every rank, with the row's links where it gives any.

    A row says what a node sends to others; here that is a card for each of its ranks, with that part of it.
    """
    num_nodes = -(-row.num_gpus // row.gpus_per_node)
    node = Node(device=profile.device, num_ranks=row.gpus_per_node, memory_bytes=profile.memory_bytes)
    intra = _link(profile, "intra", row.intra_gbytes_per_s, row.intra_latency_us)
    if num_nodes == 1:
        return uniform("row", node, num_nodes=1, intra=intra, inter=intra)
    own, cards = row.inter_gbytes_per_s, profile.machine_link("inter").per_node
    if own is not None or cards is None:
        cards = row.gpus_per_node
    inter = _link(profile, "inter", None if own is None else own / cards, row.inter_latency_us)
    return uniform("row", replace(node, num_cards=cards), num_nodes=num_nodes, intra=intra, inter=inter)


def _link(profile: Profile, scope: str, gbytes_per_s: float | None, latency_us: float | None) -> Link:
    own = profile.machine_link(scope).link
    if gbytes_per_s is not None:
        own = replace(own, name=f"{scope} of the row", bytes_per_s=gbytes_per_s * GB)
    return own if latency_us is None else replace(own, latency_s=latency_us * MICRO)


def stages_of(row: LlmRow) -> tuple[Stage, ...]:
    """Equal shares of the blocks; the embedding joins the first stage, the head the last."""
    num_stages = row.pp * row.virtual_stages
    share = row.layers // num_stages
    stages = []
    for index in range(num_stages):
        first = 0 if index == 0 else 1 + index * share
        last = 1 + (index + 1) * share + (index == num_stages - 1)
        stages.append(
            Stage(id=index, module=MODULE, replica=0, layers=(first, last), ranks=_ranks(row, index % row.pp))
        )
    return tuple(stages)


def _ranks(row: LlmRow, stage: int) -> tuple[tuple[int, ...], ...]:
    first = stage * row.dp * row.cp * row.tp
    return tuple(tuple(first + c * row.tp + t for t in range(row.tp)) for c in range(row.cp))


def _samples(row: LlmRow) -> tuple[Sample, ...]:
    segment = Segment(TEXT, 0, row.sequence, row.sequence)
    return tuple(Sample(index, (segment,)) for index in range(row.global_batch // row.dp))


def _microbatches(row: LlmRow) -> tuple[Microbatch, ...]:
    size = row.micro_batch
    return tuple(
        Microbatch(
            module=MODULE,
            replica=0,
            index=index,
            rows=tuple((Item(sample, 0),) for sample in range(index * size, (index + 1) * size)),
        )
        for index in range(row.num_microbatches)
    )


def settings_of(row: LlmRow) -> Settings:
    """How layers are computed."""
    return Settings(
        precision=Precision.FLOAT32 if row.precision is Number.FP32 else Precision.BFLOAT16,
        kernels=kernels_of(row),
        modules=(
            ModuleSettings(
                module=MODULE,
                recompute=Recompute.FULL if row.recompute is Recomputed.FULL else Recompute.NONE,
                sharding=Sharding.OPTIMIZER if row.optimizer is Optimizer.DISTRIBUTED else Sharding.NONE,
            ),
        ),
    )


def kernels_of(row: LlmRow) -> Kernels:
    """What layers keep: scores where they are stored and not computed again, shares of the sequence."""
    keeps_scores = row.attention is Scores.STORED and row.recompute is not Recomputed.SELECTIVE
    if row.sequence_parallel is YesNo.YES:
        return Kernels.MEGATRON_SEQUENCE_SCORES if keeps_scores else Kernels.MEGATRON_SEQUENCE
    return Kernels.MEGATRON_SCORES if keeps_scores else Kernels.MEGATRON
