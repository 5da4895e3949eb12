"""A row of the table: a model, its parallelism, its training settings, and its batch."""

from dataclasses import dataclass
from enum import StrEnum

from workbench.cost.eager_traffic import OptimizerKernels, PointwiseKernels
from workbench.cost.execution import Lookups, TokenCopies
from workbench.cost.products import ProductFormat
from workbench.cost.weight_update import Clipping, UpdatedWeights
from workbench.model.block_modules import BlockModule
from workbench.model.lora import Adapted


class Architecture(StrEnum):
    """GPT: layer norms, learned positions, plain MLP, biases. LLAMA: RMS norms, rotary, gated MLP.

    VIT: a GPT's blocks over all patches of an image, and a class head. T5: an encoder's blocks over
    `sequence` tokens, and a decoder's over `decoder_sequence` that read them; gated MLPs, no biases.
    DIT: a ViT's blocks over all patches of a latent, modulated by time and class (`row_diffusion`).
    MMDIT: patches of a latent and a text in two streams, then in one (`model.mmdit`).
    """

    GPT = "gpt"
    LLAMA = "llama"
    VIT = "vit"
    T5 = "t5"
    DIT = "dit"
    MMDIT = "mmdit"


PLAIN = (
    Architecture.GPT,
    Architecture.VIT,
    Architecture.DIT,
    Architecture.MMDIT,
)  # plain MLPs, biases, layer norms
SEES_ALL = (Architecture.VIT, Architecture.T5, Architecture.DIT, Architecture.MMDIT)  # no causal mask


class Recomputed(StrEnum):
    """What the backward recomputes: nothing, attention scores alone, named modules, or whole layers."""

    NONE = "none"
    SELECTIVE = "selective"
    MODULES = "modules"
    FULL = "full"


class Recorded(StrEnum):
    """What is replayed from a recorded graph: NONE, parts of layers up to the ROUTER, or ALL of an
    iteration.
    """

    NONE = "none"
    ROUTER = "router"
    ALL = "all"


class Scores(StrEnum):
    """FLASH: attention in one kernel, the newest for the device. STORED: scores go through memory.

    FLASH1 and FLASH2 are that kernel's first and second generation.
    """

    FLASH = "flash"
    FLASH1 = "flash1"
    FLASH2 = "flash2"
    STORED = "stored"


class Optimizer(StrEnum):
    """PLAIN: every replica holds the whole state. DISTRIBUTED: each data-parallel rank holds a shard."""

    PLAIN = "plain"
    DISTRIBUTED = "distributed"


class Number(StrEnum):
    """Format of matrix products: FP8 with scales as `Scaling` says, MXFP8 and NVFP4 with one per block of
    elements.

    Below two bytes, weights and activations stay BF16 outside the products of blocks; two-byte ones keep a
    float32 copy in the optimizer.
    """

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


_NARROW = {
    Number.MXFP8: ProductFormat.MXFP8,
    Number.NVFP4: ProductFormat.NVFP4,
}


class Scaling(StrEnum):
    """Scales of FP8: one a tensor, from the tensor itself (CURRENT) or from earlier steps (DELAYED), one a
    ROW, or one a BLOCK. See `ProductFormat`.
    """

    CURRENT = "current"
    DELAYED = "delayed"
    ROW = "row"
    BLOCK = "block"


_SCALED = {
    Scaling.CURRENT: ProductFormat.FP8,
    Scaling.DELAYED: ProductFormat.FP8_DELAYED,
    Scaling.ROW: ProductFormat.FP8_ROW,
    Scaling.BLOCK: ProductFormat.FP8_BLOCK,
}


class GradientNumber(StrEnum):
    """Format in which gradients are reduced over ranks."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class DataOverlap(StrEnum):
    """What overlaps passes: NO: nothing. GRADS: gradient reduction. BOTH: also gathers of updated weights."""

    NO = "no"
    GRADS = "grads"
    BOTH = "both"


class Activation(StrEnum):
    """Of an MLP, as transformers names it; GELU_NEW: the tanh form that GPT-2 writes out."""

    GELU = "gelu"
    GELU_NEW = "gelu_new"
    SILU = "silu"
    RELU2 = "relu2"


class YesNo(StrEnum):
    YES = "yes"
    NO = "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmRow:
    """See `workbench.llm_table.columns.COLUMNS` for the meaning, unit and default of every field."""

    framework: str
    release: str
    hidden: int
    layers: int
    heads: int
    sequence: int
    global_batch: int
    architecture: Architecture
    kv_heads: int
    head_dim: int
    ffn: int
    gated_mlp: YesNo
    activation: Activation
    qk_norm: YesNo
    vocab: int
    vocab_multiple: int
    tied: YesNo
    window: int
    full_every: int
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    conv_kernel: int
    pattern: str
    mamba_head_dim: int
    mamba_heads: int
    mamba_groups: int
    mamba_state: int
    mamba_chunk: int
    gated_attention: YesNo
    rotary_dim: int
    q_lora: int
    kv_lora: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    experts: int
    topk: int
    expert_ffn: int
    shared_expert_ffn: int
    shared_expert_gate: YesNo
    expert_load_cv: float
    first_dense_layers: int
    decoder_layers: int
    decoder_sequence: int
    single_layers: int
    text_sequence: int
    mtp_layers: int
    patch: int
    lora_rank: int
    lora_modules: Adapted
    tp: int
    cp: int
    pp: int
    virtual_stages: int
    stage_blocks: tuple[int, ...]
    embedding_as_layer: YesNo
    loss_as_layer: YesNo
    ep: int
    dp: int
    sequence_parallel: YesNo
    micro_batch: int
    recompute: Recomputed
    recompute_modules: tuple[BlockModule, ...]
    recompute_layers: int
    fitted: tuple[tuple[str, float], ...] = ()  # numbers of an execution, of its framework
    fitted_off: float = 0.0  # mean error of rows that these were not fitted to
    attention: Scores
    dropout: YesNo
    keeps_results: YesNo
    precision: Number
    fp8_scaling: Scaling
    grad_precision: GradientNumber
    zero_stage: int
    shard_group: int
    tp_overlap: YesNo
    dp_overlap: DataOverlap
    updated_weights: UpdatedWeights
    pointwise: PointwiseKernels
    autocast: YesNo
    optimizer_kernels: OptimizerKernels
    clipping: Clipping
    lookups: Lookups
    moe_copies: TokenCopies
    cuda_graphs: Recorded
    capacity: float | None
    moe_overlap: YesNo
    gpu: str
    gpus_per_node: int
    gpus_per_nvlink_domain: int
    intra_gbytes_per_s: float | None
    intra_latency_us: float | None
    inter_gbytes_per_s: float | None
    inter_latency_us: float | None

    @property
    def num_microbatches(self) -> int:
        """Per replica."""
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def num_gpus(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def padded_vocab(self) -> int:
        """Rows of the token table, padded so that every tensor-parallel rank gets equally many."""
        step = self.vocab_multiple * self.tp
        return -(-self.vocab // step) * step

    @property
    def data_ranks(self) -> int:
        """Ranks that hold the same weights: replicas and their context-parallel ranks."""
        return self.dp * self.cp

    @property
    def sharing_ranks(self) -> int:
        """Ranks among which one copy of sharded state is divided."""
        return self.shard_group or (self.data_ranks if self.zero_stage else 1)

    @property
    def gathers_weights(self) -> bool:
        """Whether weights are sharded, and so gathered before their use."""
        return self.zero_stage == 3 and self.data_ranks > 1

    @property
    def expert_shards(self) -> int:
        """Ranks among which one copy of a sharded expert is divided: those of the copy that hold it."""
        is_alone = self.zero_stage == 3 and not self.gathers_weights
        return 1 if is_alone else max(1, self.sharing_ranks * self.tp // self.ep)

    @property
    def narrow(self) -> ProductFormat:
        """Format of the products of blocks; SAME from two bytes on."""
        if self.precision is Number.FP8:
            return _SCALED[self.fp8_scaling]
        return _NARROW.get(self.precision, ProductFormat.SAME)

    @property
    def computed_again(self) -> tuple[BlockModule, ...]:
        """Modules of every block that the backward recomputes, unless it recomputes all."""
        return (BlockModule.CORE_ATTN,) if self.recompute is Recomputed.SELECTIVE else self.recompute_modules

    @property
    def num_blocks(self) -> int:
        """Blocks of encoder and decoder, of two streams and of one, together."""
        return self.layers + self.decoder_layers + self.single_layers

    @property
    def tokens(self) -> int:
        """Tokens of an iteration as throughputs count them: with two sequences, the encoder's alone."""
        return self.global_batch * self.sequence

    @property
    def is_mla(self) -> bool:
        """Whether keys and values are derived from a narrow latent vector."""
        return self.kv_lora > 0
