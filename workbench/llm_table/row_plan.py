"""From a row to a plan: the model, the cluster, and one replica's stages on its ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from workbench.cost.hardware import Cluster, Link, Node, uniform
from workbench.cost.profile import Profile
from workbench.data.sample import Item, Sample, Segment
from workbench.llm_table.llm_row import (
    SEES_ALL,
    DataOverlap,
    GradientNumber,
    LlmRow,
    Number,
    Recomputed,
    Scores,
    YesNo,
)
from workbench.llm_table.row_model import MODULE, model_of
from workbench.llm_table.row_mtp import LAYERS as MTP_LAYERS
from workbench.model.block_modules import BlockModule
from workbench.model.model_graph import TEXT
from workbench.plan.build import with_programs
from workbench.plan.kernels import Kernels
from workbench.plan.plan import Microbatch, ModuleSettings, Plan, Precision, Recompute, Settings, Sharding
from workbench.plan.recomputed_layers import blocks_by_stage
from workbench.plan.stage import Stage
from workbench.schedule.choice import Schedule, ScheduleKind
from workbench.units import GB

MICRO = 1e-6
BUCKET_ELEMENTS = 40_000_000  # of gradients reduced at once: Megatron-Core's DistributedDataParallelConfig
SHARDING = (Sharding.NONE, Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS)  # by ZeRO stage


def plan_of(row: LlmRow, profile: Profile) -> Plan:
    """The plan of the row's first replica, on its own ranks of the whole cluster.

    Ranks are numbered as in Megatron: tensor-parallel ranks are adjacent, then
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
    return _with_experts(with_programs(draft, schedule_of(row)), row)


def _with_experts(plan: Plan, row: LlmRow) -> Plan:
    """Distribute experts over the ranks of a stage and of further replicas, as `ep` says."""
    if row.ep == 1:
        return plan
    return replace(plan, stages=tuple(replace(stage, ep=row.ep) for stage in plan.stages))


def schedule_of(row: LlmRow) -> Schedule:
    """1F1B, interleaved if ranks have several stages."""
    if row.virtual_stages == 1:
        return Schedule()
    return Schedule(kind=ScheduleKind.INTERLEAVED, virtual_stages=row.virtual_stages)


def cluster_of(row: LlmRow, profile: Profile) -> Cluster:
    """Enough equal nodes for all ranks, with the row's links if it states any.

    An NVLink domain of several servers is one node, with the cards of all of them. A server's
    bandwidth is divided into one card per rank, as all replicas send at the same time.
    """
    size = _domain(row)
    num_nodes = -(-row.num_gpus // size)
    node = Node(device=profile.device, num_ranks=size, memory_bytes=profile.memory_bytes)
    intra = _link(profile, "intra", row.intra_gbytes_per_s, row.intra_latency_us)
    if num_nodes == 1:
        return uniform("row", node, num_nodes=1, intra=intra, inter=intra)
    server = row.inter_gbytes_per_s
    if server is None:
        link = profile.machine_link("inter")
        server = link.bytes_per_s / GB * (link.per_node or row.gpus_per_node)
    inter = _link(profile, "inter", server / row.gpus_per_node, row.inter_latency_us)
    return uniform("row", replace(node, num_cards=size), num_nodes=num_nodes, intra=intra, inter=inter)


def _domain(row: LlmRow) -> int:
    """GPUs of a run in each NVLink domain: equally many in all of them, if whole servers allow it.

    Source: NVIDIA-NeMo/Megatron-Bridge, scripts/performance/utils/executors.py: the largest divisor of the
    number of servers that fits a domain is the segment that the scheduler places together.
    """
    size, step = row.gpus_per_nvlink_domain, row.gpus_per_node
    if row.num_gpus <= size:
        return size
    return next((each for each in range(size, step, -step) if row.num_gpus % each == 0), size)


def _link(profile: Profile, scope: str, gbytes_per_s: float | None, latency_us: float | None) -> Link:
    link = profile.machine_link(scope).link
    if gbytes_per_s is not None:
        link = replace(link, name=f"{scope} of the row", bytes_per_s=gbytes_per_s * GB)
    return link if latency_us is None else replace(link, latency_s=latency_us * MICRO)


def stages_of(row: LlmRow) -> tuple[Stage, ...]:
    """Stages with equal shares of the blocks; the embedding joins the first stage, the head the last.

    A stage is cut further, on the same ranks, if its layers communicate with other replicas one by one.
    """
    stages: list[Stage] = []
    for index, layers in enumerate(_shares(row)):
        for first, last in _pieces(row, layers):
            ranks = _ranks(row, index % row.pp)
            stages.append(Stage(id=len(stages), module=MODULE, replica=0, layers=(first, last), ranks=ranks))
    return tuple(stages)


def is_cut_further(row: LlmRow) -> bool:
    """Whether stages are cut so that data-parallel communication overlaps their passes."""
    if row.data_ranks == 1 or row.virtual_stages > 1:
        return False
    return row.zero_stage == 3 or row.dp_overlap is not DataOverlap.NO


def _shares(row: LlmRow) -> Iterator[tuple[int, int]]:
    """[first, last) layers of every stage; the first has the embedding and the last the head as well.

    Modules that predict further tokens are on the last stage, and count for nothing.
    """
    blocks = row.stage_blocks or _equal_blocks(row)
    end = 0
    for index, count in enumerate(blocks):
        first = 0 if index == 0 else 1 + end
        end += count
        behind_blocks = (1 + MTP_LAYERS * row.mtp_layers) * (index == len(blocks) - 1)
        yield first, 1 + end + behind_blocks


def _equal_blocks(row: LlmRow) -> tuple[int, ...]:
    """Equal numbers of blocks for every stage, the first ones one more if need be."""
    num_stages = row.pp * row.virtual_stages
    ahead = row.embedding_as_layer is YesNo.YES
    behind = row.loss_as_layer is YesNo.YES
    share, more = divmod(row.num_blocks + ahead + behind, num_stages)
    return tuple(
        share + (index < more) - (ahead and index == 0) - (behind and index == num_stages - 1)
        for index in range(num_stages)
    )


def _pieces(row: LlmRow, layers: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Pieces of a stage: layers if weights are gathered by layer, else buckets of gradients."""
    first, last = layers
    if not is_cut_further(row):
        yield layers
        return
    least = 0 if row.zero_stage == 3 else BUCKET_ELEMENTS
    model, num_elements = model_of(row).modules[0].layers, 0
    for index in range(first, last):
        num_elements += sum(parameter.num_elements for parameter in model[index].parameters()) // row.tp
        if num_elements >= least or index == last - 1:
            yield first, index + 1
            first, num_elements = index + 1, 0


def _ranks(row: LlmRow, stage: int) -> tuple[tuple[int, ...], ...]:
    first = stage * row.dp * row.cp * row.tp
    return tuple(tuple(first + c * row.tp + t for t in range(row.tp)) for c in range(row.cp))


def _samples(row: LlmRow) -> tuple[Sample, ...]:
    segment = Segment(TEXT, 0, row.sequence, row.sequence)
    mask = "full" if row.architecture in SEES_ALL else "causal"
    return tuple(Sample(index, (segment,), mask) for index in range(row.global_batch // row.dp))


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
    """Settings of the layers. Sharded weights are cut by whoever represents all replicas."""
    sharding = SHARDING[row.zero_stage]
    return Settings(
        precision=Precision.FLOAT32 if row.precision is Number.FP32 else Precision.BFLOAT16,
        kernels=kernels_of(row),
        optimizer_precision=Precision.FLOAT32 if row.grad_precision is GradientNumber.FP32 else None,
        modules=(
            ModuleSettings(
                module=MODULE,
                recompute=Recompute.BLOCKS if row.recompute is Recomputed.FULL else Recompute.NONE,
                recompute_layers=_recomputed_blocks(row) if row.recompute_layers else None,
                sharding=Sharding.NONE if sharding is Sharding.PARAMETERS else sharding,
                computed_again=row.computed_again,
                products=row.narrow,
            ),
        ),
    )


def _recomputed_blocks(row: LlmRow) -> int | None:
    """Fewest blocks, spread evenly over the model, that leave no stage with fewer recomputed ones than the
    row says or the stage has; None: all.

    Differs: Megatron recomputes the first blocks of every stage.
    """
    layers, stage_layers = model_of(row).modules[0].layers, [last - first for first, last in _shares(row)]
    wanted = [min(row.recompute_layers, of) for of in blocks_by_stage(layers, None, stage_layers)]
    counts = range(1, len(layers))
    return next((n for n in counts if _covers(blocks_by_stage(layers, n, stage_layers), wanted)), None)


def _covers(counts: Sequence[int], wanted: Sequence[int]) -> bool:
    return all(count >= least for count, least in zip(counts, wanted, strict=True))


def kernels_of(row: LlmRow) -> Kernels:
    """What layers keep: stored scores, shares of the sequence."""
    keeps_scores = row.attention is Scores.STORED and BlockModule.CORE_ATTN not in row.computed_again
    if row.sequence_parallel is YesNo.YES:
        return Kernels.MEGATRON_SEQUENCE_SCORES if keeps_scores else Kernels.MEGATRON_SEQUENCE
    return Kernels.MEGATRON_SCORES if keeps_scores else Kernels.MEGATRON
