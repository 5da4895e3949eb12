"""One row: a dense text-only language model, how it is cut over GPUs, and its batch."""

from dataclasses import dataclass
from enum import StrEnum


class Architecture(StrEnum):
    """GPT: layer norms, learned positions, plain MLP, biases. LLAMA: RMS norms, rotary, gated MLP."""

    GPT = "gpt"
    LLAMA = "llama"


class Recomputed(StrEnum):
    """What the backward computes again: nothing, attention scores alone, or whole layers."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Scores(StrEnum):
    """FLASH: attention in one kernel. STORED: scores go through memory, product by product."""

    FLASH = "flash"
    STORED = "stored"


class Optimizer(StrEnum):
    """PLAIN: every replica holds the whole state. DISTRIBUTED: each data-parallel rank holds a part."""

    PLAIN = "plain"
    DISTRIBUTED = "distributed"


class Number(StrEnum):
    """Format of weights and activations; two-byte ones keep a float32 copy in the optimizer."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class YesNo(StrEnum):
    YES = "yes"
    NO = "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmRow:
    """See `workbench.llm_table.columns.COLUMNS` for the meaning, unit and default of every field."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    vocab_multiple: int
    sequence: int
    architecture: Architecture
    tied: YesNo
    tp: int
    cp: int
    pp: int
    virtual_stages: int
    dp: int
    sequence_parallel: YesNo
    micro_batch: int
    global_batch: int
    recompute: Recomputed
    attention: Scores
    precision: Number
    optimizer: Optimizer
    gpu: str
    gpus_per_node: int
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
        """Rows of the token table: up to a multiple that every tensor-parallel rank gets equally."""
        step = self.vocab_multiple * self.tp
        return -(-self.vocab // step) * step
